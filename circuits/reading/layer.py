"""Read the attention weights of one layer from a file whose tensors a mapping names."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..architectures.head_counts import demand_counts
from ..architectures.layouts import arrange_layer, groups
from ..architectures.mapping import Mapping, Names
from ..checkpoints.quantised import read_weights
from ..checkpoints.tensor_file import TensorFile
from ..errors import CallError
from ..weights.attention_weights import AttentionWeights
from ..weights.norms import Basis, Norm, is_centred
from ..weights.rotary import Rotary


def read_layer(file: TensorFile, mapping: Mapping, layer: int, names: Names) -> AttentionWeights:
    """Return the weights of one layer, with its norms and facts.

    Args:
        file: The file that holds the tensors.
        mapping: The mapping of the stack to which the layer belongs.
        layer: Number of the layer.
        names: Names of the layer's tensors by role.

    Raises:
        CallError: Tensors do not agree with each other.
        QkovError: A tensor cannot be read, or does not fit its layout.
    """
    tensors = _read(file, mapping, names)
    shapes = {role: tuple(tensor.shape) for role, tensor in tensors.items()}
    counts = demand_counts(shapes, mapping.layouts, names, mapping.heads.of_layer(layer))
    weights: dict[str, Any] = arrange_layer(tensors, mapping.layouts, counts, names, mapping.origin)
    d_head = weights["W_Q"].shape[-1] if "W_Q" in weights else None
    norms: dict[str, Any] = {
        f"{side}_norm": mapping.facts.head_norm(layer, side, tensors, d_head)
        for side in ("query", "key")
        if f"{side}_norm_gain" in tensors or f"{side}_norm_gain" not in mapping.tensors
    }
    facts = mapping.facts.of_layer(layer, d_head)
    if "rotary_sin" in tensors and "rotary_cos" in tensors:
        rotary = Rotary.of_tables(tensors["rotary_sin"], tensors["rotary_cos"])
        facts = replace(facts, rotary=rotary, positions="rotary")
    norm = mapping.facts.norm(layer, tensors)
    return _in_stored_basis(AttentionWeights(layer, **weights, **norms, norm=norm, facts=facts, stack=mapping.stack))


def _in_stored_basis(weights: AttentionWeights) -> AttentionWeights:
    """Return the weights with the basis that they show, where the norm in front of attention is unknown.

    Folding LayerNorm leaves W_Q, W_K and W_V whose mean over d_model is zero. Training does not do that.
    """
    read, written = (weights.W_Q, weights.W_K, weights.W_V), weights.W_O
    if "norm" not in weights.facts.unknown or not all(W is not None and _is_centred(W) for W in read):
        return weights
    facts = replace(weights.facts, unknown=weights.facts.unknown - {"norm"})
    basis: Basis = "folded_centred" if written is not None and is_centred(written, dim=-1) else "folded"
    return replace(weights, norm=Norm("layer_norm"), facts=facts, stored_basis=basis)


def _is_centred(W: Tensor) -> bool:
    """Return whether the mean over d_model is zero in every head; most weights already fail at the first head."""
    return is_centred(W[:1], dim=-2) and is_centred(W, dim=-2)


def _read(file: TensorFile, mapping: Mapping, names: Names) -> dict[str, Tensor]:
    """Return the tensors of a layer by role; heads that have tensors of their own are stacked."""
    read = read_weights(file, [name for of_role in names.values() for name in of_role])
    return {
        role: _stacked([read[name] for name in of_role], of_role, mapping.layouts.get(role))
        if "{head}" in mapping.tensors[role]
        else read[of_role[0]]
        for role, of_role in names.items()
    }


def _stacked(heads: list[Tensor], names: tuple[str, ...], layout: str | None) -> Tensor:
    """Return the tensors of all heads as one, with the axis head in front."""
    first = tuple(heads[0].shape)
    for head, name in zip(heads, names, strict=True):
        if tuple(head.shape) != first:
            raise CallError(
                f"{names[0]} has shape {first} and {name} has shape {tuple(head.shape)}; expected heads of one shape"
            )
    if layout is not None and len(groups(layout)) != 1 + len(first):
        of_one = layout.removeprefix("head ")
        raise CallError(f"{names[0]} has shape {first}, which does not fit the layout '{of_one}' of one head")
    return torch.stack(heads)
