"""The names that transformers gives to the tensors of a GGUF file."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..pickles.placeholders import DamagedError
from .header import StoredTensor

_OF_LAYER = re.compile(r"((?:enc\.|dec\.)?blk)\.(\d{1,6})\.([a-z0-9_]+)\.([a-z0-9_]+)")
_BESIDE_LAYERS = re.compile(r"([a-z0-9_]+)\.(weight|bias)")
_IN_ATTENTION = re.compile(r"((?:cross_)?attn_)(.+)")


@dataclass(frozen=True, slots=True)
class Source:
    """What stands for a tensor in the file.

    Attributes:
        stored: The tensor in the file.
        module: The name of its module in the file, such as attn_q; empty if it is not one of the names that are known.
        part: "weight", "bias", or what else stands behind the module.
        layer: The number of its layer.
    """

    stored: StoredTensor
    module: str = ""
    part: str = ""
    layer: int = 0


def renamed(tensors: Iterable[StoredTensor], names: Mapping[str, str]) -> dict[str, Source]:
    """Return the tensors by the names that transformers gives to them; others keep their own.

    Args:
        tensors: The tensors of the file.
        names: The names in transformers by those in the file, both without .weight and .bias, with {layer}.

    Raises:
        DamagedError: Two tensors have the same name in transformers.
    """
    tensors = tuple(tensors)
    stored = {tensor.name for tensor in tensors}
    sources: dict[str, Source] = {}
    for tensor in tensors:
        name, source = _renamed(tensor, names, stored)
        if name in sources:
            raise DamagedError(f"{tensor.name} and {sources[name].stored.name} are the same tensor")
        sources[name] = source
    return sources


def _renamed(tensor: StoredTensor, names: Mapping[str, str], stored: set[str]) -> tuple[str, Source]:
    beside = _BESIDE_LAYERS.fullmatch(tensor.name)
    if beside is not None and beside[1] in names:
        return f"{names[beside[1]]}.{beside[2]}", Source(tensor)
    match = _OF_LAYER.fullmatch(tensor.name)
    if match is None:
        return tensor.name, Source(tensor)
    blocks, layer, module, part = match.groups()
    base, other = names.get(f"{blocks}.{{layer}}.{module}"), _IN_ATTENTION.fullmatch(module)
    if base is None and other is not None:
        base = names.get(f"{blocks}.{{layer}}.{other[1]}*", "").replace("*", other[2])
    if not base:
        return tensor.name, Source(tensor)
    if module == "attn_output" and not {f"{blocks}.{layer}.attn_{of}.weight" for of in ("v", "qkv")} & stored:
        # Without values, it is the linear layer that DeciLM has in place of attention.
        base = names[f"{blocks}.{{layer}}.attn_*"].replace("*", "linear_attn")
    return f"{base.replace('{layer}', layer)}.{part}", Source(tensor, module, part, int(layer))
