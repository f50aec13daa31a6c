"""Mappings of a model's torch.nn.MultiheadAttention modules, which state what the names in a file do not."""

import re
from collections.abc import Mapping as Dictionary
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..architectures.mapping import Mapping, parse_mapping
from ..architectures.named_layouts import SCORES_IN
from ..architectures.stated_facts import UNKNOWN
from ..errors import QkovError
from .adapters import Entry, without_base_layer


@dataclass(frozen=True)
class FoundModules:
    """One mapping for each kind of attention in a layer, and the biases that torch stores joined.

    Attributes:
        mappings: The mapping of each kind of attention.
        joined: For each bias that is part of another tensor, the name of that tensor, and the third of it that the bias
            is.
    """

    mappings: tuple[Mapping, ...]
    joined: dict[str, tuple[str, int]]

    def apart(self, tensors: Dictionary[str, Entry]) -> dict[str, Entry]:
        """Return the tensors of the model, together with the parts of joined biases under names of their own."""
        wholes = {name: (tensors[whole], third) for name, (whole, third) in self.joined.items()}
        parts = {name: whole.chunk(3)[third] for name, (whole, third) in wholes.items() if isinstance(whole, Tensor)}
        return {**tensors, **parts}


def has_attention_modules(model: nn.Module) -> bool:
    """Return whether the model contains a torch.nn.MultiheadAttention."""
    return any(isinstance(module, nn.MultiheadAttention) for module in model.modules())


def mappings_of(model: nn.Module) -> FoundModules:
    """Return the mappings of the model's attention modules. They need neither a number of heads nor a config.

    The norm in front of attention is known in a torch.nn.TransformerEncoderLayer or TransformerDecoderLayer, and
    unknown elsewhere.

    Raises:
        QkovError: Modules whose names differ only in the number of the layer have different heads, biases or norms.
    """
    tables: dict[str, dict[str, Any]] = {}
    joined: dict[str, tuple[str, int]] = {}
    for path, module in model.named_modules():
        if not isinstance(module, nn.MultiheadAttention):
            continue
        path = without_base_layer(model, path)
        parent_path, _, name = path.rpartition(".")
        template = _numbered(path)
        facts, norm_tensors = _norm(model.get_submodule(parent_path), name, _numbered(parent_path))
        table = {"tensors": _tensors(module, template) | norm_tensors, "layout": "linear", "heads": module.num_heads}
        # A mask is given only when the module is called.
        table |= {"causal": UNKNOWN, "positions": UNKNOWN} | facts
        if tables.setdefault(template, table) != table:
            raise QkovError(
                f"the attention modules {template} differ from layer to layer in heads, biases or norm; "
                f"open the parts of the model that are alike separately"
            )
        if module.in_proj_bias is not None and module.in_proj_weight is None:
            whole = _join(path, "in_proj_bias")
            joined |= {f"{whole}.{part}": (whole, third) for third, part in enumerate(SCORES_IN)}
    stacks = {template: {} if len(tables) == 1 else {"stack": template.replace(".{layer}", "")} for template in tables}
    origin = "its torch.nn.MultiheadAttention modules"
    return FoundModules(
        tuple(parse_mapping(table | stacks[template], origin) for template, table in tables.items()), joined
    )


def _numbered(path: str) -> str:
    """Return the path with {layer} in place of its first number."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "{layer}", path, count=1)


def _tensors(module: nn.MultiheadAttention, template: str) -> dict[str, str]:
    tensors = {"O": _join(template, "out_proj.weight")}
    if module.out_proj.bias is not None:
        tensors["b_O"] = _join(template, "out_proj.bias")
    if module.in_proj_weight is not None:
        tensors["QKV"] = _join(template, "in_proj_weight")
        return tensors if module.in_proj_bias is None else tensors | {"b_QKV": _join(template, "in_proj_bias")}
    for part in SCORES_IN:
        tensors[part] = _join(template, f"{part.lower()}_proj_weight")
        if module.in_proj_bias is not None:
            tensors[f"b_{part}"] = _join(template, f"in_proj_bias.{part}")
    return tensors


def _norm(parent: nn.Module, name: str, parent_path: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what the layer around the module states about it, and the names of its norm's tensors."""
    if not isinstance(parent, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
        return {"norm": UNKNOWN}, {}
    cross = {"cross": True} if name == "multihead_attn" else {}
    if not parent.norm_first:
        return cross, {}
    norm_name = "norm2" if cross else "norm1"
    norm = parent.get_submodule(norm_name)
    if not isinstance(norm, nn.LayerNorm):
        return cross | {"norm": UNKNOWN}, {}
    path = _join(parent_path, norm_name)
    named = {"norm_gain": ("weight", norm.weight), "norm_bias": ("bias", norm.bias)}
    tensors = {role: f"{path}.{name}" for role, (name, tensor) in named.items() if tensor is not None}
    return cross | {"norm": {"kind": "layer_norm", "eps": norm.eps}}, tensors


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
