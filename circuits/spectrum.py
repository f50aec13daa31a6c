"""Spectra of a product left @ right, read from small matrices and never from the product.

With left = Q_left T_left and right = T_right Q_right', where the Q have orthonormal columns, everything that
does not change under rotations of the two outer spaces is a figure of the small matrices T_left and T_right:
the pair is called the reduction, and T_left T_right the core.

All of it is float64. A T comes from the Cholesky factor of a Gram matrix where that is accurate, and matrix by
matrix from a thin QR decomposition where it is not: zero, rank-deficient and ill-conditioned factors, which is
where training starts. A matrix with NaN or infinite entries has NaN for every figure; its neighbours in the
batch do not notice. Results carry no gradient.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

# Doubles converted at a time: a few megabytes stay in cache, which halves the time of a Gram matrix.
SCRATCH_ELEMENTS = 2**18

# Basis vectors taken from a Cholesky factor T lose orthogonality as 1e-16 (||T|| ||T^-1||)^2, and singular
# values lose as much relative accuracy. Up to this product of Frobenius norms both stay below 1e-9.
CHOLESKY_CONDITION = 2e3

# Eigenvalues of K' G_left K, for Gram matrices of trace one, are off by a few 1e-16. A smallest eigenvalue above
# this leaves every singular value, its root, a relative error of about 1e-8 at most.
SMALLEST_EIGENVALUE = 1e-8

# ||C||_F^2 as the trace of two Gram matrices of trace one: above this it has lost at most four of 16 digits.
SMALLEST_TRACE = 1e-4


class ThinSVD(NamedTuple):
    """A matrix as left @ diag(values) @ right, with orthonormal columns in left and rows in right."""

    left: Float64[Tensor, "*batch rows rank"]
    values: Float64[Tensor, "*batch rank"]
    right: Float64[Tensor, "*batch rank columns"]


class Reduction(NamedTuple):
    """The factors up to rotations of the outer spaces. A collapsed matrix is its own left, without right."""

    left: Float64[Tensor, "*#batch left_rank rank"]
    right: Float64[Tensor, "*#batch rank right_rank"] | None

    @property
    def core(self) -> Float64[Tensor, "*batch left_rank right_rank"]:
        """T_left T_right: the matrix itself, in the bases Q_left and Q_right."""
        return self.left if self.right is None else self.left @ self.right


class _Orthogonalized(NamedTuple):
    """tall = Q @ triangle, with Q = tall @ inverse, but for the matrices in rest, whose Q is kept in basis."""

    tall: Float[Tensor, "*batch long rank"]
    triangle: Float64[Tensor, "*batch small rank"]
    inverse: Float64[Tensor, "*batch rank small"]
    rest: Bool[Tensor, "*batch"]
    basis: Float64[Tensor, "some long small"] | None

    def lift(self, coordinates: Float64[Tensor, "*#batch small columns"]) -> Float64[Tensor, "*_ long columns"]:
        """Q @ coordinates."""
        lifted = multiply(self.tall, self.inverse @ coordinates)
        if self.basis is not None:
            rest = self.rest.expand(lifted.shape[:-2])
            place = (self.rest.flatten().cumsum(0) - 1).reshape(self.rest.shape).expand(rest.shape)
            lifted[rest] = self.basis[place[rest]] @ coordinates[rest]
        return lifted


def broadcast_shapes(*shapes: torch.Size) -> torch.Size:
    """The common batch shape; ValueError where there is none. torch's own function loads sympy when first called."""
    return torch.Size(np.broadcast_shapes(*shapes))


def upcast(tensor: Float[Tensor, "*shape"]) -> Float64[Tensor, "*shape"]:
    """The tensor in float64 without gradient; from MPS, which has no float64, on the CPU."""
    return _at_home(tensor).to(torch.float64)


def multiply(
    first: Float[Tensor, "*#batch rows inner"], second: Float[Tensor, "*#batch inner columns"]
) -> Float64[Tensor, "*_ rows columns"]:
    """first @ second in float64, converting a few matrices at a time."""
    first, second = _at_home(first), _at_home(second)
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


def gram(tall: Float[Tensor, "*batch long rank"]) -> Float64[Tensor, "*batch rank rank"]:
    """tall' tall in float64, converting each matrix once."""
    tall = _at_home(tall)
    if tall.dtype == torch.float64:
        return tall.mT @ tall
    batch, (long, rank) = tall.shape[:-2], tall.shape[-2:]
    step = max(1, SCRATCH_ELEMENTS // (long * rank))
    blocks = _Blocks(_flatten(tall, batch), step)
    product = torch.empty(math.prod(batch), rank, rank, dtype=torch.float64, device=tall.device)
    for start in range(0, len(product), step):
        block = blocks[start]
        torch.matmul(block.mT, block, out=product[start : start + step])
    return product.reshape(*batch, rank, rank)


def reduce(left: Float[Tensor, "*#batch rows rank"], right: Float[Tensor, "*#batch rank columns"] | None) -> Reduction:
    """The small matrices T_left [min(rows, rank), rank] and T_right [rank, min(rank, columns)]."""
    if right is None:
        return Reduction(upcast(left), None)
    return _reduce(left, right, gram(left), gram(right.mT))


def matrix_svd(matrix: Float64[Tensor, "*batch rows columns"]) -> ThinSVD:
    """Thin SVD of small or collapsed matrices, NaN where a matrix is not finite."""
    matrix, finite = _zero_where_not_finite(matrix)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    poison = torch.where(finite, 0.0, torch.nan)
    return ThinSVD(left + poison[..., None, None], values + poison[..., None], right + poison[..., None, None])


def matrix_singular_values(
    matrix: Float64[Tensor, "*batch rows columns"],
) -> Float64[Tensor, "*batch values"]:
    """Singular values of small or collapsed matrices, NaN where a matrix is not finite."""
    matrix, finite = _zero_where_not_finite(matrix)
    return torch.linalg.svdvals(matrix).masked_fill(~finite[..., None], torch.nan)


def singular_values(
    left: Float[Tensor, "*#batch rows rank"], right: Float[Tensor, "*#batch rank columns"] | None
) -> Float64[Tensor, "*_ values"]:
    """Singular values of left @ right, largest first, min(rows, rank, columns) of them.

    Relative error below 1e-7 while the condition of each factor is at most 1e3, 1e-6 at 1e4; beyond that, and
    for rank-deficient factors, the error is absolute, of the order of 1e-16 ||left|| ||right||.
    """
    if right is None or left.shape[-1] > min(left.shape[-2], right.shape[-1]):
        return matrix_singular_values(reduce(left, right).core)
    grams = gram(left), gram(right.mT)
    values, accepted = _values_from_grams(*grams)
    if not accepted.all():
        rest = ~accepted
        values[rest] = matrix_singular_values(_reduce(left, right, *grams).core[rest])
    return values


def svd(left: Float[Tensor, "*#batch rows rank"], right: Float[Tensor, "*#batch rank columns"] | None) -> ThinSVD:
    """Thin SVD of left @ right, of rank min(rows, rank, columns); null directions are orthonormal too."""
    if right is None:
        return matrix_svd(upcast(left))
    rows = _orthogonalize(left, gram(left), vectors=True)
    columns = _orthogonalize(right.mT, gram(right.mT), vectors=True)
    core = matrix_svd(rows.triangle @ columns.triangle.mT)
    return ThinSVD(rows.lift(core.left), core.values, columns.lift(core.right.mT).mT)


def frobenius_norm(
    left: Float[Tensor, "*#batch rows rank"], right: Float[Tensor, "*#batch rank columns"] | None
) -> Float64[Tensor, "*_"]:
    """||left @ right||_F, the root of tr(G_left G_right); from the reduction where that trace cancels."""
    if right is None:
        return _matrix_norm(upcast(left))
    grams = gram(left), gram(right.mT)
    (left_gram, left_size), (right_gram, right_size) = map(_normalize, grams)
    square = (left_gram * right_gram).sum((-2, -1))
    norm = square.clamp_min(0).sqrt() * left_size * right_size
    rest = ~((square > SMALLEST_TRACE) & norm.isfinite())
    if rest.any():
        norm[rest] = _matrix_norm(_reduce(left, right, *grams).core[rest])
    return norm


def _values_from_grams(
    left_gram: Float64[Tensor, "*#batch rank rank"], right_gram: Float64[Tensor, "*#batch rank rank"]
) -> tuple[Float64[Tensor, "*_ rank"], Bool[Tensor, "*_"]]:
    """Roots of the eigenvalues of K' G_left K, where K K' = G_right, and which matrices they may serve.

    The check bounds the conditions of both factors too: their product is at most
    sqrt(tr G_left tr G_right / smallest eigenvalue).
    """
    left_gram, left_size = _normalize(left_gram)
    right_gram, right_size = _normalize(right_gram)
    factor, failed = torch.linalg.cholesky_ex(right_gram)
    square, finite = _zero_where_not_finite(factor.mT @ left_gram @ factor)
    eigenvalues = torch.linalg.eigvalsh(square)
    accepted = finite & (failed == 0) & (eigenvalues[..., 0] > SMALLEST_EIGENVALUE)
    values = eigenvalues.clamp_min(0).sqrt().flip(-1) * (left_size * right_size)[..., None]
    return values, accepted & values.isfinite().all(-1)


def _reduce(left: Tensor, right: Tensor, left_gram: Tensor, right_gram: Tensor) -> Reduction:
    rows = _orthogonalize(left, left_gram, vectors=False)
    columns = _orthogonalize(right.mT, right_gram, vectors=False)
    return Reduction(rows.triangle, columns.triangle.mT)


def _orthogonalize(
    tall: Float[Tensor, "*batch long rank"], tall_gram: Float64[Tensor, "*batch rank rank"], *, vectors: bool
) -> _Orthogonalized:
    """Split tall into orthonormal columns and a triangle, by Cholesky where accurate and by QR elsewhere."""
    tall = _at_home(tall)
    batch, (long, rank) = tall.shape[:-2], tall.shape[-2:]
    small, options = min(long, rank), {"dtype": torch.float64, "device": tall.device}
    if rank > long:
        triangle = torch.empty(*batch, small, rank, **options)
        inverse = torch.zeros(*batch, rank, small, **options)
        rest = torch.ones(batch, dtype=torch.bool, device=tall.device)
    else:
        factor, failed = torch.linalg.cholesky_ex(tall_gram)
        triangle = factor.mT.contiguous()
        inverse = torch.linalg.solve_triangular(triangle, torch.eye(rank, **options), upper=True)
        condition = torch.linalg.matrix_norm(triangle) * torch.linalg.matrix_norm(inverse)
        rest = ~((failed == 0) & (condition <= CHOLESKY_CONDITION))
    basis = None
    if rest.any():
        mode = "reduced" if vectors else "r"
        basis, triangle[rest] = torch.linalg.qr(tall[rest].to(torch.float64), mode=mode)
    return _Orthogonalized(tall, triangle, inverse, rest, basis)


class _Blocks:
    """A batch of matrices, a block at a time in float64, in scratch that stays in cache."""

    def __init__(self, matrices: Tensor, step: int) -> None:
        self.matrices, self.step = matrices, step
        converted = matrices.dtype == torch.float64
        self.scratch = None if converted else torch.empty_like(matrices[:step], dtype=torch.float64)

    def __getitem__(self, start: int) -> Tensor:
        block = self.matrices[start : start + self.step]
        return block if self.scratch is None else self.scratch[: len(block)].copy_(block)


def _at_home(tensor: Tensor) -> Tensor:
    """Without gradient, and on a device that has float64."""
    tensor = tensor.detach()
    return tensor.cpu() if tensor.device.type == "mps" else tensor


def _flatten(matrices: Tensor, batch: torch.Size) -> Tensor:
    return matrices.expand(*batch, *matrices.shape[-2:]).reshape(math.prod(batch), *matrices.shape[-2:])


def _normalize(gram: Tensor) -> tuple[Tensor, Tensor]:
    """A Gram matrix of trace one and the factor's Frobenius norm, so that no fourth power overflows."""
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    return gram / trace[..., None, None], trace.sqrt()


def _zero_where_not_finite(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """LAPACK refuses a whole batch for one NaN: zero such matrices, and say which are finite."""
    finite = matrix.isfinite().all(-1).all(-1)
    return matrix.masked_fill(~finite[..., None, None], 0.0), finite


def _matrix_norm(matrix: Tensor) -> Tensor:
    matrix, finite = _zero_where_not_finite(matrix)
    return torch.linalg.matrix_norm(matrix).masked_fill(~finite, torch.nan)
