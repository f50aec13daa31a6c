"""Models with TransformerLens' weight interface: HookedTransformer, TransformerBridge, and models built like them."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..architectures.layouts import demand_floating
from ..architectures.named_layouts import LAYOUTS
from ..architectures.schema import FACTS
from ..checkpoints.tensor_file import in_memory
from ..errors import CallError, QkovError
from ..reading.checkpoint import OpenCheckpoint
from ..weights.attention_weights import BIASES, AttentionFacts, AttentionWeights
from ..weights.layer_keys import layer_name
from ..weights.norms import Basis, Norm, is_centred
from ..weights.source import AttentionSource, StackTensors
from .hooked_blocks import HookedBlock, demand_known_interface, hooked_blocks
from .hooked_facts import facts_of, head_norms_of, norm_of

_WEIGHTS = ("W_Q", "W_K", "W_V", "W_O")


def has_weight_interface(model: Any) -> bool:
    """Return whether the model has a cfg, and blocks whose attention has W_Q, W_K, W_V and W_O."""
    return hasattr(model, "cfg") and bool(_blocks_with_weights(model))


class OpenHookedModel(AttentionSource):
    """A model with TransformerLens' weight interface, whose layers are read as those of a checkpoint are.

    Attributes:
        recognised: How the model is read, in words.
        skipped: Layers that the model inside a bridge does not describe.
    """

    def __init__(self, model: Any, wrapped: OpenCheckpoint | None = None, reason: str | None = None) -> None:
        """Find the layers.

        Args:
            model: A model with `cfg` and blocks.
            wrapped: The transformers model inside a bridge, which states what the interface does not.
            reason: Why the transformers model inside is not read; None if there is no such model.

        Raises:
            CallError: The model comes from a TransformerLens before 3.9.
        """
        demand_known_interface(model)
        self._model = model
        self._wrapped = wrapped
        self._is_known = reason is None
        self.address = f"the model {type(model).__name__}"
        blocks = _blocks_with_weights(model)
        self.recognised = f"by TransformerLens' weight interface of {type(model).__name__}"
        self.skipped = {}
        if wrapped is not None:
            self.recognised += f", which holds a model recognised {wrapped.recognised}"
            self.skipped = {
                layer_name(*block.key): "the model inside has no such attention layer"
                for block in blocks
                if block.key not in wrapped.layer_keys
            }
            blocks = [block for block in blocks if block.key in wrapped.layer_keys]
        elif reason is not None:
            self.recognised += f"; facts that the weights do not show are unknown: {reason}"
        self._blocks = {block.key: block for block in blocks}

    @property
    def layer_keys(self) -> list[tuple[str, int]]:
        """The stack and the number of every layer, in the order of reading."""
        return [key for key in (self._wrapped.layer_keys if self._wrapped else self._blocks) if key in self._blocks]

    @property
    def scalars(self) -> dict[str, float]:
        """An empty dictionary: a model carries no scalars."""
        return {}

    def stack_tensors(self, stack: str) -> StackTensors:
        """Return the names by which the interface gives the weights and biases of a stack, and their axes."""
        blocks = [block for block in self._blocks.values() if block.stack == stack]
        names: dict[str, str] = {}
        for block in blocks:
            for name in (*_WEIGHTS, *BIASES):
                if _stored_weight(block, name) is not None:
                    names[name.removeprefix("W_")] = f"{block.name}.{name}"
        return StackTensors(names, {role: LAYOUTS["transformer_lens"][role] for role in "QKVO"})

    def layers(self) -> Iterator[AttentionWeights]:
        """Yield the attention weights of one layer after another, in the basis in which they are stored.

        Raises:
            QkovError: Weights cannot be read, do not fit each other, or are in no basis.
        """
        try:
            for weights in (
                self._of_wrapped(self._wrapped) if self._wrapped else map(self._layer, self._blocks.values())
            ):
                yield replace(weights, stored_basis=self._basis(weights))
        except CallError as error:
            raise QkovError(f"{type(self._model).__name__}: {error}") from error

    def _of_wrapped(self, wrapped: OpenCheckpoint) -> Iterator[AttentionWeights]:
        """Yield the layers of the model inside a bridge, with the weights of the interface.

        A bridge splits fused projections and trains the parts, so the weights of the model inside may be outdated.
        """
        for layer in wrapped.layers():
            block = self._blocks.get((layer.stack, layer.layer))
            if block is not None:
                yield replace(layer, **_tensors(block))

    def _layer(self, block: HookedBlock) -> AttentionWeights:
        tensors = _tensors(block)
        if not self._is_known:
            facts = AttentionFacts(unknown=frozenset(FACTS))
            return AttentionWeights(block.layer, **tensors, facts=facts, stack=block.stack)
        cfg, d_head = self._model.cfg, tensors["W_Q"].shape[-1]
        query_norm, key_norm = head_norms_of(cfg, block.attention, d_head)
        return AttentionWeights(
            block.layer,
            **tensors,
            norm=norm_of(cfg, block.block, block.stack),
            query_norm=query_norm,
            key_norm=key_norm,
            facts=facts_of(cfg, block.attention, block.stack, block.layer, d_head),
            stack=block.stack,
        )

    def _basis(self, weights: AttentionWeights) -> Basis:
        """Return the basis of the weights. Folding leaves norms without a gain, and means of zero."""
        norm = weights.norm
        is_written_centred = weights.W_O is not None and is_centred(weights.W_O, dim=-1)
        if norm is not None and _is_plain(norm) and self._reads_folded(weights, norm):
            return "folded_centred" if is_written_centred and norm.kind == "layer_norm" else "folded"
        if is_written_centred and "norm" not in weights.facts.unknown:
            raise QkovError(
                f"{weights.label} of the model has W_O centred and no norm folded, which is not a known basis; "
                f"load the model with fold_ln as well, or without processing its weights"
            )
        return "raw"

    def _reads_folded(self, weights: AttentionWeights, norm: Norm) -> bool:
        """Return whether a norm without gain was folded, as opposed to one that never had a gain."""
        if norm.kind == "rms_norm":
            # Folding RMSNorm leaves no trace in the weights, but the model records it.
            cfg = self._model.cfg
            without_gain = str(getattr(cfg, "normalization_type", None)).endswith("Pre")
            converted = getattr(cfg, "original_architecture", None) is not None
            return bool(getattr(self._model, "_weights_processed", False)) or (without_gain and converted)
        read = [weight for weight in (weights.W_Q, weights.W_K, weights.W_V) if weight is not None]
        return all(is_centred(weight, dim=-2) for weight in read)


def _blocks_with_weights(model: Any) -> list[HookedBlock]:
    return [block for block in hooked_blocks(model) if all(hasattr(block.attention, name) for name in _WEIGHTS)]


def _tensors(block: HookedBlock) -> dict[str, Any]:
    return {name: _tensor(block, name) for name in (*_WEIGHTS, *BIASES)}


def _tensor(block: HookedBlock, name: str) -> Tensor | None:
    tensor = _stored_weight(block, name)
    if tensor is None:
        return None
    tensor = in_memory(tensor, block.tensor_name(name))
    demand_floating(tensor, block.tensor_name(name))
    return tensor


def _stored_weight(block: HookedBlock, name: str) -> Tensor | None:
    """Return a weight of the interface; weights of grouped heads as they are stored, without repetition."""
    stored = f"_{name}"
    try:
        with torch.no_grad():
            return getattr(block.attention, stored if hasattr(block.attention, stored) else name, None)
    except (NotImplementedError, RuntimeError) as error:
        raise QkovError(f"{block.tensor_name(name)} cannot be read: {error}") from error


def _is_plain(norm: Norm) -> bool:
    """Return whether the norm neither multiplies nor adds."""
    return (norm.gain is None or bool((norm.gain == 1).all())) and (norm.bias is None or bool((norm.bias == 0).all()))
