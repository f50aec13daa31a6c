"""Every quantity of a circuit that follows from a checkpoint's weights, by name, from one factorization."""

import torch
from jaxtyping import Complex128, Float64
from torch import Tensor

from .circuit import Circuit, inner_in_range
from .exponents import Exponent, times_power_of_two
from .preconditioner import Agreement, largest_rate, mean_rate, reduced_agreement, reduced_imbalance, self_rate
from .products import multiply, upcast
from .spectrum import Reduction, ThinSVD, matrix_by_matrix, matrix_singular_values, matrix_svd

#: Quantities in the unit of C.
_SIZES = ("frobenius_norm", "spectral_norm", "nuclear_norm", "omega_largest", "omega_mean", "omega_self")
FACTOR_QUANTITIES = ("imbalance", *(f"agreement_{side}" for side in Agreement._fields))
SYMMETRY_QUANTITIES = ("symmetric_share", "antisymmetric_share")
EIGENVALUE_QUANTITIES = ("copying_score", "positive_eigenvalue_share")


def measure(circuit: Circuit, reference: Circuit | None = None, eigenvalues: bool = True) -> dict[str, Tensor]:
    """Measure a circuit C = A B (or a collapsed C), p x q, with singular values s_1 >= s_2 >= ...

    | name | unit | formula |
    |---|---|---|
    | `singular_values` | C | s_1, s_2, ..., min(p, k, q) of them |
    | `frobenius_norm` | C | (sum s^2)^{1/2} |
    | `spectral_norm` | C | s_1 |
    | `nuclear_norm` | C | sum s |
    | `stable_rank` | | sum s^2 / s_1^2 |
    | `effective_rank` | | exp(-sum w ln w), w = s / sum s (Roy & Vetterli 2007) |
    | `omega_largest` | C | 2 s_1, Omega's largest eigenvalue |
    | `omega_mean` | C | (1/p + 1/q) sum s, its mean eigenvalue |
    | `omega_self` | C | 2 sum s^3 / sum s^2, its Rayleigh quotient along C |
    | `imbalance` | | norm(A'A - B B') / (norm(A'A) + norm(B B')), Frobenius norms |
    | `agreement_rows_cosine` | | cosine of (CC')^{1/2} and A A' (key or write side) |
    | `agreement_rows_difference` | | norm((CC')^{1/2} - A A') / norm(A A') |
    | `agreement_columns_cosine` | | cosine of (C'C)^{1/2} and B'B (query or read side) |
    | `agreement_columns_difference` | | norm((C'C)^{1/2} - B'B) / norm(B'B) |
    | `symmetric_share` | | norm((C + C')/2)^2 / norm(C)^2 = (1 + tr(CC) / norm(C)^2) / 2 |
    | `antisymmetric_share` | | norm((C - C')/2)^2 / norm(C)^2 = (1 - tr(CC) / norm(C)^2) / 2 |
    | `copying_score` | | sum Re z / sum abs z over the eigenvalues z of C (Elhage et al. 2021) |
    | `positive_eigenvalue_share` | | share of sum abs(Re z) that comes from z with Re z > 0 |
    | `reference_scale` | C/R | <C, R> / <R, R>, the scale along R |
    | `reference_cosine` | | <C, R> / (norm(C) norm(R)) |

    Quantities with the unit C have the unit of the circuit; the others are pure numbers.

    A quantity that does not exist is NaN: imbalance and agreement of a collapsed circuit, which has no factors;
    symmetry and eigenvalues if p is not q; ranks, shares, scores and cosines of a zero matrix (its norms and rates are
    0); and every quantity of a matrix with NaN or infinite entries, or whose singular values or eigenvalues LAPACK does
    not find.

    Args:
        circuit: The circuit C, of any batch shape.
        reference: A circuit R of the same shape; with it, the last two quantities are returned too.
        eigenvalues: Whether to compute the two quantities of the eigenvalues z. Without them the call takes about a
            third less time for k = 64.

    Returns:
        Each quantity by name, a float64 tensor of the circuit's batch shape; `singular_values` has one dimension more.

    Raises:
        CallError: The reference does not have the circuit's shape.
    """
    if reference is not None:
        circuit.demand_shape(reference.shape, "measure: the reference")
    circuit, reduction, of_left, of_right = circuit.reduction_in_range()
    exponent = of_left + of_right
    # A collapsed circuit has no factors to compare with and needs no singular vectors.
    core = None if circuit.right is None else matrix_svd(reduction.core)
    s = matrix_singular_values(reduction.core) if core is None else core.values
    square = circuit.shape[-2] == circuit.shape[-1]
    missing = torch.full_like(s[..., 0], torch.nan)

    values = _of_spectrum(s, circuit.shape)
    norm = values["frobenius_norm"]
    if core is None:
        values |= dict.fromkeys(FACTOR_QUANTITIES, missing)
    else:
        values |= _of_factors(reduction, core, of_left - of_right)
    matrix = _with_its_eigenvalues(circuit) if square else None
    values |= dict.fromkeys(SYMMETRY_QUANTITIES, missing) if matrix is None else _of_symmetry(matrix, norm)
    z = None if matrix is None or not eigenvalues else _eigenvalues(matrix)
    if eigenvalues:
        values |= dict.fromkeys(EIGENVALUE_QUANTITIES, missing) if z is None else _of_eigenvalues(z)
    if reference is not None:
        values |= _along_reference(circuit, norm, reference, exponent)

    finite = s.isfinite().all(-1) if z is None else s.isfinite().all(-1) & z.isfinite().all(-1)
    values |= {name: times_power_of_two(values[name], exponent) for name in _SIZES}
    values = {name: torch.where(finite, value, torch.nan) for name, value in values.items()}
    of_values = exponent if isinstance(exponent, int) else exponent[..., None]
    s = s.masked_fill(~finite[..., None], torch.nan)
    return {"singular_values": times_power_of_two(s, of_values), **values}


def _of_spectrum(s: Float64[Tensor, "*batch rank"], shape: torch.Size) -> dict[str, Tensor]:
    norm, spectral, nuclear = torch.linalg.vector_norm(s, dim=-1), s[..., 0], s.sum(-1)
    return {
        "frobenius_norm": norm,
        "spectral_norm": spectral,
        "nuclear_norm": nuclear,
        "stable_rank": (norm / spectral).square(),
        "effective_rank": torch.special.entr(s / nuclear[..., None]).sum(-1).exp(),
        "omega_largest": largest_rate(s),
        "omega_mean": mean_rate(s, shape),
        "omega_self": self_rate(s),
    }


def _of_factors(reduction: Reduction, core: ThinSVD, exponent: Exponent) -> dict[str, Tensor]:
    values = (reduced_imbalance(reduction, exponent), *reduced_agreement(reduction, core, exponent))
    return dict(zip(FACTOR_QUANTITIES, values, strict=True))


def _of_symmetry(matrix: Float64[Tensor, "*batch n n"], norm: Float64[Tensor, "*batch"]) -> dict[str, Tensor]:
    trace = (matrix * matrix.mT).sum((-2, -1)) / norm.square()
    return dict(zip(SYMMETRY_QUANTITIES, ((1 + trace) / 2, (1 - trace) / 2), strict=True))


def _eigenvalues(matrix: Float64[Tensor, "*batch n n"]) -> Complex128[Tensor, "*batch n"]:
    (values,) = matrix_by_matrix(lambda some: (torch.linalg.eigvals(some),), matrix)
    return values


def _of_eigenvalues(values: Complex128[Tensor, "*batch n"]) -> dict[str, Tensor]:
    copying = values.real.sum(-1) / values.abs().sum(-1)
    positive = values.real.clamp_min(0).sum(-1) / values.real.abs().sum(-1)
    return dict(zip(EIGENVALUE_QUANTITIES, (copying, positive), strict=True))


def _along_reference(
    circuit: Circuit, norm: Float64[Tensor, "*batch"], reference: Circuit, exponent: Exponent
) -> dict[str, Tensor]:
    reference, of_left, of_right = reference.in_range()
    inner, size = inner_in_range(circuit, reference), reference.frobenius_norm()
    scale = times_power_of_two(inner / size.square(), exponent - of_left - of_right)
    return {"reference_scale": scale, "reference_cosine": inner / (norm * size)}


def _with_its_eigenvalues(circuit: Circuit) -> Float64[Tensor, "*batch n n"]:
    """Return R L, which has the nonzero eigenvalues of C = L R and so its tr(CC); or C itself if it is collapsed."""
    return upcast(circuit.left) if circuit.right is None else multiply(circuit.right, circuit.left)
