"""Gram matrices of three matrices side by side, from which sums of products of their factors are measured at once.

With W = [A, M, A_other - A] and V' = [B', N', B_other' - B'] for the factors of C = A B, every product that is compared
with C is a sum of terms W_i Z V_j with a small matrix Z. Norms and inner products of such sums follow from W'W and V V'
alone, which are computed a few matrices at a time, in memory that stays in cache. Nothing is lost to cancellation in a
change of C, because it is the factors that are subtracted.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from .blas import multiply_by_transpose
from .products import SCRATCH_ELEMENTS
from .spectrum import SMALLEST_TRACE

#: Matrices of norms between these have products whose squares stay in the range of float64.
_SMALLEST_SIZE, _LARGEST_SIZE = 1e-65, 1e65

#: The places of a factor, of what is beside it and of its change, in a Gram matrix.
FACTOR, BESIDE, CHANGE = range(3)


class Side(NamedTuple):
    """One side of three circuits, with its long dimension first: the left factors, or the right factors transposed.

    Attributes:
        factor: The factor of C.
        beside: That of another circuit, or a gradient.
        other: That of C at another time.
    """

    factor: Float[Tensor, "batch long rank"]
    beside: Float[Tensor, "batch long rank"]
    other: Float[Tensor, "batch long rank"]


class Gram:
    """The Gram matrices W_i'W_j of a factor, of what is beside it and of its change, each of norm one, and their norms.

    Attributes:
        sizes: The norm of each of the three.
        are_in_range: For which matrices of the batch no square leaves the range of float64.
    """

    def __init__(self, product: Float64[Tensor, "batch three_ranks three_ranks"], places: tuple[Tensor, ...]) -> None:
        """Take the joint Gram matrix apart.

        Args:
            product: The Gram matrix of the three side by side, which is overwritten.
            places: The three, of any scale.
        """
        rank = product.shape[-1] // 3
        self.sizes = product.diagonal(dim1=-2, dim2=-1).unflatten(-1, (3, rank)).sum(-1).sqrt().unbind(-1)
        self.are_in_range = torch.stack(
            [_is_in_range(size, matrices) for size, matrices in zip(self.sizes, places, strict=True)]
        ).all(dim=0)
        units = torch.stack([torch.where(size > 0, size, 1.0) for size in self.sizes], dim=-1)
        units = units.repeat_interleave(rank, dim=-1)
        self._product = product.div_(units[:, :, None]).div_(units[:, None, :])
        self._rank = rank

    def __getitem__(self, pair: tuple[int, int]) -> Float64[Tensor, "batch rank rank"]:
        """Return W_i'W_j."""
        first, second = (slice(place * self._rank, (place + 1) * self._rank) for place in pair)
        return self._product[:, first, second]


class Term(NamedTuple):
    """A term of a sum: size * W_place M V_other, with W and V of norm one; M is the identity if it is None."""

    size: Float64[Tensor, " batch"]
    place: int
    between: Float64[Tensor, "batch rank rank"] | None
    other: int


class Sums:
    """Inner products of sums of products, each a list of terms."""

    def __init__(self, left: Gram, right: Gram) -> None:
        """Keep the Gram matrices of both sides."""
        self._left, self._right = left, right

    def inner(self, one: list[Term], two: list[Term]) -> Float64[Tensor, " batch"]:
        """Return the inner product of two sums."""
        total = torch.zeros_like(one[0].size)
        for first in one:
            for second in two:
                total += first.size * second.size * self._of_terms(first, second)
        return total

    def norm(self, terms: list[Term]) -> tuple[Float64[Tensor, " batch"], Bool[Tensor, " batch"]]:
        """Return the norm of a sum, and whether it is accurate: not much smaller than its terms allow."""
        square = self.inner(terms, terms)
        largest = sum(term.size * self._left_norm(term) for term in terms)
        return square.clamp_min(0).sqrt(), ~(square <= SMALLEST_TRACE * largest**2) | (largest == 0)

    def _of_terms(self, first: Term, second: Term) -> Float64[Tensor, " batch"]:
        left = self._left[first.place, second.place]
        if first.between is not None:
            left = first.between.mT @ left
        if second.between is not None:
            left = left @ second.between
        return (left * self._right[first.other, second.other]).sum((-2, -1))

    def _left_norm(self, term: Term) -> Tensor | float:
        """The norm of W_place M, with which that of a term is compared."""
        if term.between is None:
            return 1.0
        gram = term.between.mT @ self._left[term.place, term.place] @ term.between
        return gram.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(0).sqrt()


def grams(left: Side, right: Side) -> Iterator[tuple[Gram, Gram]]:
    """Yield both Gram matrices of a few matrices of the batch at a time.

    Args:
        left: The left factors.
        right: The right factors, transposed.
    """
    longest, rank = max(left.factor.shape[-2], right.factor.shape[-2]), left.factor.shape[-1]
    at_once = max(1, SCRATCH_ELEMENTS // (3 * rank * longest))
    joint = [_Joint(side, at_once) for side in (left, right)]
    for start in range(0, len(left.factor), at_once):
        part = slice(start, start + at_once)
        yield joint[0].gram(part), joint[1].gram(part)


class _Joint:
    """A factor, what is beside it and its change, in float64 scratch memory that is laid out as the factor is."""

    def __init__(self, side: Side, at_once: int) -> None:
        self._side = side
        (count, long, rank), device = side.factor.shape, side.factor.device
        wide = math.prod((min(at_once, count), long, 3 * rank))
        scratch = torch.empty(wide, dtype=torch.float64, device=device)
        self._is_wide = side.factor.stride(-2) < side.factor.stride(-1)
        shape = (-1, 3 * rank, long) if self._is_wide else (-1, long, 3 * rank)
        self._scratch = scratch.view(shape).mT if self._is_wide else scratch.view(shape)

    def gram(self, part: slice) -> Gram:
        factor, beside, other = (tensor[part] for tensor in self._side)
        joint = self._scratch[: len(factor)]
        places = joint.tensor_split(3, dim=-1)
        places[FACTOR].copy_(factor)
        places[BESIDE].copy_(beside)
        torch.sub(other.to(torch.float64), places[FACTOR], out=places[CHANGE])
        if joint.device.type != "cpu":
            return Gram(joint.mT @ joint, places)
        product = np.empty((len(factor), joint.shape[-1], joint.shape[-1]))
        with np.errstate(all="ignore"):
            multiply_by_transpose(joint.mT.numpy(), out=product)
        return Gram(torch.from_numpy(product), places)


def _is_in_range(size: Float64[Tensor, " batch"], matrices: Tensor) -> Bool[Tensor, " batch"]:
    """Return whether squares of a size stay in the range of float64; it is 0 or NaN, too, where the matrix is."""
    fits = ~((size < _SMALLEST_SIZE) | (size > _LARGEST_SIZE))
    if (size == 0).any():
        fits |= (matrices == 0).flatten(1).all(dim=1)
    return fits
