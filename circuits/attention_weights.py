"""The attention weights of one layer, and the two circuits that they form."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from .errors import CallError
from .factored import Circuit

#: The tensors of a layer, in the order of the fields.
NAMES = ("W_Q", "W_K", "W_V", "W_O", "W_QK", "W_OV")


@dataclass(frozen=True)
class AttentionWeights:
    """W_Q, W_K, W_V and W_O of one layer as TransformerLens stores them, or its circuits already collapsed.

    Attributes:
        layer: number of the layer.
        W_Q, W_K, W_V: [head, d_model, d_head].
        W_O: [head, d_head, d_model].
        W_QK: a collapsed query-key circuit, [head, key, query], where there are no factors.
        W_OV: a collapsed output-value circuit, [head, write, read].
        rotary: whether positions rotate queries and keys, which makes W_QK a family over the offset between them.
    """

    layer: int
    W_Q: Float[Tensor, "head d_model d_head"] | None = None
    W_K: Float[Tensor, "head d_model d_head"] | None = None
    W_V: Float[Tensor, "head d_model d_head"] | None = None
    W_O: Float[Tensor, "head d_head d_out"] | None = None
    W_QK: Float[Tensor, "head key query"] | None = None
    W_OV: Float[Tensor, "head write read"] | None = None
    rotary: bool = False

    @classmethod
    def of(cls, layer: int, tensors: dict[str, Tensor], rotary: bool = False) -> "AttentionWeights":
        """Make the weights of a table of tensors by name.

        Raises:
            CallError: a name is none of W_Q, W_K, W_V, W_O, W_QK and W_OV.
        """
        unknown = sorted(set(tensors) - set(NAMES))
        if unknown:
            raise CallError(f"layer {layer} was given {unknown[0]}; attention weights are {', '.join(NAMES)}")
        return cls(layer, *(tensors.get(name) for name in NAMES), rotary=rotary)

    def qk(self) -> Circuit:
        """Return W_QK = W_K W_Q', one matrix a head: score = x_key' W_QK x_query, without the 1/sqrt(d_head).

        With rotary positions this is W_QK at offset 0. TransformerLens' `.QK` is its transpose.

        Raises:
            CallError: the weights hold neither W_Q and W_K nor W_QK.
        """
        if self.W_QK is not None:
            return Circuit(self.W_QK)
        if self.W_Q is None or self.W_K is None:
            raise CallError(f"layer {self.layer} has no W_QK: that takes W_Q and W_K, or W_QK itself")
        return Circuit(self.W_K, self.W_Q.mT)

    def ov(self) -> Circuit:
        """Return W_OV = W_O W_V, one matrix a head; rows are the write side, columns the read side.

        TransformerLens' `.OV` is its transpose.

        Raises:
            CallError: the weights hold neither W_V and W_O nor W_OV.
        """
        if self.W_OV is not None:
            return Circuit(self.W_OV)
        if self.W_V is None or self.W_O is None:
            raise CallError(f"layer {self.layer} has no W_OV: that takes W_V and W_O, or W_OV itself")
        return Circuit(self.W_O.mT, self.W_V.mT)

    def circuits(self) -> dict[str, Circuit]:
        """Return the circuits that can be formed, by name: QK, OV or both."""
        formed = {}
        if self.W_QK is not None or (self.W_Q is not None and self.W_K is not None):
            formed["QK"] = self.qk()
        if self.W_OV is not None or (self.W_V is not None and self.W_O is not None):
            formed["OV"] = self.ov()
        return formed
