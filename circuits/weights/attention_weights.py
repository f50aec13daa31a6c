"""The attention weights of one layer, and the two circuits that they form."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from jaxtyping import Float
from torch import Tensor

from ..algebra.circuit import Circuit, circuit_of
from ..algebra.gram import Folded
from ..errors import CallError
from .layer_keys import layer_name
from .norms import BASES, Basis, HeadNorm, Norm
from .rotary import Rotary

#: The weights of a layer, in the order of the fields.
NAMES = ("W_Q", "W_K", "W_V", "W_O", "W_QK", "W_OV")
BIASES = ("b_Q", "b_K", "b_V", "b_O")

Positions = Literal["rotary", "alibi", "relative", "absolute", "none"]


@dataclass(frozen=True)
class AttentionFacts:
    """The facts about a layer's attention that its weights alone do not say.

    Attributes:
        rotary: How positions rotate queries and keys, or None if they do not.
        score_scale: The factor on the scores, or None for 1/sqrt(d_head).
        soft_cap: c if scores become c tanh(score/c).
        clip_qkv: c if queries, keys and values are clipped to [-c, c], which no circuit represents.
        sinks: Whether each head has a learned score that belongs to no token and takes part of its attention.
        window: How many tokens a query sees, itself included, or None for all.
        causal: Whether a query sees only the tokens before it and itself, or None if that is unknown.
        positions: How the scores depend on positions; "none" if they do not.
        cross: Whether keys and values are read from another stream than queries.
        used_by: How many layers use these same weights.
        unknown: The names of the facts that are unknown, with "norm" among them if the norm in front of attention is.
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
    """W_Q, W_K, W_V and W_O of one layer as TransformerLens stores them, or its collapsed circuits.

    With grouped heads, W_K and W_V have fewer heads than W_Q and W_O: query head h reads key-value head h // (head /
    key_value_head).

    Attributes:
        layer: The number of the layer.
        W_Q: [head, d_model, d_head].
        W_K, W_V: [key_value_head, d_model, d_head].
        W_O: [head, d_head, d_model].
        W_QK: A collapsed query-key circuit, [head, key, query], for a layer without factors.
        W_OV: A collapsed output-value circuit, [head, write, read].
        b_Q, b_K, b_V: Biases, [head, d_head] or [key_value_head, d_head], or None. No circuit contains them.
        b_O: [d_model], or None.
        norm: The norm that the residual stream passes before attention reads it, or None if there is none.
        query_norm, key_norm: Norms of queries and keys (QK-norm); behind them the scale of W_QK does not affect scores.
        facts: What the weights alone do not say.
        stack: The stack of a model with several, such as encoder, decoder or decoder cross; empty for a single stack.
        stored_basis: The basis in which the weights were read; live models may have folded their norms already.

    Raises:
        CallError: The heads or inner widths of two tensors do not match.
    """

    layer: int
    # Plain types: shapes that do not match get the messages below, even if annotations are checked at run time.
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
        """Refuse tensors whose heads or inner widths do not match."""
        for first, of_first, second, of_second, what in (
            ("W_Q", 2, "W_K", 2, "d_head"),
            ("W_V", 2, "W_O", 1, "d_head"),
            ("W_K", 0, "W_V", 0, "heads"),
            ("W_Q", 0, "W_O", 0, "heads"),
        ):
            one, other = getattr(self, first), getattr(self, second)
            if one is not None and other is not None and one.shape[of_first] != other.shape[of_second]:
                raise CallError(
                    f"{self.label}: {first} has {what} = {one.shape[of_first]} and {second} has "
                    f"{other.shape[of_second]}; they must be equal (is the number of heads right?)"
                )
        for many, few in (("W_Q", "W_K"), ("W_O", "W_V")):
            one, other = getattr(self, many), getattr(self, few)
            if one is not None and other is not None and one.shape[0] % other.shape[0]:
                raise CallError(
                    f"{self.label}: {many} has {one.shape[0]} heads and {few} has {other.shape[0]}; "
                    f"expected the same number, or a multiple of it (is the number of heads right?)"
                )

    @classmethod
    def of(cls, layer: int, tensors: dict[str, Tensor]) -> "AttentionWeights":
        """Make the weights of a layer from a table of tensors by name: W_Q, b_Q and so on.

        Args:
            layer: The number of the layer.
            tensors: The tensors by name.

        Raises:
            CallError: A name is not one of attention weights, or shapes do not match.
        """
        unknown = sorted(set(tensors) - {*NAMES, *BIASES})
        if unknown:
            known = ", ".join((*NAMES, *BIASES))
            raise CallError(f"layer {layer}: {unknown[0]} is not the name of attention weights; expected {known}")
        return replace(cls(layer), **tensors)

    @property
    def label(self) -> str:
        """The layer in words, for messages."""
        return layer_name(self.stack, self.layer)

    @property
    def heads(self) -> int:
        """The number of query heads.

        Raises:
            CallError: The layer holds no weights.
        """
        for name in ("W_Q", "W_O", "W_QK", "W_OV"):
            tensor = getattr(self, name)
            if tensor is not None:
                return tensor.shape[0]
        raise CallError(f"{self.label} holds no weights")

    @property
    def group_size(self) -> int:
        """The number of query heads that share one key-value head; 1 if heads are not grouped."""
        few = self.W_K if self.W_K is not None else self.W_V
        return 1 if few is None else self.heads // few.shape[0]

    def in_basis(self, basis: Basis) -> "AttentionWeights":
        """Return the weights in another basis, in float64 unless they are in it already; biases are folded too.

        A layer without a norm in front of its attention has nothing to fold, so its weights are the raw ones. Keys and
        values of cross-attention read another stream, with another norm, and stay as they are.

        Raises:
            CallError: There is no such basis; the weights were read with their norms folded, are collapsed, or do not
                have the width of the norm in front of them.
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
        """Return the weights that another basis changes, as tall factors that are not formed yet.

        W_O is among them as [head, d_model, d_head].

        Raises:
            CallError: As for `in_basis`.
        """
        if basis not in BASES:
            raise CallError(f"basis should be one of {', '.join(BASES)}, got {basis!r}")
        if basis == self.stored_basis:
            return {}
        if self.stored_basis != "raw" and (self.stored_basis, basis) != ("folded", "folded_centred"):
            raise CallError(
                f"{self.label} was read from a model whose weights are in the basis {self.stored_basis}; "
                f"they cannot be converted to {basis}: load the model without processing its weights"
            )
        if "norm" in self.facts.unknown:
            raise CallError(
                f"the norm in front of {self.label} is not known, so its weights cannot be {basis}; provide a "
                f"config.json beside the weights, --family, or [norm] in a mapping file"
            )
        norm = self.norm
        if norm is None:
            return {}
        if self.W_QK is not None or self.W_OV is not None:
            raise CallError(f"{self.label} holds collapsed circuits, whose basis is raw; they cannot be {basis}")
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
        """Return W_QK = W_K W_Q', one matrix for each query head; score = x_key' W_QK x_query, without the score scale.

        With rotary positions, W_QK(offset) = W_K R(offset) W_Q', where the offset is the query's position minus the
        key's. TransformerLens' `.QK` is the transpose at offset 0.

        Args:
            basis: The basis of the weights: raw, folded or folded_centred.
            rotary_offset: The offset in positions; 0 for no rotation.

        Returns:
            A circuit [head, key side, query side].

        Raises:
            CallError: The layer has neither W_Q and W_K nor W_QK, the weights cannot be converted to the basis, or an
                offset was given and the positions are not rotary or their frequencies are unknown.
        """
        if rotary_offset:
            weights = self.in_basis(basis)
            if weights.W_QK is not None:
                raise CallError(f"{self.label} holds a collapsed W_QK, which is known only at rotary offset 0")
            W_K, W_Q = weights._query_and_key(rotary_offset)
            return circuit_of(W_K, W_Q, repeat_left=self.group_size)
        folded = self._folded(basis)
        if self.W_QK is not None:
            return Circuit(self.W_QK)
        W_K, W_Q = self._query_and_key(0)
        return circuit_of(folded.get("W_K", W_K), folded.get("W_Q", W_Q), repeat_left=self.group_size)

    def ov(self, basis: Basis = "raw") -> Circuit:
        """Return W_OV = W_O W_V, one matrix for each query head; rows are the write side, columns the read side.

        TransformerLens' `.OV` is its transpose.

        Raises:
            CallError: The layer has neither W_V and W_O nor W_OV, or the weights cannot be converted to the basis.
        """
        folded = self._folded(basis)
        if self.W_OV is not None:
            return Circuit(self.W_OV)
        W_V, W_O = self._value_and_output()
        return circuit_of(folded.get("W_O", W_O.mT), folded.get("W_V", W_V), repeat_right=self.group_size)

    def qk_groups(self, basis: Basis = "raw", rotary_offset: int = 0) -> Circuit:
        """Return W_QK of each group of heads that share a key: W_K [W_Q1', W_Q2', ...], [key side, (head, query side)].

        Gradient flow moves the factors of a group together: W_K'W_K minus the sum of the heads' W_Q'W_Q is what
        balances, and Omega belongs to this matrix. Without groups the result is that of `qk`.

        Args:
            basis: The basis of the weights.
            rotary_offset: The offset in positions, the query's minus the key's.

        Raises:
            CallError: As for `qk`.
        """
        weights = self.in_basis(basis)
        if weights.W_QK is not None or self.group_size == 1:
            return weights.qk(basis, rotary_offset)
        W_K, W_Q = weights._query_and_key(rotary_offset)
        return Circuit(W_K, self._joined(W_Q).mT)

    def ov_groups(self, basis: Basis = "raw") -> Circuit:
        """Return W_OV of each group of heads that share a value: [W_O1; W_O2; ...] W_V.

        Its rows are (head, write side), its columns the read side. Without groups the result is that of `ov`.

        Raises:
            CallError: As for `ov`.
        """
        weights = self.in_basis(basis)
        if weights.W_OV is not None or self.group_size == 1:
            return weights.ov(basis)
        W_V, W_O = weights._value_and_output()
        return Circuit(self._joined(W_O.mT), W_V.mT)

    def circuits(self, basis: Basis = "raw", rotary_offset: int = 0) -> dict[str, Circuit]:
        """Return the circuits that the weights form, by name: QK, OV or both.

        Args:
            basis: The basis of the weights.
            rotary_offset: The offset of W_QK in positions, the query's minus the key's.

        Raises:
            CallError: As for `qk` and `ov`.
        """
        formed = {}
        if self.has_qk:
            formed["QK"] = self.qk(basis, rotary_offset)
        if self.has_ov:
            formed["OV"] = self.ov(basis)
        return formed

    @property
    def has_qk(self) -> bool:
        """Whether the weights form W_QK."""
        return self.W_QK is not None or (self.W_Q is not None and self.W_K is not None)

    @property
    def has_ov(self) -> bool:
        """Whether the weights form W_OV."""
        return self.W_OV is not None or (self.W_V is not None and self.W_O is not None)

    def rotary_norms(self, offsets: list[int], basis: Basis = "raw") -> Float[Tensor, "offset head"]:
        """Return ||W_QK(offset)||_F of every head at several offsets in one pass over the weights.

        Args:
            offsets: Offsets in positions, the query's minus the key's.
            basis: The basis of the weights.

        Raises:
            CallError: As for `qk`.
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
            received = ", ".join(f"{name} {width}" for name, width in widths.items())
            raise CallError(
                f"the weights of {self.label} must have the width of the norm in front of it, got {received}; if keys "
                f"and values read another stream, set cross = true in a mapping file, or use the basis raw"
            )

    def _query_and_key(self, rotary_offset: int) -> tuple[Tensor, Tensor]:
        if self.W_Q is None or self.W_K is None:
            raise CallError(f"{self.label} has no W_QK, which takes W_Q and W_K, or W_QK itself")
        if rotary_offset == 0:
            return self.W_K, self.W_Q
        return self.W_K, self._demand_rotary().rotate(self.W_Q, rotary_offset)

    def _value_and_output(self) -> tuple[Tensor, Tensor]:
        if self.W_V is None or self.W_O is None:
            raise CallError(f"{self.label} has no W_OV, which takes W_V and W_O, or W_OV itself")
        return self.W_V, self.W_O

    def _demand_rotary(self) -> Rotary:
        if "rotary" in self.facts.unknown:
            raise CallError(
                f"whether positions rotate queries and keys in {self.label} is not known, so its W_QK is known only "
                f"at offset 0; provide a config.json beside the weights, --family, or [rotary] in a mapping file"
            )
        if self.facts.rotary is None:
            raise CallError(f"{self.label} has no rotary positions, so its W_QK is the same at every offset; use 0")
        return self.facts.rotary

    def _joined(self, per_head: Float[Tensor, "head rows d_head"]) -> Float[Tensor, "group joined d_head"]:
        """Stack the heads of each group on top of each other."""
        return per_head.reshape(-1, self.group_size * per_head.shape[1], per_head.shape[2])


def _without_gain(norm: Norm) -> Norm:
    return replace(norm, gain=None, bias=None)
