"""A circuit whose factors stand behind a norm, measured without the folded factors being formed."""

from functools import cached_property

import torch
from jaxtyping import Float64
from torch import Tensor

from . import spectrum
from .factored import Circuit
from .gram_matrices import Folded, dense
from .products import broadcast_shapes


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
