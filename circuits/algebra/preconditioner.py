"""Omega(C), the preconditioner of gradient flow on balanced factors of C = A B, and the exact operator for comparison.

Gradient flow on A and B at one rate moves C by dC/dt = -eta (A A' G + G B'B), where G is the gradient with respect to
C. With balanced factors, A'A = B B', this is dC/dt = -eta [(CC')^{1/2} G + G (C'C)^{1/2}], or vec(dC/dt) = -eta
Omega(C) vec(G) with the Kronecker sum Omega(C) = (C'C)^{1/2} (+) (CC')^{1/2}: a function of C alone, homogeneous of
degree one. No matrix of its size, (rows columns)^2, is formed here.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from ..errors import CallError
from .circuit import Circuit
from .exponents import Exponent, times_power_of_two
from .products import upcast
from .spectrum import Reduction, ThinSVD, matrix_svd


class Eigenvalues(NamedTuple):
    """The distinct kinds of eigenvalue of Omega, and how often each occurs: rows * columns eigenvalues in all.

    Attributes:
        values: One eigenvalue of each kind.
        multiplicities: How often each kind occurs.
    """

    values: Float64[Tensor, "*batch kinds"]
    multiplicities: Int64[Tensor, " kinds"]


class Agreement(NamedTuple):
    """How close Omega's two sides are to those of the exact operator.

    On the rows (the key or write side), (CC')^{1/2} is compared with A A'; on the columns (the query or read side),
    (C'C)^{1/2} with B'B. The cosine is that of the Frobenius inner product, NaN if either matrix is zero. The
    difference is ||(CC')^{1/2} - A A'||_F / ||A A'||_F, and likewise for the columns; it is 0 if both matrices are
    zero.

    Attributes:
        rows_cosine: The cosine on the rows.
        rows_difference: The relative difference on the rows.
        columns_cosine: The cosine on the columns.
        columns_difference: The relative difference on the columns.
    """

    rows_cosine: Float64[Tensor, "*batch"]
    rows_difference: Float64[Tensor, "*batch"]
    columns_cosine: Float64[Tensor, "*batch"]
    columns_difference: Float64[Tensor, "*batch"]


@dataclass(frozen=True, eq=False)
class Preconditioner:
    """Omega(C) = (C'C)^{1/2} (+) (CC')^{1/2}, of a factored or a collapsed circuit.

    Its rates have the unit of C. The spectrum and the singular vectors are computed once, when they are first needed.

    Attributes:
        circuit: The circuit C.
    """

    circuit: Circuit

    @cached_property
    def singular_values(self) -> Float64[Tensor, "*batch rank"]:
        """The circuit's singular values s_1 >= s_2 >= ..."""
        return self.circuit.singular_values()

    @cached_property
    def _svd(self) -> ThinSVD:
        return self.circuit.svd()

    def apply(self, gradient: Float[Tensor, "*_ rows columns"]) -> Float64[Tensor, "*batch rows columns"]:
        """Return Omega(C) G = (CC')^{1/2} G + G (C'C)^{1/2}, at a cost of order rows * columns * rank.

        Raises:
            CallError: The gradient does not have the circuit's shape.
        """
        self.circuit.demand_shape(gradient.shape, "The gradient")
        gradient = upcast(gradient)
        left, values, right = self._svd
        scale = values[..., None]
        by_rows = left @ (scale * (left.mT @ gradient))
        return by_rows + (gradient @ right.mT) @ (scale * right)

    @property
    def eigenvalues(self) -> Eigenvalues:
        """Every eigenvalue in closed form.

        For C of shape p x q with k singular values these are s_i + s_j, once for each of the k^2 ordered pairs; s_i, (p
        - k) + (q - k) times each; and 0, (p - k)(q - k) times.
        """
        s = self.singular_values
        (rows, columns), rank = self.circuit.shape[-2:], s.shape[-1]
        pairs = (s[..., :, None] + s[..., None, :]).flatten(-2)
        # A multiple of s and not a constant, so that it is NaN for a matrix that is not finite.
        values = torch.cat([pairs, s, 0.0 * s[..., :1]], dim=-1)
        counts = [1] * rank**2 + [rows + columns - 2 * rank] * rank + [(rows - rank) * (columns - rank)]
        return Eigenvalues(values, torch.tensor(counts, dtype=torch.int64, device=s.device))

    @property
    def largest(self) -> Float64[Tensor, "*batch"]:
        """The largest eigenvalue, 2 s_1: the fastest rate at which any direction moves."""
        return largest_rate(self.singular_values)

    @property
    def trace(self) -> Float64[Tensor, "*batch"]:
        """The sum of the eigenvalues, (rows + columns) ||C||_*."""
        return sum(self.circuit.shape[-2:]) * self.singular_values.sum(-1)

    @property
    def mean_rate(self) -> Float64[Tensor, "*batch"]:
        """The mean eigenvalue, (1/rows + 1/columns) ||C||_*: the expected rate of a random direction."""
        return mean_rate(self.singular_values, self.circuit.shape)

    @property
    def self_rate(self) -> Float64[Tensor, "*batch"]:
        """The Rayleigh quotient along C itself, 2 sum s^3 / sum s^2; its limit 0 for a zero circuit."""
        return self_rate(self.singular_values)


def largest_rate(singular_values: Float64[Tensor, "*batch rank"]) -> Float64[Tensor, "*batch"]:
    """Return 2 s_1."""
    return 2 * singular_values[..., 0]


def mean_rate(singular_values: Float64[Tensor, "*batch rank"], shape: torch.Size) -> Float64[Tensor, "*batch"]:
    """Return (1/rows + 1/columns) times the sum of s, for a circuit of shape [..., rows, columns]."""
    return ((1 / shape[-2] + 1 / shape[-1]) * singular_values).sum(-1)


def self_rate(singular_values: Float64[Tensor, "*batch rank"]) -> Float64[Tensor, "*batch"]:
    """Return 2 sum s^3 / sum s^2, or its limit 0 if every s is 0."""
    # Relative to s_1, so that cubes of small values do not underflow.
    largest = singular_values[..., :1]
    relative = torch.where(largest == 0, 0.0, singular_values / largest)
    ratio = relative.pow(3).sum(-1) / relative.square().sum(-1)
    return torch.where(largest == 0, 0.0, largest * (2 * ratio[..., None])).squeeze(-1)


def exact_step(circuit: Circuit, gradient: Float[Tensor, "*_ rows columns"]) -> Float64[Tensor, "*batch rows columns"]:
    """Return A A' G + G B'B, minus the velocity of C = A B under gradient flow on A and B at a unit rate.

    It equals Omega(C) G exactly if the factors are balanced, A'A = B B'.

    Args:
        circuit: A factored circuit.
        gradient: G = dL/dC, of the circuit's shape.

    Returns:
        The step, [*batch, rows, columns] in float64.

    Raises:
        CallError: The circuit is collapsed, or the gradient does not have its shape.
    """
    left, right = _factors(circuit, "exact_step")
    circuit.demand_shape(gradient.shape, "The gradient")
    gradient, left, right = upcast(gradient), upcast(left), upcast(right)
    return left @ (left.mT @ gradient) + (gradient @ right.mT) @ right


def agreement(circuit: Circuit) -> Agreement:
    """Return how close Omega(C) is to the exact operator: cosine and relative difference of each side.

    They are computed from k x k matrices.

    Raises:
        CallError: The circuit is collapsed.
    """
    _factors(circuit, "agreement")
    _, reduction, of_left, of_right = circuit.reduction_in_range()
    return reduced_agreement(reduction, matrix_svd(reduction.core), of_left - of_right)


def reduced_agreement(reduction: Reduction, core: ThinSVD, exponent: Exponent = 0) -> Agreement:
    """Return `agreement` from the reduction of A / 2^m and B / 2^n.

    Args:
        reduction: The reduction of the scaled circuit.
        core: The SVD of the reduction's core.
        exponent: m - n.

    Raises:
        CallError: The reduction is that of a collapsed circuit.
    """
    left, right = reduction.left, reduction.right
    if right is None:
        raise CallError("agreement needs the reduction of a factored circuit, got a collapsed one.")
    scale = core.values[..., None]
    # In the bases Q_left and Q_right both operators are small matrices, computed without cancellation.
    rows = _compare(core.left @ (scale * core.left.mT), left @ left.mT, -exponent)
    columns = _compare(core.right.mT @ (scale * core.right), right.mT @ right, exponent)
    return Agreement(*rows, *columns)


def imbalance(circuit: Circuit) -> Float64[Tensor, "*batch"]:
    """Return ||A'A - B B'||_F / (||A'A||_F + ||B B'||_F), from 0 (balanced) to 1; 0 if both factors are zero.

    Raises:
        CallError: The circuit is collapsed.
    """
    _factors(circuit, "imbalance")
    _, reduction, of_left, of_right = circuit.reduction_in_range()
    return reduced_imbalance(reduction, of_left - of_right)


def reduced_imbalance(reduction: Reduction, exponent: Exponent = 0) -> Float64[Tensor, "*batch"]:
    """Return `imbalance` from the reduction of A / 2^m and B / 2^n.

    Args:
        reduction: The reduction of the scaled circuit.
        exponent: m - n.

    Raises:
        CallError: The reduction is that of a collapsed circuit.
    """
    left, right = reduction.left, reduction.right
    if right is None:
        raise CallError("imbalance needs the reduction of a factored circuit, got a collapsed one.")
    first, second, _ = _side_by_side(left.mT @ left, right @ right.mT, 2 * exponent)
    size = _norm(first) + _norm(second)
    return torch.where(size == 0, 0.0, _norm(first - second) / size)


def _side_by_side(first: Tensor, second: Tensor, exponent: Exponent) -> tuple[Tensor, Tensor, Exponent]:
    """Return first * 2^exponent and second, both divided by a power of two that keeps them in range, and that power."""
    if isinstance(exponent, int):
        return first, second, 0
    above = exponent.clamp_min(0)
    down = (exponent - above)[..., None, None]
    return times_power_of_two(first, down), times_power_of_two(second, -above[..., None, None]), above


def _compare(omega: Tensor, exact: Tensor, exponent: Exponent) -> tuple[Tensor, Tensor]:
    """Return the cosine of omega * 2^exponent and the exact operator, and their relative difference."""
    exact_norm = _norm(exact)
    cosine = (omega * exact).sum((-2, -1)) / (_norm(omega) * exact_norm)
    near, exact, above = _side_by_side(omega, exact, exponent)
    difference = times_power_of_two(_norm(near - exact) / exact_norm, above)
    # C is zero if A is, so Omega's side is zero if the exact one is.
    return cosine, torch.where(exact_norm == 0, 0.0, difference)


def _norm(matrix: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(matrix)


def _factors(circuit: Circuit, function: str) -> tuple[Tensor, Tensor]:
    if circuit.right is None:
        raise CallError(
            f"{function} compares with gradient flow on the factors A and B, but a collapsed circuit has no factors. "
            "Pass Circuit(left, right); Preconditioner takes collapsed circuits."
        )
    return circuit.left, circuit.right
