"""A mapping: which tensors of a file are W_Q, W_K, W_V and W_O of a stack of layers, and how their axes lie."""

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import CallError, QkovError
from .layouts import LAYOUTS, SCORES_IN, TARGETS, axes, joins_heads
from .stated_facts import FACTS, UNKNOWN, StatedFacts
from .tensor_names import named, template_pattern

#: Tensors that may be there or not: biases, the norm in front of attention, the norms of queries and keys, the tables
#: [position, dims] by which positions rotate.
OPTIONAL = (
    *("b_Q", "b_K", "b_V", "b_QKV", "b_O", "norm_gain", "norm_bias"),
    *("query_norm_gain", "query_norm_bias", "key_norm_gain", "key_norm_bias"),
    *("rotary_sin", "rotary_cos"),
)
_KEYS = {"prefix", "heads", "layout", "stack", "tensors", "scalars", *FACTS}

#: The names of one layer's tensors by role; several where a role's name has {head} in it.
Names = dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class Mapping:
    """Names and layouts of the attention tensors of a stack of layers.

    Attributes:
        tensors: for each of Q, K, V, O (or QKV, or the collapsed QK, OV) the tensor's name, with {layer} where the
            layer's number stands ({inner} for layers inside of numbered groups, {head} for heads that have tensors of
            their own); also for any of `OPTIONAL`.
        layouts: for each of the weights its axes in einops' notation, such as "(head d_head) d_model" for a
            torch.nn.Linear. The layout of a bias follows from it.
        heads: number of query heads; needed where a layout joins the heads with another axis. That of key-value heads
            follows from the shapes.
        prefix: of every name; the keys of nested dictionaries are joined with dots.
        facts: what the tensors do not say.
        scalars: figures to carry along, such as {"loss": "val_loss"}.
        stack: name of the stack, where a model has several.
        origin: where the mapping comes from, for messages.
    """

    tensors: dict[str, str]
    layouts: dict[str, str]
    heads: int | None = None
    prefix: str = ""
    facts: StatedFacts = field(default_factory=StatedFacts)
    scalars: dict[str, str] = field(default_factory=dict)
    stack: str = ""
    origin: str = "the mapping"

    def layers(self, names: Iterable[str]) -> dict[int, Names]:
        """Return for every layer, by its number, the names of its tensors.

        A tensor whose name has no {layer} serves all layers, where those of others have one.

        Raises:
            QkovError: none of the mapping's weights is there, or a layer has only some of them.
        """
        names = set(names)
        found, shared = self._match(names)
        # Layers without attention may have a norm of the same name.
        found = {layer: roles for layer, roles in found.items() if set(TARGETS) & {*roles, *shared}}
        if not found:
            wanted = ", ".join(self.full_name(name) for role, name in self.tensors.items() if role in TARGETS)
            raise QkovError(
                f"{self.origin} names no tensor of the file: it asks for {wanted}; "
                f"{self._other_prefix(names)}{seen(names)}"
            )
        for layer, roles in sorted(found.items()):
            roles |= {role: name for role, name in shared.items() if role not in roles}
            missing = [
                self.full_name(name, layer)
                for role, name in self.tensors.items()
                if role in TARGETS and role not in roles
            ]
            if missing:
                raise QkovError(f"layer {layer} lacks {', '.join(missing)}, which {self.origin} names; {seen(names)}")
        return dict(sorted(found.items()))

    def full_name(self, template: str, layer: int | None = None) -> str:
        """Return a tensor's name in the file, with the prefix and, where given, the layer's number."""
        name = f"{self.prefix}.{template}" if self.prefix else template
        return name if layer is None else name.replace("{layer}", str(layer))

    def _match(self, names: set[str]) -> tuple[dict[int, Names], Names]:
        found: dict[int, Names] = {}
        shared: Names = {}
        matches = {role: self._matches(template, names) for role, template in self.tensors.items()}
        inner = 1 + max((int(match.get("inner", 0)) for of_role in matches.values() for match in of_role), default=0)
        for role, of_role in matches.items():
            of_layer: dict[int | None, list[tuple[int, str]]] = {}
            for match in of_role:
                layer = int(match["layer"]) * inner + int(match.get("inner", 0)) if "layer" in match else None
                of_layer.setdefault(layer, []).append((int(match.get("head", 0)), match["name"]))
            for layer, heads in of_layer.items():
                target = shared if layer is None else found.setdefault(layer, {})
                target[role] = tuple(name for _, name in sorted(heads))
        if shared and not found:
            found[0] = {}
        return found, shared

    def _other_prefix(self, names: set[str]) -> str:
        """The prefix under which the names are there, in words; empty where there is none."""
        templates = [name for role, name in self.tensors.items() if role in TARGETS]
        found = [{match["prefix"] for match in named(name, names)} for name in templates]
        common = sorted(prefix for prefix in set.intersection(*found) if prefix) if found else []
        return f'they are there with prefix = "{common[0]}"; ' if common else ""

    def _matches(self, template: str, names: set[str]) -> list[dict[str, str]]:
        """The names that are of a template, each with the numbers that stand in it."""
        pattern = re.compile(f"(?P<name>{template_pattern(self.full_name(template))})")
        return [match.groupdict() for name in names if (match := pattern.fullmatch(name))]


def read_mapping(path: Path | str) -> Mapping:
    """Read a mapping from a TOML file. What it does not say of norm and score scale counts as not known.

    Raises:
        CallError: the file is missing, is no TOML, or says something that a mapping cannot say.
    """
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CallError(f"the mapping {path} does not exist") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise CallError(f"the mapping {path} cannot be read as TOML: {error}") from error
    return parse_mapping({"norm": UNKNOWN, "score_scale": UNKNOWN, **table}, f"the mapping {path}")


def parse_mapping(
    table: dict[str, Any], origin: str, cases: tuple[tuple[frozenset[int], dict[str, Any]], ...] = ()
) -> Mapping:
    """Make a mapping of a table as TOML gives it.

    Args:
        table: with the keys of the TOML file.
        origin: for messages.
        cases: numbers of layers, and the facts in which they differ from the rest.

    Raises:
        CallError: a key is unknown, a value has the wrong type, or a layout lacks an axis; the message names it.
    """
    unknown = sorted(set(table) - _KEYS)
    if unknown:
        raise CallError(f"{origin} has the unknown key {unknown[0]!r}; known are {', '.join(sorted(_KEYS))}")
    tensors = _strings(table.get("tensors", {}), f"[tensors] of {origin}")
    _demand_circuits(tensors, origin)
    for name, kind in (("heads", int), ("prefix", str), ("stack", str)):
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
        facts=StatedFacts({name: table[name] for name in FACTS if name in table}, cases, origin),
        scalars=_strings(table.get("scalars", {}), f"[scalars] of {origin}"),
        stack=table.get("stack", ""),
        origin=origin,
    )


def seen(names: Iterable[str]) -> str:
    """Return the names that a file holds, in words, a long list cut short."""
    names = sorted(names)
    shown = names[:12]
    rest = len(names) - len(shown)
    return f"the file holds {', '.join(shown) or 'no tensor'}" + (f" and {rest} more" if rest else "")


def _demand_circuits(tensors: dict[str, str], origin: str) -> None:
    unknown = sorted(set(tensors) - set(TARGETS) - set(OPTIONAL))
    if unknown:
        known = ", ".join((*TARGETS, *OPTIONAL))
        raise CallError(f"[tensors] of {origin} has {unknown[0]!r}; known are {known}")
    weights = [role for role in tensors if role in TARGETS]
    if not weights:
        raise CallError(f"{origin} names no tensor; it needs a table [tensors] with Q, K, V and O (or some of them)")
    if "QKV" in weights and set(weights) & set(SCORES_IN):
        raise CallError(f"[tensors] of {origin} has both QKV and one of Q, K, V; give one or the other")
    parts = {role for given in weights for role in (SCORES_IN if given == "QKV" else (given,))}
    for collapsed, factors in (("QK", {"Q", "K"}), ("OV", {"V", "O"})):
        if collapsed in parts and parts & factors:
            raise CallError(f"[tensors] of {origin} has both {collapsed} and its factors; give one or the other")
    if not parts & {"QK", "OV"} and not {"Q", "K"} <= parts and not {"V", "O"} <= parts:
        raise CallError(
            f"[tensors] of {origin} has {', '.join(weights)}, which make up no circuit; W_QK takes Q and K (or QK), "
            f"W_OV takes V and O (or OV)"
        )
    for role in tensors:
        if role.startswith("b_") and role[2:] not in weights and not (role == "b_QKV" and {*SCORES_IN} <= parts):
            raise CallError(f"[tensors] of {origin} has {role} without {role[2:]}, whose bias it is")


def _layouts(layout: Any, tensors: dict[str, str], heads: int | None, origin: str) -> dict[str, str]:
    known = f"one of {', '.join(LAYOUTS)}, or a table with the axes of each tensor, such as Q = '(head d_head) d_model'"
    if isinstance(layout, str):
        if layout not in LAYOUTS:
            raise CallError(f"layout of {origin} is {layout!r}; expected {known}")
        layouts = LAYOUTS[layout]
    else:
        layouts = _strings(layout if layout is not None else {}, f"[layout] of {origin}")
    weights = [role for role in tensors if role in TARGETS]
    # A tensor that keeps its heads apart tells how many there are.
    told = heads is not None or any(
        "head" in axes(layouts.get(role, "")) and not joins_heads(layouts[role]) for role in weights
    )
    for role in weights:
        if role not in layouts:
            raise CallError(f"{origin} gives no layout for {role}; layout should be {known}")
        given, wanted = axes(layouts[role]), TARGETS[role].split()
        if set(given) not in (set(wanted), set(wanted) - {"head"}) or len(given) != len(set(given)):
            named = ", ".join(wanted)
            raise CallError(f"the layout of {role} in {origin} is {layouts[role]!r}; expected the axes {named}")
        if not told and joins_heads(layouts[role]):
            raise CallError(f"{origin} gives no number of heads, and the layout of {role} joins them: add heads = ...")
        if "head" not in given and heads not in (None, 1):
            raise CallError(f"the layout of {role} in {origin} has no axis head, and heads is {heads}")
    return {role: layouts[role] for role in weights}


def _strings(table: Any, where: str) -> dict[str, str]:
    if not isinstance(table, dict) or not all(isinstance(value, str) for value in table.values()):
        raise CallError(f"{where} should be a table of strings, got {table!r}")
    return dict(table)
