"""Products in float64 of factors of any floating type, converted a few matrices at a time."""

import math

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

#: Doubles converted at a time, four megabytes: they stay in cache, which halves the time of a product.
SCRATCH_ELEMENTS = 2**19


def broadcast_shapes(*shapes: torch.Size) -> torch.Size:
    """The common batch shape; ValueError where there is none. torch's own function loads sympy when first called."""
    return torch.Size(np.broadcast_shapes(*shapes))


def upcast(tensor: Float[Tensor, "*shape"]) -> Float64[Tensor, "*shape"]:
    """The tensor in float64 without gradient; from MPS, which has no float64, on the CPU."""
    return at_home(tensor).to(torch.float64)


def multiply(
    first: Float[Tensor, "*#batch rows inner"], second: Float[Tensor, "*#batch inner columns"]
) -> Float64[Tensor, "*_ rows columns"]:
    """first @ second in float64, converting a few matrices at a time."""
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
    """||matrix||_F, also where the squares of the entries leave the range of float64; NaN where they are not finite."""
    largest = matrix.abs().amax((-2, -1), keepdim=True)
    unit = torch.where(largest > 0, largest, 1.0)
    return torch.linalg.vector_norm(matrix / unit, dim=(-2, -1)) * unit[..., 0, 0]


def at_home(tensor: Tensor) -> Tensor:
    """The tensor without gradient, on a device that has float64."""
    tensor = tensor.detach()
    return tensor.cpu() if tensor.device.type == "mps" else tensor


class _Blocks:
    """A batch of matrices, a block at a time in float64, in scratch that stays in cache."""

    def __init__(self, matrices: Tensor, step: int) -> None:
        self.matrices, self.step = matrices, step
        converted = matrices.dtype == torch.float64
        self.scratch = None if converted else torch.empty_like(matrices[:step], dtype=torch.float64)

    def __getitem__(self, start: int) -> Tensor:
        block = self.matrices[start : start + self.step]
        return block if self.scratch is None else self.scratch[: len(block)].copy_(block)


def _flatten(matrices: Tensor, batch: torch.Size) -> Tensor:
    return matrices.expand(*batch, *matrices.shape[-2:]).reshape(math.prod(batch), *matrices.shape[-2:])


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
