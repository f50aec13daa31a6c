"""Bootstrap intervals of means over examples and, where there are several, over trained models."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float64, Int
from scipy.stats import binomtest, bootstrap

from ...circuits.errors import CallError

#: The ways in which an interval can have been computed.
BOOTSTRAP, EXACT, NO_SPREAD, TOO_FEW = "bootstrap", "exact binomial", "no spread", "too few examples"
#: Largest number of drawn indices held in memory at once.
_AT_ONCE = 2**22

#: A statistic that is computed from several means, such as a ratio: means [metric, resample] -> [outcome, resample].
OfMeans = Callable[[Float64[np.ndarray, "metric resample"]], Float64[np.ndarray, "outcome resample"]]


@dataclass(frozen=True)
class Bootstrap:
    """How bootstrap intervals are drawn.

    The intervals are percentile intervals. They stay within the range of the statistic, as an interval of a share
    should, need no jackknife, and are defined when examples and models are both resampled. In a simulation with small
    and skewed shares of attention, Beta(0.3, 7.2), 95% percentile intervals covered the true mean in 91% of 2,000
    samples of 50 examples and in 93% of those of 200; BCa intervals did so in 93% and 93%.

    Attributes:
        resamples: number of resamples.
        confidence: share of such intervals that should cover the true value, between 0 and 1.
        seed: seed of the draws.

    Raises:
        CallError: A setting is out of its range.
    """

    resamples: int = 9999
    confidence: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse settings that are out of range."""
        if self.resamples < 1:
            raise CallError(f"resamples should be at least 1, got {self.resamples}")
        if not 0 < self.confidence < 1:
            raise CallError(f"confidence is a share between 0 and 1, got {self.confidence}")


#: 95% intervals from 9,999 resamples.
DEFAULT = Bootstrap()


def mean_intervals(
    values: Float64[np.ndarray, "metric run example"],
    settings: Bootstrap = DEFAULT,
    *,
    shares: bool | Sequence[bool] = False,
    of: OfMeans | None = None,
) -> pd.DataFrame:
    """Return the mean of each metric over examples and runs, with its interval.

    Runs are models that saw the same examples, for instance models trained from several seeds. With several runs,
    examples and runs are both drawn with replacement, independently of each other, and each draw of examples is the
    same in every run (the pigeonhole bootstrap). Examples that are hard for one model are hard for another, so drawing
    them separately in each run would count them as additional examples. With a single run only the examples are drawn.
    With s runs, the share of the variance that is due to runs is estimated as (s - 1)/s of its size, so intervals over
    few runs are narrow.

    The bootstrap of a sample without spread has no width. If the metric is a share of examples, the exact binomial
    interval (Clopper and Pearson) for that many examples takes its place; for any other metric, low and high equal the
    value. A single example gives no interval.

    Args:
        values: value of every metric for every run and example. An example for which any value is NaN is left out of
            all of them.
        settings: how the intervals are drawn.
        shares: whether the values are 0 or 1 and the metrics are shares of examples; one flag for all metrics or one
            for each.
        of: function that computes the metrics from the means; by default the means themselves are the metrics.

    Returns:
        One row for each metric, with the columns value, low, high, examples, runs and interval; the last says how the
        interval was computed: "bootstrap", "exact binomial", "no spread" or "too few examples".

    Raises:
        CallError: There is no run.

    Source: Owen, "The Pigeonhole Bootstrap", 2007.
    """
    if not values.shape[1]:
        raise CallError("expected the values of at least one run, got none")
    values = values[:, :, np.isfinite(values).all(axis=(0, 1))]
    metrics, runs, examples = values.shape
    combine = of or (lambda means: means)
    means = values.mean(axis=(1, 2)) if examples else np.full(metrics, np.nan)
    value = combine(means[:, None])[:, 0]
    low, high, kinds = np.full_like(value, np.nan), np.full_like(value, np.nan), [TOO_FEW] * len(value)
    if examples > 1:
        low, high = _drawn_interval(values, settings, combine)
        kinds = [BOOTSTRAP] * len(value)
        is_share = np.broadcast_to(shares, len(value))
        constant = np.ptp(values, axis=(1, 2)) == 0
        for metric in np.flatnonzero(constant if of is None else np.full(len(value), constant.all())):
            low[metric] = high[metric] = value[metric]
            kinds[metric] = NO_SPREAD
            if is_share[metric]:
                exact = binomtest(round(value[metric] * examples), examples).proportion_ci(settings.confidence, "exact")
                low[metric], high[metric], kinds[metric] = exact.low, exact.high, EXACT
    return pd.DataFrame(
        {"value": value, "low": low, "high": high, "examples": examples, "runs": runs, "interval": kinds}
    )


def _drawn_interval(
    values: Float64[np.ndarray, "metric run example"], settings: Bootstrap, combine: OfMeans
) -> tuple[Float64[np.ndarray, " outcome"], Float64[np.ndarray, " outcome"]]:
    """Draw indices of examples and of runs, the same for all metrics, and return the ends of the intervals."""
    _, runs, examples = values.shape

    def statistic(
        drawn: Int[np.ndarray, "resample example"], *drawn_runs: Int[np.ndarray, "resample run"], axis: int
    ) -> Float64[np.ndarray, "outcome resample"]:
        assert axis == -1
        weighted = values @ _weights(drawn, examples).T
        of_runs = _weights(drawn_runs[0], runs).T if drawn_runs else 1.0
        return combine((weighted * of_runs).sum(axis=1))

    # scipy refuses to resample a sample of one, so a single run is not resampled.
    indices = (np.arange(examples), np.arange(runs)) if runs > 1 else (np.arange(examples),)
    interval = bootstrap(
        indices,
        statistic,
        n_resamples=settings.resamples,
        batch=max(1, _AT_ONCE // examples),
        vectorized=True,
        axis=-1,
        confidence_level=settings.confidence,
        method="percentile",
        rng=np.random.default_rng(settings.seed),
    ).confidence_interval
    return interval.low, interval.high


def _weights(drawn: Int[np.ndarray, "resample drawn"], count: int) -> Float64[np.ndarray, "resample index"]:
    """Return how often each index was drawn, as a share of the draws."""
    rows = len(drawn)
    flat = drawn + count * np.arange(rows)[:, None]
    return np.bincount(flat.ravel(), minlength=rows * count).reshape(rows, count) / drawn.shape[1]
