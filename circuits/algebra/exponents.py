"""Exact scaling by powers of two for factors whose powers would leave the range of float64."""

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

#: The exponent of a power of two for each matrix of a batch, or the number 0 if no matrix needs one.
Exponent = Int[Tensor, "*batch"] | int

#: If the largest entry has an exponent of at most this in absolute value, sums of fourth powers stay in range.
_LARGEST_EXPONENT = 150


def in_range(factor: Float[Tensor, "*batch rows columns"]) -> tuple[Tensor, Exponent]:
    """Divide each matrix by a power of two, 2^n, if powers of its entries could leave the range of float64.

    Other types than float64 are always in range.

    Returns:
        The scaled factor, and n for each matrix; or the factor itself and the number 0 if no matrix needs scaling.
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
    """Return whether `in_range` would leave every matrix as it is, and none of them is zero or not finite."""
    exponent, has_one = _exponents(matrices)
    return bool((has_one & (exponent.abs() <= _LARGEST_EXPONENT)).all())


def times_power_of_two(values: Float64[Tensor, "*_"], exponent: Exponent) -> Float64[Tensor, "*_"]:
    """Return values * 2^exponent, multiplied in two steps since the power itself may leave the range."""
    if isinstance(exponent, int):
        return values
    half = exponent // 2
    return values * _power_of_two(half) * _power_of_two(exponent - half)


def _exponents(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Return the exponent of each matrix's largest entry, and whether there is one: not for zero, infinity and NaN."""
    largest = torch.maximum(matrices.amax((-2, -1)), -matrices.amin((-2, -1)))
    return torch.frexp(largest).exponent, largest.isfinite() & (largest > 0)


def _power_of_two(exponent: Tensor) -> Tensor:
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent)
