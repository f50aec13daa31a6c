"""Circuit: a matrix kept as left @ right, batched over layers and heads."""

from dataclasses import dataclass
from functools import cached_property
from types import EllipsisType

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from ..errors import CallError
from . import spectrum
from .exponents import Exponent, in_range, is_in_range, times_power_of_two
from .gram import Folded, dense
from .products import broadcast_shapes, difference_factors, joined, multiply, upcast

Index = int | slice | EllipsisType | None | Tensor | list[int] | list[bool]


@dataclass(frozen=True, eq=False)
class Circuit:
    """A circuit C = left @ right, kept as its two factors; without a right factor it is collapsed, and C = left.

    For attention, with W_K and W_Q [d_model, d_head]: W_QK = W_K W_Q^T has its rows on the key side and its columns on
    the query side, so that the score is x_key' W_QK x_query. W_OV = W_O W_V has its rows on the write side and its
    columns on the read side. TransformerLens' QK and OV are the transposes.

    Leading dimensions are batch dimensions and broadcast, so a key that a group of query heads shares is stored once.
    Factors may have any floating type and keep it. Every result is float64, carries no gradient, and is NaN for a
    matrix of the batch with NaN or infinite entries. Only `dense` forms a matrix of size [rows, columns].

    Attributes:
        left: [*batch, rows, rank], or the matrix itself [*batch, rows, columns].
        right: [*batch, rank, columns], or None for a collapsed circuit.

    Raises:
        CallError: A factor is not a floating tensor of at least two dimensions, a matrix dimension is zero, the inner
            dimensions differ, or the batch dimensions do not broadcast.
    """

    # Plain types: a wrong shape gets the messages below, even if annotations are checked at run time.
    left: Tensor
    right: Tensor | None = None

    def __post_init__(self) -> None:
        """Refuse factors that do not make a matrix."""
        for name, factor in (("left", self.left), ("right", self.right)):
            if factor is not None and not (isinstance(factor, Tensor) and factor.is_floating_point()):
                kind = factor.dtype if isinstance(factor, Tensor) else type(factor).__name__
                raise CallError(f"Circuit: {name} must be a tensor of floating type, got {kind}.")
            if factor is not None and (factor.ndim < 2 or 0 in factor.shape[-2:]):
                raise CallError(
                    f"Circuit: {name} must be a matrix, or a batch [..., rows, columns] of matrices with at least "
                    f"one row and one column, got shape {list(factor.shape)}."
                )
        if self.right is None:
            return
        shapes = f"left {list(self.left.shape)} and right {list(self.right.shape)}"
        if self.left.shape[-1] != self.right.shape[-2]:
            raise CallError(
                "Circuit: left [..., rows, rank] and right [..., rank, columns] must share their rank, got "
                f"{shapes}. Weights stored as [d_model, d_head] on both sides need .mT on the right."
            )
        _demand_broadcast(self.left.shape[:-2], self.right.shape[:-2], f"Circuit: {shapes}")

    @classmethod
    def from_collapsed(cls, matrix: Float[Tensor, "*batch rows columns"]) -> "Circuit":
        """Make the circuit of a matrix that was trained as a whole and has no factors."""
        return cls(matrix)

    @property
    def batch_shape(self) -> torch.Size:
        """The leading dimensions."""
        if self.right is None:
            return self.left.shape[:-2]
        return broadcast_shapes(self.left.shape[:-2], self.right.shape[:-2])

    @property
    def shape(self) -> torch.Size:
        """[*batch, rows, columns]."""
        columns = (self.left if self.right is None else self.right).shape[-1]
        return torch.Size((*self.batch_shape, self.left.shape[-2], columns))

    @property
    def rank_bound(self) -> int:
        """The number of singular values, min(rows, rank, columns)."""
        return min(*self.left.shape[-2:], self.shape[-1])

    @property
    def mT(self) -> "Circuit":  # noqa: N802  torch's name
        """C', with its sides exchanged."""
        return Circuit(self.left.mT) if self.right is None else Circuit(self.right.mT, self.left.mT)

    def __getitem__(self, index: Index | tuple[Index, ...]) -> "Circuit":
        """Index the batch dimensions like those of a tensor; the matrix dimensions stay whole.

        Raises:
            CallError: The index does not fit the batch dimensions.
        """
        entries = index if isinstance(index, tuple) else (index,)
        try:
            # A stand-in without matrix dimensions, which an index into the factors themselves could reach.
            torch.empty(self.batch_shape)[entries]
        except IndexError as error:
            raise CallError(f"Circuit: index {index} in batch shape {list(self.batch_shape)}: {error}") from error
        if any(entry is Ellipsis for entry in entries):
            entries = (*entries, slice(None), slice(None))
        factors = (
            factor.expand(*self.batch_shape, *factor.shape[-2:])[entries]
            for factor in (self.left, self.right)
            if factor is not None
        )
        return Circuit(*factors)

    def __sub__(self, other: "Circuit") -> "Circuit":
        """Return C - D in float64, of rank k1 + k2 if both are factored and collapsed otherwise.

        If the factors of both are close, the difference has all its digits, however small it is compared with C and D
        (`difference_factors`).

        Raises:
            CallError: The shapes differ.
        """
        self._check_same_matrix(other, "difference")
        if self.right is None or other.right is None:
            return Circuit(self.dense() - other.dense())
        left, right, other_left, other_right = map(upcast, (self.left, self.right, other.left, other.right))
        if left.shape[-1] == other_left.shape[-1]:
            return Circuit(*difference_factors(left, right, other_left, other_right))
        return Circuit(joined(left, -other_left, dim=-1), joined(right, other_right, dim=-2))

    def inner(self, other: "Circuit") -> Float64[Tensor, "*batch"]:
        """Return the Frobenius inner product <C, D> = tr(C' D).

        For C = L R and D = M S it is the sum of the entries of (L'M) * (R S'), so that no matrix [rows, columns] is
        formed.

        Raises:
            CallError: The shapes differ.
        """
        self._check_same_matrix(other, "inner product")
        parts = _parts_of_inner(self, other)
        # The parts are small; if they are in range, the factors need no scaling.
        if all(map(is_in_range, parts)):
            return (parts[0] * parts[1]).sum((-2, -1))
        (one, *exponents), (two, *others) = self.in_range(), other.in_range()
        return times_power_of_two(inner_in_range(one, two), sum((*exponents, *others)))

    def in_range(self) -> tuple["Circuit", Exponent, Exponent]:
        """Scale the factors to A / 2^m and B / 2^n if fourth powers of their entries could leave the range of float64.

        Returns:
            The scaled circuit C / 2^(m + n), m and n; or the circuit itself, 0 and 0 if no factor needs scaling, as for
            all types but float64.
        """
        left, of_left = in_range(self.left)
        right, of_right = (None, 0) if self.right is None else in_range(self.right)
        is_here = isinstance(of_left, int) and isinstance(of_right, int)
        return self if is_here else Circuit(left, right), of_left, of_right

    def reduction_in_range(self) -> tuple["Circuit", spectrum.Reduction, Exponent, Exponent]:
        """Return what `in_range` returns, with the circuit's reduction in second position."""
        reduction = self.reduction()
        # Its entries are as large as those of the factors, and there are fewer to check.
        if all(is_in_range(triangle) for triangle in reduction if triangle is not None):
            return self, reduction, 0, 0
        circuit, of_left, of_right = self.in_range()
        return circuit, reduction if circuit is self else circuit.reduction(), of_left, of_right

    def dense(self) -> Float64[Tensor, "*batch rows columns"]:
        """Form the matrix itself, in float64."""
        return upcast(self.left) if self.right is None else multiply(self.left, self.right)

    def reduction(self) -> spectrum.Reduction:
        """Return the small matrices T_left and T_right, which determine every orthogonally invariant quantity."""
        return spectrum.reduce(self.left, self.right)

    def singular_values(self) -> Float64[Tensor, "*batch rank_bound"]:
        """Return the singular values, largest first; for their accuracy see `spectrum.singular_values`."""
        return spectrum.singular_values(self.left, self.right)

    def svd(self) -> spectrum.ThinSVD:
        """Return the thin SVD C = left @ diag(values) @ right; left has orthonormal columns, right orthonormal rows."""
        return spectrum.svd(self.left, self.right)

    def frobenius_norm(self) -> Float64[Tensor, "*batch"]:
        """Return ||C||_F = tr(C'C)^{1/2}, the root of the sum of the squared singular values."""
        return spectrum.frobenius_norm(self.left, self.right)

    def nuclear_norm(self) -> Float64[Tensor, "*batch"]:
        """Return ||C||_*, the sum of the singular values."""
        return self.singular_values().sum(-1)

    def demand_shape(self, shape: torch.Size, what: str) -> None:
        """Refuse a shape that neither is the circuit's nor broadcasts to it from fewer batch dimensions.

        Args:
            shape: The shape to check.
            what: The name of what has this shape, for the message.

        Raises:
            CallError: The shape does not fit.
        """
        try:
            fits = broadcast_shapes(shape[:-2], self.batch_shape) == self.batch_shape
        except ValueError:
            fits = False
        if not fits or shape[-2:] != self.shape[-2:]:
            raise CallError(
                f"{what} must have the circuit's shape {list(self.shape)}, or fewer batch dimensions that broadcast to "
                f"it, got {list(shape)}."
            )

    def _check_same_matrix(self, other: "Circuit", operation: str) -> None:
        """Refuse a circuit of another shape."""
        if self.shape[-2:] != other.shape[-2:]:
            raise CallError(
                f"Circuit: a {operation} needs two circuits of one shape, got {list(self.shape)} and "
                f"{list(other.shape)}."
            )
        what = f"Circuit {operation}: shapes {list(self.shape)} and {list(other.shape)}"
        _demand_broadcast(self.batch_shape, other.batch_shape, what)


def inner_in_range(one: Circuit, other: Circuit) -> Float64[Tensor, "*batch"]:
    """Return `Circuit.inner` of two circuits of one shape that `Circuit.in_range` returned."""
    rows, columns = _parts_of_inner(one, other)
    return (rows * columns).sum((-2, -1))


def _parts_of_inner(one: Circuit, other: Circuit) -> tuple[Tensor, Tensor]:
    """Return L'M and R S', or what takes their place for collapsed circuits.

    The inner product is the sum of the entries of their elementwise product.
    """
    if one.right is None and other.right is None:
        return upcast(one.left), upcast(other.left)
    if one.right is None:
        return _parts_of_inner(other, one)
    columns = upcast(one.right) if other.right is None else multiply(one.right, other.right.mT)
    return multiply(one.left.mT, other.left), columns


def _demand_broadcast(first: torch.Size, second: torch.Size, what: str) -> None:
    try:
        broadcast_shapes(first, second)
    except ValueError as error:
        raise CallError(f"{what}: the batch dimensions {list(first)} and {list(second)} do not broadcast.") from error


class FoldedCircuit(Circuit):
    """C = left right' of two tall factors, with a norm folded into one or both of them.

    Singular values are computed from Gram matrices, into which the norm is folded directly. The folded factors, which
    take twice the memory of the weights, are formed only for other quantities.
    """

    _tall: tuple[Tensor | Folded, Tensor | Folded]

    def __init__(self, left: Tensor | Folded, right: Tensor | Folded) -> None:
        """Store the factors, [*batch, rows, rank] and [*batch, columns, rank]."""
        self.__dict__["_tall"] = left, right

    @cached_property
    def left(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The left factor, formed."""
        return dense(self._tall[0])

    @cached_property
    def right(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The right factor, formed."""
        return dense(self._tall[1]).mT

    @property
    def batch_shape(self) -> torch.Size:
        """The leading dimensions."""
        return broadcast_shapes(*(factor.shape[:-2] for factor in self._tall))

    @property
    def shape(self) -> torch.Size:
        """[*batch, rows, columns]."""
        left, right = self._tall
        return torch.Size((*self.batch_shape, left.shape[-2], right.shape[-2]))

    @property
    def rank_bound(self) -> int:
        """min(rows, rank, columns)."""
        return min(*self.shape[-2:], self._tall[0].shape[-1])

    def singular_values(self) -> Float64[Tensor, "*batch rank_bound"]:
        """Return the singular values, largest first; for their accuracy see `spectrum.singular_values`."""
        return spectrum.product_singular_values(*self._tall)


def circuit_of(left: Tensor | Folded, right: Tensor | Folded, repeat_left: int = 1, repeat_right: int = 1) -> Circuit:
    """Return the circuit left right' of two tall factors, repeating a factor that several heads share.

    Args:
        left: [head, rows, rank].
        right: [head, columns, rank].
        repeat_left: How many heads in a row share each matrix of `left`.
        repeat_right: How many heads in a row share each matrix of `right`.

    Returns:
        A circuit with one matrix for each head.
    """
    left, right = _repeated(left, repeat_left), _repeated(right, repeat_right)
    if isinstance(left, Folded) or isinstance(right, Folded):
        return FoldedCircuit(left, right)
    return Circuit(left, right.mT)


def _repeated(factor: Tensor | Folded, times: int) -> Tensor | Folded:
    if times == 1:
        return factor
    return factor.repeated(times) if isinstance(factor, Folded) else factor.repeat_interleave(times, dim=0)
