"""Spectra of a product left @ right, read from small matrices and never from the product.

With left = Q_left T_left and right = T_right Q_right', where the Q have orthonormal columns, everything that
does not change under rotations of the two outer spaces is a figure of the small matrices T_left and T_right:
the pair is called the reduction, and T_left T_right the core.

All of it is float64. A T comes from the Cholesky factor of a Gram matrix where that is accurate, and matrix by
matrix from a thin QR decomposition where it is not: zero, rank-deficient and ill-conditioned factors, which is
where training starts. A matrix with NaN or infinite entries has NaN for every figure; its neighbours in the
batch do not notice. Results carry no gradient.
"""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from .gram import Folded, dense, gram
from .products import at_home, broadcast_shapes, matrix_norm, multiply, upcast
from .threads import in_threads

# Basis vectors taken from a Cholesky factor T lose orthogonality as 1e-16 (||T|| ||T^-1||)^2, and singular
# values lose as much relative accuracy. Up to this product of Frobenius norms both stay below 1e-9.
CHOLESKY_CONDITION = 2e3

# Eigenvalues of K' G_left K, for Gram matrices of trace one, are off by a few 1e-16. A smallest eigenvalue above
# this leaves every singular value, its root, a relative error of about 1e-8 at most.
SMALLEST_EIGENVALUE = 1e-8

# ||C||_F^2 as the trace of two Gram matrices of trace one: above this it has lost at most four of 16 digits.
SMALLEST_TRACE = 1e-4

# Below this norm of a factor the squares in its Gram matrix may be too small to have all their digits.
SMALLEST_SIZE = 1e-140


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


def reduce(left: Float[Tensor, "*#batch rows rank"], right: Float[Tensor, "*#batch rank columns"] | None) -> Reduction:
    """The small matrices T_left [min(rows, rank), rank] and T_right [rank, min(rank, columns)]."""
    if right is None:
        return Reduction(upcast(left), None)
    rows = _orthogonalize(left, gram(left), vectors=False)
    columns = _orthogonalize(right.mT, gram(right.mT), vectors=False)
    return Reduction(rows.triangle, columns.triangle.mT)


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
    if right is None:
        return matrix_singular_values(upcast(left))
    return product_singular_values(left, right.mT)


def product_singular_values(
    left: Float[Tensor, "*#batch rows rank"] | Folded, right: Float[Tensor, "*#batch columns rank"] | Folded
) -> Float64[Tensor, "*_ values"]:
    """Singular values of left @ right', both of them tall, as `singular_values`; heads side by side in threads."""
    if left.shape[-1] > min(left.shape[-2], right.shape[-2]):
        return matrix_singular_values(reduce(dense(left), dense(right).mT).core)
    batch = broadcast_shapes(left.shape[:-2], right.shape[:-2])
    if not batch:
        return _product_singular_values(left, right)

    def some(factor: Tensor | Folded, start: int, stop: int) -> Tensor | Folded:
        is_shared = len(factor.shape) < len(batch) + 2 or factor.shape[0] == 1
        return factor if is_shared else factor[start:stop]

    return torch.cat(
        in_threads(
            lambda start, stop: _product_singular_values(some(left, start, stop), some(right, start, stop)), batch[0]
        )
    )


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
        return matrix_norm(upcast(left))
    (left_gram, left_size), (right_gram, right_size) = map(_normalize, (gram(left), gram(right.mT)))
    square = (left_gram * right_gram).sum((-2, -1))
    norm = square.clamp_min(0).sqrt() * left_size * right_size
    rest = ~((square > SMALLEST_TRACE) & norm.isfinite())
    if rest.any():
        norm[rest] = _norm_by_reduction(*(each.expand(*rest.shape, *each.shape[-2:])[rest] for each in (left, right)))
    return norm


def _norm_by_reduction(
    left: Float[Tensor, "some rows rank"], right: Float[Tensor, "some rank columns"]
) -> Float64[Tensor, "some"]:
    """||left @ right||_F from the core; zero without more ado where a factor is, as for weights that do not move."""
    is_zero = (left == 0).flatten(1).all(dim=1) | (right == 0).flatten(1).all(dim=1)
    norm = torch.zeros(len(left), dtype=torch.float64, device=left.device)
    norm[~is_zero] = matrix_norm(reduce(left[~is_zero], right[~is_zero]).core)
    return norm


def _product_singular_values(left: Tensor | Folded, right: Tensor | Folded) -> Float64[Tensor, "*_ values"]:
    values, accepted = _values_from_grams(gram(left), gram(right))
    if not accepted.all():
        rest = ~accepted
        values[rest] = matrix_singular_values(reduce(dense(left), dense(right).mT).core[rest])
    return values


def _values_from_grams(
    left_gram: Float64[Tensor, "*#batch rank rank"], right_gram: Float64[Tensor, "*#batch rank rank"]
) -> tuple[Float64[Tensor, "*_ rank"], Bool[Tensor, "*_"]]:
    """Roots of the eigenvalues of K' G_left K, where K K' = G_right, and which matrices they may serve.

    The check bounds the conditions of both factors too: their product is at most
    sqrt(tr G_left tr G_right / smallest eigenvalue). Both Gram matrices are used up.
    """
    (left_gram, left_size), (right_gram, right_size) = map(_normalize, (left_gram, right_gram))
    factor, failed = torch.linalg.cholesky_ex(right_gram)
    size = left_size * right_size
    # A trace of squares is finite where all of the matrix is. LAPACK refuses a whole batch for one NaN.
    accepted = size.isfinite() & (failed == 0)
    square = _congruent(left_gram, factor)
    if not accepted.all():
        square.masked_fill_(~accepted[..., None, None], 0.0)
    eigenvalues = torch.linalg.eigvalsh(square)
    values = eigenvalues.clamp_min(0).sqrt_().flip(-1).mul_(size[..., None])
    return values, accepted & (eigenvalues[..., 0] > SMALLEST_EIGENVALUE)


def _congruent(
    symmetric: Float64[Tensor, "*#batch rank rank"], factor: Float64[Tensor, "*#batch rank rank"]
) -> Float64[Tensor, "*_ rank rank"]:
    """factor' symmetric factor; by numpy where it can, whose products of small matrices are the faster ones."""
    if factor.device.type != "cpu":
        return factor.mT @ symmetric @ factor
    with np.errstate(all="ignore"):
        return torch.from_numpy(factor.mT.numpy() @ (symmetric.numpy() @ factor.numpy()))


def _orthogonalize(
    tall: Float[Tensor, "*batch long rank"], tall_gram: Float64[Tensor, "*batch rank rank"], *, vectors: bool
) -> _Orthogonalized:
    """Split tall into orthonormal columns and a triangle, by Cholesky where accurate and by QR elsewhere."""
    tall = at_home(tall)
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
        size = torch.linalg.matrix_norm(triangle)
        condition = size * torch.linalg.matrix_norm(inverse)
        rest = ~((failed == 0) & (size > SMALLEST_SIZE) & (condition <= CHOLESKY_CONDITION))
    basis = None
    if rest.any():
        mode = "reduced" if vectors else "r"
        basis, triangle[rest] = torch.linalg.qr(tall[rest].to(torch.float64), mode=mode)
    return _Orthogonalized(tall, triangle, inverse, rest, basis)


def _normalize(gram: Tensor) -> tuple[Tensor, Tensor]:
    """A Gram matrix, brought to trace one in place, and the factor's norm, so that no fourth power overflows.

    The norm is NaN where the Gram matrix has lost digits of it.
    """
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    return gram.div_(trace[..., None, None]), trace.sqrt().masked_fill_(trace < SMALLEST_SIZE**2, torch.nan)


def _zero_where_not_finite(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """LAPACK refuses a whole batch for one NaN: zero such matrices, and say which are finite."""
    finite = matrix.isfinite().all(-1).all(-1)
    return matrix.masked_fill(~finite[..., None, None], 0.0), finite
