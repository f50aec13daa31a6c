"""The paper's metrics of relevant-token attention, MRTA, AC and ACMC, with intervals and chance levels."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from ..intervals import DEFAULT, Bootstrap, mean_intervals
from .compared_runs import COLUMNS, DECIMALS, Runs, Sides, aligned, as_list, compared, partners

#: What the acronyms stand for. These are this project's readings: the paper spells out neither DTAP nor the thresholds
#: of the others.
DEFINITIONS = {
    "MRTA": "mean relevant-token attention",
    "AC": "attention correct: share of examples with relevant-token attention above {attention:g}",
    "ACMC": "attention correct and model correct: share of examples with relevant-token attention above {attention:g} "
    "and a probability of the right class above {probability:g}",
    "DTAP": "Distinct-Token Attention-Probability, which is this project's reading: percent of examples by "
    "relevant-token attention and by the probability of the right class",
}


@dataclass(frozen=True)
class Thresholds:
    """The values above which attention and probability count as correct.

    Attributes:
        attention: threshold of relevant-token attention in AC and ACMC.
        probability: threshold of the probability of the right class in ACMC.
    """

    attention: float = 0.5
    probability: float = 0.5

    def definition(self, metric: str) -> str:
        """Return what a metric's acronym stands for, with these thresholds."""
        return DEFINITIONS[metric].format(attention=self.attention, probability=self.probability)


#: Thresholds of one half.
HALF = Thresholds()


def relevance_summary(runs: Runs, thresholds: Thresholds = HALF, settings: Bootstrap = DEFAULT) -> pd.DataFrame:
    """Return MRTA, AC and ACMC with their intervals and chance levels.

    With a_i the relevant-token attention of example i, p_i the probability of its right class, and N examples,

        MRTA = 1/N sum_i a_i                                  mean relevant-token attention
        AC   = 1/N #{i: a_i > threshold}                      attention correct
        ACMC = 1/N #{i: a_i > threshold, p_i > threshold}     attention correct and model correct

    Each is given over all tokens, and without the token at which attention is read. The chance level is the same metric
    for uniform attention over the same tokens, with the model's own probabilities in ACMC. ACMC is missing if no
    probability is known.

    Args:
        runs: the relevant-token attention of one model, or of several models that saw the same examples, for instance
            models trained from several seeds; examples that not all of them measured are left out.
        thresholds: thresholds of AC and ACMC.
        settings: how the intervals are drawn.

    Returns:
        One row for each metric and choice of tokens, with the columns metric, definition, tokens, value, low, high,
        chance, examples, runs and interval; see `mean_intervals`.

    Raises:
        CallError: The runs have no example in common.

    Source: the paper, arXiv 2608.06776. It does not spell out AC and ACMC with their thresholds; these definitions are
    this project's readings.
    """
    return _metrics(aligned([as_list(runs)]), thresholds, settings)


def relevance_differences(
    runs: Runs, others: Runs, thresholds: Thresholds = HALF, settings: Bootstrap = DEFAULT
) -> pd.DataFrame:
    """Return the differences of MRTA, AC and ACMC between two groups of runs, computed example by example.

    Args:
        runs: the relevant-token attention of one model, or of several.
        others: that of as many models; each is compared with the run at the same index of `runs`, for instance the one
            trained from the same seed.
        thresholds: thresholds of AC and ACMC.
        settings: how the intervals are drawn.

    Returns:
        A table as `relevance_summary` returns it, each value being that of `runs` minus that of `others`; chance is the
        difference of the chance levels.

    Raises:
        CallError: The numbers of runs differ, or the runs have no example in common.
    """
    return _metrics(aligned(partners(runs, others)), thresholds, settings)


def _metrics(columns: dict[str, Sides], thresholds: Thresholds, settings: Bootstrap) -> pd.DataFrame:
    shares_apart = len(columns["attention"]) == 1
    named, values, chances = [], [], []
    correct = _above(columns["probability"], thresholds.probability)
    for tokens, names in COLUMNS.items():
        for metric in ("MRTA", "AC", "ACMC"):
            named.append({"metric": metric, "definition": thresholds.definition(metric), "tokens": tokens})
            for name, results in zip(names, (values, chances), strict=True):
                attention = columns[name] if metric == "MRTA" else _above(columns[name], thresholds.attention)
                results.append(attention * correct if metric == "ACMC" else attention)
    known = [np.isfinite(value).all(axis=(0, 1)) for value in values]
    tables = []
    # Metrics of the same examples share their draws.
    for some in {mask.tobytes(): mask for mask in known if mask.any()}.values():
        indices = [index for index, mask in enumerate(known) if np.array_equal(mask, some)]
        shares = [shares_apart and named[index]["metric"] != "MRTA" for index in indices]
        means = mean_intervals(
            np.stack([compared(values[index][..., some]) for index in indices]), settings, shares=shares
        )
        chance = [float(compared(chances[index][..., some]).mean()) for index in indices]
        tables.append(pd.DataFrame([named[index] for index in indices], index=indices).join(means.set_axis(indices)))
        tables[-1]["chance"] = chance
    order = ["metric", "definition", "tokens", "value", "low", "high", "chance", "examples", "runs", "interval"]
    return pd.concat(tables).sort_index(ignore_index=True)[order]


def _above(values: Sides, threshold: float) -> Sides:
    """Return 1 where a value is above the threshold, 0 where it is not, and NaN where it is unknown."""
    return np.where(np.isfinite(values), values.round(DECIMALS) > threshold, np.nan)
