"""The paper's summary figures of relevant-token attention: MRTA, AC and ACMC, with intervals and chance levels."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from ..intervals import DEFAULT, Bootstrap, mean_intervals
from .compared_runs import COLUMNS, DECIMALS, Runs, Sides, aligned, as_list, compared, partners

#: What the acronyms stand for; the paper spells out neither DTAP nor, with their thresholds, the others.
READINGS = {
    "MRTA": "mean relevant-token attention",
    "AC": "attention correct: share of examples with relevant-token attention above {attention:g}",
    "ACMC": "attention correct and model correct: share of examples with relevant-token attention above {attention:g} "
    "and a probability of the right class above {probability:g}",
    "DTAP": "Distinct-Token Attention-Probability, which is this project's reading: percent of examples by "
    "relevant-token attention and by the probability of the right class",
}


@dataclass(frozen=True)
class Thresholds:
    """Above which attention and probability count as correct.

    Attributes:
        attention: of AC and ACMC.
        probability: of ACMC.
    """

    attention: float = 0.5
    probability: float = 0.5

    def reading(self, figure: str) -> str:
        """Return what a figure's acronym stands for."""
        return READINGS[figure].format(attention=self.attention, probability=self.probability)


#: A half of each.
HALF = Thresholds()


def relevance_summary(runs: Runs, thresholds: Thresholds = HALF, settings: Bootstrap = DEFAULT) -> pd.DataFrame:
    """Return MRTA, AC and ACMC with their intervals and their chance levels.

    Each is over all tokens, and without the token at which attention is read. Chance is the same figure with uniform
    attention over the same tokens, and for ACMC the model's own probabilities. ACMC is missing where no probability is
    known.

    Columns: figure, reading, tokens, value, low, high, chance, examples, runs, interval (see `mean_intervals`).

    Args:
        runs: one model's figures, or those of several models that saw the same examples, such as those of several
            seeds; examples that not all of them measured are left out.
        thresholds: of AC and ACMC.
        settings: of the bootstrap.

    Raises:
        CallError: the runs have no example in common.
    """
    return _figures(aligned([as_list(runs)]), thresholds, settings)


def relevance_differences(
    runs: Runs, others: Runs, thresholds: Thresholds = HALF, settings: Bootstrap = DEFAULT
) -> pd.DataFrame:
    """Return by how much MRTA, AC and ACMC of some runs are above those of others, example by example.

    Columns as of `relevance_summary`; chance is the difference of the chance levels.

    Args:
        runs: one model's figures, or those of several.
        others: as many, each the partner of that in the same place, such as the one of the same seed.
        thresholds: of AC and ACMC.
        settings: of the bootstrap.

    Raises:
        CallError: there are not as many, or no example is common to all.
    """
    return _figures(aligned(partners(runs, others)), thresholds, settings)


def _figures(columns: dict[str, Sides], thresholds: Thresholds, settings: Bootstrap) -> pd.DataFrame:
    shares_apart = len(columns["attention"]) == 1
    named, values, chances = [], [], []
    correct = _above(columns["probability"], thresholds.probability)
    for tokens, names in COLUMNS.items():
        for figure in ("MRTA", "AC", "ACMC"):
            named.append({"figure": figure, "reading": thresholds.reading(figure), "tokens": tokens})
            for name, found in zip(names, (values, chances), strict=True):
                attention = columns[name] if figure == "MRTA" else _above(columns[name], thresholds.attention)
                found.append(attention * correct if figure == "ACMC" else attention)
    known = [np.isfinite(value).all(axis=(0, 1)) for value in values]
    tables = []
    # Figures of the same examples share their draws.
    for some in {mask.tobytes(): mask for mask in known if mask.any()}.values():
        places = [place for place, mask in enumerate(known) if np.array_equal(mask, some)]
        shares = [shares_apart and named[place]["figure"] != "MRTA" for place in places]
        found = mean_intervals(
            np.stack([compared(values[place][..., some]) for place in places]), settings, shares=shares
        )
        chance = [float(compared(chances[place][..., some]).mean()) for place in places]
        tables.append(pd.DataFrame([named[place] for place in places], index=places).join(found.set_axis(places)))
        tables[-1]["chance"] = chance
    order = ["figure", "reading", "tokens", "value", "low", "high", "chance", "examples", "runs", "interval"]
    return pd.concat(tables).sort_index(ignore_index=True)[order]


def _above(values: Sides, threshold: float) -> Sides:
    """1 where a value is above the threshold, 0 where it is not, NaN where it is not known."""
    return np.where(np.isfinite(values), values.round(DECIMALS) > threshold, np.nan)
