"""What is in a checkpoint, how it was recognised, and what would be measured of it."""

from dataclasses import fields
from typing import Any

from ..weights.attention_weights import AttentionFacts, AttentionWeights
from ..weights.norms import HeadNorm, Norm
from .checkpoint import OpenCheckpoint


def inspect_checkpoint(opened: OpenCheckpoint) -> dict[str, Any]:
    """Return the facts of a checkpoint as JSON can hold them; every layer's attention tensors are read once.

    Raises:
        QkovError: a tensor does not fit its layout.
    """
    layers: dict[str, list[dict[str, Any]]] = {}
    for weights in opened.layers():
        layers.setdefault(weights.stack, []).append(_layer(weights))
    return {
        "address": opened.file.address,
        "recognised": opened.recognised,
        "tensors": len(opened.file.shapes),
        "config": opened.file.config_origin,
        "scalars": opened.scalars,
        "skipped": opened.skipped,
        "stacks": [
            {
                "stack": mapping.stack,
                "tensors": opened.tensors(mapping),
                "layouts": mapping.layouts,
                "layers": layers[mapping.stack],
            }
            for mapping in opened.stacks
        ],
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
        "biases": [name for name in ("b_Q", "b_K", "b_V", "b_O") if getattr(weights, name) is not None],
        "norm": _norm(weights.norm),
        "query_key_norm": _norm(weights.query_norm or weights.key_norm),
        "stored_basis": weights.stored_basis,
        "facts": _facts(weights.facts),
    }


def _norm(norm: Norm | HeadNorm | None) -> dict[str, Any] | None:
    if norm is None:
        return None
    told = {"kind": norm.kind, "gain": norm.gain is not None, "bias": norm.bias is not None, "eps": norm.eps}
    return told | ({"over": norm.over} if isinstance(norm, HeadNorm) else {})


def _facts(facts: AttentionFacts) -> dict[str, Any]:
    told = {each.name: getattr(facts, each.name) for each in fields(facts)}
    rotary = facts.rotary
    if rotary is not None:
        told["rotary"] = {
            "dims": rotary.dims,
            "pairing": rotary.pairing,
            "frequencies": None if rotary.frequencies is None else list(rotary.frequencies),
            "amplitude": rotary.amplitude,
        }
    return told | {"unknown": sorted(facts.unknown)}
