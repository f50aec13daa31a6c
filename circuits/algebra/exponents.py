"""Factors so large or small that powers of their entries leave the range of float64, brought into it exactly."""

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

#: A power of two for each matrix of a batch; the number 0 where none needs one.
Exponent = Int[Tensor, "*batch"] | int

#: Entries up to 2 to this, and largest ones not below its inverse, have fourth powers that add up within the range.
_LARGEST_EXPONENT = 150


def in_range(factor: Float[Tensor, "*batch rows columns"]) -> tuple[Tensor, Exponent]:
    """The factor divided by 2^n, and n for each matrix; the factor itself and 0 where no matrix needs it.

    What other types than float64 can hold is always in range.
    """
    if factor.dtype != torch.float64:
        return factor, 0
    factor = factor.detach()
    exponent, has_one = _exponents(factor)
    is_out = has_one & (exponent.abs() > _LARGEST_EXPONENT)
    if not is_out.any():
        return factor, 0
    exponent = torch.where(is_out, exponent, 0)
    return times_power_of_two(factor, -exponent[..., None, None]), exponent


def is_in_range(matrices: Float64[Tensor, "*batch rows columns"]) -> bool:
    """Whether `in_range` would leave all of them as they are, and none is zero or not finite, as after leaving it."""
    exponent, has_one = _exponents(matrices)
    return bool((has_one & (exponent.abs() <= _LARGEST_EXPONENT)).all())


def times_power_of_two(values: Float64[Tensor, "*_"], exponent: Exponent) -> Float64[Tensor, "*_"]:
    """values * 2^exponent, in two steps, since the power itself may leave the range."""
    if isinstance(exponent, int):
        return values
    half = exponent // 2
    return values * _power_of_two(half) * _power_of_two(exponent - half)


def _exponents(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """The exponent of the largest entry of each matrix, and whether there is one: not of zero, infinity and NaN."""
    largest = torch.maximum(matrices.amax((-2, -1)), -matrices.amin((-2, -1)))
    return torch.frexp(largest).exponent, largest.isfinite() & (largest > 0)


def _power_of_two(exponent: Tensor) -> Tensor:
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent)
