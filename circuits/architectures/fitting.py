"""Which families' tensor names and shapes fit a checkpoint."""

from typing import Any

import torch

from ..checkpoints.tensor_file import TensorFile
from ..errors import CallError, QkovError
from ..weights.attention_weights import AttentionWeights
from .families import architectures
from .layouts import LAYOUTS, TARGETS, arrange_layer, axes, count_heads, joins_heads
from .mapping import Mapping, Names, parse_mapping
from .tensor_names import named

#: What a family's file says of a stack that is no part of its mapping.
_OF_RECOGNITION = ("cases", "config_in", "beside", "not_under", "number_of_layers")


def fitting_families(file: TensorFile, prefix: str | None) -> dict[str, tuple[int, int, int]]:
    """The families whose names and shapes fit, best first: of whom most tensors and marks are there, by name."""
    fitting = {}
    for key, architecture in architectures().items():
        if not architecture.by_names or not all(named(mark, file.shapes) for mark in architecture.marks):
            continue
        matched, unnamed = 0, 0
        for stack in architecture.stacks:
            for found in prefixes_of(without_holes(stack), set(file.shapes), prefix):
                mapping = placed(without_holes(stack), found)
                if _shapes_fit(mapping, file, stack):
                    matched += sum(len(names) for names in mapping.layers(file.shapes).values())
                    unnamed += len(found)
        if matched:
            own = {name for stack in architecture.stacks for name in stack["tensors"].values()}
            fitting[key] = (matched, len(set(architecture.marks) - own), -unnamed)
    return dict(sorted(fitting.items(), key=lambda item: item[1], reverse=True))


def _shapes_fit(mapping: Mapping, file: TensorFile, stack: dict[str, Any]) -> bool:
    """Whether for some number of heads the tensors of a layer make circuits of one width."""
    names = next(iter(mapping.layers(file.shapes).values()))
    shapes = {role: file.shapes[of_role[0]] for role, of_role in names.items()}
    sizes = {size for role, shape in shapes.items() for size in shape if role in TARGETS}
    divisors = (heads for heads in range(1, max(sizes, default=0) + 1) if any(size % heads == 0 for size in sizes))
    beside = {
        layout: file.shapes[found.group()]
        for template, layout in stack.get("beside", {}).items()
        for found in named(mapping.full_name(template), file.shapes)
    }
    numbers = (None,) if mapping.heads is None else divisors
    return any(_fit(mapping, names, shapes, heads, beside) for heads in numbers)


def _fit(
    mapping: Mapping,
    names: Names,
    shapes: dict[str, tuple[int, ...]],
    heads: int | None,
    beside: dict[str, tuple[int, ...]],
) -> bool:
    counts = count_heads(shapes, mapping.layouts, heads)
    empty = {role: torch.empty(shape, device="meta") for role, shape in shapes.items()}
    try:
        arranged: dict[str, Any] = arrange_layer(empty, mapping.layouts, counts, names, mapping.origin)
        made = AttentionWeights(0, **arranged)
    except (QkovError, CallError):
        return False
    W_Q, W_O = made.W_Q, made.W_O
    widths = {None if W_Q is None else W_Q.shape[1], None if W_O is None else W_O.shape[2]}
    widths |= {shape[-1] for role, shape in shapes.items() if role in ("b_O", "norm_gain")}
    widths |= {shape[axes(layout).index("d_model")] for layout, shape in beside.items()}
    # Where no bias or gain shows the width, heads that seem wider than the model are read the wrong way round.
    shown = mapping.heads is not None or any(role.startswith("b_") or role == "norm_gain" for role in shapes)
    upright = shown or W_Q is None or W_Q.shape[2] <= W_Q.shape[1]
    biases = {name: bias.shape for name, bias in arranged.items() if name in ("b_Q", "b_K", "b_V")}
    joined = all(shape == arranged[f"W_{name[2]}"].shape[::2] for name, shape in biases.items())
    return len(widths - {None}) <= 1 and upright and joined


def placed(
    table: dict[str, Any], prefix: str, cases: tuple[tuple[frozenset[int], dict[str, Any]], ...] = (), title: str = ""
) -> Mapping:
    """Return the mapping of a stack of a family under a prefix."""
    plain = {name: value for name, value in table.items() if name not in _OF_RECOGNITION}
    # One head stands in where only names and shapes are asked for.
    heads = {"heads": 1} if "heads" not in plain and needs_heads(plain) else {}
    return parse_mapping({**plain, **heads, "prefix": prefix}, title or "the family", cases)


def without_holes(stack: dict[str, Any]) -> dict[str, Any]:
    """Names and layouts alone."""
    return {name: stack[name] for name in ("tensors", "layout", "stack", "not_under") if name in stack}


def prefixes_of(table: dict[str, Any], names: set[str], prefix: str | None) -> list[str]:
    """What stands before the names of a layer that is whole, in every way in which that is so."""
    found: dict[str, dict[str | None, set[str]]] = {}
    weights = weight_names(table)
    for role, template in weights.items():
        for match in named(template, names):
            layer = match.groupdict().get("layer")
            found.setdefault(match["prefix"] or "", {}).setdefault(layer, set()).add(role)
    whole = [each for each, layers in found.items() if any(len(roles) == len(weights) for roles in layers.values())]
    # Another stack of the family has the same names under one of these.
    others = table.get("not_under", ())
    whole = [each for each in whole if each.rpartition(".")[2] not in others]
    return sorted(each for each in whole if prefix is None or each == prefix)


def weight_names(table: dict[str, Any]) -> dict[str, str]:
    """Return by role the names of the weights that a family's stack has."""
    return {role: name for role, name in table["tensors"].items() if role in TARGETS and name}


def needs_heads(table: dict[str, Any]) -> bool:
    """Whether the shapes do not tell the number of heads: no tensor keeps them apart, and one joins them."""
    stated = table["layout"]
    layouts = [(LAYOUTS[stated] if isinstance(stated, str) else stated)[role] for role in weight_names(table)]
    joined = [layout for layout in layouts if joins_heads(layout)]
    return bool(joined) and not any("head" in axes(layout) for layout in layouts if layout not in joined)
