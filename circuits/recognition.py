"""Recognise an architecture by its config or its tensor names, and make its mappings."""

from collections.abc import Iterable
from collections.abc import Mapping as Dictionary
from dataclasses import dataclass, field
from typing import Any

import torch

from .architectures import Architecture, architecture_of, architectures, skipped, unsupported
from .attention_weights import AttentionWeights
from .config_holes import Config, cases, filled, look_up
from .errors import CallError, QkovError
from .layouts import LAYOUTS, TARGETS, arrange_layer, axes, count_heads, joins_heads, width_of_model
from .mapping import Mapping, Names, named, parse_mapping, seen
from .missing_layers import missing_layers
from .stated_facts import UNKNOWN
from .tensor_files import TensorFile

#: What configs call the width of the residual stream.
_WIDTHS = ("hidden_size", "d_model", "n_embd", "dim")
#: What a family's file says of a stack that is no part of its mapping.
_OF_RECOGNITION = ("cases", "config_in", "beside", "not_under", "number_of_layers")


@dataclass(frozen=True)
class Recognised:
    """The mapping of each stack of a checkpoint, how they were found, and what was left out, with the reason."""

    how: str
    stacks: tuple[Mapping, ...]
    skipped: dict[str, str] = field(default_factory=dict)


def recognise(
    file: TensorFile, family: str | None = None, heads: int | None = None, prefix: str | None = None
) -> Recognised:
    """Return the mappings of a checkpoint's stacks: by the family asked for, the config's model_type, or the names.

    Raises:
        CallError: there is no such family, or no such number of heads.
        QkovError: nothing fits, several do, the attention is of a kind that has no such circuits, or a number is
            missing; the message says what to do.
    """
    if heads is not None and heads < 1:
        raise CallError(f"heads should be at least 1, got {heads}")
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
        config = config if told and all(look_up(config, key) is not None for key in told) else None
        how += "" if config is None else f", with the numbers of {file.config_origin}"
    untold = found.needs_config if config is None and family is None else ()
    try:
        made = list(_mappings(found, file, config, untold, heads, prefix))
    except CallError as error:
        if config is None:
            raise
        raise QkovError(f"{file.config_origin} of {file.address} cannot be used: {error}") from error
    stacks = tuple(mapping for mapping, _ in made)
    _demand_distinct(stacks, file)
    if not stacks:
        wanted = ", ".join(_weights(stack)[role] for stack in found.stacks for role in _weights(stack))
        fitting = next(iter(_fitting(file, prefix)), None)
        hint = seen(names) if fitting is None else f"its names fit {fitting}: --family {fitting} reads it so"
        raise QkovError(
            f"{file.address} should be {found.title} ({how}), and holds none of its attention weights: "
            f"expected {wanted}; {hint}"
        )
    left_out = skipped(names)
    for _, missing in made:
        left_out |= missing
    return Recognised(f"as {found.title} {how}", stacks, left_out)


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
    architecture = architecture_of(model_type)
    if architecture is not None:
        return architecture
    fitting = _fitting(file, None)
    hint = (
        f"its tensor names fit {', '.join(fitting)}: --family {next(iter(fitting))} reads it so, with the "
        f"norm and positions of that family"
        if fitting
        else f"{seen(file.shapes)}; say which are W_Q, W_K, W_V and W_O in a mapping file (--map FILE.toml)"
    )
    raise QkovError(
        f"{file.address} has the model_type {model_type!r} in {file.config_origin}, which is not known; {hint}"
    )


def _by_names(file: TensorFile, prefix: str | None) -> Architecture:
    for entry in unsupported():
        if entry.whole and any(named(template, file.shapes) for template in entry.tensors):
            raise QkovError(f"{file.address} is {entry.title} by its names, which is not measured: {entry.reason}")
    fitting = _fitting(file, prefix)
    if not fitting:
        for what, reason in skipped(file.shapes).items():
            raise QkovError(f"{file.address} holds nothing to measure: {what}: {reason}")
        raise QkovError(
            f"the tensor names of {file.address} are not recognised: {seen(file.shapes)}; "
            f"say which are W_Q, W_K, W_V and W_O in a mapping file (--map FILE.toml, "
            f"in code mapping=read_mapping(FILE); the README shows one)"
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
        if not architecture.by_names or not all(named(mark, file.shapes) for mark in architecture.marks):
            continue
        matched, unnamed = 0, 0
        for stack in architecture.stacks:
            for found in _prefixes(_without_holes(stack), set(file.shapes), prefix):
                mapping = _placed(_without_holes(stack), found)
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


def _mappings(
    architecture: Architecture,
    file: TensorFile,
    config: Config | None,
    untold: tuple[str, ...],
    heads: int | None,
    prefix: str | None,
) -> Iterable[tuple[Mapping, dict[str, str]]]:
    """The mapping of each stack, and which of its layers are missing."""
    whole, names = config, set(file.shapes)
    for stack in architecture.stacks:
        config = _part_of(whole, stack)
        table = filled(stack, config, names) | dict.fromkeys(untold, UNKNOWN)
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
        layers = _placed(table, prefixes[0], title=architecture.title).layers(names)
        mapping = _placed(table, prefixes[0], cases(stack, config, names, frozenset(layers)), architecture.title)
        _demand_config_of_same_model(mapping, next(iter(layers.values())), config or {}, file)
        yield mapping, missing_layers(file, mapping, set(layers), table.get("number_of_layers"))


def _demand_config_of_same_model(mapping: Mapping, names: Names, config: Config, file: TensorFile) -> None:
    """QkovError for a config that says other numbers than a layer's shapes: its number of heads would be wrong too."""
    shapes = {role: file.shapes[of_role[0]] for role, of_role in names.items() if role in TARGETS}
    counts = count_heads(shapes, mapping.layouts, mapping.heads)
    shown = {"num_key_value_heads": None if counts is None else counts.key_value}
    role = next((role for role in ("Q", "QKV") if role in shapes), None)
    if role is not None:
        shown |= dict.fromkeys(_WIDTHS, width_of_model(shapes[role], mapping.layouts[role]))
    for key, size in shown.items():
        if size is not None and isinstance(config.get(key), int) and config[key] != size:
            raise QkovError(
                f"{file.config_origin} of {file.address} says {key} = {config[key]}, and the shapes of its weights say "
                f"{size}: they are of different models; put the weights' own config beside them"
            )


def _part_of(config: Config | None, stack: dict[str, Any]) -> Config | None:
    """The part of the config that is of this stack: that of a model within a model, such as text_config."""
    inner = None if config is None else config.get(stack.get("config_in", ""))
    return inner if isinstance(inner, Dictionary) else config


def _placed(
    table: dict[str, Any], prefix: str, cases: tuple[tuple[frozenset[int], dict[str, Any]], ...] = (), title: str = ""
) -> Mapping:
    plain = {name: value for name, value in table.items() if name not in _OF_RECOGNITION}
    # One head stands in where only names and shapes are asked for.
    heads = {"heads": 1} if "heads" not in plain and _needs_heads(plain) else {}
    return parse_mapping({**plain, **heads, "prefix": prefix}, title or "the family", cases)


def _without_holes(stack: dict[str, Any]) -> dict[str, Any]:
    """Names and layouts alone."""
    return {name: stack[name] for name in ("tensors", "layout", "stack", "not_under") if name in stack}


def _prefixes(table: dict[str, Any], names: set[str], prefix: str | None) -> list[str]:
    """What stands before the names of a layer that is whole, in every way in which that is so."""
    found: dict[str, dict[str | None, set[str]]] = {}
    weights = _weights(table)
    for role, template in weights.items():
        for match in named(template, names):
            layer = match.groupdict().get("layer")
            found.setdefault(match["prefix"] or "", {}).setdefault(layer, set()).add(role)
    whole = [each for each, layers in found.items() if any(len(roles) == len(weights) for roles in layers.values())]
    # Another stack of the family has the same names under one of these.
    others = table.get("not_under", ())
    whole = [each for each in whole if each.rpartition(".")[2] not in others]
    return sorted(each for each in whole if prefix is None or each == prefix)


def _weights(table: dict[str, Any]) -> dict[str, str]:
    return {role: name for role, name in table["tensors"].items() if role in TARGETS and name}


def _needs_heads(table: dict[str, Any]) -> bool:
    """Whether the shapes do not tell the number of heads: no tensor keeps them apart, and one joins them."""
    stated = table["layout"]
    layouts = [(LAYOUTS[stated] if isinstance(stated, str) else stated)[role] for role in _weights(table)]
    joined = [layout for layout in layouts if joins_heads(layout)]
    return bool(joined) and not any("head" in axes(layout) for layout in layouts if layout not in joined)
