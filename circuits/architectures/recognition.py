"""Recognise an architecture by its config or its tensor names, and make its mappings."""

from collections.abc import Iterable
from collections.abc import Mapping as Dictionary
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ..checkpoints.tensor_file import TensorFile
from ..errors import CallError, QkovError
from .config_holes import Config, cases, filled, look_up
from .families import Architecture, architecture_of, architectures, skipped, skipped_layers, unsupported
from .fitting import fitting_families, needs_heads, placed, prefixes_of, weight_names
from .layouts import TARGETS, count_heads, width_of_model
from .mapping import Mapping, Names, seen
from .stated_facts import UNKNOWN
from .tensor_names import named

#: What configs call the width of the residual stream.
_WIDTHS = ("hidden_size", "d_model", "n_embd", "dim")


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
        wanted = ", ".join(weight_names(stack)[role] for stack in found.stacks for role in weight_names(stack))
        fitting = next(iter(fitting_families(file, prefix)), None)
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
    fitting = fitting_families(file, None)
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
    fitting = fitting_families(file, prefix)
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
        prefixes = prefixes_of(table, names, prefix)
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
        elif needs_heads(table):
            raise QkovError(
                f"this is {architecture.title}, and nothing tells its number of heads: give --heads, "
                f"or put the model's config.json beside the weights"
            )
        layers = placed(table, prefixes[0], title=architecture.title).layers(names)
        mapping = placed(table, prefixes[0], cases(stack, config, names, frozenset(layers)), architecture.title)
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


def missing_layers(file: TensorFile, mapping: Mapping, layers: set[int], number: object) -> dict[str, str]:
    """Return which layers of a stack are missing, and how that is known, in words; nothing where none is.

    Layers of a kind that is named and skipped are not missing, nor are those in other files where this one is a part.

    Args:
        file: that holds the stack.
        mapping: of the stack.
        layers: the numbers of those that are there.
        number: of layers that the config tells, from 0 on; anything but an int where it tells none.
    """
    if type(number) is not int or file.partial is not None:
        return {}
    held = {layer for layer in layers if layer < number}
    if len(held) == number:
        return {}
    gaps = _gaps(held | skipped_layers(file.shapes), number)
    if not gaps:
        return {}
    several = "s" if gaps[0][0] != gaps[-1][1] else ""
    where = ", ".join(f"{first} to {last}" if first != last else str(first) for first, last in gaps)
    # Layers that share their weights count as one.
    whose = " with weights of their own" if "used_by" in mapping.facts.table else ""
    reason = (
        f"by {file.config_origin} there are {number} layers{whose}, and the attention of {len(held)} of them is there"
    )
    return {f"{mapping.stack} layer{several} {where}".lstrip(): reason}


def _gaps(there: set[int], number: int) -> list[tuple[int, int]]:
    """First and last of the numbers in a row that are not there; a damaged config may tell of too many to list."""
    found = [-1, *sorted(layer for layer in there if layer < number), number]
    return [(before + 1, after - 1) for before, after in pairwise(found) if after - before > 1]
