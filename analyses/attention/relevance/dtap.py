"""DTAP: the distribution of examples over relevant-token attention and the probability of the right class."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np
import pandas as pd
from jaxtyping import Int

from ....circuits.errors import CallError
from ..intervals import DEFAULT, Bootstrap, mean_intervals
from .compared_runs import ALL_TOKENS, COLUMNS, DECIMALS, Runs, Sides, aligned, as_list, compared, partners
from .relevance import RelevantAttention


@dataclass(frozen=True)
class Dtap:
    """The 2-D histogram of relevant-token attention against the probability of the right class.

    Attributes:
        cells: one row for each cell, with the columns attention_from, attention_to, probability_from, probability_to,
            percent, low and high (its interval), and chance (the percentage if attention were uniform).
        examples: number of examples of which the percentages are taken.
        outside: percentage of these whose attention or probability lies outside the edges.
    """

    cells: pd.DataFrame
    examples: int
    outside: float


def dtap(
    runs: Runs,
    attention_edges: Sequence[float],
    probability_edges: Sequence[float],
    *,
    tokens: str = ALL_TOKENS,
    settings: Bootstrap = DEFAULT,
) -> Dtap:
    """Return the DTAP: the 2-D histogram of relevant-token attention against probability, in percent of the examples.

        percent[x, y] = 100 / N * #{examples with attention in bin x and probability of the right class in bin y}

    A bin contains its lower edge but not its upper one, except for the last bin of each axis, which contains both, as
    in `numpy.histogram2d`. N counts all examples with a known probability, including those outside the edges. The
    paper does not spell out the acronym; "Distinct-Token Attention-Probability" is this project's reading of it.

    Args:
        runs: the relevant-token attention of one model, or of several models that saw the same examples; examples that
            not all of them measured are left out, and percentages are averaged over models.
        attention_edges: rising edges of the attention bins; those of a task are its `attention_bins`.
        probability_edges: rising edges of the probability bins; those of a task are its `probability_bins`.
        tokens: "all tokens", or "without the readout token", which leaves out the position at which attention is read.
        settings: how the intervals are drawn.

    Returns:
        Percentages of all cells with their intervals and chance levels.

    Raises:
        CallError: The edges do not rise, or the runs have no example with a known probability in common.

    Source: the paper, arXiv 2608.06776, and its released code.
    """
    return _dtap([as_list(runs)], attention_edges, probability_edges, tokens, settings)


def dtap_differences(
    runs: Runs,
    others: Runs,
    attention_edges: Sequence[float],
    probability_edges: Sequence[float],
    *,
    tokens: str = ALL_TOKENS,
    settings: Bootstrap = DEFAULT,
) -> Dtap:
    """Return the difference of two DTAPs, cell by cell, in percentage points of the examples.

    Args:
        runs: the relevant-token attention of one model, or of several.
        others: that of as many models; each is compared with the run at the same index of `runs`, for instance the one
            trained from the same seed.
        attention_edges: rising edges of the attention bins.
        probability_edges: rising edges of the probability bins.
        tokens: "all tokens", or "without the readout token".
        settings: how the intervals are drawn.

    Returns:
        For each cell the percentage of `runs` minus that of `others`; chance is the difference of the chance levels.

    Raises:
        CallError: The edges do not rise, the numbers of runs differ, or the runs have no example with a known
            probability in common.
    """
    return _dtap(partners(runs, others), attention_edges, probability_edges, tokens, settings)


def dtap_grid(cells: pd.DataFrame, column: str = "percent") -> pd.DataFrame:
    """Return one column of a DTAP's cells as a grid as it is drawn: attention rises to the right, probability upwards.

    Args:
        cells: `Dtap.cells`.
        column: a column of the cells, such as percent, low, high or chance.

    Returns:
        A table with attention_from as its columns and probability_from, falling, as its rows.
    """
    return cells.pivot(index="probability_from", columns="attention_from", values=column).sort_index(ascending=False)


_BinNumbers = Int[np.ndarray, "side run example"]


def _dtap(
    sides: list[list[RelevantAttention]],
    attention_edges: Sequence[float],
    probability_edges: Sequence[float],
    tokens: str,
    settings: Bootstrap,
) -> Dtap:
    for name, edges in (("attention", attention_edges), ("probability", probability_edges)):
        if len(edges) < 2 or not (np.diff(edges) > 0).all():
            raise CallError(f"edges of {name} should be at least two rising numbers; got {tuple(edges)}")
    if tokens not in COLUMNS:
        raise CallError(f"tokens should be one of {', '.join(COLUMNS)}; got {tokens!r}")
    columns = aligned(sides)
    attention, chance = (columns[name] for name in COLUMNS[tokens])
    known = np.isfinite(attention + columns["probability"]).all(axis=(0, 1))
    if not known.any():
        raise CallError(
            "DTAP needs the probability of the right class, which is known for none of the examples; give probabilities"
        )
    cells = list(product(pairwise(range(len(attention_edges))), pairwise(range(len(probability_edges)))))
    above = _bins(columns["probability"][..., known], probability_edges)
    members, at_chance = (
        [compared(((across == x) & (above == y)).astype(np.float64)) for (x, _), (y, _) in cells]
        for across in (_bins(column[..., known], attention_edges) for column in (attention, chance))
    )
    means = mean_intervals(np.stack(members), settings, shares=len(sides) == 1)
    table = pd.DataFrame(
        {
            "attention_from": [attention_edges[x] for (x, _), _ in cells],
            "attention_to": [attention_edges[x] for (_, x), _ in cells],
            "probability_from": [probability_edges[y] for _, (y, _) in cells],
            "probability_to": [probability_edges[y] for _, (_, y) in cells],
            "percent": 100 * means["value"],
            "low": 100 * means["low"],
            "high": 100 * means["high"],
            "chance": [100 * float(cell.mean()) for cell in at_chance],
        }
    )
    whole = 1.0 if len(sides) == 1 else 0.0
    outside = 100 * float((whole - np.sum(members, axis=0)).mean())
    return Dtap(table, int(known.sum()), outside)


def _bins(values: Sides, edges: Sequence[float]) -> _BinNumbers:
    """Return the number of each value's bin; -1 or the number of bins if the value lies outside the edges."""
    rounded = values.round(DECIMALS)
    numbers = np.searchsorted(edges, rounded, side="right") - 1
    return np.where(rounded == edges[-1], len(edges) - 2, numbers)
