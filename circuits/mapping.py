"""A mapping: which tensors of a file are W_Q, W_K, W_V and W_O, and how their axes lie."""

import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import einops
from torch import Tensor

from .errors import CallError, QkovError

#: What each tensor is brought to. QKV is one tensor that holds the three, along an axis named qkv.
TARGETS = {
    "Q": "head d_model d_head",
    "K": "head d_model d_head",
    "V": "head d_model d_head",
    "O": "head d_head d_model",
    "QKV": "qkv head d_model d_head",
    "QK": "head key query",
    "OV": "head write read",
}

_SCORES_IN = ("Q", "K", "V")
_COLLAPSED = {role: TARGETS[role] for role in ("QK", "OV")}
LAYOUTS: dict[str, dict[str, str]] = {
    "linear": {**dict.fromkeys(_SCORES_IN, "(head d_head) d_model"), "O": "d_model (head d_head)", **_COLLAPSED},
    "conv1d": {**dict.fromkeys(_SCORES_IN, "d_model (head d_head)"), "O": "(head d_head) d_model", **_COLLAPSED},
    "transformer_lens": {role: axes for role, axes in TARGETS.items() if role != "QKV"},
}
_KEYS = {"prefix", "heads", "layout", "rotary", "tensors", "scalars"}


@dataclass(frozen=True)
class Mapping:
    """Names and layouts of the attention tensors of a checkpoint.

    Attributes:
        tensors: for each of Q, K, V, O (or QKV, or the collapsed QK, OV) the tensor's name, with {layer} where the
            layer's number stands.
        layouts: for each of them its axes in einops' notation, such as "(head d_head) d_model" for a torch.nn.Linear.
        heads: number of heads; needed where a layout joins the heads with another axis.
        prefix: of every name; the keys of nested dictionaries are joined with dots.
        rotary: whether the model uses rotary positions.
        scalars: figures to carry along, such as {"loss": "val_loss"}.
        origin: where the mapping comes from, for messages.
    """

    tensors: dict[str, str]
    layouts: dict[str, str]
    heads: int | None = None
    prefix: str = ""
    rotary: bool = False
    scalars: dict[str, str] = field(default_factory=dict)
    origin: str = "the mapping"

    def layers(self, names: set[str]) -> dict[int, dict[str, str]]:
        """Return for every layer, by its number, the name of each of its tensors.

        A tensor whose name has no {layer} serves all layers, where those of others have one.

        Raises:
            QkovError: none of the mapping's tensors is there, or a layer has only some of them.
        """
        found: dict[int, dict[str, str]] = {}
        shared: dict[str, str] = {}
        for role, template in self.tensors.items():
            pattern = re.compile(re.escape(self.full_name(template)).replace(r"\{layer\}", r"(\d+)"))
            for name in sorted(names):
                match = pattern.fullmatch(name)
                if match and match.groups():
                    found.setdefault(int(match[1]), {})[role] = name
                elif match:
                    shared[role] = name
        if shared and not found:
            found[0] = {}
        if not found:
            wanted = ", ".join(self.full_name(template) for template in self.tensors.values())
            raise QkovError(f"{self.origin} names no tensor of the file: it asks for {wanted}; {seen(names)}")
        for layer, roles in sorted(found.items()):
            roles |= shared
            missing = [self.full_name(name, layer) for role, name in self.tensors.items() if role not in roles]
            if missing:
                raise QkovError(f"layer {layer} lacks {', '.join(missing)}, which {self.origin} names; {seen(names)}")
        return found

    def full_name(self, template: str, layer: int | None = None) -> str:
        """Return a tensor's name in the file, with the prefix and, where given, the layer's number."""
        name = f"{self.prefix}.{template}" if self.prefix else template
        return name if layer is None else name.replace("{layer}", str(layer))

    def arrange(self, role: str, tensor: Tensor, name: str) -> dict[str, Tensor]:
        """Return the tensor brought to TransformerLens' axes; QKV is split into its three.

        Raises:
            QkovError: the tensor is not of floating type, is empty, or does not fit its layout.
        """
        if not tensor.is_floating_point():
            raise QkovError(
                f"{name} holds {tensor.dtype} numbers; expected floating ones (quantised weights are not read)"
            )
        if 0 in tensor.shape:
            raise QkovError(f"{name} has shape {tuple(tensor.shape)}, which holds nothing to measure")
        layout, target = self.layouts[role], TARGETS[role]
        sizes = {"qkv": 3} if role == "QKV" else {}
        if "head" not in _axes(layout):
            target = target.replace("head", "1", 1)
        elif self.heads is not None:
            sizes["head"] = self.heads
        try:
            arranged = einops.rearrange(tensor, f"{layout} -> {target}", **sizes)
        except einops.EinopsError as error:
            heads = "" if self.heads is None else f" with {self.heads} heads"
            raise QkovError(
                f"{name} has shape {tuple(tensor.shape)}, which does not fit the layout '{layout}'{heads} "
                f"that {self.origin} gives for {role}"
            ) from error
        if role == "QKV":
            return dict(zip(_SCORES_IN, arranged.unbind(0), strict=True))
        return {role: arranged}


def read_mapping(path: Path) -> Mapping:
    """Read a mapping from a TOML file.

    Raises:
        CallError: the file is missing, is no TOML, or says something that a mapping cannot say.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CallError(f"the mapping {path} does not exist") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise CallError(f"the mapping {path} cannot be read as TOML: {error}") from error
    return parse_mapping(table, f"the mapping {path}")


def parse_mapping(table: dict[str, Any], origin: str) -> Mapping:
    """Make a mapping of a table as TOML gives it.

    Raises:
        CallError: a key is unknown, a value has the wrong type, or a layout lacks an axis; the message names it.
    """
    unknown = sorted(set(table) - _KEYS)
    if unknown:
        raise CallError(f"{origin} has the unknown key {unknown[0]!r}; known are {', '.join(sorted(_KEYS))}")
    tensors = _strings(table.get("tensors", {}), f"[tensors] of {origin}")
    unknown = sorted(set(tensors) - set(TARGETS))
    if unknown:
        raise CallError(f"[tensors] of {origin} has {unknown[0]!r}; known are {', '.join(TARGETS)}")
    if not tensors:
        raise CallError(f"{origin} names no tensor; it needs a table [tensors] with Q, K, V and O (or some of them)")
    if "QKV" in tensors and set(tensors) & set(_SCORES_IN):
        raise CallError(f"[tensors] of {origin} has both QKV and one of Q, K, V; give one or the other")
    parts = {role for given in tensors for role in (_SCORES_IN if given == "QKV" else (given,))}
    for collapsed, factors in (("QK", {"Q", "K"}), ("OV", {"V", "O"})):
        if collapsed in parts and parts & factors:
            raise CallError(f"[tensors] of {origin} has both {collapsed} and its factors; give one or the other")
    if not parts & {"QK", "OV"} and not {"Q", "K"} <= parts and not {"V", "O"} <= parts:
        raise CallError(
            f"[tensors] of {origin} has {', '.join(tensors)}, which make up no circuit; W_QK takes Q and K (or QK), "
            f"W_OV takes V and O (or OV)"
        )
    for name, kind in (("heads", int), ("prefix", str), ("rotary", bool)):
        if name in table and type(table[name]) is not kind:
            raise CallError(f"{name} of {origin} should be of type {kind.__name__}, got {table[name]!r}")
    heads = table.get("heads")
    if heads is not None and heads < 1:
        raise CallError(f"heads of {origin} should be at least 1, got {heads}")
    return Mapping(
        tensors=tensors,
        layouts=_layouts(table.get("layout"), tensors, heads, origin),
        heads=heads,
        prefix=table.get("prefix", ""),
        rotary=table.get("rotary", False),
        scalars=_strings(table.get("scalars", {}), f"[scalars] of {origin}"),
        origin=origin,
    )


def seen(names: set[str]) -> str:
    """Return the names that a file holds, in words, a long list cut short."""
    shown = sorted(names)[:12]
    rest = len(names) - len(shown)
    return f"the file holds {', '.join(shown) or 'no tensor'}" + (f" and {rest} more" if rest else "")


def _layouts(layout: Any, tensors: dict[str, str], heads: int | None, origin: str) -> dict[str, str]:
    known = f"one of {', '.join(LAYOUTS)}, or a table with the axes of each tensor, such as Q = '(head d_head) d_model'"
    if isinstance(layout, str):
        if layout not in LAYOUTS:
            raise CallError(f"layout of {origin} is {layout!r}; expected {known}")
        layouts = LAYOUTS[layout]
    else:
        layouts = _strings(layout if layout is not None else {}, f"[layout] of {origin}")
    for role in tensors:
        if role not in layouts:
            raise CallError(f"{origin} gives no layout for {role}; layout should be {known}")
        axes, wanted = _axes(layouts[role]), TARGETS[role].split()
        if set(axes) not in (set(wanted), set(wanted) - {"head"}) or len(axes) != len(set(axes)):
            named = ", ".join(wanted)
            raise CallError(f"the layout of {role} in {origin} is {layouts[role]!r}; expected the axes {named}")
        if heads is None and re.search(r"\([^)]*\bhead\b[^)]*\)", layouts[role]):
            raise CallError(f"{origin} gives no number of heads, and the layout of {role} joins them: add heads = ...")
        if "head" not in axes and heads not in (None, 1):
            raise CallError(f"the layout of {role} in {origin} has no axis head, and heads is {heads}")
    return {role: layouts[role] for role in tensors}


def _strings(table: Any, where: str) -> dict[str, str]:
    if not isinstance(table, dict) or not all(isinstance(value, str) for value in table.values()):
        raise CallError(f"{where} should be a table of strings, got {table!r}")
    return dict(table)


def _axes(layout: str) -> list[str]:
    return re.findall(r"\w+", layout)
