"""What a GGUF file states about attention that is not read, or does not state, with the facts that are unknown then."""

from collections.abc import Container
from typing import Any

from .architectures import Converted, LeftOpen
from .metadata import Metadata

#: Keys of the metadata, by the facts that they change where the architecture is read without them.
_CHANGES = {
    "attention.sliding_window": ("window",),
    "attention.scale": ("score_scale",),
    "attention.temperature_scale": ("score_scale",),
    "attention.temperature_length": ("score_scale",),
    "attn_logit_softcapping": ("soft_cap",),
    "attention.clamp_kqv": ("clip_qkv",),
    "attention.max_alibi_bias": ("positions", "rotary"),
    "rope.dimension_sections": ("rotary",),
    "rope.scaling.alpha": ("rotary",),
    "rope.scaling.yarn_ext_factor": ("rotary",),
    "rope.scaling.yarn_log_multiplier": ("rotary",),
}
_CAUSAL, _LOCAL_BASE, _ROTATES = "attention.causal", "rope.freq_base_swa", "rope.scaling.finetuned"


def doubts_about(
    metadata: Metadata, converted: Converted, tensors: Container[str]
) -> dict[str, tuple[tuple[str, ...], str]]:
    """Return what the file has or lacks, each with the facts that are unknown therefore, and the reason.

    Args:
        metadata: The metadata.
        converted: How the architecture is stored.
        tensors: The names of the tensors in the file.
    """
    doubts: dict[str, tuple[tuple[str, ...], str]] = {}
    for key, facts in _CHANGES.items():
        if key not in converted.keys and not _is_off(metadata.value(key)):
            doubts[_words(metadata, key)] = facts, "in the metadata, which this architecture is read without"
    causal = metadata.value(_CAUSAL)
    if causal is not None and bool(causal) != converted.is_causal:
        doubts[_words(metadata, _CAUSAL)] = ("causal",), "in the metadata, which this architecture is read without"
    local = metadata.value(_LOCAL_BASE)
    if not converted.has_local_base and local not in (None, metadata.value("rope.freq_base")):
        doubts[_words(metadata, _LOCAL_BASE)] = ("rotary",), "in the metadata, which this architecture is read without"
    if converted.score_scale is not None and metadata.value(_ROTATES) is False:
        doubts[_words(metadata, _ROTATES)] = ("positions", "rotary"), "in the metadata, so nothing may rotate"
    for open_fact in converted.leaves_open:
        what = _left_open(open_fact, metadata, tensors)
        if what is not None:
            facts = ("positions", "rotary") if open_fact.fact == "positions" else (open_fact.fact,)
            doubts[what] = facts, "llama.cpp's converter does not store it for such a model"
    return doubts


def _left_open(fact: LeftOpen, metadata: Metadata, tensors: Container[str]) -> str | None:
    """Return what the file has or lacks that leaves a fact open, or None."""
    if fact.key is not None and metadata.value(fact.key) is None:
        return f"no {metadata.architecture}.{fact.key} in the metadata"
    if fact.tensor is not None and fact.tensor in tensors:
        return fact.tensor
    if fact.name is not None and metadata.is_named(fact.name):
        return None if fact.but_not is not None and metadata.is_named(fact.but_not) else f"the name {fact.name!r}"
    return None


def _words(metadata: Metadata, key: str) -> str:
    return f"{metadata.architecture}.{key} = {metadata.value(key)!r:.80}"


def _is_off(value: Any) -> bool:
    values = value if isinstance(value, list) else [value]
    return all(each in (None, False, 0) for each in values)
