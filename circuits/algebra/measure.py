"""Every figure that a checkpoint's weights give of a circuit, by name, from one factorization."""

import torch
from jaxtyping import Float64
from torch import Tensor

from .circuit import Circuit, inner_in_range
from .exponents import Exponent, times_power_of_two
from .preconditioner import Agreement, largest_rate, mean_rate, reduced_agreement, reduced_imbalance, self_rate
from .products import multiply, upcast
from .spectrum import Reduction, ThinSVD, matrix_singular_values, matrix_svd

#: Figures in the units of C.
_SIZES = ("frobenius_norm", "spectral_norm", "nuclear_norm", "omega_largest", "omega_mean", "omega_self")
FACTOR_FIGURES = ("imbalance", *(f"agreement_{side}" for side in Agreement._fields))
SYMMETRY_FIGURES = ("symmetric_share", "antisymmetric_share")
EIGENVALUE_FIGURES = ("copying_score", "positive_eigenvalue_share")


def measure(circuit: Circuit, reference: Circuit | None = None, eigenvalues: bool = True) -> dict[str, Tensor]:
    """Measure C = A B (or a collapsed C), p x q, with singular values s_1 >= s_2 >= ...

    Each figure is a float64 tensor of the circuit's batch shape; `singular_values` alone has one dimension more.
    Units: C for those marked C; the others are pure numbers.

    | name | | formula |
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
    | `positive_eigenvalue_share` | | part of sum abs(Re z) that is on z with Re z > 0 |
    | `reference_scale` | C/R | <C, R> / <R, R>, the scale along R |
    | `reference_cosine` | | <C, R> / (norm(C) norm(R)) |

    The two of the eigenvalues z are left out with `eigenvalues=False`, which saves about a third of the time for
    k = 64; the last two are there when a `reference` R is given.

    NaN stands where a figure does not exist: imbalance and agreement of a collapsed circuit, which has no
    factors; symmetry and eigenvalues when p is not q; ranks, shares, scores and cosines of a zero matrix (its
    norms and rates are 0); and every figure of a matrix with NaN or infinite entries.

    Raises:
        CallError: the reference has not the circuit's shape.
    """
    if reference is not None:
        circuit.demand_shape(reference.shape, "measure: the reference")
    circuit, reduction, of_left, of_right = circuit.reduction_in_range()
    exponent = of_left + of_right
    # A collapsed circuit has no factors to compare with, and can do without singular vectors.
    core = None if circuit.right is None else matrix_svd(reduction.core)
    s = matrix_singular_values(reduction.core) if core is None else core.values
    square = circuit.shape[-2] == circuit.shape[-1]
    missing = torch.full_like(s[..., 0], torch.nan)

    figures = _spectral_figures(s, circuit.shape)
    norm = figures["frobenius_norm"]
    if core is None:
        figures |= dict.fromkeys(FACTOR_FIGURES, missing)
    else:
        figures |= _factor_figures(reduction, core, of_left - of_right)
    matrix = _with_its_eigenvalues(circuit) if square else None
    figures |= dict.fromkeys(SYMMETRY_FIGURES, missing) if matrix is None else _symmetry_figures(matrix, norm)
    if eigenvalues:
        figures |= dict.fromkeys(EIGENVALUE_FIGURES, missing) if matrix is None else _eigenvalue_figures(matrix)
    if reference is not None:
        figures |= _reference_figures(circuit, norm, reference, exponent)

    finite = s.isfinite().all(-1)
    figures |= {name: times_power_of_two(figures[name], exponent) for name in _SIZES}
    figures = {name: torch.where(finite, figure, torch.nan) for name, figure in figures.items()}
    of_each = exponent if isinstance(exponent, int) else exponent[..., None]
    return {"singular_values": times_power_of_two(s, of_each), **figures}


def _spectral_figures(s: Float64[Tensor, "*batch rank"], shape: torch.Size) -> dict[str, Tensor]:
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


def _factor_figures(reduction: Reduction, core: ThinSVD, exponent: Exponent) -> dict[str, Tensor]:
    figures = (reduced_imbalance(reduction, exponent), *reduced_agreement(reduction, core, exponent))
    return dict(zip(FACTOR_FIGURES, figures, strict=True))


def _symmetry_figures(matrix: Float64[Tensor, "*batch n n"], norm: Float64[Tensor, "*batch"]) -> dict[str, Tensor]:
    trace = (matrix * matrix.mT).sum((-2, -1)) / norm.square()
    return dict(zip(SYMMETRY_FIGURES, ((1 + trace) / 2, (1 - trace) / 2), strict=True))


def _eigenvalue_figures(matrix: Float64[Tensor, "*batch n n"]) -> dict[str, Tensor]:
    finite = matrix.isfinite().all(-1).all(-1)
    # LAPACK refuses a whole batch for one NaN; `measure` puts it back.
    values = torch.linalg.eigvals(matrix.masked_fill(~finite[..., None, None], 0.0))
    copying = values.real.sum(-1) / values.abs().sum(-1)
    positive = values.real.clamp_min(0).sum(-1) / values.real.abs().sum(-1)
    return dict(zip(EIGENVALUE_FIGURES, (copying, positive), strict=True))


def _reference_figures(
    circuit: Circuit, norm: Float64[Tensor, "*batch"], reference: Circuit, exponent: Exponent
) -> dict[str, Tensor]:
    reference, of_left, of_right = reference.in_range()
    inner, size = inner_in_range(circuit, reference), reference.frobenius_norm()
    scale = times_power_of_two(inner / size.square(), exponent - of_left - of_right)
    return {"reference_scale": scale, "reference_cosine": inner / (norm * size)}


def _with_its_eigenvalues(circuit: Circuit) -> Float64[Tensor, "*batch n n"]:
    """R L, whose nonzero eigenvalues, and so tr(CC), are those of C = L R; C itself when collapsed."""
    return upcast(circuit.left) if circuit.right is None else multiply(circuit.right, circuit.left)
