"""The figures of a training step of C = A B from Gram matrices of the factors, their gradients and their changes.

Each step that `measure_step` compares is a sum of products of one of A, G_A, D_A and one of B, G_B, D_B, where D is the
change of a factor, with a small matrix between them:

    E = A G_B + G_A B        Omega(C) G = A X G_B + G_A Y B        C_after - C = A D_B + D_A B + D_A D_B

With A = Q_A R_A and B' = Q_B R_B, where each Q has orthonormal columns, the polar factor of C is Q_A Z Q_B' with Z that
of R_A R_B', so that X = R_A^{-1} Z R_B and Y = R_A' Z (R_B')^{-1}. Both are the identity if the factors are balanced.

Norms and inner products of such sums follow from the Gram matrices of [A, G_A, D_A] and [B; G_B; D_B] alone. These are
computed a few matrices at a time, in memory that stays in cache. Nothing is lost to cancellation in the change, because
it is the factors that are subtracted.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from .blas import multiply_by_transpose
from .products import SCRATCH_ELEMENTS, matrix_norm
from .spectrum import CHOLESKY_CONDITION, SMALLEST_TRACE, matrix_svd

#: Factors, gradients and changes of norms between these have products whose squares stay in the range of float64.
_SMALLEST_SIZE, _LARGEST_SIZE = 1e-65, 1e65

#: The places of a factor, its gradient and its change in a Gram matrix.
_FACTOR, _GRADIENT, _CHANGE = range(3)


class Side(NamedTuple):
    """One factor of a step, with its long dimension first: A, or B'.

    Attributes:
        factor: The factor before the step.
        gradient: Its gradient.
        after: The factor after the step.
    """

    factor: Float[Tensor, "batch long rank"]
    gradient: Float[Tensor, "batch long rank"]
    after: Float[Tensor, "batch long rank"]


def figures_by_grams(left: Side, right: Side) -> tuple[dict[str, Float64[Tensor, " batch"]], Bool[Tensor, " batch"]]:
    """Return the figures of a step by name, and for which matrices they are accurate.

    They are not where a factor is ill-conditioned, rank-deficient or out of range, or a step much smaller than its
    terms.

    Args:
        left: A, with its gradient and its value after the step.
        right: B', likewise.
    """
    parts = [_figures(*sides) for sides in _grams(left, right)]
    figures = {name: torch.cat([values[name] for values, _ in parts]) for name in parts[0][0]}
    return figures, torch.cat([accurate for _, accurate in parts])


class _Gram:
    """The Gram matrices W_i'W_j of a factor, its gradient and its change, each of norm one, and their norms."""

    def __init__(self, product: Float64[Tensor, "batch three_ranks three_ranks"], places: tuple[Tensor, ...]) -> None:
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
        first, second = (slice(place * self._rank, (place + 1) * self._rank) for place in pair)
        return self._product[:, first, second]


class _Term(NamedTuple):
    """A term of a step: size * W_place M V_other, with W and V of norm one; without M there is nothing in between."""

    size: Float64[Tensor, " batch"]
    place: int
    between: Float64[Tensor, "batch rank rank"] | None
    other: int


class _Sums:
    """Inner products of steps, each a list of terms."""

    def __init__(self, left: _Gram, right: _Gram) -> None:
        self._left, self._right = left, right

    def inner(self, one: list[_Term], two: list[_Term]) -> Float64[Tensor, " batch"]:
        """Return the inner product of two steps."""
        total = torch.zeros_like(one[0].size)
        for first in one:
            for second in two:
                total += first.size * second.size * self._of_terms(first, second)
        return total

    def norm(self, step: list[_Term]) -> tuple[Float64[Tensor, " batch"], Bool[Tensor, " batch"]]:
        """Return the norm of a step, and whether it is accurate: not much smaller than its terms allow."""
        square = self.inner(step, step)
        largest = sum(term.size * self._left_norm(term) for term in step)
        return square.clamp_min(0).sqrt(), ~(square <= SMALLEST_TRACE * largest**2) | (largest == 0)

    def _of_terms(self, first: _Term, second: _Term) -> Float64[Tensor, " batch"]:
        left = self._left[first.place, second.place]
        if first.between is not None:
            left = first.between.mT @ left
        if second.between is not None:
            left = left @ second.between
        return (left * self._right[first.other, second.other]).sum((-2, -1))

    def _left_norm(self, term: _Term) -> Tensor | float:
        """The norm of W_place M, with which that of a term is compared."""
        if term.between is None:
            return 1.0
        gram = term.between.mT @ self._left[term.place, term.place] @ term.between
        return gram.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(0).sqrt()


def _figures(left: _Gram, right: _Gram) -> tuple[dict[str, Tensor], Tensor]:
    sums = _Sums(left, right)
    (a, of_a, change_a), (b, of_b, change_b) = left.sizes, right.sizes
    X, Y, apart_X, apart_Y, is_conditioned = _omega_matrices(left, right)
    exact = [_Term(a * of_b, _FACTOR, None, _GRADIENT), _Term(of_a * b, _GRADIENT, None, _FACTOR)]
    omega, error = (
        [_Term(a * of_b, _FACTOR, of_left, _GRADIENT), _Term(of_a * b, _GRADIENT, of_right, _FACTOR)]
        for of_left, of_right in ((X, Y), (apart_X, apart_Y))
    )
    taken = [
        _Term(a * change_b, _FACTOR, None, _CHANGE),
        _Term(change_a * b, _CHANGE, None, _FACTOR),
        _Term(change_a * change_b, _CHANGE, None, _CHANGE),
    ]
    (exact_norm, *checks), (omega_norm, of_omega), (error_norm, of_error), (taken_norm, of_taken) = (
        sums.norm(step) for step in (exact, omega, error, taken)
    )
    along_exact = -sums.inner(taken, exact) / exact_norm
    first, second = a * of_a, b * of_b
    first, second = (
        size[:, None, None] * product
        for size, product in ((first, left[_FACTOR, _GRADIENT]), (second, right[_GRADIENT, _FACTOR]))
    )
    size = matrix_norm(first) + matrix_norm(second)
    values = {
        "gradient_disagreement": torch.where(size == 0, 0.0, matrix_norm(first - second) / size),
        "exact_step_norm": exact_norm,
        "omega_step_norm": omega_norm,
        "omega_cosine": sums.inner(omega, exact) / exact_norm / omega_norm,
        "omega_relative_error": error_norm / exact_norm,
        "taken_step_norm": taken_norm,
        "taken_exact_cosine": along_exact / taken_norm,
        "taken_omega_cosine": -sums.inner(taken, omega) / omega_norm / taken_norm,
        "taken_rate": along_exact / exact_norm,
    }
    for check in (*checks, of_omega, of_error, of_taken, left.are_in_range, right.are_in_range):
        is_conditioned &= check
    return values, is_conditioned


def _is_in_range(size: Float64[Tensor, " batch"], matrices: Tensor) -> Bool[Tensor, " batch"]:
    """Return whether squares of a size stay in the range of float64; it is 0 or NaN, too, where the matrix is."""
    fits = ~((size < _SMALLEST_SIZE) | (size > _LARGEST_SIZE))
    if (size == 0).any():
        fits |= (matrices == 0).flatten(1).all(dim=1)
    return fits


def _omega_matrices(left: _Gram, right: _Gram) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return X, Y, X - 1 and Y - 1 between factors of norm one, and whether both factors are well-conditioned."""
    (R_A, inverse_A, fits), (R_B, inverse_B, fits_too) = (_triangle(gram[_FACTOR, _FACTOR]) for gram in (left, right))
    (U, _, V) = matrix_svd(R_A @ R_B.mT)
    Z = U @ V
    ratio = (right.sizes[_FACTOR] / left.sizes[_FACTOR])[:, None, None]
    turned_left, turned_right = ratio * (Z @ R_B), R_A.mT @ Z / ratio
    apart_X, apart_Y = inverse_A @ (turned_left - R_A), (turned_right - R_B.mT) @ inverse_B.mT
    return inverse_A @ turned_left, turned_right @ inverse_B.mT, apart_X, apart_Y, fits & fits_too


def _triangle(gram: Float64[Tensor, "batch rank rank"]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the triangle R with R'R the Gram matrix, its inverse, and whether they are accurate."""
    lower, failed = torch.linalg.cholesky_ex(gram)
    identity = torch.eye(gram.shape[-1], dtype=torch.float64, device=gram.device)
    inverse = torch.linalg.solve_triangular(lower, identity, upper=False)
    condition = torch.linalg.matrix_norm(lower) * torch.linalg.matrix_norm(inverse)
    return lower.mT, inverse.mT, (failed == 0) & (condition <= CHOLESKY_CONDITION)


def _grams(left: Side, right: Side) -> Iterator[tuple[_Gram, _Gram]]:
    """Yield both Gram matrices of a few matrices at a time."""
    longest, rank = max(left.factor.shape[-2], right.factor.shape[-2]), left.factor.shape[-1]
    at_once = max(1, SCRATCH_ELEMENTS // (3 * rank * longest))
    joint = [_Joint(side, at_once) for side in (left, right)]
    for start in range(0, len(left.factor), at_once):
        part = slice(start, start + at_once)
        yield joint[0].gram(part), joint[1].gram(part)


class _Joint:
    """The factor, the gradient and the change side by side, in float64 scratch memory laid out as the factor is."""

    def __init__(self, side: Side, at_once: int) -> None:
        self._side = side
        (count, long, rank), device = side.factor.shape, side.factor.device
        wide = math.prod((min(at_once, count), long, 3 * rank))
        scratch = torch.empty(wide, dtype=torch.float64, device=device)
        self._is_wide = side.factor.stride(-2) < side.factor.stride(-1)
        shape = (-1, 3 * rank, long) if self._is_wide else (-1, long, 3 * rank)
        self._scratch = scratch.view(shape).mT if self._is_wide else scratch.view(shape)

    def gram(self, part: slice) -> _Gram:
        factor, gradient, after = (tensor[part] for tensor in self._side)
        joint = self._scratch[: len(factor)]
        places = joint.tensor_split(3, dim=-1)
        places[_FACTOR].copy_(factor)
        places[_GRADIENT].copy_(gradient)
        torch.sub(after.to(torch.float64), places[_FACTOR], out=places[_CHANGE])
        if joint.device.type != "cpu":
            return _Gram(joint.mT @ joint, places)
        product = np.empty((len(factor), joint.shape[-1], joint.shape[-1]))
        with np.errstate(all="ignore"):
            multiply_by_transpose(joint.mT.numpy(), out=product)
        return _Gram(torch.from_numpy(product), places)
