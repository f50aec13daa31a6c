"""The difference of two products: factors joined, of equal rank the differences of the factors."""

import torch
from jaxtyping import Float64
from torch import Tensor

from .products import broadcast_shapes


def difference_factors(
    left: Float64[Tensor, "*#batch rows rank"],
    right: Float64[Tensor, "*#batch rank columns"],
    other_left: Float64[Tensor, "*#batch rows rank"],
    other_right: Float64[Tensor, "*#batch rank columns"],
) -> tuple[Float64[Tensor, "*_ rows twice_rank"], Float64[Tensor, "*_ twice_rank columns"]]:
    """Factors of A B - M S = (A - M) B + M (B - S): [(A - M) t, M] and [B / t; B - S], t a power of two.

    Factors that are near each other differ exactly in floating point, so that a small difference of the products keeps
    its digits, which [A, -M] and [B; S] would lose to rounding; of equal factors it is zero. With t the two terms weigh
    the same, so that the norm can be read from Gram matrices.
    """
    moved_left, moved_right = left - other_left, right - other_right
    factors = (moved_left, other_left, right, moved_right)
    moved, stayed, taken, moved_too = (each.abs().amax(dim=(-2, -1)) for each in factors)
    rows, columns = stayed / moved, taken / moved_too
    # Where one side has not moved its term is zero, and the other one is all that counts.
    wanted = torch.where(moved == 0, columns, torch.where(moved_too == 0, rows, rows.sqrt() * columns.sqrt()))
    balance = torch.where((wanted > 0) & wanted.isfinite(), wanted.log2().round().exp2(), 1.0)[..., None, None]
    has_moved = ~((moved == 0) & (moved_too == 0))[..., None, None]
    return (
        joined(moved_left * balance, other_left * has_moved, dim=-1),
        joined(right / balance, moved_right, dim=-2),
    )


def joined(first: Tensor, second: Tensor, dim: int) -> Tensor:
    """Two factors side by side (dim -1) or one above the other (dim -2), their batch dimensions broadcast."""
    batch = broadcast_shapes(first.shape[:-2], second.shape[:-2])
    return torch.cat([each.expand(*batch, *each.shape[-2:]) for each in (first, second)], dim=dim)
