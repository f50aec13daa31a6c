"""The choices of the paper's released code that differ from the standard ones, for `convention="paper"`."""

import math
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
from jaxtyping import Float64
from torch import Tensor

from ...circuits.errors import CallError

#: `standard`: every quantity is computed as its source defines it. `paper`: it is computed as the paper's released code
#: computes it, so that results can be compared with the published ones like for like.
Convention = Literal["standard", "paper"]

#: The released code pads every sequence to this length and takes its cuts as shares of it.
PADDED_LENGTH = 128
#: The only cut at which the released code evaluates sufficiency and comprehensiveness.
PAPER_CUT = 0.05


def demand_convention(convention: str) -> None:
    """Raise `CallError` if the convention is neither 'standard' nor 'paper'."""
    if convention not in get_args(Convention):
        raise CallError(f"convention should be 'standard' or 'paper'; got {convention!r}")


def padded_cut_size(cut: float, padded_length: int) -> int:
    """Return how many tokens a cut takes from any sequence in the paper's convention: max(1, floor(cut * length)).

    Args:
        cut: share of the padded length, from 0 to 1.
        padded_length: length to which every sequence is padded.
    """
    return max(1, math.floor(round(cut * padded_length, 9)))


def partly_sorted(
    row: Float64[Tensor, " position"], removable: Sequence[int], size: int, padded_length: int
) -> tuple[int, ...]:
    """Return the positions of the highest weights in the order in which numpy's partial sort of the padded row ends.

    This is neither the order of the sentence nor that of the ranking. Padding and tokens that cannot be removed are
    never among the positions.

    Args:
        row: weight of each token of one example.
        removable: positions that may be returned.
        size: number of positions to return.
        padded_length: length to which the row is padded before it is sorted.

    Returns:
        `size` positions.
    """
    padded = np.full(max(padded_length, len(row)), -np.inf)
    padded[list(removable)] = row.numpy()[list(removable)]
    return tuple(np.argpartition(padded, -size)[-size:].tolist()) if size else ()
