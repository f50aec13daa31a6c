"""A training step of C = A B seen through the gradients of the factors, without the gradient of C itself.

With G = dL/dC, which no training step computes, the gradients of the factors are G_A = G B' and G_B = A'G. They
determine the step of C that plain gradient descent takes at a small rate, up to its sign and the rate,

    E = A G_B + G_A B = A A' G + G B'B,

and Omega(C) G = (CC')^{1/2} G + G (C'C)^{1/2} as well. With the polar factor P = U V' of C = U S V',

    (CC')^{1/2} G = P C'G = (P B') G_B        G (C'C)^{1/2} = G C'P = G_A (A'P)

so Omega's step is E with A replaced by P B' and B by A'P, which equal A and B when the factors are balanced. Nothing is
inverted, so this holds for factors of any rank. All of these matrices have rank 2k, as sums of two products of thin
factors.
"""

import torch
from jaxtyping import Float64
from torch import Tensor

from ..errors import CallError
from .circuit import Circuit
from .joint_grams import Side
from .products import at_home, matrix_norm, upcast
from .spectrum import chosen
from .step_grams import figures_by_grams
from .threads import in_threads

#: The names of what `measure_step` returns, in order.
STEP_QUANTITIES = (
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

#: The quantities that exist only if G does, that is if the loss depends on the factors through their product alone.
OMEGA_QUANTITIES = ("omega_step_norm", "omega_cosine", "omega_relative_error", "taken_omega_cosine")

#: Above this `gradient_disagreement`, the two gradients do not come from one G. Rounding leaves about 1e-7 in float32
#: and up to 1e-2 in bfloat16; losses that depend on the factors other than through their product leave 0.1 and more.
LARGEST_DISAGREEMENT = 0.05

# Singular values below this fraction of ||A|| ||B|| are zero up to rounding, and their vectors are arbitrary.
_NULL = 1e-13


def measure_step(
    factors: Circuit, gradients: Circuit, after: Circuit, *, of_product: bool = True
) -> dict[str, Float64[Tensor, "*batch"]]:
    """Compare one training step of C = A B, from C to C_after, with E and Omega(C) G.

    | name | unit | formula |
    |---|---|---|
    | `gradient_disagreement` | | norm(A'G_A - G_B B') / (norm(A'G_A) + norm(G_B B')), rounding error if G exists |
    | `exact_step_norm` | C/eta | norm(E), the step of plain gradient descent on the factors at a unit rate |
    | `omega_step_norm` | C/eta | norm(Omega(C) G) |
    | `omega_cosine` | | cosine of Omega(C) G and E, 1 for balanced factors |
    | `omega_relative_error` | | norm(Omega(C) G - E) / norm(E), 0 for balanced factors |
    | `taken_step_norm` | C | norm(C_after - C), the step that the optimizer took |
    | `taken_exact_cosine` | | cosine of C_after - C and -E, 1 for plain gradient descent at a small rate |
    | `taken_omega_cosine` | | cosine of C_after - C and -Omega(C) G |
    | `taken_rate` | eta | <C_after - C, -E> / <E, E>, the rate at which plain gradient descent goes as far along -E |

    The unit C is that of the circuit, eta is that of a learning rate. Norms are Frobenius norms.

    A quantity that does not exist is NaN: cosines with a step of zero, whatever is relative to an E of zero, and
    whatever depends on a gradient or weight that is not finite. The quantities of Omega (`OMEGA_QUANTITIES`) are also
    NaN if there is no G because the loss depends on the factors other than through their product: if `of_product` is
    False, or if `gradient_disagreement` is above `LARGEST_DISAGREEMENT`.

    Args:
        factors: A [*batch, rows, rank] and B [*batch, rank, columns] before the step.
        gradients: G_A as the left factor and G_B as the right factor.
        after: A and B after the step.
        of_product: Whether the loss is a function of A B, so that G exists.

    Returns:
        The quantities by name, in the order of `STEP_QUANTITIES`, each a float64 tensor [*batch].

    Raises:
        CallError: A circuit is collapsed, or the shapes differ.
    """
    _demand_alike(factors, gradients, "the gradients")
    _demand_alike(factors, after, "the factors after the step")
    batch = factors.batch_shape
    flat = [
        [part.expand(*batch, *part.shape[-2:]).flatten(0, -3) if batch else part[None] for part in _sides(circuit)]
        for circuit in (factors, gradients, after)
    ]
    parts = in_threads(
        lambda start, stop: _measured([[part[start:stop] for part in pair] for pair in flat]), batch.numel()
    )
    values = {name: torch.cat([part[name] for part in parts]).reshape(batch) for name in STEP_QUANTITIES}
    has_gradient = (values["gradient_disagreement"] <= LARGEST_DISAGREEMENT) & of_product
    return values | {name: torch.where(has_gradient, values[name], torch.nan) for name in OMEGA_QUANTITIES}


def _measured(pairs: list[list[Tensor]]) -> dict[str, Tensor]:
    """Measure the steps of some matrices, those for which Gram matrices are not accurate enough by their factors."""
    (A, B), (G_A, G_B), (A_after, B_after) = pairs
    if A.shape[-1] > min(A.shape[-2], B.shape[-1]):
        return _measured_by_factors(pairs)
    values, accurate = figures_by_grams(Side(A, G_A, A_after), Side(B.mT, G_B.mT, B_after.mT))
    rest = ~accurate
    if rest.any():
        for name, value in _measured_by_factors([[chosen(part, rest) for part in pair] for pair in pairs]).items():
            values[name][rest] = value
    return values


def _measured_by_factors(pairs: list[list[Tensor]]) -> dict[str, Tensor]:
    factors, gradients, after = (Circuit(*pair) for pair in pairs)
    of_omega = omega_factors(factors)
    exact, omega, taken = exact_step_of(factors, gradients), exact_step_of(of_omega, gradients), after - factors
    # E is linear in A and B, so this is Omega(C) G - E, without cancellation when the factors are nearly balanced.
    error = exact_step_of(_difference(of_omega, factors), gradients)
    exact_norm, omega_norm, taken_norm = (step.frobenius_norm() for step in (exact, omega, taken))
    # Squares of norms may leave the range of float64 even if the norms do not.
    along_exact, along_omega = _of_norm_one(exact, exact_norm), _of_norm_one(omega, omega_norm)
    taken_along_exact = -taken.inner(along_exact)
    return {
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


def exact_step_of(factors: Circuit, gradients: Circuit) -> Circuit:
    """Return E = A G_B + G_A B, of rank 2k, from the gradients of the factors.

    E is minus the velocity of A B while A and B follow their gradients at a unit rate.

    Args:
        factors: A and B.
        gradients: G_A as the left factor and G_B as the right factor.

    Raises:
        CallError: A circuit is collapsed.
    """
    A, B = _factors(factors)
    G_A, G_B = _factors(gradients)
    return _sum_of_products(A, G_B, G_A, B)


def omega_factors(factors: Circuit) -> Circuit:
    """Return P B' and A'P as a circuit, with P the polar factor of C = A B.

    With these in place of A and B, `exact_step_of` returns Omega(C) G if G exists.
    """
    A, B = _factors(factors)
    U, s, V = factors.svd()
    # Null directions are arbitrary, and the gradient that multiplies what they add has no component in them.
    used = (s > _NULL * (matrix_norm(A) * matrix_norm(B))[..., None]).to(torch.float64)
    return Circuit((U * used[..., None, :]) @ (V @ B.mT), (A.mT @ U) @ (used[..., None] * V))


def gradient_disagreement(factors: Circuit, gradients: Circuit) -> Float64[Tensor, "*batch"]:
    """Return ||A'G_A - G_B B'|| / (||A'G_A|| + ||G_B B'||), which is zero if both gradients come from one G.

    Both products are A'G B' if G exists. The quotient is 0 if both are zero.

    Args:
        factors: A and B.
        gradients: G_A as the left factor and G_B as the right factor.

    Returns:
        A number from 0 to 1 for each matrix of the batch.

    Raises:
        CallError: A circuit is collapsed.
    """
    A, B = _factors(factors)
    G_A, G_B = _factors(gradients)
    first, second = A.mT @ G_A, G_B @ B.mT
    size = matrix_norm(first) + matrix_norm(second)
    return torch.where(size == 0, 0.0, matrix_norm(first - second) / size)


def _difference(factors: Circuit, other: Circuit) -> Circuit:
    """Return the differences of the factors, which are not the factors of a difference."""
    (A, B), (other_A, other_B) = _factors(factors), _factors(other)
    return Circuit(A - other_A, B - other_B)


def _of_norm_one(step: Circuit, norm: Tensor) -> Circuit:
    left, right = (factor / norm.sqrt()[..., None, None] for factor in _factors(step))
    return Circuit(left, right)


def _sum_of_products(first_left: Tensor, first_right: Tensor, second_left: Tensor, second_right: Tensor) -> Circuit:
    """Return first_left first_right + second_left second_right, with factors of equal norm in each product.

    The norm of the sum then needs no QR decomposition.
    """
    lefts, rights = zip(_of_one_size(first_left, first_right), _of_one_size(second_left, second_right), strict=True)
    return Circuit(torch.cat(lefts, dim=-1), torch.cat(rights, dim=-2))


def _of_one_size(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    sizes = matrix_norm(left), matrix_norm(right)
    ratio = (sizes[1] / sizes[0]).sqrt()
    ratio = torch.where((sizes[0] > 0) & (sizes[1] > 0), ratio, 1.0)[..., None, None]
    return left * ratio, right / ratio


def _sides(circuit: Circuit) -> tuple[Tensor, Tensor]:
    if circuit.right is None:
        raise CallError("measuring a step needs a circuit with factors, got a collapsed one")
    return at_home(circuit.left), at_home(circuit.right)


def _factors(circuit: Circuit) -> tuple[Tensor, Tensor]:
    left, right = _sides(circuit)
    return upcast(left), upcast(right)


def _demand_alike(factors: Circuit, other: Circuit, what: str) -> None:
    for side, ours, theirs in zip(("left", "right"), _sides(factors), _sides(other), strict=True):
        if ours.shape != theirs.shape:
            raise CallError(
                f"{what} must have the factors' shapes: {side} is {list(ours.shape)}, got {list(theirs.shape)}"
            )
