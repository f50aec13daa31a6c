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
    """C = left @ right, left [*batch, rows, rank], right [*batch, rank, columns]; C = left without right (collapsed).

    For attention, with W_K and W_Q [d_model, d_head]: W_QK = W_K W_Q^T, rows on the key side and columns on the
    query side, so that the score is x_key' W_QK x_query. W_OV = W_O W_V, rows on the write side and columns on
    the read side. TransformerLens' QK and OV are the transposes.

    Leading dimensions are batch dimensions and broadcast, so a key shared by a group of query heads is kept
    once. Any floating type is taken as it is and stays as it is; every figure is float64, carries no gradient,
    and is NaN for a matrix of the batch with NaN or infinite entries. Nothing of size [rows, columns] is formed
    but by `dense`.

    Raises:
        CallError: a factor is not a floating tensor of at least two dimensions, none of the matrix
            dimensions zero, when the inner dimensions differ, or when the batch dimensions do not broadcast.
    """

    # Plain types: a wrong shape is answered below, in words, also where annotations are checked at run time.
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
        """The circuit of a matrix trained whole, which has no factors."""
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
        """min(rows, rank, columns): the number of singular values that are returned."""
        return min(*self.left.shape[-2:], self.shape[-1])

    @property
    def mT(self) -> "Circuit":  # noqa: N802  torch's name
        """C', with the sides exchanged."""
        return Circuit(self.left.mT) if self.right is None else Circuit(self.right.mT, self.left.mT)

    def __getitem__(self, index: Index | tuple[Index, ...]) -> "Circuit":
        """Index the batch dimensions as a tensor's; the matrix dimensions stay whole.

        Raises:
            CallError: the index does not fit the batch dimensions.
        """
        entries = index if isinstance(index, tuple) else (index,)
        try:
            # An empty stand-in: indexing the factors themselves could reach into the matrix dimensions.
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
        """C - D in float64: of rank k1 + k2 if both are factored, collapsed otherwise.

        Of factors near each other it has all its digits, however small it is beside C and D: `difference_factors`.

        Raises:
            CallError: the shapes differ.
        """
        self._check_same_matrix(other, "difference")
        if self.right is None or other.right is None:
            return Circuit(self.dense() - other.dense())
        left, right, other_left, other_right = map(upcast, (self.left, self.right, other.left, other.right))
        if left.shape[-1] == other_left.shape[-1]:
            return Circuit(*difference_factors(left, right, other_left, other_right))
        return Circuit(joined(left, -other_left, dim=-1), joined(right, other_right, dim=-2))

    def inner(self, other: "Circuit") -> Float64[Tensor, "*batch"]:
        """Frobenius inner product <C, D> = tr(C' D), through the factors: the sum of (L'M) * (R S') for C = LR, D = MS.

        Raises:
            CallError: the shapes differ.
        """
        self._check_same_matrix(other, "inner product")
        parts = _parts_of_inner(self, other)
        # The parts are small, and tell of the factors what counts here.
        if all(map(is_in_range, parts)):
            return (parts[0] * parts[1]).sum((-2, -1))
        (one, *exponents), (two, *others) = self.in_range(), other.in_range()
        return times_power_of_two(inner_in_range(one, two), sum((*exponents, *others)))

    def in_range(self) -> tuple["Circuit", Exponent, Exponent]:
        """C / 2^(m + n) with the factors A / 2^m and B / 2^n, m and n: fourth powers of its entries do not overflow.

        The circuit itself, 0 and 0 where no factor needs it, as with all types but float64.
        """
        left, of_left = in_range(self.left)
        right, of_right = (None, 0) if self.right is None else in_range(self.right)
        is_here = isinstance(of_left, int) and isinstance(of_right, int)
        return self if is_here else Circuit(left, right), of_left, of_right

    def reduction_in_range(self) -> tuple["Circuit", spectrum.Reduction, Exponent, Exponent]:
        """What `in_range` gives, the circuit with its reduction."""
        reduction = self.reduction()
        # Its matrices are as large as the factors, and looked through faster.
        if all(is_in_range(each) for each in reduction if each is not None):
            return self, reduction, 0, 0
        circuit, of_left, of_right = self.in_range()
        return circuit, reduction if circuit is self else circuit.reduction(), of_left, of_right

    def dense(self) -> Float64[Tensor, "*batch rows columns"]:
        """The matrix itself, formed."""
        return upcast(self.left) if self.right is None else multiply(self.left, self.right)

    def reduction(self) -> spectrum.Reduction:
        """The small matrices T_left and T_right that carry every orthogonally invariant figure."""
        return spectrum.reduce(self.left, self.right)

    def singular_values(self) -> Float64[Tensor, "*batch rank_bound"]:
        """Singular values, largest first; accuracy as in `spectrum.singular_values`."""
        return spectrum.singular_values(self.left, self.right)

    def svd(self) -> spectrum.ThinSVD:
        """C = left @ diag(values) @ right, thin: orthonormal columns in left and rows in right."""
        return spectrum.svd(self.left, self.right)

    def frobenius_norm(self) -> Float64[Tensor, "*batch"]:
        """||C||_F = tr(C'C)^{1/2}, the root of the sum of the squared singular values."""
        return spectrum.frobenius_norm(self.left, self.right)

    def nuclear_norm(self) -> Float64[Tensor, "*batch"]:
        """||C||_*, the sum of the singular values."""
        return self.singular_values().sum(-1)

    def demand_shape(self, shape: torch.Size, what: str) -> None:
        """CallError for a shape that is not the circuit's and does not broadcast to it from fewer batch dimensions."""
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
        """Refuse circuits of other shapes."""
        if self.shape[-2:] != other.shape[-2:]:
            raise CallError(
                f"Circuit: a {operation} needs two circuits of one shape, got {list(self.shape)} and "
                f"{list(other.shape)}."
            )
        what = f"Circuit {operation}: shapes {list(self.shape)} and {list(other.shape)}"
        _demand_broadcast(self.batch_shape, other.batch_shape, what)


def inner_in_range(one: Circuit, other: Circuit) -> Float64[Tensor, "*batch"]:
    """`Circuit.inner` of circuits of one shape that `Circuit.in_range` gave."""
    rows, columns = _parts_of_inner(one, other)
    return (rows * columns).sum((-2, -1))


def _parts_of_inner(one: Circuit, other: Circuit) -> tuple[Tensor, Tensor]:
    """L'M and R S', or what stands for them of collapsed circuits: the inner product is the sum of their products."""
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
    """C = left right' of two tall factors, one or both of them folded.

    Singular values come from Gram matrices into which the norm is folded as they are made: the folded factors, of twice
    the size of the weights, are formed for all other figures alone.
    """

    _tall: tuple[Tensor | Folded, Tensor | Folded]

    def __init__(self, left: Tensor | Folded, right: Tensor | Folded) -> None:
        """Take the factors, [*batch, rows, rank] and [*batch, columns, rank]."""
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
        """Singular values, largest first; accuracy as in `spectrum.singular_values`."""
        return spectrum.product_singular_values(*self._tall)


def circuit_of(left: Tensor | Folded, right: Tensor | Folded, repeat_left: int = 1, repeat_right: int = 1) -> Circuit:
    """Return left right' of two tall factors, with what heads share repeated for each of them."""
    left, right = _repeated(left, repeat_left), _repeated(right, repeat_right)
    if isinstance(left, Folded) or isinstance(right, Folded):
        return FoldedCircuit(left, right)
    return Circuit(left, right.mT)


def _repeated(factor: Tensor | Folded, times: int) -> Tensor | Folded:
    if times == 1:
        return factor
    return factor.repeated(times) if isinstance(factor, Folded) else factor.repeat_interleave(times, dim=0)
