"""Products in float64 of factors of any floating type, converted a few matrices at a time."""

import math

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

#: The number of float64 entries converted at a time. These four megabytes stay in cache, which halves the time of a
#: product.
SCRATCH_ELEMENTS = 2**19


def broadcast_shapes(*shapes: torch.Size) -> torch.Size:
    """Return the common batch shape of several shapes.

    torch's own function is avoided because it imports sympy on its first call.

    Raises:
        ValueError: The shapes do not broadcast.
    """
    return torch.Size(np.broadcast_shapes(*shapes))


def upcast(tensor: Float[Tensor, "*shape"]) -> Float64[Tensor, "*shape"]:
    """Return the tensor in float64 without gradient; a tensor on MPS, which has no float64, moves to the CPU."""
    return at_home(tensor).to(torch.float64)


def multiply(
    first: Float[Tensor, "*#batch rows inner"], second: Float[Tensor, "*#batch inner columns"]
) -> Float64[Tensor, "*_ rows columns"]:
    """Return first @ second in float64, converting a few matrices at a time.

    Args:
        first: A batch of matrices of any floating type.
        second: A batch of matrices whose batch dimensions broadcast with those of `first`.

    Returns:
        The products, without gradient.
    """
    first, second = at_home(first), at_home(second)
    if first.dtype == second.dtype == torch.float64:
        return first @ second
    batch = broadcast_shapes(first.shape[:-2], second.shape[:-2])
    rows, inner, columns = *first.shape[-2:], second.shape[-1]
    step = max(1, SCRATCH_ELEMENTS // (inner * max(rows, columns)))
    firsts, seconds = _Blocks(_flatten(first, batch), step), _Blocks(_flatten(second, batch), step)
    product = torch.empty(math.prod(batch), rows, columns, dtype=torch.float64, device=first.device)
    for start in range(0, len(product), step):
        torch.matmul(firsts[start], seconds[start], out=product[start : start + step])
    return product.reshape(*batch, rows, columns)


def matrix_norm(matrix: Float64[Tensor, "*batch rows columns"]) -> Float64[Tensor, "*batch"]:
    """Return ||matrix||_F, even if squares of the entries leave the range of float64; NaN if an entry is not finite."""
    largest = matrix.abs().amax((-2, -1), keepdim=True)
    unit = torch.where(largest > 0, largest, 1.0)
    return torch.linalg.vector_norm(matrix / unit, dim=(-2, -1)) * unit[..., 0, 0]


def at_home(tensor: Tensor) -> Tensor:
    """Return the tensor without gradient, on a device that has float64."""
    tensor = tensor.detach()
    return tensor.cpu() if tensor.device.type == "mps" else tensor


def difference_factors(
    left: Float64[Tensor, "*#batch rows rank"],
    right: Float64[Tensor, "*#batch rank columns"],
    other_left: Float64[Tensor, "*#batch rows rank"],
    other_right: Float64[Tensor, "*#batch rank columns"],
) -> tuple[Float64[Tensor, "*_ rows twice_rank"], Float64[Tensor, "*_ twice_rank columns"]]:
    """Return factors of the difference of two products, A B - M S, without losing digits when the products are close.

        A B - M S = (A - M) B + M (B - S) = [(A - M) t, M] [B / t; B - S],   t a power of two.

    Factors that are near each other have an exact difference in floating point, so a small difference of the products
    keeps its digits; [A, -M] and [B; S] would lose them to rounding. For equal factors the difference is zero. The
    choice of t gives both terms the same weight, so that the norm can be computed from Gram matrices.

    Args:
        left: A [*batch, rows, rank].
        right: B [*batch, rank, columns].
        other_left: M [*batch, rows, rank].
        other_right: S [*batch, rank, columns].

    Returns:
        The left factor [*batch, rows, 2 rank] and the right factor [*batch, 2 rank, columns].
    """
    left_change, right_change = left - other_left, right - other_right
    moved, stayed, taken, moved_too = (
        factor.abs().amax(dim=(-2, -1)) for factor in (left_change, other_left, right, right_change)
    )
    rows, columns = stayed / moved, taken / moved_too
    # If one side has not changed, its term is zero and only the other term counts.
    wanted = torch.where(moved == 0, columns, torch.where(moved_too == 0, rows, rows.sqrt() * columns.sqrt()))
    balance = torch.where((wanted > 0) & wanted.isfinite(), wanted.log2().round().exp2(), 1.0)[..., None, None]
    has_moved = ~((moved == 0) & (moved_too == 0))[..., None, None]
    return (
        joined(left_change * balance, other_left * has_moved, dim=-1),
        joined(right / balance, right_change, dim=-2),
    )


def joined(first: Tensor, second: Tensor, dim: int) -> Tensor:
    """Join two factors side by side (dim -1) or on top of each other (dim -2), broadcasting their batch dimensions."""
    batch = broadcast_shapes(first.shape[:-2], second.shape[:-2])
    return torch.cat([factor.expand(*batch, *factor.shape[-2:]) for factor in (first, second)], dim=dim)


class _Blocks:
    """A batch of matrices, read as blocks in float64 in scratch memory that stays in cache."""

    def __init__(self, matrices: Tensor, step: int) -> None:
        self.matrices, self.step = matrices, step
        converted = matrices.dtype == torch.float64
        self.scratch = None if converted else torch.empty_like(matrices[:step], dtype=torch.float64)

    def __getitem__(self, start: int) -> Tensor:
        block = self.matrices[start : start + self.step]
        return block if self.scratch is None else self.scratch[: len(block)].copy_(block)


def _flatten(matrices: Tensor, batch: torch.Size) -> Tensor:
    return matrices.expand(*batch, *matrices.shape[-2:]).reshape(math.prod(batch), *matrices.shape[-2:])
