"""Spectra of a product left @ right, computed from small matrices and never from the product itself.

With left = Q_left T_left and right = T_right Q_right', where each Q has orthonormal columns, every quantity that does
not change under rotations of the two outer spaces is determined by the small matrices T_left and T_right. This pair is
called the reduction, and T_left T_right the core.

All results are float64. A T comes from the Cholesky factor of a Gram matrix if that is accurate, and from a thin QR
decomposition, matrix by matrix, if it is not: for zero, rank-deficient and ill-conditioned factors, as at the start of
training. A matrix with NaN or infinite entries has NaN for every quantity; other matrices of the batch are not
affected. Results carry no gradient.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from .gram import Folded, dense, gram
from .products import at_home, broadcast_shapes, matrix_norm, multiply, upcast
from .threads import in_threads

# Basis vectors from a Cholesky factor T lose orthogonality as 1e-16 (||T|| ||T^-1||)^2, and singular values lose as
# much relative accuracy. Up to this product of Frobenius norms both errors stay below 1e-9.
CHOLESKY_CONDITION = 2e3

# The eigenvalues of K' G_left K, for Gram matrices of trace one, have errors of a few 1e-16. If the smallest
# eigenvalue is above this, every singular value, its root, has a relative error of about 1e-8 at most.
SMALLEST_EIGENVALUE = 1e-8

# Above this, ||C||_F^2 as the trace of the product of two Gram matrices of trace one lost at most four of 16 digits.
SMALLEST_TRACE = 1e-4

# Below this norm of a factor, the squares in its Gram matrix may be too small to have all their digits.
SMALLEST_SIZE = 1e-140


class ThinSVD(NamedTuple):
    """A matrix as left @ diag(values) @ right, with orthonormal columns in left and orthonormal rows in right.

    Attributes:
        left: The left singular vectors, as columns.
        values: The singular values, largest first.
        right: The right singular vectors, as rows.
    """

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
    """tall = Q @ triangle, with Q = tall @ inverse, except for the matrices in rest, whose Q is kept in basis."""

    tall: Float[Tensor, "*batch long rank"]
    triangle: Float64[Tensor, "*batch small rank"]
    inverse: Float64[Tensor, "*batch rank small"]
    rest: Bool[Tensor, "*batch"]
    basis: Float64[Tensor, "some long small"] | None

    def lift(self, coordinates: Float64[Tensor, "*#batch small columns"]) -> Float64[Tensor, "*_ long columns"]:
        """Return Q @ coordinates."""
        lifted = multiply(self.tall, self.inverse @ coordinates)
        if self.basis is not None:
            rest = self.rest.expand(lifted.shape[:-2])
            index = (self.rest.flatten().cumsum(0) - 1).reshape(self.rest.shape).expand(rest.shape)
            lifted[rest] = self.basis[index[rest]] @ coordinates[rest]
        return lifted


def reduce(left: Float[Tensor, "*#batch rows rank"], right: Float[Tensor, "*#batch rank columns"] | None) -> Reduction:
    """Return the small matrices T_left [min(rows, rank), rank] and T_right [rank, min(rank, columns)]."""
    if right is None:
        return Reduction(upcast(left), None)
    rows = _orthogonalize(left, gram(left), vectors=False)
    columns = _orthogonalize(right.mT, gram(right.mT), vectors=False)
    return Reduction(rows.triangle, columns.triangle.mT)


def matrix_by_matrix(
    decompose: Callable[[Tensor], Iterable[Tensor]], matrices: Float64[Tensor, "*batch rows columns"]
) -> list[Tensor]:
    """Return what a decomposition gives for a batch, with NaN for each matrix that is not finite or does not converge.

    LAPACK refuses a whole batch that contains one NaN, or one matrix for which its iterations do not converge. The
    batch is decomposed at once, and matrix by matrix only if that fails.

    Args:
        decompose: Returns tensors whose first dimensions are those of the batch that it is called with.
        matrices: The matrices.
    """
    finite = matrices.isfinite().all(-1).all(-1)
    clean = matrices if bool(finite.all()) else matrices.masked_fill(~finite[..., None, None], 0.0)
    try:
        results = list(decompose(clean))
    except torch.linalg.LinAlgError:  # pyright: ignore[reportPrivateImportUsage]
        batch, flat = clean.shape[:-2], clean.reshape(-1, *clean.shape[-2:])
        # A matrix of zeros converges, and shows the shapes of the results.
        zeros = torch.zeros_like(flat[:1])
        parts, converged = [], torch.ones(len(flat), dtype=torch.bool, device=clean.device)
        for position, matrix in enumerate(flat):
            try:
                parts.append(list(decompose(matrix[None])))
            except torch.linalg.LinAlgError:  # pyright: ignore[reportPrivateImportUsage]
                converged[position] = False
                parts.append(list(decompose(zeros)))
        results = [
            torch.cat(of_result).reshape(*batch, *of_result[0].shape[1:]) for of_result in zip(*parts, strict=True)
        ]
        finite = finite & converged.reshape(batch)
    unknown = ~finite
    if not unknown.any():
        return results
    return [
        result.masked_fill(unknown.reshape(*unknown.shape, *(1,) * (result.ndim - unknown.ndim)), torch.nan)
        for result in results
    ]


def matrix_svd(matrix: Float64[Tensor, "*batch rows columns"]) -> ThinSVD:
    """Return the thin SVD of small or collapsed matrices, NaN for a matrix that is not finite."""
    return ThinSVD(*matrix_by_matrix(lambda some: torch.linalg.svd(some, full_matrices=False), matrix))


def matrix_singular_values(
    matrix: Float64[Tensor, "*batch rows columns"],
) -> Float64[Tensor, "*batch values"]:
    """Return the singular values of small or collapsed matrices, NaN for a matrix that is not finite."""
    (values,) = matrix_by_matrix(lambda some: (torch.linalg.svdvals(some),), matrix)
    return values


def singular_values(
    left: Float[Tensor, "*#batch rows rank"], right: Float[Tensor, "*#batch rank columns"] | None
) -> Float64[Tensor, "*_ values"]:
    """Return the min(rows, rank, columns) singular values of left @ right, largest first.

    The relative error is below 1e-7 if the condition number of each factor is at most 1e3, and 1e-6 at 1e4. Beyond
    that, and for rank-deficient factors, the error is absolute, of the order of 1e-16 ||left|| ||right||.

    Args:
        left: [*batch, rows, rank], or a collapsed matrix [*batch, rows, columns].
        right: [*batch, rank, columns], or None for a collapsed matrix.
    """
    if right is None:
        return matrix_singular_values(upcast(left))
    return product_singular_values(left, right.mT)


def product_singular_values(
    left: Float[Tensor, "*#batch rows rank"] | Folded, right: Float[Tensor, "*#batch columns rank"] | Folded
) -> Float64[Tensor, "*_ values"]:
    """Return the singular values of left @ right' for two tall factors, with the heads spread over threads.

    The accuracy is that of `singular_values`.

    Args:
        left: [*batch, rows, rank].
        right: [*batch, columns, rank].
    """
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
    """Return the thin SVD of left @ right, of rank min(rows, rank, columns); null directions are orthonormal too.

    Args:
        left: [*batch, rows, rank], or a collapsed matrix [*batch, rows, columns].
        right: [*batch, rank, columns], or None for a collapsed matrix.
    """
    if right is None:
        return matrix_svd(upcast(left))
    rows = _orthogonalize(left, gram(left), vectors=True)
    columns = _orthogonalize(right.mT, gram(right.mT), vectors=True)
    core = matrix_svd(rows.triangle @ columns.triangle.mT)
    return ThinSVD(rows.lift(core.left), core.values, columns.lift(core.right.mT).mT)


def frobenius_norm(
    left: Float[Tensor, "*#batch rows rank"], right: Float[Tensor, "*#batch rank columns"] | None
) -> Float64[Tensor, "*_"]:
    """Return ||left @ right||_F, the root of tr(G_left G_right), or from the reduction if that trace cancels.

    Args:
        left: [*batch, rows, rank], or a collapsed matrix [*batch, rows, columns].
        right: [*batch, rank, columns], or None for a collapsed matrix.
    """
    if right is None:
        return matrix_norm(upcast(left))
    (left_gram, left_size), (right_gram, right_size) = map(_normalize, (gram(left), gram(right.mT)))
    square = (left_gram * right_gram).sum((-2, -1))
    norm = square.clamp_min(0).sqrt() * left_size * right_size
    rest = ~((square > SMALLEST_TRACE) & norm.isfinite())
    if rest.any():
        factors = (chosen(factor.expand(*rest.shape, *factor.shape[-2:]), rest) for factor in (left, right))
        norm[rest] = _norm_by_reduction(*factors)
    return norm


def _norm_by_reduction(
    left: Float[Tensor, "some rows rank"], right: Float[Tensor, "some rank columns"]
) -> Float64[Tensor, "some"]:
    """Return ||left @ right||_F from the core, or zero at once if a factor is zero, as for weights that do not move."""
    is_zero = (left == 0).flatten(1).all(dim=1) | (right == 0).flatten(1).all(dim=1)
    norm = torch.zeros(len(left), dtype=torch.float64, device=left.device)
    norm[~is_zero] = matrix_norm(reduce(left[~is_zero], right[~is_zero]).core)
    return norm


def chosen(matrices: Float[Tensor, "*batch rows columns"], mask: Bool[Tensor, "*batch"]) -> Float64[Tensor, "some _ _"]:
    """Return the chosen matrices in float64; torch 2.6 cannot index float8 itself, so its bytes are indexed."""
    if matrices.element_size() == 1:
        return matrices.view(torch.uint8)[mask].view(matrices.dtype).to(torch.float64)
    return matrices[mask].to(torch.float64)


def _product_singular_values(left: Tensor | Folded, right: Tensor | Folded) -> Float64[Tensor, "*_ values"]:
    values, accepted = _values_from_grams(gram(left), gram(right))
    if not accepted.all():
        rest = ~accepted
        values[rest] = matrix_singular_values(reduce(dense(left), dense(right).mT).core[rest])
    return values


def _values_from_grams(
    left_gram: Float64[Tensor, "*#batch rank rank"], right_gram: Float64[Tensor, "*#batch rank rank"]
) -> tuple[Float64[Tensor, "*_ rank"], Bool[Tensor, "*_"]]:
    """Return the roots of the eigenvalues of K' G_left K, where K K' = G_right, and whether they are accurate.

    The check also bounds the condition numbers of both factors: their product is at most sqrt(tr G_left tr G_right /
    smallest eigenvalue). Both Gram matrices are overwritten.
    """
    (left_gram, left_size), (right_gram, right_size) = map(_normalize, (left_gram, right_gram))
    factor, failed = torch.linalg.cholesky_ex(right_gram)
    size = left_size * right_size
    # A trace of squares is finite if all of the matrix is. LAPACK refuses a whole batch that contains one NaN.
    accepted = size.isfinite() & (failed == 0)
    square = _congruent(left_gram, factor)
    if not accepted.all():
        square.masked_fill_(~accepted[..., None, None], 0.0)
    (eigenvalues,) = matrix_by_matrix(lambda some: (torch.linalg.eigvalsh(some),), square)
    values = eigenvalues.clamp_min(0).sqrt_().flip(-1).mul_(size[..., None])
    # NaN is not above the bound either, so a matrix whose eigenvalues do not converge is tried by another way.
    return values, accepted & (eigenvalues[..., 0] > SMALLEST_EIGENVALUE)


def _congruent(
    symmetric: Float64[Tensor, "*#batch rank rank"], factor: Float64[Tensor, "*#batch rank rank"]
) -> Float64[Tensor, "*_ rank rank"]:
    """Return factor' symmetric factor, computed by numpy on the CPU, whose products of small matrices are faster."""
    if factor.device.type != "cpu":
        return factor.mT @ symmetric @ factor
    with np.errstate(all="ignore"):
        return torch.from_numpy(factor.mT.numpy() @ (symmetric.numpy() @ factor.numpy()))


def _orthogonalize(
    tall: Float[Tensor, "*batch long rank"], tall_gram: Float64[Tensor, "*batch rank rank"], *, vectors: bool
) -> _Orthogonalized:
    """Split tall into orthonormal columns and a triangle, by Cholesky if that is accurate and by QR otherwise."""
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
        basis, triangle[rest] = torch.linalg.qr(chosen(tall, rest), mode=mode)
    return _Orthogonalized(tall, triangle, inverse, rest, basis)


def _normalize(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Scale a Gram matrix to trace one in place, so that no fourth power overflows.

    Returns:
        The scaled matrix and the factor's norm, which is NaN if the Gram matrix is too small to have all its digits.
    """
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    return gram.div_(trace[..., None, None]), trace.sqrt().masked_fill_(trace < SMALLEST_SIZE**2, torch.nan)
