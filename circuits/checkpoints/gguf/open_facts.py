"""The facts about attention that a GGUF file leaves open: it states what is not read, or does not state them."""

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
_READ_WITHOUT = "in the metadata, which this architecture is read without"
_CAUSAL, _LOCAL_BASE, _ROTATES = "attention.causal", "rope.freq_base_swa", "rope.scaling.finetuned"


def open_facts(
    metadata: Metadata, converted: Converted, tensors: Container[str]
) -> dict[str, tuple[tuple[str, ...], str]]:
    """Return the facts that the file leaves open, and the reason, by what it has or lacks.

    Args:
        metadata: The metadata.
        converted: How the architecture is stored.
        tensors: The names of the tensors in the file.
    """
    found: dict[str, tuple[tuple[str, ...], str]] = {}
    for key, facts in _CHANGES.items():
        if key not in converted.keys and not _is_off(metadata.value(key)):
            found[_words(metadata, key)] = facts, _READ_WITHOUT
    causal = metadata.value(_CAUSAL)
    if causal is not None and bool(causal) != converted.is_causal:
        found[_words(metadata, _CAUSAL)] = ("causal",), _READ_WITHOUT
    local = metadata.value(_LOCAL_BASE)
    if not converted.has_local_base and local not in (None, metadata.value("rope.freq_base")):
        found[_words(metadata, _LOCAL_BASE)] = ("rotary",), _READ_WITHOUT
    if converted.score_scale is not None and metadata.value(_ROTATES) is False:
        found[_words(metadata, _ROTATES)] = ("positions", "rotary"), "in the metadata, so nothing may rotate"
    for left_open in converted.leaves_open:
        what = _what_leaves_open(left_open, metadata, tensors)
        if what is not None:
            found[what] = left_open.facts, left_open.reason
    return found


def _what_leaves_open(left_open: LeftOpen, metadata: Metadata, tensors: Container[str]) -> str | None:
    """Return what the file has or lacks that leaves facts open, or None."""
    key, tensor, name, but_not = left_open.key, left_open.tensor, left_open.name, left_open.but_not
    if key is not None and metadata.value(key) is None:
        return f"no {metadata.architecture}.{key} in the metadata"
    if tensor is not None and tensor in tensors:
        return tensor
    if name is not None and metadata.is_named(name) and not (but_not is not None and metadata.is_named(but_not)):
        return f"the name {name!r} in the metadata"
    return None


def _words(metadata: Metadata, key: str) -> str:
    return f"{metadata.architecture}.{key} = {metadata.value(key)!r:.80}"


def _is_off(value: Any) -> bool:
    values = value if isinstance(value, list) else [value]
    return all(each in (None, False, 0) for each in values)
