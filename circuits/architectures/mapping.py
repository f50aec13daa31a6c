"""A mapping: which tensors of a file are W_Q, W_K, W_V and W_O of a stack of layers, and how their axes are ordered."""

import re
import tomllib
from collections.abc import Iterable
from collections.abc import Mapping as Dictionary
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..checkpoints.finding.in_file import SeriesNames, split_prefix
from ..checkpoints.steps.pattern import step_patterns
from ..errors import CallError, QkovError, named_input
from .head_counts import StatedHeads
from .layouts import axes, groups, joins_heads
from .named_layouts import LAYOUTS, SCORES_IN, TARGETS
from .schema import FACTS, MAPPING, OPTIONAL, check_mapping
from .stated_facts import UNKNOWN, StatedFacts
from .tensor_names import named, template_pattern

_KEYS = (*MAPPING, *FACTS)

#: tomllib takes time and memory in proportion to the square of the dots in a key.
_DOTS = 200

#: The names of one layer's tensors by role; several names if the template of the role contains {head}.
Names = dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class Mapping:
    """Names and layouts of the attention tensors of a stack of layers.

    Attributes:
        tensors: The name of each of Q, K, V, O (or QKV, or the collapsed QK, OV), and of those of `schema.OPTIONAL`
            that exist. {layer} stands for the layer's number, {inner} for the number of a layer within a numbered
            group, and {head} for the head's number if heads have tensors of their own.
        layouts: The axes of each weight in einops' notation, such as "(head d_head) d_model" for a torch.nn.Linear. The
            layout of a bias follows from that of its weight.
        heads: What is stated about the number and the width of the heads, which is required if a layout joins the heads
            with another axis. The number of key-value heads follows from the shapes.
        prefix: Prefix of every name. The keys of nested dictionaries are joined with dots.
        facts: What the tensors do not show.
        scalars: Numbers to carry along, such as {"loss": "val_loss"}.
        step: Patterns for the names of a run's files, such as "A_1_1_{step}.pt", which say where the step is.
        series: The list of checkpoints in one file, and that of their steps, if the prefix has {step}.
        number_of_layers: Number of layers that the model uses, if it is known; layers beyond it are left out.
        others: The mappings of the model's other stacks, such as its decoder's and its cross-attention's.
        stack: Name of the stack, if the model has several.
        origin: Where the mapping comes from, for messages.
    """

    tensors: dict[str, str]
    layouts: dict[str, str]
    heads: StatedHeads = field(default_factory=StatedHeads)
    prefix: str = ""
    facts: StatedFacts = field(default_factory=StatedFacts)
    scalars: dict[str, str] = field(default_factory=dict)
    stack: str = ""
    origin: str = "the mapping"
    number_of_layers: int | None = None
    others: tuple["Mapping", ...] = ()
    step: tuple[str, ...] = ()
    series: SeriesNames | None = None

    def layers(self, names: Iterable[str]) -> dict[int, Names]:
        """Return the names of every layer's tensors, by the number of the layer.

        A tensor whose name has no {layer} belongs to all layers, if the names of other tensors have one.

        Args:
            names: Names of the tensors in the file.

        Raises:
            QkovError: The file has none of the mapping's weights, or a layer has only some of them.
        """
        names = set(names)
        layers, shared = self._match(names)
        # Layers without attention may have a norm of the same name.
        layers = {layer: roles for layer, roles in layers.items() if set(TARGETS) & {*roles, *shared}}
        if not layers:
            wanted = ", ".join(self.full_name(name) for role, name in self.tensors.items() if role in TARGETS)
            raise QkovError(
                f"{self.origin} names no tensor of the file: it names {wanted}; "
                f"{self._other_prefix(names)}{seen(names)}"
            )
        used = {layer: roles for layer, roles in layers.items() if layer < (self.number_of_layers or layer + 1)}
        if not used:
            raise QkovError(
                f"{self.origin} has {self.number_of_layers} layers, and the first one in the file is {min(layers)}; "
                f"put the weights' own config beside them"
            )
        for layer, roles in sorted(used.items()):
            roles |= {role: name for role, name in shared.items() if role not in roles}
            missing = [
                self.full_name(name, layer)
                for role, name in self.tensors.items()
                if role in TARGETS and role not in roles
            ]
            if missing:
                raise QkovError(f"layer {layer} lacks {', '.join(missing)}, which {self.origin} names; {seen(names)}")
        return dict(sorted(used.items()))

    def shapes(self, names: Names, shapes: Dictionary[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor of a layer by role; those of heads with tensors of their own are stacked.

        Args:
            names: Names of the layer's tensors by role.
            shapes: Shape of each tensor in the file.
        """
        return {
            role: (len(of_role), *shapes[of_role[0]]) if "{head}" in self.tensors[role] else shapes[of_role[0]]
            for role, of_role in names.items()
        }

    def with_width_of(self, layer: int, names: Names, shapes: Dictionary[str, tuple[int, ...]]) -> "Mapping":
        """Return the mapping with the width of the heads of one layer, if it holds for all layers and is not stated.

        Args:
            layer: Number of the layer.
            names: Names of the layer's tensors by role.
            shapes: Shape of each tensor in the file.
        """
        heads = self.heads
        if heads.query is None or heads.d_head is not None or not heads.one_width:
            return self
        joins = {role for role, layout in self.layouts.items() if joins_heads(layout)}
        counts = heads.of_layer(layer).count(self.shapes(names, shapes), self.layouts)
        if counts is None or joins.isdisjoint(("Q", "K", "QKV", "V", "O")):
            return self
        return replace(self, heads=replace(heads, d_head=counts.d_head, origin="the width in the first layer"))

    def full_name(self, template: str, layer: int | None = None) -> str:
        """Return a tensor's name in the file.

        Args:
            template: The name in the mapping, without the prefix.
            layer: The layer's number, which replaces {layer}; None leaves {layer} in the name.
        """
        name = f"{self.prefix}.{template}" if self.prefix else template
        return name if layer is None else name.replace("{layer}", str(layer))

    def _match(self, names: set[str]) -> tuple[dict[int, Names], Names]:
        """Return the names of each layer's tensors, and those of the tensors that all layers share."""
        layers: dict[int, Names] = {}
        shared: Names = {}
        matches = {role: self._matches(template, names) for role, template in self.tensors.items()}
        inner = 1 + max((int(match.get("inner", 0)) for of_role in matches.values() for match in of_role), default=0)
        for role, of_role in matches.items():
            of_layer: dict[int | None, list[tuple[int, str]]] = {}
            for match in of_role:
                layer = int(match["layer"]) * inner + int(match.get("inner", 0)) if "layer" in match else None
                of_layer.setdefault(layer, []).append((int(match.get("head", 0)), match["name"]))
            for layer, heads in of_layer.items():
                target = shared if layer is None else layers.setdefault(layer, {})
                target[role] = tuple(name for _, name in sorted(heads))
                self._demand_every_head(role, [number for number, _ in sorted(heads)], target[role])
        if shared and not layers:
            layers[0] = {}
        return layers, shared

    def _demand_every_head(self, role: str, numbers: list[int], names: tuple[str, ...]) -> None:
        if "{head}" in self.tensors[role] and numbers != list(range(len(numbers))):
            gap = next(number for number in range(max(numbers) + 1) if number not in numbers)
            raise QkovError(
                f"the heads of {names[0]} are numbered {', '.join(map(str, numbers))}, so head {gap} is missing; "
                f"{self.origin} expects a tensor for every head"
            )

    def _other_prefix(self, names: set[str]) -> str:
        """Return in words the prefix under which the file has the names; an empty string if there is none."""
        templates = [name for role, name in self.tensors.items() if role in TARGETS]
        prefixes = [{match["prefix"] for match in named(name, names)} for name in templates]
        common = sorted(prefix for prefix in set.intersection(*prefixes) if prefix) if prefixes else []
        return f'the file has them with prefix = "{common[0]}"; ' if common else ""

    def _matches(self, template: str, names: set[str]) -> list[dict[str, str]]:
        """Return the names that match a template, each with the numbers in it."""
        pattern = re.compile(f"(?P<name>{template_pattern(self.full_name(template))})")
        return [match.groupdict() for name in names if (match := pattern.fullmatch(name))]


def read_mapping(path: Path | str) -> Mapping:
    """Read a mapping from a TOML file. If it does not state the norm or the score scale, they are unknown.

    The file describes one stack of layers, or several in tables [[stacks]]; what stands above the tables holds for all.

    `circuits/architectures/families/README.md` describes every key.

    Args:
        path: The TOML file.

    Raises:
        CallError: The file is missing, is not TOML, holds an unknown key at any level, or a value that cannot be used.
    """
    origin = f"the mapping {path}"
    if not Path(path).is_file():
        raise CallError(f"{origin} {'is not a regular file' if Path(path).exists() else 'does not exist'}")
    with named_input(origin, "TOML", "correct it", CallError):
        text = Path(path).read_bytes().decode()
        if any(line.count(".") > _DOTS for line in text.split("\n")):
            raise CallError(f"{origin} has a line with more than {_DOTS} dots; write tables in place of dotted keys")
        table = tomllib.loads(text)
    with named_input(origin, "a mapping", "correct it", CallError):
        first, *others = (_of_stack(stack, where) for stack, where in _stacks(table, origin))
        names = [mapping.stack for mapping in (first, *others)]
        if len(set(names)) < len(names):
            raise CallError(f"the stacks of {origin} are named {', '.join(map(repr, names))}; give each its own stack")
        return replace(first, others=tuple(others))


def _stacks(table: dict[str, Any], origin: str) -> list[tuple[dict[str, Any], str]]:
    """Return the table of each stack, completed by what holds for all, and where it stands."""
    if "stacks" not in table:
        return [(table, origin)]
    shared = {name: value for name, value in table.items() if name != "stacks"}
    stacks = table["stacks"]
    if not isinstance(stacks, list) or not stacks or not all(isinstance(stack, dict) for stack in stacks):
        raise CallError(f"stacks of {origin} should be tables [[stacks]], one for each stack, got {stacks!r}")
    return [({**shared, **stack}, f"[[stacks]] {number} of {origin}") for number, stack in enumerate(stacks, start=1)]


def _of_stack(table: dict[str, Any], origin: str) -> Mapping:
    check_mapping(table, origin)
    return parse_mapping({"norm": UNKNOWN, "score_scale": UNKNOWN, **table}, origin)


def parse_mapping(
    table: dict[str, Any],
    origin: str,
    cases: tuple[tuple[frozenset[int], dict[str, Any]], ...] = (),
    heads: StatedHeads | None = None,
) -> Mapping:
    """Return the mapping that a table describes.

    Args:
        table: The keys and values of a mapping file.
        origin: Where the table comes from, for messages.
        cases: Numbers of layers, with the facts in which they differ from the rest.
        heads: What is stated about the heads; None if the table states it.

    Raises:
        CallError: A key is unknown, a value has the wrong type, or a layout lacks an axis; the message names it.
    """
    unknown = sorted(set(table) - set(_KEYS))
    if unknown:
        raise CallError(f"{origin} has the unknown key {unknown[0]!r}; known are {', '.join(_KEYS)}")
    tensors = _strings(table.get("tensors", {}), f"[tensors] of {origin}")
    _demand_circuits(tensors, origin)
    for name in ("prefix", "stack", "steps"):
        if name in table and type(table[name]) is not str:
            raise CallError(f"{name} of {origin} should be of type str, got {table[name]!r}")
    if heads is None:
        heads = _stated_heads(table, origin)
    prefix, series = _series(table, origin)
    return Mapping(
        tensors=tensors,
        layouts=_layouts(table.get("layout"), tensors, heads, origin),
        heads=heads,
        prefix=prefix,
        facts=StatedFacts({name: table[name] for name in FACTS if name in table}, cases, origin),
        scalars=_strings(table.get("scalars", {}), f"[scalars] of {origin}"),
        stack=table.get("stack", ""),
        origin=origin,
        step=_step(table.get("step", []), origin),
        series=series,
    )


def _series(table: dict[str, Any], origin: str) -> tuple[str, SeriesNames | None]:
    """Return the prefix within one checkpoint, and the series of checkpoints in a file that the table names."""
    steps = table.get("steps")
    name, prefix = split_prefix(table.get("prefix", ""))
    if name is None and steps is not None:
        raise CallError(f"{origin} has steps and no {{step}} in its prefix; expected prefix = 'NAME.{{step}}' as well")
    if name is None:
        return prefix, SeriesNames(None) if prefix else None
    return prefix, SeriesNames(name, steps)


def _step(patterns: Any, origin: str) -> tuple[str, ...]:
    texts = (patterns,) if isinstance(patterns, str) else patterns
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise CallError(
            f"step of {origin} should be a pattern, such as 'A_1_1_{{step}}.pt', or a list, got {patterns!r}"
        )
    return tuple(pattern.text for pattern in step_patterns(texts))


def seen(names: Iterable[str]) -> str:
    """Return the names that a file holds, in words; a long list is cut short."""
    names = sorted(names)
    shown = names[:12]
    rest = len(names) - len(shown)
    return f"the file holds {', '.join(shown) or 'no tensor'}" + (f" and {rest} more" if rest else "")


def _demand_circuits(tensors: dict[str, str], origin: str) -> None:
    unknown = sorted(set(tensors) - set(TARGETS) - set(OPTIONAL))
    if unknown:
        known = ", ".join((*TARGETS, *OPTIONAL))
        raise CallError(f"[tensors] of {origin} has the unknown key {unknown[0]!r}; known are {known}")
    weights = [role for role in tensors if role in TARGETS]
    if not weights:
        raise CallError(f"{origin} names no tensor; it needs a table [tensors] with Q, K, V and O (or some of them)")
    if "QKV" in weights and set(weights) & set(SCORES_IN):
        raise CallError(f"[tensors] of {origin} has both QKV and one of Q, K, V; give one or the other")
    parts = {part for role in weights for part in (SCORES_IN if role == "QKV" else (role,))}
    for collapsed, factors in (("QK", {"Q", "K"}), ("OV", {"V", "O"})):
        if collapsed in parts and parts & factors:
            raise CallError(f"[tensors] of {origin} has both {collapsed} and its factors; give one or the other")
    if not parts & {"QK", "OV"} and not {"Q", "K"} <= parts and not {"V", "O"} <= parts:
        raise CallError(
            f"[tensors] of {origin} has {', '.join(weights)}, which do not form a circuit; W_QK needs Q and K (or QK), "
            f"W_OV needs V and O (or OV; for one head without an output projection, W_V is OV)"
        )
    for role in tensors:
        if role.startswith("b_") and role[2:] not in weights and not (role == "b_QKV" and {*SCORES_IN} <= parts):
            raise CallError(f"[tensors] of {origin} has {role} without {role[2:]}, whose bias it is")


def _stated_heads(table: dict[str, Any], origin: str) -> StatedHeads:
    """Return what a table states about heads; a list has one number for each layer."""
    stated: dict[str, Any] = {name: table.get(name) for name in ("heads", "d_head", "d_value")}
    for name, value in stated.items():
        if value is None:
            continue
        by_layer = isinstance(value, list) and name != "d_value"
        numbers: list[Any] = value if by_layer else [value]
        if not numbers or any(type(number) is not int for number in numbers):
            kind = "int" if name == "d_value" else "int, or a list of them with one for each layer"
            raise CallError(f"{name} of {origin} should be of type {kind}, got {value!r}")
        if min(numbers) < 1:
            raise CallError(f"{name} of {origin} should be at least 1, got {min(numbers)}")
        if by_layer:
            stated[name] = dict(enumerate(value))
    return StatedHeads(
        query=stated["heads"],
        d_head=stated["d_head"],
        d_value=stated["d_value"],
        origin=f"d_head of {origin}",
        one_width=not isinstance(stated["heads"], dict),
    )


def _layouts(layout: Any, tensors: dict[str, str], heads: StatedHeads, origin: str) -> dict[str, str]:
    known = f"one of {', '.join(LAYOUTS)}, or a table with the axes of each tensor, such as Q = '(head d_head) d_model'"
    if isinstance(layout, str):
        if layout not in LAYOUTS:
            raise CallError(f"layout of {origin} is {layout!r}; expected {known}")
        layouts = LAYOUTS[layout]
        if heads.query == 1 and layout != "conv1d":
            # The circuit of one head is a matrix.
            layouts = layouts | {role: TARGETS[role].removeprefix("head ") for role in ("QK", "OV")}
    else:
        layouts = _strings(layout if layout is not None else {}, f"[layout] of {origin}")
    weights = [role for role in tensors if role in TARGETS]
    for role in weights:
        if role not in layouts:
            raise CallError(f"{origin} gives no layout for {role}; layout should be {known}")
        stated, expected = axes(layouts[role]), TARGETS[role].split()
        if set(stated) not in (set(expected), set(expected) - {"head"}) or len(stated) != len(set(stated)):
            raise CallError(
                f"the layout of {role} in {origin} is {layouts[role]!r}; expected the axes {', '.join(expected)}"
            )
    chosen = {role: _of_heads_apart(layouts[role]) if "{head}" in tensors[role] else layouts[role] for role in weights}
    # A tensor with the heads in a dimension of their own shows how many there are.
    is_number_known = any((heads.query, heads.d_head)) or any(
        "head" in axes(of_role) and not joins_heads(of_role) for of_role in chosen.values()
    )
    for role, of_role in chosen.items():
        if not is_number_known and joins_heads(of_role):
            raise CallError(f"{origin} gives no number of heads, and the layout of {role} joins them: add heads = ...")
        if "head" not in axes(of_role) and heads.query not in (None, 1):
            raise CallError(f"the layout of {role} in {origin} has no axis head, and heads is {heads.query}")
    return chosen


def _of_heads_apart(layout: str) -> str:
    """Return the layout of the stacked tensors of heads that have tensors of their own, from that of a whole weight."""
    of_one = [" ".join(axis for axis in group if axis != "head") for group in groups(layout)]
    return " ".join(["head", *(f"({axes_})" if " " in axes_ else axes_ for axes_ in of_one if axes_)])


def _strings(table: Any, where: str) -> dict[str, str]:
    if not isinstance(table, dict) or not all(isinstance(value, str) for value in table.values()):
        raise CallError(f"{where} should be a table of strings, got {table!r}")
    return dict(table)
