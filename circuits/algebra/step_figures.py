"""What the gradients of the factors of C = A B say of a step of training, without the gradient of C itself.

With G = dL/dC, which no training step computes, the factors' gradients are G_A = G B' and G_B = A'G. They tell the step
of C that plain gradient descent takes at a small rate, but for its sign and the rate,

    E = A G_B + G_A B = A A' G + G B'B,

and Omega(C) G = (CC')^{1/2} G + G (C'C)^{1/2} as well. With the polar factor P = U V' of C = U S V',

    (CC')^{1/2} G = P C'G = (P B') G_B        G (C'C)^{1/2} = G C'P = G_A (A'P)

so that Omega's step is E with A replaced by P B' and B by A'P, to which they are equal when the factors balance.
Nothing is inverted, so this holds for factors of any rank; all are of rank 2k, sums of two products of thin factors.
"""

import torch
from jaxtyping import Float64
from torch import Tensor

from ..errors import CallError
from .circuit import Circuit
from .products import matrix_norm, upcast

#: The figures of `step_figures`, in their order.
STEP_FIGURES = (
    "gradient_disagreement",
    "exact_step_norm",
    "omega_step_norm",
    "omega_cosine",
    "omega_relative_error",
    "taken_step_norm",
    "taken_exact_cosine",
    "taken_omega_cosine",
    "taken_rate",
)

#: What needs a G, and so a loss that knows the factors by their product alone.
OMEGA_FIGURES = ("omega_step_norm", "omega_cosine", "omega_relative_error", "taken_omega_cosine")

#: `gradient_disagreement` above which the two gradients are not those of one G. Rounding leaves about 1e-7 in float32
#: and up to 1e-2 in bfloat16; losses that know the factors otherwise than by their product leave 0.1 and more.
LARGEST_DISAGREEMENT = 0.05

# Singular values below this part of ||A|| ||B|| are zero but for rounding, and their vectors any.
_NULL = 1e-13


def step_figures(
    factors: Circuit, gradients: Circuit, after: Circuit, *, of_product: bool = True
) -> dict[str, Float64[Tensor, "*batch"]]:
    """Measure a step of training of C = A B, from C to C_after, beside E and Omega(C) G.

    | name | | formula |
    |---|---|---|
    | `gradient_disagreement` | | norm(A'G_A - G_B B') / (norm(A'G_A) + norm(G_B B')), rounding where there is a G |
    | `exact_step_norm` | C/eta | norm(E), of the step of plain gradient descent on the factors at a unit rate |
    | `omega_step_norm` | C/eta | norm(Omega(C) G) |
    | `omega_cosine` | | cosine of Omega(C) G and E, 1 where the factors balance |
    | `omega_relative_error` | | norm(Omega(C) G - E) / norm(E), 0 where the factors balance |
    | `taken_step_norm` | C | norm(C_after - C), of the step that the optimizer took |
    | `taken_exact_cosine` | | cosine of C_after - C and -E, 1 for plain gradient descent at a small rate |
    | `taken_omega_cosine` | | cosine of C_after - C and -Omega(C) G |
    | `taken_rate` | eta | <C_after - C, -E> / <E, E>, the rate at which plain gradient descent went as far along -E |

    Units: C those of the circuit, C/eta those that a rate makes the circuit's. Norms are Frobenius norms.

    NaN stands where a figure does not exist: cosines with a step of zero; what is relative to an E of zero; whatever
    comes from a gradient or a weight that is not finite; and the figures of Omega (`OMEGA_FIGURES`) where there is no
    G, since the loss knows the factors otherwise than by their product: where that is told, and where
    `gradient_disagreement` is above `LARGEST_DISAGREEMENT`.

    Args:
        factors: A and B before the step.
        gradients: G_A as its left and G_B as its right.
        after: A and B after the step.
        of_product: whether the loss is a function of A B, so that there is a G.

    Raises:
        CallError: a circuit is collapsed, or they are of different shapes.
    """
    _demand_alike(factors, gradients, "the gradients")
    _demand_alike(factors, after, "the factors after the step")
    of_omega = omega_factors(factors)
    exact, omega, taken = exact_step_of(factors, gradients), exact_step_of(of_omega, gradients), change(factors, after)
    # E is linear in A and B, so this is Omega(C) G - E, which does not cancel where the factors nearly balance.
    error = exact_step_of(_difference(of_omega, factors), gradients)
    exact_norm, omega_norm, taken_norm = (step.frobenius_norm() for step in (exact, omega, taken))
    # Squares of norms may leave the range of float64 where norms do not.
    along_exact, along_omega = _of_norm_one(exact, exact_norm), _of_norm_one(omega, omega_norm)
    taken_along_exact = -taken.inner(along_exact)
    figures = {
        "gradient_disagreement": gradient_disagreement(factors, gradients),
        "exact_step_norm": exact_norm,
        "omega_step_norm": omega_norm,
        "omega_cosine": omega.inner(along_exact) / omega_norm,
        "omega_relative_error": error.frobenius_norm() / exact_norm,
        "taken_step_norm": taken_norm,
        "taken_exact_cosine": taken_along_exact / taken_norm,
        "taken_omega_cosine": -taken.inner(along_omega) / taken_norm,
        "taken_rate": taken_along_exact / exact_norm,
    }
    has_gradient = (figures["gradient_disagreement"] <= LARGEST_DISAGREEMENT) & of_product
    return figures | {name: torch.where(has_gradient, figures[name], torch.nan) for name in OMEGA_FIGURES}


def exact_step_of(factors: Circuit, gradients: Circuit) -> Circuit:
    """E = A G_B + G_A B, of rank 2k: less the velocity of A B as A and B follow their gradients at unit rate."""
    A, B = _factors(factors)
    G_A, G_B = _factors(gradients)
    return _sum_of_products(A, G_B, G_A, B)


def omega_factors(factors: Circuit) -> Circuit:
    """P B' and A'P: with these in place of A and B, `exact_step_of` is Omega(C) G, where there is a G."""
    A, B = _factors(factors)
    U, s, V = factors.svd()
    # Null directions are any, and what they add is multiplied by a gradient that has no part there.
    used = (s > _NULL * (matrix_norm(A) * matrix_norm(B))[..., None]).to(torch.float64)
    return Circuit((U * used[..., None, :]) @ (V @ B.mT), (A.mT @ U) @ (used[..., None] * V))


def change(factors: Circuit, after: Circuit) -> Circuit:
    """C_after - C = (A_after - A) B_after + A (B_after - B), which does not cancel where a step is small."""
    A, B = _factors(factors)
    A_after, B_after = _factors(after)
    return _sum_of_products(A_after - A, B_after, A, B_after - B)


def gradient_disagreement(factors: Circuit, gradients: Circuit) -> Float64[Tensor, "*batch"]:
    """||A'G_A - G_B B'|| / (||A'G_A|| + ||G_B B'||), both A'G B' where there is a G; 0 where both are zero."""
    A, B = _factors(factors)
    G_A, G_B = _factors(gradients)
    first, second = A.mT @ G_A, G_B @ B.mT
    size = matrix_norm(first) + matrix_norm(second)
    return torch.where(size == 0, 0.0, matrix_norm(first - second) / size)


def _difference(factors: Circuit, other: Circuit) -> Circuit:
    """The differences of the factors, which are not the factors of a difference."""
    (A, B), (other_A, other_B) = _factors(factors), _factors(other)
    return Circuit(A - other_A, B - other_B)


def _of_norm_one(step: Circuit, norm: Tensor) -> Circuit:
    left, right = (factor / norm.sqrt()[..., None, None] for factor in _factors(step))
    return Circuit(left, right)


def _sum_of_products(first_left: Tensor, first_right: Tensor, second_left: Tensor, second_right: Tensor) -> Circuit:
    """first_left first_right + second_left second_right; with factors of one size norms need no QR decomposition."""
    lefts, rights = zip(_of_one_size(first_left, first_right), _of_one_size(second_left, second_right), strict=True)
    return Circuit(torch.cat(lefts, dim=-1), torch.cat(rights, dim=-2))


def _of_one_size(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    sizes = matrix_norm(left), matrix_norm(right)
    ratio = (sizes[1] / sizes[0]).sqrt()
    ratio = torch.where((sizes[0] > 0) & (sizes[1] > 0), ratio, 1.0)[..., None, None]
    return left * ratio, right / ratio


def _factors(circuit: Circuit) -> tuple[Tensor, Tensor]:
    if circuit.right is None:
        raise CallError("the step of the factors needs a circuit with factors, got a collapsed one")
    return upcast(circuit.left), upcast(circuit.right)


def _demand_alike(factors: Circuit, other: Circuit, what: str) -> None:
    for side, ours, theirs in zip(("left", "right"), _factors(factors), _factors(other), strict=True):
        if ours.shape != theirs.shape:
            raise CallError(
                f"{what} should be of the factors' shapes: {side} is {list(ours.shape)}, got {list(theirs.shape)}"
            )
