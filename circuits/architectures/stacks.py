"""One stack of a family, placed in a file: the prefix of its names, its number of heads, and its mapping."""

from typing import Any

from .head_counts import StatedHeads
from .layouts import axes, joins_heads
from .mapping import Mapping, parse_mapping
from .named_layouts import LAYOUTS, TARGETS
from .schema import OF_RECOGNITION
from .tensor_names import named


def names_and_layouts(stack: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a family's stack that does not depend on a config."""
    return {name: stack[name] for name in ("tensors", "layout", "stack", "not_under") if name in stack}


def weight_names(table: dict[str, Any]) -> dict[str, str]:
    """Return by role the names of the weights of a stack, without biases and norms."""
    return {role: name for role, name in table["tensors"].items() if role in TARGETS and name}


def prefixes_of(table: dict[str, Any], names: set[str], prefix: str | None) -> list[str]:
    """Return the prefixes under which a file has all weights of at least one layer.

    Args:
        table: The table of the stack.
        names: Names of the tensors in the file.
        prefix: The only prefix to accept; None accepts all.
    """
    layers_under: dict[str, dict[str | None, set[str]]] = {}
    weights = weight_names(table)
    for role, template in weights.items():
        for match in named(template, names):
            layer = match.groupdict().get("layer")
            layers_under.setdefault(match["prefix"] or "", {}).setdefault(layer, set()).add(role)
    whole = [
        candidate
        for candidate, layers in layers_under.items()
        if any(len(roles) == len(weights) for roles in layers.values())
    ]
    # Another stack of the family has the same names under one of these.
    others = table.get("not_under", ())
    whole = [candidate for candidate in whole if candidate.rpartition(".")[2] not in others]
    return sorted(candidate for candidate in whole if prefix is None or candidate == prefix)


def needs_heads(table: dict[str, Any]) -> bool:
    """Return whether the number of heads has to be stated, because no shape shows it."""
    stated = table["layout"]
    layouts = [(LAYOUTS[stated] if isinstance(stated, str) else stated)[role] for role in weight_names(table)]
    joined = [layout for layout in layouts if joins_heads(layout)]
    if any("{head}" in name for name in weight_names(table).values()):
        return False
    return bool(joined) and not any("head" in axes(layout) for layout in layouts if layout not in joined)


def mapping_under(
    prefix: str,
    table: dict[str, Any],
    cases: tuple[tuple[frozenset[int], dict[str, Any]], ...] = (),
    title: str = "the family",
    heads: StatedHeads | None = None,
) -> Mapping:
    """Return the mapping of a family's stack under a prefix.

    Args:
        prefix: The prefix of the tensor names.
        table: The table of the stack, without look-ups.
        cases: Numbers of layers, with the facts in which they differ from the rest.
        title: Title of the family, for messages.
        heads: What is stated about the heads; None if only names and shapes matter.

    Raises:
        CallError: A value that comes from the config cannot be used.
    """
    plain = {name: value for name, value in table.items() if name not in OF_RECOGNITION}
    if heads is None and needs_heads(plain):
        # Where only names and shapes matter, one head stands in for the unknown number.
        heads = StatedHeads(1)
    return parse_mapping({**plain, "prefix": prefix}, title, cases, heads)
