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
