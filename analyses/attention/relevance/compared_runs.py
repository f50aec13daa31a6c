"""Relevant-token attention of one model or of several, aligned by example."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64

from ....circuits.errors import CallError
from .relevance import RelevantAttention

#: The relevant-token attention of one model, or of several models that saw the same examples.
Runs = RelevantAttention | Sequence[RelevantAttention]
#: Values of one group of runs, or of the two groups of a comparison, [side, run, example].
Sides = Float64[np.ndarray, "side run example"]
#: Which tokens count: all to which attention could go, or all of these but the readout position.
ALL_TOKENS, ELSEWHERE = "all tokens", "without the readout token"
#: For each choice of tokens, the columns of the attention and of its chance level.
COLUMNS = {ALL_TOKENS: ("attention", "chance"), ELSEWHERE: ("attention_elsewhere", "chance_elsewhere")}
#: Values are rounded to this many decimals before they are compared with an edge or a threshold, since float64 sums
#: that should equal it are slightly off.
DECIMALS = 12


def as_list(runs: Runs) -> list[RelevantAttention]:
    """Return the relevant-token attention of one or several models as a list."""
    return [runs] if isinstance(runs, RelevantAttention) else list(runs)


def partners(runs: Runs, others: Runs) -> list[list[RelevantAttention]]:
    """Return the two sides of a comparison, each as a list of runs.

    Args:
        runs: the first side.
        others: the second side; each run is compared with the run at the same index of the first side.

    Raises:
        CallError: The sides have different numbers of runs.
    """
    sides = [as_list(runs), as_list(others)]
    if len(sides[0]) != len(sides[1]):
        raise CallError(
            f"{len(sides[0])} runs cannot be compared with {len(sides[1])}; expected one partner for each run"
        )
    return sides


def aligned(sides: list[list[RelevantAttention]]) -> dict[str, Sides]:
    """Return the columns of `RelevantAttention.table` for the examples that all runs measured, in the same order.

    Args:
        sides: one or two groups of runs.

    Returns:
        By column, an array [side, run, example].

    Raises:
        CallError: There is no run, or no example that all runs measured.
    """
    tables = [[run.table.set_index("example") for run in side] for side in sides]
    every = [table for side in tables for table in side]
    if not every:
        raise CallError("expected the relevant-token attention of at least one model, got none")
    common = every[0].index
    for table in every[1:]:
        common = common.intersection(table.index)
    if common.empty:
        raise CallError("the runs have no example in common; measure the same examples")
    names = ("attention", "chance", "attention_elsewhere", "chance_elsewhere", "probability")
    return {
        name: np.array([[table.loc[common, name].to_numpy(dtype=float) for table in side] for side in tables])
        for name in names
    }


def compared(values: Float64[np.ndarray, "side *rest"]) -> Float64[np.ndarray, "*rest"]:
    """Return the first side minus the second, or the only side."""
    return values[0] - values[1] if len(values) == 2 else values[0]
