"""What the paper's released code does otherwise than is right; used under `convention="paper"` alone."""

import math
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
from jaxtyping import Float64
from torch import Tensor

from ...circuits.errors import CallError

#: `right`: as each measure's source defines it. `paper`: as the released code does, to compare figures like for like.
Convention = Literal["right", "paper"]

#: Sequences are padded to this length, and shares of a sequence are taken of it.
PADDED_LENGTH = 128
#: The one cut of sufficiency and comprehensiveness.
PAPER_CUT = 0.05


def demand_convention(convention: str) -> None:
    """CallError for what is no convention."""
    if convention not in get_args(Convention):
        raise CallError(f"convention should be 'right' or 'paper'; got {convention!r}")


def padded_cut_size(cut: float, padded_length: int) -> int:
    """Return how many tokens a cut takes of a sequence of any length: a share of the padded length, at least 1."""
    return max(1, math.floor(round(cut * padded_length, 9)))


def partly_sorted(
    row: Float64[Tensor, " position"], removable: Sequence[int], size: int, padded_length: int
) -> tuple[int, ...]:
    """Return the positions of the highest weights in the order in which numpy's partial sort of the padded row ends.

    That order is neither the sentence's nor the ranking's. Padding and what cannot be removed is never among them.

    Args:
        row: weights of an example.
        removable: positions that can be among them.
        size: how many.
        padded_length: to which the row is padded.
    """
    padded = np.full(max(padded_length, len(row)), -np.inf)
    padded[list(removable)] = row.numpy()[list(removable)]
    return tuple(np.argpartition(padded, -size)[-size:].tolist()) if size else ()
