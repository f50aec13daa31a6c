"""The figures of a training step of C = A B from Gram matrices of the factors, their gradients and their changes.

Each step that `measure_step` compares is a sum of products of one of A, G_A, D_A and one of B, G_B, D_B, where D is the
change of a factor, with a small matrix between them:

    E = A G_B + G_A B        Omega(C) G = A X G_B + G_A Y B        C_after - C = A D_B + D_A B + D_A D_B

With A = Q_A R_A and B' = Q_B R_B, where each Q has orthonormal columns, the polar factor of C is Q_A Z Q_B' with Z that
of R_A R_B', so that X = R_A^{-1} Z R_B and Y = R_A' Z (R_B')^{-1}. Both are the identity if the factors are balanced.

Norms and inner products of such sums follow from the Gram matrices of [A, G_A, D_A] and [B; G_B; D_B] (`joint_grams`).
"""

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from .joint_grams import BESIDE, CHANGE, FACTOR, Gram, Side, Sums, Term, grams
from .products import matrix_norm
from .spectrum import CHOLESKY_CONDITION, matrix_svd


def figures_by_grams(left: Side, right: Side) -> tuple[dict[str, Float64[Tensor, " batch"]], Bool[Tensor, " batch"]]:
    """Return the figures of a step by name, and for which matrices they are accurate.

    They are not where a factor is ill-conditioned, rank-deficient or out of range, or a step much smaller than its
    terms.

    Args:
        left: A, with its gradient beside it and its value after the step as the other.
        right: B', likewise.
    """
    parts = [_figures(*sides) for sides in grams(left, right)]
    figures = {name: torch.cat([values[name] for values, _ in parts]) for name in parts[0][0]}
    return figures, torch.cat([accurate for _, accurate in parts])


def _figures(left: Gram, right: Gram) -> tuple[dict[str, Tensor], Tensor]:
    sums = Sums(left, right)
    (a, of_a, change_a), (b, of_b, change_b) = left.sizes, right.sizes
    X, Y, apart_X, apart_Y, is_conditioned = _omega_matrices(left, right)
    exact = [Term(a * of_b, FACTOR, None, BESIDE), Term(of_a * b, BESIDE, None, FACTOR)]
    omega, error = (
        [Term(a * of_b, FACTOR, of_left, BESIDE), Term(of_a * b, BESIDE, of_right, FACTOR)]
        for of_left, of_right in ((X, Y), (apart_X, apart_Y))
    )
    taken = [
        Term(a * change_b, FACTOR, None, CHANGE),
        Term(change_a * b, CHANGE, None, FACTOR),
        Term(change_a * change_b, CHANGE, None, CHANGE),
    ]
    (exact_norm, *checks), (omega_norm, of_omega), (error_norm, of_error), (taken_norm, of_taken) = (
        sums.norm(step) for step in (exact, omega, error, taken)
    )
    along_exact = -sums.inner(taken, exact) / exact_norm
    first, second = a * of_a, b * of_b
    first, second = (
        size[:, None, None] * product
        for size, product in ((first, left[FACTOR, BESIDE]), (second, right[BESIDE, FACTOR]))
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


def _omega_matrices(left: Gram, right: Gram) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return X, Y, X - 1 and Y - 1 between factors of norm one, and whether both factors are well-conditioned."""
    (R_A, inverse_A, fits), (R_B, inverse_B, fits_too) = (_triangle(gram[FACTOR, FACTOR]) for gram in (left, right))
    (U, _, V) = matrix_svd(R_A @ R_B.mT)
    Z = U @ V
    ratio = (right.sizes[FACTOR] / left.sizes[FACTOR])[:, None, None]
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
