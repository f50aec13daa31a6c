"""The attention weights of one layer, and the two circuits that they form."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from jaxtyping import Float
from torch import Tensor

from ..algebra.circuit import Circuit, circuit_of
from ..algebra.gram import Folded
from ..errors import CallError
from .norms import BASES, Basis, HeadNorm, Norm
from .rotary import Rotary

#: The weights of a layer, in the order of the fields.
NAMES = ("W_Q", "W_K", "W_V", "W_O", "W_QK", "W_OV")
BIASES = ("b_Q", "b_K", "b_V", "b_O")

Positions = Literal["rotary", "alibi", "relative", "absolute", "none"]


@dataclass(frozen=True)
class AttentionFacts:
    """What the weights alone do not say of a layer's attention.

    Attributes:
        rotary: how positions rotate queries and keys; None where they do not.
        score_scale: what multiplies the scores; None for 1/sqrt(d_head).
        soft_cap: c where scores become c tanh(score/c).
        clip_qkv: c where queries, keys and values are clipped to [-c, c], which no circuit holds.
        sinks: whether a learned score of each head that is no token's takes part of its attention.
        window: how many tokens back a query sees, itself included; None for all.
        causal: whether a query sees only what came before it; None where that is not known.
        positions: how the scores know positions, where not by rotation; "none" where they do not.
        cross: whether keys and values are read from another stream.
        used_by: how many layers use these same weights.
        unknown: names of the facts that nothing told; "norm" among them where the norm in front is not known.
    """

    rotary: Rotary | None = None
    score_scale: float | None = None
    soft_cap: float | None = None
    clip_qkv: float | None = None
    sinks: bool = False
    window: int | None = None
    causal: bool | None = None
    positions: Positions | None = None
    cross: bool = False
    used_by: int = 1
    unknown: frozenset[str] = frozenset()


@dataclass(frozen=True, eq=False)
class AttentionWeights:
    """W_Q, W_K, W_V and W_O of one layer as TransformerLens stores them, or its circuits already collapsed.

    With grouped heads, W_K and W_V have fewer heads than W_Q and W_O: query head h reads key-value head
    h // (head / key_value_head).

    Attributes:
        layer: number of the layer.
        W_Q: [head, d_model, d_head].
        W_K, W_V: [key_value_head, d_model, d_head].
        W_O: [head, d_head, d_model].
        W_QK: a collapsed query-key circuit, [head, key, query], where there are no factors.
        W_OV: a collapsed output-value circuit, [head, write, read].
        b_Q, b_K, b_V: biases, [head, d_head] or [key_value_head, d_head], None where there are none. No circuit holds
            them.
        b_O: [d_model].
        norm: what the residual stream goes through before it is read, None where nothing is there.
        query_norm, key_norm: norms of queries and keys (QK-norm), after which the scale of W_QK does not reach scores.
        facts: what the weights alone do not say.
        stack: which stack of a model with several, such as encoder, decoder, decoder cross; empty where there is one.
        stored_basis: the basis that the weights were read in; live models may come with their norms folded.
    """

    layer: int
    # Plain types: shapes that do not agree are answered below, in words, also where annotations are checked.
    W_Q: Tensor | None = None
    W_K: Tensor | None = None
    W_V: Tensor | None = None
    W_O: Tensor | None = None
    W_QK: Tensor | None = None
    W_OV: Tensor | None = None
    b_Q: Tensor | None = None
    b_K: Tensor | None = None
    b_V: Tensor | None = None
    b_O: Tensor | None = None
    norm: Norm | None = None
    query_norm: HeadNorm | None = None
    key_norm: HeadNorm | None = None
    facts: AttentionFacts = AttentionFacts()
    stack: str = ""
    stored_basis: Basis = "raw"

    def __post_init__(self) -> None:
        """Refuse tensors whose heads or inner widths do not agree."""
        for first, of_first, second, of_second, what in (
            ("W_Q", 2, "W_K", 2, "d_head"),
            ("W_V", 2, "W_O", 1, "d_head"),
            ("W_K", 0, "W_V", 0, "heads"),
            ("W_Q", 0, "W_O", 0, "heads"),
        ):
            one, other = getattr(self, first), getattr(self, second)
            if one is not None and other is not None and one.shape[of_first] != other.shape[of_second]:
                raise CallError(
                    f"{self.place}: {first} has {what} = {one.shape[of_first]} and {second} has "
                    f"{other.shape[of_second]}; they should agree (is the number of heads right?)"
                )
        for many, few in (("W_Q", "W_K"), ("W_O", "W_V")):
            one, other = getattr(self, many), getattr(self, few)
            if one is not None and other is not None and one.shape[0] % other.shape[0]:
                raise CallError(
                    f"{self.place}: {many} has {one.shape[0]} heads and {few} has {other.shape[0]}; "
                    f"expected the same number, or a multiple of it (is the number of heads right?)"
                )

    @classmethod
    def of(cls, layer: int, tensors: dict[str, Tensor]) -> "AttentionWeights":
        """Make the weights of a table of tensors by name: W_Q, b_Q and so on.

        Raises:
            CallError: there is no tensor of that name in a layer, or shapes do not agree.
        """
        unknown = sorted(set(tensors) - {*NAMES, *BIASES})
        if unknown:
            known = ", ".join((*NAMES, *BIASES))
            raise CallError(f"layer {layer} was given {unknown[0]}; attention weights are {known}")
        return replace(cls(layer), **tensors)

    @property
    def place(self) -> str:
        """The layer in words, for messages."""
        return f"{self.stack} layer {self.layer}".lstrip()

    @property
    def heads(self) -> int:
        """Number of heads, those of the queries."""
        return self._given(("W_Q", "W_O", "W_QK", "W_OV")).shape[0]

    @property
    def group_size(self) -> int:
        """How many query heads share one key-value head; 1 where heads are not grouped."""
        few = self.W_K if self.W_K is not None else self.W_V
        return 1 if few is None else self.heads // few.shape[0]

    def in_basis(self, basis: Basis) -> "AttentionWeights":
        """Return the weights in another basis, in float64 unless it is their own; biases are folded too.

        Layers without a norm in front of their attention have nothing to fold: theirs are the raw weights. Keys and
        values of cross-attention read another stream, whose norm is not this one, and stay as they are.

        Raises:
            CallError: there is no such basis; the weights were read with their norms folded, or are collapsed, or are
                of other widths than the norm in front of them.
        """
        folded: dict[str, Any] = {name: tall.dense for name, tall in self._folded(basis).items()}
        if basis == self.stored_basis:
            return self
        norm = self.norm
        if norm is None:
            return replace(self, stored_basis=basis)
        if "W_O" in folded:
            folded["W_O"] = folded["W_O"].mT
            if self.b_O is not None:
                folded["b_O"] = Folded(self.b_O[:, None], None, centred=True).dense[:, 0]
        for side in "QKV":
            if f"W_{side}" in folded:
                folded[f"b_{side}"] = norm.fold_bias(getattr(self, f"b_{side}"), getattr(self, f"W_{side}"))
        return replace(self, **folded, norm=_without_gain(norm), stored_basis=basis)

    def _folded(self, basis: Basis) -> dict[str, Folded]:
        """The weights that another basis changes, tall, W_O as [head, d_model, d_head] too; none of them formed yet.

        Raises:
            CallError: as `in_basis`.
        """
        if basis not in BASES:
            raise CallError(f"basis should be one of {', '.join(BASES)}, got {basis!r}")
        if basis == self.stored_basis:
            return {}
        if self.stored_basis != "raw" and (self.stored_basis, basis) != ("folded", "folded_centred"):
            raise CallError(
                f"{self.place} was read from a model whose weights are in the basis {self.stored_basis}; "
                f"they cannot be brought to {basis}: load the model without processing its weights"
            )
        if "norm" in self.facts.unknown:
            raise CallError(
                f"the norm in front of {self.place} is not known, so its weights cannot be {basis}: a config.json "
                f"beside the weights tells it, or --family, or [norm] in a mapping file"
            )
        norm = self.norm
        if norm is None:
            return {}
        if self.W_QK is not None or self.W_OV is not None:
            raise CallError(f"{self.place} holds collapsed circuits, whose basis is raw; they cannot be {basis}")
        self._demand_one_stream(norm)
        folded = {}
        for side in "Q" if self.facts.cross else "QKV":
            W = getattr(self, f"W_{side}")
            if W is not None:
                folded[f"W_{side}"] = norm.fold(W)
        if self.W_O is not None and basis == "folded_centred" and norm.kind == "layer_norm":
            folded["W_O"] = Folded(self.W_O.mT, None, centred=True)
        return folded

    def qk(self, basis: Basis = "raw", rotary_offset: int = 0) -> Circuit:
        """Return W_QK = W_K W_Q', one matrix a query head: score = x_key' W_QK x_query, without the score scale.

        With rotary positions W_QK(offset) = W_K R(offset) W_Q', the offset being the query's position less the key's.
        TransformerLens' `.QK` is the transpose at offset 0.

        Raises:
            CallError: the weights hold neither W_Q and W_K nor W_QK, cannot be brought to the basis, or an offset was
                given and the positions are not rotary or their frequencies not known.
        """
        if rotary_offset:
            weights = self.in_basis(basis)
            if weights.W_QK is not None:
                raise CallError(f"{self.place} holds a collapsed W_QK, which is known at rotary offset 0 alone")
            W_K, W_Q = weights._query_and_key(rotary_offset)
            return circuit_of(W_K, W_Q, repeat_left=self.group_size)
        folded = self._folded(basis)
        if self.W_QK is not None:
            return Circuit(self.W_QK)
        W_K, W_Q = self._query_and_key(0)
        return circuit_of(folded.get("W_K", W_K), folded.get("W_Q", W_Q), repeat_left=self.group_size)

    def ov(self, basis: Basis = "raw") -> Circuit:
        """Return W_OV = W_O W_V, one matrix a query head; rows are the write side, columns the read side.

        TransformerLens' `.OV` is its transpose.

        Raises:
            CallError: the weights hold neither W_V and W_O nor W_OV, or cannot be brought to the basis.
        """
        folded = self._folded(basis)
        if self.W_OV is not None:
            return Circuit(self.W_OV)
        W_V, W_O = self._value_and_output()
        return circuit_of(folded.get("W_O", W_O.mT), folded.get("W_V", W_V), repeat_right=self.group_size)

    def qk_groups(self, basis: Basis = "raw", rotary_offset: int = 0) -> Circuit:
        """Return W_QK of each group of heads that share a key: W_K [W_Q1', W_Q2', ...], [key, (head, query)].

        Gradient flow moves the factors of the group together: what is balanced is W_K'W_K less the sum of the heads'
        W_Q'W_Q, and Omega belongs to this matrix. Without groups it is `qk`.
        """
        weights = self.in_basis(basis)
        if weights.W_QK is not None or self.group_size == 1:
            return weights.qk(basis, rotary_offset)
        W_K, W_Q = weights._query_and_key(rotary_offset)
        return Circuit(W_K, self._joined(W_Q).mT)

    def ov_groups(self, basis: Basis = "raw") -> Circuit:
        """Return W_OV of each group of heads that share a value: [W_O1; W_O2; ...] W_V, [(head, write), read]."""
        weights = self.in_basis(basis)
        if weights.W_OV is not None or self.group_size == 1:
            return weights.ov(basis)
        W_V, W_O = weights._value_and_output()
        return Circuit(self._joined(W_O.mT), W_V.mT)

    def circuits(self, basis: Basis = "raw", rotary_offset: int = 0) -> dict[str, Circuit]:
        """Return the circuits that can be formed, by name: QK, OV or both."""
        formed = {}
        if self.has_qk:
            formed["QK"] = self.qk(basis, rotary_offset)
        if self.has_ov:
            formed["OV"] = self.ov(basis)
        return formed

    @property
    def has_qk(self) -> bool:
        """Whether W_QK can be formed."""
        return self.W_QK is not None or (self.W_Q is not None and self.W_K is not None)

    @property
    def has_ov(self) -> bool:
        """Whether W_OV can be formed."""
        return self.W_OV is not None or (self.W_V is not None and self.W_O is not None)

    def rotary_norms(self, offsets: list[int], basis: Basis = "raw") -> Float[Tensor, "offset head"]:
        """Return ||W_QK(offset)||_F of every head at many offsets in one pass over the weights.

        Raises:
            CallError: as `qk`.
        """
        weights = self.in_basis(basis)
        W_K, W_Q = weights._query_and_key(0)
        rotary = self._demand_rotary()
        grouped = W_Q.reshape(-1, self.group_size, *W_Q.shape[1:])
        return rotary.norms(W_K[:, None], grouped, offsets).flatten(1)

    def _demand_one_stream(self, norm: Norm) -> None:
        read = {f"W_{side}": getattr(self, f"W_{side}") for side in ("Q" if self.facts.cross else "QKV")}
        widths = {name: W.shape[1] for name, W in read.items() if W is not None}
        if norm.gain is not None:
            widths["the norm's gain"] = norm.gain.shape[0]
        if len(set(widths.values())) > 1:
            told = ", ".join(f"{name} {width}" for name, width in widths.items())
            raise CallError(
                f"what {self.place} reads should have the width of the norm in front of it, got {told}: where keys and "
                f"values read another stream, say cross = true in a mapping file, or leave the basis raw"
            )

    def _query_and_key(self, rotary_offset: int) -> tuple[Tensor, Tensor]:
        if self.W_Q is None or self.W_K is None:
            raise CallError(f"{self.place} has no W_QK: that takes W_Q and W_K, or W_QK itself")
        if rotary_offset == 0:
            return self.W_K, self.W_Q
        return self.W_K, self._demand_rotary().rotate(self.W_Q, rotary_offset)

    def _value_and_output(self) -> tuple[Tensor, Tensor]:
        if self.W_V is None or self.W_O is None:
            raise CallError(f"{self.place} has no W_OV: that takes W_V and W_O, or W_OV itself")
        return self.W_V, self.W_O

    def _demand_rotary(self) -> Rotary:
        if "rotary" in self.facts.unknown:
            raise CallError(
                f"whether positions rotate queries and keys in {self.place} is not known, so its W_QK is known at "
                f"offset 0 alone: a config.json beside the weights tells it, or --family, or [rotary] in a mapping file"
            )
        if self.facts.rotary is None:
            raise CallError(f"{self.place} has no rotary positions, so its W_QK is the same at every offset: ask for 0")
        return self.facts.rotary

    def _joined(self, per_head: Float[Tensor, "head rows d_head"]) -> Float[Tensor, "group joined d_head"]:
        """The heads of a group on top of each other."""
        return per_head.reshape(-1, self.group_size * per_head.shape[1], per_head.shape[2])

    def _given(self, names: tuple[str, ...]) -> Tensor:
        for name in names:
            tensor = getattr(self, name)
            if tensor is not None:
                return tensor
        raise CallError(f"{self.place} holds no weights")


def _without_gain(norm: Norm) -> Norm:
    return replace(norm, gain=None, bias=None)
