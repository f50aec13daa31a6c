"""Bootstrap intervals of means over examples and, where there are several, over trained models."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float64, Int
from scipy.stats import binomtest, bootstrap

from ...circuits.errors import CallError

#: How an interval came about.
BOOTSTRAP, EXACT, NO_SPREAD, TOO_FEW = "bootstrap", "exact binomial", "no spread", "too few examples"
#: How many drawn indices are in memory at once.
_AT_ONCE = 2**22

#: A figure made of means, such as a ratio: takes means [figure, resample], gives [outcome, resample].
OfMeans = Callable[[Float64[np.ndarray, "figure resample"]], Float64[np.ndarray, "outcome resample"]]


@dataclass(frozen=True)
class Bootstrap:
    """How intervals are drawn.

    They are percentile intervals: those keep to the range of the figure, as an interval of a share should, need no
    jackknife, and are defined where examples and models are drawn both. For the mean of small and skewed shares of
    attention, Beta(0.3, 7.2), 95% intervals covered it in 91% of 2,000 samples of 50 examples and in 93% of those of
    200; BCa intervals in 93% and 93%.

    Attributes:
        resamples: how many.
        confidence: share of intervals that should cover the figure.
        seed: of the draws.

    Raises:
        CallError: a setting is out of its range.
    """

    resamples: int = 9999
    confidence: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse settings out of their range."""
        if self.resamples < 1:
            raise CallError(f"resamples should be at least 1, got {self.resamples}")
        if not 0 < self.confidence < 1:
            raise CallError(f"confidence is a share between 0 and 1, got {self.confidence}")


#: 95% intervals.
DEFAULT = Bootstrap()


def mean_intervals(
    values: Float64[np.ndarray, "figure run example"],
    settings: Bootstrap = DEFAULT,
    *,
    shares: bool | Sequence[bool] = False,
    of: OfMeans | None = None,
) -> pd.DataFrame:
    """Return the mean of each figure over examples and runs, and its interval.

    Runs are models that saw the same examples, such as those of several seeds. Both are then drawn with replacement,
    independently of each other, each draw of examples being the same in every run (the pigeonhole bootstrap): examples
    that are hard for one model are hard for another, and to draw them apart in each run would count them as so many
    more. Of a single run only the examples are drawn. With s runs their part of the variance comes out (s - 1)/s of
    what it is, so intervals over few runs are narrow.

    Columns: value, low, high, examples and runs, and interval, which says how it came about. The bootstrap of a sample
    without spread has no width. Where it is that of a share, the exact binomial interval of so many examples (Clopper
    and Pearson) stands in its place; of another figure low and high are the value. One example gives no interval.

    Args:
        values: of every example; one that is NaN anywhere is left out of all of it.
        settings: of the bootstrap.
        shares: whether values are 0 or 1 and the figures shares of examples, of all figures or of each.
        of: makes the figures of the means; by default they are the means.

    Raises:
        CallError: there is no run.

    Source: Owen, "The Pigeonhole Bootstrap", 2007.
    """
    if not values.shape[1]:
        raise CallError("expected the values of at least one run, got none")
    values = values[:, :, np.isfinite(values).all(axis=(0, 1))]
    figures, runs, examples = values.shape
    combine = of or (lambda means: means)
    means = values.mean(axis=(1, 2)) if examples else np.full(figures, np.nan)
    value = combine(means[:, None])[:, 0]
    low, high, kinds = np.full_like(value, np.nan), np.full_like(value, np.nan), [TOO_FEW] * len(value)
    if examples > 1:
        low, high = _drawn_interval(values, settings, combine)
        kinds = [BOOTSTRAP] * len(value)
        is_share = np.broadcast_to(shares, len(value))
        constant = np.ptp(values, axis=(1, 2)) == 0
        for figure in np.flatnonzero(constant if of is None else np.full(len(value), constant.all())):
            low[figure] = high[figure] = value[figure]
            kinds[figure] = NO_SPREAD
            if is_share[figure]:
                exact = binomtest(round(value[figure] * examples), examples).proportion_ci(settings.confidence, "exact")
                low[figure], high[figure], kinds[figure] = exact.low, exact.high, EXACT
    return pd.DataFrame(
        {"value": value, "low": low, "high": high, "examples": examples, "runs": runs, "interval": kinds}
    )


def _drawn_interval(
    values: Float64[np.ndarray, "figure run example"], settings: Bootstrap, combine: OfMeans
) -> tuple[Float64[np.ndarray, " outcome"], Float64[np.ndarray, " outcome"]]:
    """Draw places of examples and of runs, the same for all figures."""
    _, runs, examples = values.shape

    def statistic(
        drawn: Int[np.ndarray, "resample example"], *drawn_runs: Int[np.ndarray, "resample run"], axis: int
    ) -> Float64[np.ndarray, "outcome resample"]:
        assert axis == -1
        weighted = values @ _weights(drawn, examples).T
        of_runs = _weights(drawn_runs[0], runs).T if drawn_runs else 1.0
        return combine((weighted * of_runs).sum(axis=1))

    # A sample of one cannot be drawn from.
    places = (np.arange(examples), np.arange(runs)) if runs > 1 else (np.arange(examples),)
    interval = bootstrap(
        places,
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


def _weights(drawn: Int[np.ndarray, "resample drawn"], count: int) -> Float64[np.ndarray, "resample place"]:
    """How often each place was drawn, as a share."""
    rows = len(drawn)
    flat = drawn + count * np.arange(rows)[:, None]
    return np.bincount(flat.ravel(), minlength=rows * count).reshape(rows, count) / drawn.shape[1]
