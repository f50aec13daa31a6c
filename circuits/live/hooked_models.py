"""Models with TransformerLens' weight interface: HookedTransformer, TransformerBridge, and what is built like them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..architectures.layouts import demand_floating
from ..architectures.stated_facts import FACTS
from ..checkpoints.tensor_file import in_memory
from ..errors import CallError, QkovError
from ..reading.checkpoint import OpenCheckpoint
from ..weights.attention_weights import BIASES, AttentionFacts, AttentionWeights
from ..weights.layer_keys import layer_name
from ..weights.norms import Basis, Norm, is_centred
from .hooked_facts import facts_of, head_norms_of, norm_of

#: Where TransformerLens keeps blocks and their attention: stack, names of the list, names of the attention in a block.
_PLACES = (
    ("", ("blocks",), ("attn",)),
    ("encoder", ("encoder_blocks", "encoder"), ("attn", "self_attn")),
    ("decoder", ("decoder_blocks", "decoder"), ("attn", "self_attn")),
    ("decoder cross", ("decoder_blocks", "decoder"), ("cross_attn",)),
)
_WEIGHTS = ("W_Q", "W_K", "W_V", "W_O")


@dataclass(frozen=True, eq=False)
class _Place:
    """The attention of one layer, and the block around it."""

    stack: str
    layer: int
    block: Any
    attention: Any

    @property
    def key(self) -> tuple[str, int]:
        return self.stack, self.layer


def has_weight_interface(model: Any) -> bool:
    """Whether the model has a cfg, and blocks whose attention has W_Q, W_K, W_V and W_O."""
    return hasattr(model, "cfg") and bool(_places(model))


class OpenHookedModel:
    """A model with TransformerLens' weight interface, whose layers are read as those of a checkpoint.

    Attributes:
        recognised: how, in words.
        skipped: layers that the model inside a bridge does not describe.
        scalars: none.
    """

    def __init__(self, model: Any, wrapped: OpenCheckpoint | None = None, reason: str | None = None) -> None:
        """Find the layers.

        Args:
            model: with `cfg` and blocks.
            wrapped: the transformers model inside a bridge, which says what the interface does not.
            reason: why the transformers model inside is not read; None where there is none.
        """
        self._model = model
        self._wrapped = wrapped
        self._is_known = reason is None
        places = _places(model)
        self.recognised = f"by TransformerLens' weight interface of {type(model).__name__}"
        self.skipped: dict[str, str] = {}
        if wrapped is not None:
            self.recognised += f", which holds a model recognised {wrapped.recognised}"
            self.skipped = {
                layer_name(*place.key): "the model inside has no such layer of attention"
                for place in places
                if place.key not in wrapped.layer_keys
            }
            places = [place for place in places if place.key in wrapped.layer_keys]
        elif reason is not None:
            self.recognised += f"; what the weights do not say is not known: {reason}"
        self._places = {place.key: place for place in places}
        self.scalars: dict[str, float] = {}

    @property
    def layer_keys(self) -> list[tuple[str, int]]:
        """The stack and the number of every layer, in the order of reading."""
        return [key for key in (self._wrapped.layer_keys if self._wrapped else self._places) if key in self._places]

    def layers(self) -> Iterator[AttentionWeights]:
        """Yield the attention weights of one layer after the other, in the basis that they are in.

        Raises:
            QkovError: weights cannot be read, do not fit each other, or are in no basis.
        """
        try:
            for weights in (
                self._of_wrapped(self._wrapped) if self._wrapped else map(self._layer, self._places.values())
            ):
                yield replace(weights, stored_basis=self._basis(weights))
        except CallError as error:
            raise QkovError(f"{type(self._model).__name__}: {error}") from error

    def _of_wrapped(self, wrapped: OpenCheckpoint) -> Iterator[AttentionWeights]:
        """What the model inside a bridge says of its layers, with the weights of the interface.

        A bridge takes fused projections apart and trains the parts, so the weights of the model inside may be old.
        """
        for base in wrapped.layers():
            place = self._places.get((base.stack, base.layer))
            if place is not None:
                yield replace(base, **_tensors(place))

    def _layer(self, place: _Place) -> AttentionWeights:
        tensors = _tensors(place)
        if not self._is_known:
            facts = AttentionFacts(unknown=frozenset(FACTS))
            return AttentionWeights(place.layer, **tensors, facts=facts, stack=place.stack)
        cfg, d_head = self._model.cfg, tensors["W_Q"].shape[-1]
        query_norm, key_norm = head_norms_of(cfg, place.attention, d_head)
        return AttentionWeights(
            place.layer,
            **tensors,
            norm=norm_of(cfg, place.block, place.stack),
            query_norm=query_norm,
            key_norm=key_norm,
            facts=facts_of(cfg, place.attention, place.stack, place.layer, d_head),
            stack=place.stack,
        )

    def _basis(self, weights: AttentionWeights) -> Basis:
        """The basis that the weights are in, by what folding leaves behind: no gain, and means of zero."""
        norm = weights.norm
        written_centred = weights.W_O is not None and is_centred(weights.W_O, dim=-1)
        if norm is not None and _is_plain(norm) and self._reads_folded(weights, norm):
            return "folded_centred" if written_centred and norm.kind == "layer_norm" else "folded"
        if written_centred and "norm" not in weights.facts.unknown:
            raise QkovError(
                f"{weights.place} of the model has W_O centred and no norm folded, which is no basis; "
                f"load the model with fold_ln as well, or without processing its weights"
            )
        return "raw"

    def _reads_folded(self, weights: AttentionWeights, norm: Norm) -> bool:
        """Whether a norm without gain was folded, or never had one."""
        if norm.kind == "rms_norm":
            # Folding RMSNorm leaves no trace in the weights, but the model says so.
            cfg = self._model.cfg
            without_gain = str(getattr(cfg, "normalization_type", None)).endswith("Pre")
            converted = getattr(cfg, "original_architecture", None) is not None
            return bool(getattr(self._model, "_weights_processed", False)) or (without_gain and converted)
        read = [weight for weight in (weights.W_Q, weights.W_K, weights.W_V) if weight is not None]
        return all(is_centred(weight, dim=-2) for weight in read)


def _places(model: Any) -> list[_Place]:
    found = []
    for stack, lists, attentions in _PLACES:
        blocks = next((getattr(model, name) for name in lists if hasattr(model, name)), ())
        for layer, block in enumerate(blocks):
            attention = next((getattr(block, name) for name in attentions if hasattr(block, name)), None)
            if all(hasattr(attention, name) for name in _WEIGHTS):
                found.append(_Place(stack, layer, block, attention))
    return found


def _tensors(place: _Place) -> dict[str, Any]:
    return {name: _tensor(place, name) for name in (*_WEIGHTS, *BIASES)}


def _tensor(place: _Place, name: str) -> Tensor | None:
    """A weight of the interface; grouped heads as they are kept, not repeated."""
    kept = f"_{name}"
    try:
        with torch.no_grad():
            tensor = getattr(place.attention, kept if hasattr(place.attention, kept) else name, None)
    except (NotImplementedError, RuntimeError) as error:
        raise QkovError(f"{name} of layer {place.layer} cannot be read: {error}") from error
    if tensor is None:
        return None
    tensor = in_memory(tensor, f"{name} of layer {place.layer}")
    demand_floating(tensor, f"{name} of layer {place.layer}")
    return tensor


def _is_plain(norm: Norm) -> bool:
    """Whether the norm neither multiplies nor adds."""
    return (norm.gain is None or bool((norm.gain == 1).all())) and (norm.bias is None or bool((norm.bias == 0).all()))
