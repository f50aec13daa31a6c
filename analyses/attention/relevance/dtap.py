"""DTAP: how many examples are at which relevant-token attention and which probability of the right class."""

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
    """The table of attention against probability.

    Attributes:
        cells: a row for each, with the columns attention_from, attention_to, probability_from, probability_to, percent,
            low, high (its interval), and chance (the percentage if attention were uniform).
        examples: of how many the percentages are.
        outside: of how many percent of them attention or probability is beyond the edges.
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
    """Return the 2-D histogram of attention against probability, in percent of the examples.

    A cell has its lower edges and not its upper ones, but for the last of each side, which has both, as in
    `numpy.histogram2d`. Percentages are of all examples with a probability, those beyond the edges among them.

    Args:
        runs: as of `relevance_summary`.
        attention_edges: rising; those of a task are its `attention_bins`.
        probability_edges: rising.
        tokens: `ALL_TOKENS` or `ELSEWHERE`.
        settings: of the bootstrap.

    Raises:
        CallError: edges do not rise, or no example with a probability is common to the runs.
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
    """Return by how many percent of the examples each cell of some runs is above that of others.

    Runs are as of `relevance_differences`.

    Raises:
        CallError: as `dtap` and `relevance_differences` do.
    """
    return _dtap(partners(runs, others), attention_edges, probability_edges, tokens, settings)


def dtap_grid(cells: pd.DataFrame, column: str = "percent") -> pd.DataFrame:
    """Return a column of the cells as a table as it is drawn: attention to the right, probability upwards."""
    return cells.pivot(index="probability_from", columns="attention_from", values=column).sort_index(ascending=False)


_Places = Int[np.ndarray, "side run example"]


def _dtap(
    sides: list[list[RelevantAttention]],
    attention_edges: Sequence[float],
    probability_edges: Sequence[float],
    tokens: str,
    settings: Bootstrap,
) -> Dtap:
    for name, edges in (("attention", attention_edges), ("probability", probability_edges)):
        if len(edges) < 2 or not (np.diff(edges) > 0).all():
            raise CallError(f"edges of {name} should rise, and be two or more; got {tuple(edges)}")
    if tokens not in COLUMNS:
        raise CallError(f"tokens should be one of {', '.join(COLUMNS)}; got {tokens!r}")
    columns = aligned(sides)
    attention, chance = (columns[name] for name in COLUMNS[tokens])
    known = np.isfinite(attention + columns["probability"]).all(axis=(0, 1))
    if not known.any():
        raise CallError("DTAP takes the probability of the right class, and it is known of no example: give it")
    cells = list(product(pairwise(range(len(attention_edges))), pairwise(range(len(probability_edges)))))
    above = _bins(columns["probability"][..., known], probability_edges)
    members, at_chance = (
        [compared(((across == x) & (above == y)).astype(np.float64)) for (x, _), (y, _) in cells]
        for across in (_bins(column[..., known], attention_edges) for column in (attention, chance))
    )
    found = mean_intervals(np.stack(members), settings, shares=len(sides) == 1)
    table = pd.DataFrame(
        {
            "attention_from": [attention_edges[x] for (x, _), _ in cells],
            "attention_to": [attention_edges[x] for (_, x), _ in cells],
            "probability_from": [probability_edges[y] for _, (y, _) in cells],
            "probability_to": [probability_edges[y] for _, (_, y) in cells],
            "percent": 100 * found["value"],
            "low": 100 * found["low"],
            "high": 100 * found["high"],
            "chance": [100 * float(cell.mean()) for cell in at_chance],
        }
    )
    whole = 1.0 if len(sides) == 1 else 0.0
    outside = 100 * float((whole - np.sum(members, axis=0)).mean())
    return Dtap(table, int(known.sum()), outside)


def _bins(values: Sides, edges: Sequence[float]) -> _Places:
    """The number of each value's bin; -1 or the number of bins where it is beyond the edges."""
    rounded = values.round(DECIMALS)
    found = np.searchsorted(edges, rounded, side="right") - 1
    return np.where(rounded == edges[-1], len(edges) - 2, found)
