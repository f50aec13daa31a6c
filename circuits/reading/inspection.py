"""State what a source holds, how it was recognised, and what would be measured."""

from dataclasses import fields
from typing import Any

from ..weights.attention_weights import BIASES, NAMES, AttentionFacts, AttentionWeights
from ..weights.norms import HeadNorm, Norm
from ..weights.source import AttentionSource


def inspect_checkpoint(source: AttentionSource) -> dict[str, Any]:
    """Return the facts of a checkpoint or of a model in memory, in a form that JSON can hold.

    Every attention tensor is read once.

    Args:
        source: What `open_checkpoint` or `open_model` returned.

    Returns:
        The address, how it was recognised, the number of tensors, where the config was found, the scalars, what is
        skipped, what else is in the file, which facts are in doubt, and for each stack its tensors, their layouts and
        the facts of its layers.

    Raises:
        QkovError: A tensor does not fit its layout.
    """
    layers: dict[str, list[dict[str, Any]]] = {}
    tensor_count = 0
    for weights in source.layers():
        layers.setdefault(weights.stack, []).append(_layer(weights))
        tensor_count += sum(getattr(weights, name) is not None for name in (*NAMES, *BIASES))
    stacks = []
    for stack, facts in layers.items():
        tensors = source.stack_tensors(stack)
        stacks.append({"stack": stack, "tensors": tensors.names, "layouts": tensors.layouts, "layers": facts})
    return {
        "address": source.address,
        "recognised": source.recognised,
        "tensors": tensor_count if source.tensor_count is None else source.tensor_count,
        "config": source.config_origin,
        "scalars": source.scalars,
        "skipped": source.skipped,
        "not_read": dict(source.not_read),
        "doubts": dict(source.doubts),
        "stacks": stacks,
    }


def _layer(weights: AttentionWeights) -> dict[str, Any]:
    return {
        "layer": weights.layer,
        "heads": weights.heads,
        "key_value_heads": weights.heads // weights.group_size,
        "circuits": {
            name: {
                "rows": circuit.shape[-2],
                "columns": circuit.shape[-1],
                "rank_bound": circuit.rank_bound,
                "factorized": circuit.right is not None,
                "dtype": str(circuit.left.dtype).removeprefix("torch."),
            }
            for name, circuit in weights.circuits().items()
        },
        "biases": [name for name in BIASES if getattr(weights, name) is not None],
        "norm": _norm(weights.norm),
        "query_key_norm": _norm(weights.query_norm or weights.key_norm),
        "stored_basis": weights.stored_basis,
        "facts": _facts(weights.facts),
    }


def _norm(norm: Norm | HeadNorm | None) -> dict[str, Any] | None:
    if norm is None:
        return None
    facts = {"kind": norm.kind, "gain": norm.gain is not None, "bias": norm.bias is not None, "eps": norm.eps}
    return facts | ({"over": norm.over} if isinstance(norm, HeadNorm) else {})


def _facts(facts: AttentionFacts) -> dict[str, Any]:
    table = {field.name: getattr(facts, field.name) for field in fields(facts)}
    rotary = facts.rotary
    if rotary is not None:
        table["rotary"] = {
            "dims": rotary.dims,
            "pairing": rotary.pairing,
            "frequencies": None if rotary.frequencies is None else list(rotary.frequencies),
            "amplitude": rotary.amplitude,
        }
    return table | {"unknown": sorted(facts.unknown)}
