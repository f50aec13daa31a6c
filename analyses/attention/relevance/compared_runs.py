"""Relevant-token attention of one model or of several, example beside example."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64

from ....circuits.errors import CallError
from .relevance import RelevantAttention

#: One model's figures, or those of several models that saw the same examples.
Runs = RelevantAttention | Sequence[RelevantAttention]
#: One or two sides of a comparison, as arrays [side, run, example].
Sides = Float64[np.ndarray, "side run example"]
#: Over all tokens that attention could go to, or without the one at which it is read.
ALL_TOKENS, ELSEWHERE = "all tokens", "without the readout token"
#: The columns of attention and of chance for each.
COLUMNS = {ALL_TOKENS: ("attention", "chance"), ELSEWHERE: ("attention_elsewhere", "chance_elsewhere")}
#: Sums of float64 that should be at an edge or a threshold are a little off it.
DECIMALS = 12


def as_list(runs: Runs) -> list[RelevantAttention]:
    """Return one or several models' figures as a list."""
    return [runs] if isinstance(runs, RelevantAttention) else list(runs)


def partners(runs: Runs, others: Runs) -> list[list[RelevantAttention]]:
    """Return two sides of a comparison, run by run.

    Raises:
        CallError: there are not as many on both.
    """
    sides = [as_list(runs), as_list(others)]
    if len(sides[0]) != len(sides[1]):
        raise CallError(
            f"{len(sides[0])} runs were given with {len(sides[1])} to compare them with; expected a partner for each"
        )
    return sides


def aligned(sides: list[list[RelevantAttention]]) -> dict[str, Sides]:
    """Return the columns of the examples that all runs measured, in the same order.

    Raises:
        CallError: there is no run, or no such example.
    """
    tables = [[run.table.set_index("example") for run in side] for side in sides]
    every = [table for side in tables for table in side]
    if not every:
        raise CallError("expected the figures of at least one model, got none")
    common = every[0].index
    for table in every[1:]:
        common = common.intersection(table.index)
    if common.empty:
        raise CallError("the runs have no example in common; give figures of the same examples")
    names = ("attention", "chance", "attention_elsewhere", "chance_elsewhere", "probability")
    return {
        name: np.array([[table.loc[common, name].to_numpy(dtype=float) for table in side] for side in tables])
        for name in names
    }


def compared(values: Float64[np.ndarray, "side *rest"]) -> Float64[np.ndarray, "*rest"]:
    """Return the first side less the second, or the only one."""
    return values[0] - values[1] if len(values) == 2 else values[0]
