"""Recognise an architecture by its config or its tensor names, and make the mappings of its stacks."""

from collections.abc import Iterable
from collections.abc import Mapping as Dictionary
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from ..checkpoints.quantised import other_form
from ..checkpoints.tensor_file import TensorFile
from ..errors import CallError, QkovError, named_input
from .config_lookups import Config, cases, filled, look_up
from .evidence import contradictions, with_biases
from .families import Architecture, architecture_of, architectures, skipped, skipped_layers, unsupported
from .fitting import fitting_families
from .head_counts import StatedHeads
from .layouts import width_of_model
from .mapping import Mapping, Names, seen
from .named_layouts import TARGETS
from .stack_heads import demand_config_of_same_model, heads_of_stack, stated_width
from .stacks import mapping_under, needs_heads, prefixes_of, weight_names
from .stated_facts import UNKNOWN
from .tensor_names import named


@dataclass(frozen=True)
class Recognised:
    """The mappings of a checkpoint, or of a model in memory.

    Attributes:
        how: How they were found, in words.
        stacks: The mapping of each stack of layers.
        skipped: What is not read, with the reason.
        doubts: What the file or its config has that the family does not, or lacks, with the facts that are unknown
            therefore.
    """

    how: str
    stacks: tuple[Mapping, ...]
    skipped: dict[str, str] = field(default_factory=dict)
    doubts: dict[str, str] = field(default_factory=dict)


def recognise(
    file: TensorFile, family: str | None = None, heads: int | None = None, prefix: str | None = None
) -> Recognised:
    """Return the mappings of the stacks that a file holds.

    The family is the one that is asked for, else that of the config's model_type, else one that the names fit.

    Args:
        file: The file.
        family: Key of the family to use.
        heads: Number of query heads; None to infer it.
        prefix: Prefix of the tensor names; None to find it.

    Raises:
        CallError: There is no such family, or the number of heads is not positive.
        QkovError: No family fits, several do, qkov does not read this kind of attention, or the number of heads is
            missing. The message says what to do.
    """
    if heads is not None and heads < 1:
        raise CallError(f"heads should be at least 1, got {heads}")
    names, config = set(file.shapes), file.config
    model_type = None if config is None else config.get("model_type")
    if family is not None:
        if family not in architectures():
            raise CallError(f"there is no family {family!r}; known are {', '.join(architectures())}")
        architecture, how = architectures()[family], "as requested"
    elif model_type is not None:
        architecture, how = (
            _by_model_type(str(model_type), file),
            f"by model_type {model_type!r} in {file.config_origin}",
        )
    else:
        architecture, how = _by_names(file, prefix), "by its tensor names"
    if config is not None and (model_type is None or not architecture.model_types):
        # Any training script may have written the config, so it has to show that it belongs to this family.
        required = set(architecture.config_keys)
        config = config if required and all(_states(config, key) for key in required) else None
        how += "" if config is None else f", with the values of {file.config_origin}"
    unknown = ()
    if family is None:
        unknown = (*architecture.undetermined, *(architecture.needs_config if config is None else ()))
    origin = file.address if config is None else f"{file.config_origin} of {file.address}"
    with named_input(origin, architecture.title, "put the model's own config beside the weights"):
        try:
            mapped = list(_mappings(architecture, file, config, unknown, heads, prefix, family is not None))
        except CallError as error:
            if config is None:
                raise
            raise QkovError(f"{origin} cannot be used: {error}") from error
    stacks = tuple(mapping for mapping, *_ in mapped)
    _demand_distinct(stacks, file)
    if not stacks:
        wanted = ", ".join(weight_names(stack)[role] for stack in architecture.stacks for role in weight_names(stack))
        fitting = next(iter(fitting_families(file, prefix)), None)
        hint = (
            seen(names) if fitting is None else f"its names fit {fitting}; to read it as that, give --family {fitting}"
        )
        form = other_form(names)
        if form is not None:
            raise QkovError(f"{file.address} is {architecture.title} ({how}), but {form}, save it, and read that")
        raise QkovError(
            f"{file.address} should be {architecture.title} ({how}), but holds none of its attention weights: "
            f"expected {wanted}; {hint}"
        )
    left_out, doubts = skipped(names), {}
    for _, missing, of_stack in mapped:
        left_out |= missing
        doubts |= of_stack
    return Recognised(f"as {architecture.title} {how}", stacks, left_out, doubts)


def _states(config: Config, keys: str) -> bool:
    """Return whether the config has a value for one of several keys, between which "or" stands."""
    return any(look_up(config, key) is not None for key in keys.split(" or "))


def _demand_distinct(stacks: tuple[Mapping, ...], file: TensorFile) -> None:
    by_stack: dict[str, Mapping] = {}
    for mapping in stacks:
        other = by_stack.setdefault(mapping.stack, mapping)
        if other is not mapping:
            first, second = (next(iter(same_name.tensors.values())) for same_name in (other, mapping))
            raise QkovError(
                f"{file.address} holds two attentions that cannot be distinguished, {other.full_name(first)} and "
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
        f"its tensor names fit {', '.join(fitting)}; --family {next(iter(fitting))} reads it with the norm and the "
        f"positions of that family"
        if fitting
        else f"{seen(file.shapes)}; say which are W_Q, W_K, W_V and W_O in a mapping file (--map FILE.toml)"
    )
    raise QkovError(
        f"{file.address} has the model_type {model_type!r} in {file.config_origin}, which is unknown; {hint}"
    )


def _by_names(file: TensorFile, prefix: str | None) -> Architecture:
    for entry in unsupported():
        if entry.whole and any(named(template, file.shapes) for template in entry.tensors):
            raise QkovError(
                f"{file.address} is {entry.title}, as its names show, which is not measured: {entry.reason}"
            )
    fitting = fitting_families(file, prefix)
    if not fitting:
        form = other_form(set(file.shapes))
        if form is not None:
            raise QkovError(f"the weights of {file.address} cannot be read: {form}, save it, and read that")
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
    unknown: tuple[str, ...],
    heads: int | None,
    prefix: str | None,
    requested: bool,
) -> Iterable[tuple[Mapping, dict[str, str], dict[str, str]]]:
    """Yield the mapping of each stack, which of its layers are not read, and which of its facts are in doubt."""
    whole, names = config, set(file.shapes)
    for stack in architecture.stacks:
        config = _part_of(whole, stack)
        table = filled(stack, config, names) | dict.fromkeys(unknown, UNKNOWN)
        prefixes = prefixes_of(table, names, prefix)
        if len(prefixes) > 1:
            raise QkovError(
                f"{file.address} holds the tensors of {architecture.title} under several prefixes, "
                f"{', '.join(map(repr, prefixes))}: choose one with --prefix"
            )
        if not prefixes:
            continue
        first = next(iter(mapping_under(prefixes[0], table, title=architecture.title).layers(names).values()))
        role = next(role for role in first if role in TARGETS)
        form = other_form(names, first[role][0])
        if form is not None:
            raise QkovError(f"{first[role][0]} of {file.address} cannot be read: {form}, save it, and read that")
        if heads is not None:
            table["heads"] = heads
        table = with_biases(table, prefixes[0], names)
        # What a family needs to be recognised by is not needed where the caller names the family.
        is_whole = file.partial is None and not requested
        against = contradictions(table, prefixes[0], names, config, architecture.own_keys, is_whole)
        for what, (facts, reason) in file.open_facts.items():
            against.add(facts, what, f"{reason}: {', '.join(facts)} unknown")
        table |= dict.fromkeys(against.unknown, UNKNOWN)
        plain = mapping_under(prefixes[0], table, title=architecture.title)
        layers = plain.layers(names)
        stated = _stated_heads(stack, table, config, heads, plain, layers, file)
        if stated.query is None and stated.d_head is None and needs_heads(table):
            raise QkovError(
                f"{file.address} is {architecture.title}, and nothing states its number of heads: give --heads, "
                f"or put the model's config.json beside the weights"
            )
        of_layers = tuple(
            (numbers, {name: value for name, value in facts.items() if name not in against.unknown})
            for numbers, facts in cases(stack, config, names, frozenset(layers))
        )
        mapping = mapping_under(prefixes[0], table, of_layers, architecture.title, stated)
        number = table.get("number_of_layers")
        left_out = missing_layers(file, mapping, set(layers), number)
        if type(number) is int and number > 0:
            left_out |= layers_beyond(file, mapping, set(layers), number)
            mapping = replace(mapping, number_of_layers=number)
        demand_config_of_same_model(mapping, mapping.layers(names), config or {}, file)
        yield mapping, left_out, against.reasons


def _stated_heads(
    stack: dict[str, Any],
    table: dict[str, Any],
    config: Config | None,
    requested: int | None,
    mapping: Mapping,
    layers: dict[int, Names],
    file: TensorFile,
) -> StatedHeads:
    """Return what the caller or the config states about the heads of a stack."""
    if requested is not None:
        return StatedHeads(requested, stated_width(stack, config), origin="the width that the config states")
    of_first = mapping.shapes(next(iter(layers.values())), file.shapes)
    role = next((role for role in ("Q", "QKV") if role in of_first), None)
    d_model = None if role is None else width_of_model(of_first[role], mapping.layouts[role])
    return heads_of_stack(table, stack, config, layers, d_model)


def _part_of(config: Config | None, stack: dict[str, Any]) -> Config | None:
    """Return the part of the config that describes this stack, such as the text_config of a model with two stacks."""
    inner = None if config is None else config.get(stack.get("config_in", ""))
    return inner if isinstance(inner, Dictionary) else config


def missing_layers(file: TensorFile, mapping: Mapping, layers: set[int], number: object) -> dict[str, str]:
    """Return which layers of a stack are missing, in words, with the evidence; nothing if none is missing.

    Layers whose kind of attention is not read are not missing. If the file is only a part of a model, nothing is.

    Args:
        file: The file that holds the stack.
        mapping: The mapping of the stack.
        layers: Numbers of the layers that the file holds.
        number: Number of layers according to the config, anything but an int if it does not say.
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
    # Layers that share their weights are one entry of the file.
    whose = " with weights of their own" if "used_by" in mapping.facts.table else ""
    reason = (
        f"{file.config_origin} says that there are {number} layers{whose}, and the attention of {len(held)} of them "
        f"was found"
    )
    return {f"{mapping.stack} layer{several} {where}".lstrip(): reason}


def layers_beyond(file: TensorFile, mapping: Mapping, layers: set[int], number: int) -> dict[str, str]:
    """Return which layers of a file the model does not use, in words, with the evidence; nothing if there are none.

    Args:
        file: The file that holds the stack.
        mapping: The mapping of the stack.
        layers: Numbers of the layers that the file holds.
        number: Number of layers according to the config.
    """
    beyond = sorted(layer for layer in layers if layer >= number)
    if not beyond:
        return {}
    where = f"s {beyond[0]} to {beyond[-1]}" if len(beyond) > 1 else f" {beyond[0]}"
    reason = (
        f"{file.config_origin} says that there are {number} layers, so the model does not use "
        f"{'them' if len(beyond) > 1 else 'it'}; if it does, correct the number in the config"
    )
    return {f"{mapping.stack} layer{where}".lstrip(): reason}


def _gaps(there: set[int], number: int) -> list[tuple[int, int]]:
    """Return the first and the last number of each gap; a damaged config may claim more layers than can be listed."""
    present = [-1, *sorted(layer for layer in there if layer < number), number]
    return [(before + 1, after - 1) for before, after in pairwise(present) if after - before > 1]
