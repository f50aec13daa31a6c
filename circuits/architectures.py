"""Architectures as data: recognise one by its config or its tensor names, and make its mappings.

A file of `families/` is a mapping with holes: `{ config = "n_head" }` stands for what the config beside the weights
says under that key, or under the first of several that is there.
"""

import re
import tomllib
from collections.abc import Iterable
from collections.abc import Mapping as Dictionary
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

import torch

from .attention_weights import AttentionWeights
from .errors import CallError, QkovError
from .layouts import LAYOUTS, TARGETS, arrange_layer, axes, count_heads, joins_heads
from .mapping import Mapping, Names, parse_mapping, seen, template_pattern
from .stated_facts import FACTS, UNKNOWN
from .tensor_files import TensorFile

Config = Dictionary[str, Any]
_ABSENT = object()
_CONDITIONS = ("when", "unless", "missing", "told", "has")


@dataclass(frozen=True)
class Architecture:
    """One family of models whose attention tensors have the same names and layouts.

    Attributes:
        key: name of its file, by which it can be asked for.
        title: in words.
        model_types: what transformers calls the models of the family.
        stacks: the mapping of each stack, with holes.
        by_names: whether tensor names alone recognise it; families that share them with another leave it to that one.
        marks: tensors beside those of attention that have to be there for its names alone to recognise it.
        needs_config: facts that its names do not tell without a config, since other families have the same ones.
        config_keys: keys that make a config without model_type one of this family's.
    """

    key: str
    title: str
    model_types: tuple[str, ...] = ()
    stacks: tuple[dict[str, Any], ...] = ()
    by_names: bool = True
    marks: tuple[str, ...] = ()
    needs_config: tuple[str, ...] = ()
    config_keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class Unsupported:
    """Attention that has no W_QK = W_K W_Q' and W_OV = W_O W_V, or none that is read here."""

    title: str
    reason: str
    model_types: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recognised:
    """The mapping of each stack of a checkpoint, how they were found, and what was left out, with the reason."""

    how: str
    stacks: tuple[Mapping, ...]
    skipped: dict[str, str] = field(default_factory=dict)


@cache
def architectures() -> dict[str, Architecture]:
    """Return every family by its key."""
    found = {}
    for resource in sorted(files(__package__).joinpath("families").iterdir(), key=lambda each: each.name):
        key, _, suffix = resource.name.rpartition(".")
        if suffix == "toml" and key != "unsupported":
            table = tomllib.loads(resource.read_text(encoding="utf-8"))
            stacks = tuple(table.pop("stacks"))
            lists = {name: tuple(value) for name, value in table.items() if isinstance(value, list)}
            found[key] = Architecture(key=key, stacks=stacks, **(table | lists))
    return found


@cache
def unsupported() -> tuple[Unsupported, ...]:
    """Return what is named and skipped."""
    text = files(__package__).joinpath("families", "unsupported.toml").read_text(encoding="utf-8")
    return tuple(
        Unsupported(
            title=entry["title"],
            reason=entry["reason"],
            model_types=tuple(entry.get("model_types", ())),
            tensors=tuple(entry.get("tensors", ())),
        )
        for entry in tomllib.loads(text)["unsupported"]
    )


def recognise(
    file: TensorFile, family: str | None = None, heads: int | None = None, prefix: str | None = None
) -> Recognised:
    """Return the mappings of a checkpoint's stacks: by the family asked for, the config's model_type, or the names.

    Raises:
        CallError: there is no such family.
        QkovError: nothing fits, several do, the attention is of a kind that has no such circuits, or a number is
            missing; the message says what to do.
    """
    names, config = set(file.shapes), file.config
    model_type = None if config is None else config.get("model_type")
    if family is not None:
        if family not in architectures():
            raise CallError(f"there is no family {family!r}; known are {', '.join(architectures())}")
        found, how = architectures()[family], "as asked"
    elif model_type is not None:
        found, how = _by_model_type(str(model_type), file), f"by model_type {model_type!r} in {file.config_origin}"
    else:
        found, how = _by_names(file, prefix), "by its tensor names"
    if config is not None and (model_type is None or not found.model_types):
        # Any training script may have put a config there: it has to show that it is of this family.
        told = set(found.config_keys)
        config = config if told and all(_look_up(config, key) is not None for key in told) else None
        how += "" if config is None else f", with the numbers of {file.config_origin}"
    stacks = tuple(_mappings(found, names, config, heads, prefix))
    _demand_distinct(stacks, file)
    if not stacks:
        wanted = ", ".join(_weights(stack)[role] for stack in found.stacks for role in _weights(stack))
        fitting = next(iter(_fitting(file, prefix)), None)
        hint = seen(names) if fitting is None else f"its names fit {fitting}: --family {fitting} reads it so"
        raise QkovError(
            f"{file.address} should be {found.title} ({how}), and holds none of its attention weights: "
            f"expected {wanted}; {hint}"
        )
    return Recognised(f"as {found.title} {how}", stacks, _skipped(names))


def _demand_distinct(stacks: tuple[Mapping, ...], file: TensorFile) -> None:
    found: dict[str, Mapping] = {}
    for mapping in stacks:
        other = found.setdefault(mapping.stack, mapping)
        if other is not mapping:
            first, second = (next(iter(each.tensors.values())) for each in (other, mapping))
            raise QkovError(
                f"{file.address} holds two attentions that cannot be told apart, {other.full_name(first)} and "
                f"{mapping.full_name(second)}: name the tensors of one in a mapping file (--map FILE.toml)"
            )


def _by_model_type(model_type: str, file: TensorFile) -> Architecture:
    for entry in unsupported():
        if model_type in entry.model_types:
            raise QkovError(
                f"{file.address} is {entry.title} (model_type {model_type!r}), which is not measured: {entry.reason}"
            )
    for architecture in architectures().values():
        if model_type in architecture.model_types:
            return architecture
    fitting = _fitting(file, None)
    hint = (
        f"its tensor names fit {', '.join(fitting)}: --family {next(iter(fitting))} reads it so"
        if fitting
        else f"{seen(file.shapes)}; say which are W_Q, W_K, W_V and W_O in a mapping file (--map FILE.toml)"
    )
    raise QkovError(
        f"{file.address} has the model_type {model_type!r} in {file.config_origin}, which is not known; {hint}"
    )


def _by_names(file: TensorFile, prefix: str | None) -> Architecture:
    fitting = _fitting(file, prefix)
    if not fitting:
        skipped = _skipped(set(file.shapes))
        if skipped:
            what, reason = next(iter(skipped.items()))
            raise QkovError(f"{file.address} holds nothing to measure: {what}: {reason}")
        raise QkovError(
            f"the tensor names of {file.address} are not recognised: {seen(file.shapes)}; "
            f"say which are W_Q, W_K, W_V and W_O in a mapping file (--map FILE.toml; the README shows one)"
        )
    most = max(fitting.values())
    best = [key for key, fit in fitting.items() if fit == most]
    if len(best) > 1:
        raise QkovError(
            f"the tensor names of {file.address} fit several families, {', '.join(best)}: "
            f"choose one with --family, or put the model's config.json beside the weights"
        )
    return architectures()[best[0]]


def _fitting(file: TensorFile, prefix: str | None) -> dict[str, tuple[int, int, int]]:
    """The families whose names and shapes fit, best first: of whom most tensors and marks are there, by name."""
    fitting = {}
    for key, architecture in architectures().items():
        if not architecture.by_names or not all(_named(mark, file.shapes) for mark in architecture.marks):
            continue
        matched, unnamed = 0, 0
        for stack in architecture.stacks:
            for found in _prefixes(_without_holes(stack), set(file.shapes), prefix):
                mapping = _placed(_without_holes(stack), found)
                if _shapes_fit(mapping, file, stack):
                    matched += sum(len(names) for names in mapping.layers(file.shapes).values())
                    unnamed += len(found)
        if matched:
            fitting[key] = (matched, len(architecture.marks), -unnamed)
    return dict(sorted(fitting.items(), key=lambda item: item[1], reverse=True))


def _shapes_fit(mapping: Mapping, file: TensorFile, stack: dict[str, Any]) -> bool:
    """Whether for some number of heads the tensors of a layer make circuits of one width."""
    names = next(iter(mapping.layers(file.shapes).values()))
    shapes = {role: file.shapes[of_role[0]] for role, of_role in names.items()}
    sizes = {size for role, shape in shapes.items() for size in shape if role in TARGETS}
    divisors = (heads for heads in range(1, max(sizes) + 1) if any(size % heads == 0 for size in sizes))
    beside = {
        layout: file.shapes[found.group()]
        for template, layout in stack.get("beside", {}).items()
        for found in _named(mapping.full_name(template), file.shapes)
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
        arranged = arrange_layer(empty, mapping.layouts, counts, names, mapping.origin)
        made = AttentionWeights(0, **arranged)
    except (QkovError, CallError):
        return False
    W_Q, W_O = made.W_Q, made.W_O
    widths = {None if W_Q is None else W_Q.shape[1], None if W_O is None else W_O.shape[2]}
    widths |= {shape[-1] for role, shape in shapes.items() if role in ("b_O", "norm_gain")}
    widths |= {shape[axes(layout).index("d_model")] for layout, shape in beside.items()}
    # Heads that are kept apart and seem wider than the model are read the wrong way round.
    upright = mapping.heads is not None or W_Q is None or W_Q.shape[2] <= W_Q.shape[1]
    biases = {name: bias.shape for name, bias in arranged.items() if name in ("b_Q", "b_K", "b_V")}
    joined = all(shape == arranged[f"W_{name[2]}"].shape[::2] for name, shape in biases.items())
    return len(widths - {None}) <= 1 and upright and joined


def _mappings(
    architecture: Architecture, names: set[str], config: Config | None, heads: int | None, prefix: str | None
) -> Iterable[Mapping]:
    whole = config
    for stack in architecture.stacks:
        config = _part_of(whole, stack)
        table = _filled(stack, config, names)
        if config is None:
            table |= dict.fromkeys(architecture.needs_config, UNKNOWN)
        prefixes = _prefixes(table, names, prefix)
        if len(prefixes) > 1:
            raise QkovError(
                f"the tensors of {architecture.title} are there under several prefixes, "
                f"{', '.join(repr(each) for each in prefixes)}: choose one with --prefix"
            )
        if not prefixes:
            continue
        told = heads or table.pop("heads", UNKNOWN)
        if told is not UNKNOWN:
            table["heads"] = told
        elif _needs_heads(table):
            raise QkovError(
                f"this is {architecture.title}, and nothing tells its number of heads: give --heads, "
                f"or put the model's config.json beside the weights"
            )
        numbers = _placed(table, prefixes[0]).layers(names)
        yield _placed(table, prefixes[0], _cases(stack, config, names, frozenset(numbers)), architecture.title)


def _part_of(config: Config | None, stack: dict[str, Any]) -> Config | None:
    """The part of the config that is of this stack: that of a model within a model, such as text_config."""
    inner = None if config is None else config.get(stack.get("config_in", ""))
    return inner if isinstance(inner, Dictionary) else config


def _placed(
    table: dict[str, Any], prefix: str, cases: tuple[tuple[frozenset[int], dict[str, Any]], ...] = (), title: str = ""
) -> Mapping:
    plain = {name: value for name, value in table.items() if name not in ("cases", "config_in", "beside")}
    # One head stands in where only names and shapes are asked for.
    heads = {"heads": 1} if "heads" not in plain and _needs_heads(plain) else {}
    return parse_mapping({**plain, **heads, "prefix": prefix}, title or "the family", cases)


def _without_holes(stack: dict[str, Any]) -> dict[str, Any]:
    """Names and layouts alone."""
    return {name: stack[name] for name in ("tensors", "layout", "stack") if name in stack}


def _filled(stack: dict[str, Any], config: Config | None, names: Iterable[str]) -> dict[str, Any]:
    """The stack's table with its holes filled, and with the cases that hold for all layers applied."""
    table = {name: _fill(value, config) for name, value in stack.items() if name != "cases"}
    for case in stack.get("cases", ()):
        if config is None and _asks_config(case):
            changed = {name: _untold(value) for name, value in case.items() if name in FACTS}
        elif "layers" not in case and _holds(case, config, names):
            changed = {name: _fill(value, config) for name, value in case.items() if name not in _CONDITIONS}
        else:
            continue
        for name, value in changed.items():
            both = isinstance(value, dict) and isinstance(table.get(name), dict)
            table[name] = {**table[name], **value} if both else value
    # An empty string takes a tensor of the other cases away.
    table["tensors"] = {role: name for role, name in table["tensors"].items() if name}
    # False takes a table of facts away; of a fact that is true or false it is the answer.
    return {
        name: value
        for name, value in table.items()
        if value is not None and (value is not False or FACTS.get(name) == (bool,))
    }


def _cases(
    stack: dict[str, Any], config: Config | None, names: Iterable[str], numbers: frozenset[int]
) -> tuple[tuple[frozenset[int], dict[str, Any]], ...]:
    """The facts in which some layers differ."""
    found = []
    for case in stack.get("cases", ()):
        if "layers" in case and _holds(case, config, names):
            chosen = _chosen(case["layers"], config, numbers)
            facts = {name: _fill(value, config) for name, value in case.items() if name in FACTS}
            if chosen:
                found.append((chosen, facts))
    return tuple(found)


def _chosen(layers: dict[str, Any], config: Config | None, numbers: frozenset[int]) -> frozenset[int]:
    listed = _fill({"config": layers["config"]}, config) if "config" in layers else None
    if isinstance(listed, list):
        listed = _written_out(listed)
        return frozenset(number for number in numbers if number < len(listed) and listed[number] == layers["is"])
    if "only" in layers:
        return numbers & frozenset(layers["only"])
    if "every" in layers:
        period = _fill(layers["every"], config)
        if not isinstance(period, int):
            return frozenset()
        at = {each % period for each in layers.get("at", layers.get("except", ()))}
        return frozenset(number for number in numbers if (number % period in at) == ("at" in layers))
    first = _fill(layers.get("from"), config)
    return frozenset(number for number in numbers if isinstance(first, int) and number >= first)


def _written_out(kinds: list[Any]) -> list[Any]:
    """[[["global", "local"], 6]], as GPT-Neo says it, layer by layer."""
    if not all(isinstance(entry, list) and len(entry) == 2 for entry in kinds):
        return kinds
    return [kind for several, times in kinds for _ in range(times) for kind in several]


def _holds(case: dict[str, Any], config: Config | None, names: Iterable[str]) -> bool:
    config = config or {}
    wanted = all(_is(config, key, value) for key, value in case.get("when", {}).items())
    unwanted = any(_is(config, key, value) for key, value in case.get("unless", {}).items())
    silent = all(_look_up(config, key) is None for key in case.get("missing", ()))
    told = all(_look_up(config, key) is not None for key in case.get("told", ()))
    there = all(_named(template, names) for template in case.get("has", ()))
    return wanted and silent and told and there and not unwanted


def _is(config: Config, key: str, value: Any) -> bool:
    found = _look_up(config, key)
    return found in value if isinstance(value, list) else found == value


def _asks_config(case: dict[str, Any]) -> bool:
    layers = case.get("layers", {})
    asks = "config" in layers or any(isinstance(value, dict) for value in layers.values())
    return asks or any(condition in case for condition in ("when", "unless", "missing", "told"))


def _untold(value: Any) -> Any:
    """A fact that may be this or another: only the config would tell."""
    return dict.fromkeys(value, UNKNOWN) if isinstance(value, dict) and "config" not in value else UNKNOWN


def _named(template: str, names: Iterable[str]) -> list[re.Match[str]]:
    """The names that the template fits, whatever stands before them."""
    pattern = re.compile(r"(?:.+\.)?" + template_pattern(template))
    return [match for match in map(pattern.fullmatch, names) if match]


def _fill(value: Any, config: Config | None) -> Any:
    if isinstance(value, list):
        return [_fill(entry, config) for entry in value]
    if not isinstance(value, dict):
        return value
    if "config" not in value:
        filled = {name: _fill(entry, config) for name, entry in value.items()}
        return {name: entry for name, entry in filled.items() if entry is not None}
    if config is None:
        return UNKNOWN
    keys = value["config"] if isinstance(value["config"], list) else [value["config"]]
    stated = [_look_up(config, key, _ABSENT) for key in keys]
    for found in stated:
        if found is not None and found is not _ABSENT:
            return _computed(found, value, config)
    # A config that says null says that there is none; the default holds where it says nothing.
    return None if None in stated else value.get("default")


def _computed(found: Any, hole: dict[str, Any], config: Config) -> Any:
    """What a hole makes of the config's number: found^power / divided_by + plus."""
    if "power" in hole:
        found = found ** hole["power"]
    if "divided_by" in hole:
        divisor = _fill(hole["divided_by"], config)
        # A quotient that is no whole number tells nothing of layers or tokens.
        if not isinstance(divisor, int) or not isinstance(found, int) or divisor < 1 or found % divisor:
            return UNKNOWN
        found //= divisor
    return found + hole["plus"] if "plus" in hole else found


def _look_up(config: Config, key: str, absent: Any = None) -> Any:
    found: Any = config
    for part in key.split("."):
        found = found.get(part, absent) if isinstance(found, Dictionary) else absent
    return found


def _prefixes(table: dict[str, Any], names: set[str], prefix: str | None) -> list[str]:
    """What stands before the names of a layer that is whole, in every way in which that is so."""
    found: dict[str, dict[str | None, set[str]]] = {}
    weights = _weights(table)
    for role, template in weights.items():
        pattern = re.compile(r"(?:(?P<prefix>.+)\.)?" + template_pattern(template))
        for name in names:
            match = pattern.fullmatch(name)
            if match:
                layer = match.groupdict().get("layer")
                found.setdefault(match["prefix"] or "", {}).setdefault(layer, set()).add(role)
    whole = [each for each, layers in found.items() if any(len(roles) == len(weights) for roles in layers.values())]
    return sorted(each for each in whole if prefix is None or each == prefix)


def _weights(table: dict[str, Any]) -> dict[str, str]:
    return {role: name for role, name in table["tensors"].items() if role in TARGETS and name}


def _needs_heads(table: dict[str, Any]) -> bool:
    """Whether the shapes do not tell the number of heads: no tensor keeps them apart, and one joins them."""
    stated = table["layout"]
    layouts = [(LAYOUTS[stated] if isinstance(stated, str) else stated)[role] for role in _weights(table)]
    joined = [layout for layout in layouts if joins_heads(layout)]
    return bool(joined) and not any("head" in axes(layout) for layout in layouts if layout not in joined)


def _skipped(names: set[str]) -> dict[str, str]:
    """What of the file is attention of a kind that has no such circuits, and the reason."""
    skipped = {}
    for entry in unsupported():
        layers = {
            match.groupdict().get("layer") or "" for template in entry.tensors for match in _named(template, names)
        }
        if layers:
            numbers = sorted(int(layer) for layer in layers if layer)
            where = (
                f"layers {', '.join(map(str, numbers))}"
                if len(numbers) > 1
                else f"layer {numbers[0]}"
                if numbers
                else "all"
            )
            skipped[f"{where} ({entry.title})"] = entry.reason
    return skipped
