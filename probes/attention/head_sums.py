"""Sums and largest values of a measure for every head of a layer, which add up over calls."""

from dataclasses import dataclass

import torch
from jaxtyping import Float64
from torch import Tensor


@dataclass(frozen=True, eq=False)
class HeadSums:
    """Sums of one measure over queries or examples, and their number, for every head of a layer.

    Attributes:
        total: The sums.
        count: The numbers of queries or examples.
        unknown: Why the measure of some of them is not known, and so its mean is not.
    """

    total: Float64[Tensor, " head"]
    count: Float64[Tensor, " head"]
    unknown: tuple[str, ...] = ()

    def __add__(self, other: "HeadSums") -> "HeadSums":
        """Add the sums of another batch."""
        return HeadSums(self.total + other.total, self.count + other.count, self._unknown_with(other))

    def mean(self) -> Float64[Tensor, " head"]:
        """Return the mean; NaN if there was nothing to average, or if some of it is not known."""
        return torch.full_like(self.total, torch.nan) if self.unknown else self.total / self.count

    def on_cpu(self) -> "HeadSums":
        """Copy them to the CPU."""
        return type(self)(self.total.cpu(), self.count.cpu(), self.unknown)

    def _unknown_with(self, other: "HeadSums") -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.unknown, *other.unknown)))


@dataclass(frozen=True, eq=False)
class HeadMaxima(HeadSums):
    """The largest value of one measure over queries, in `total`, and their number, for every head of a layer."""

    def __add__(self, other: HeadSums) -> "HeadMaxima":
        """Take the larger of this and another batch's."""
        return HeadMaxima(torch.maximum(self.total, other.total), self.count + other.count, self._unknown_with(other))

    def mean(self) -> Float64[Tensor, " head"]:
        """Return the largest; NaN if there was no query, or if some of it is not known."""
        return torch.where(self.count > 0, self.total, torch.nan) if not self.unknown else super().mean()
