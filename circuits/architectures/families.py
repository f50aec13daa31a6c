"""Architectures as data: the families whose attention is read, and the kinds of attention that are not.

Each file of `families/` describes one family; `families/README.md` explains every key. `{ config = "n_head" }` stands
for the value that the config beside the weights has under that key.
"""

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from .schema import check_family, check_unsupported
from .tensor_names import named

_FAMILIES = files(__name__.rpartition(".")[0]).joinpath("families")


@dataclass(frozen=True)
class Architecture:
    """One family of models whose attention tensors have the same names and layouts.

    Attributes:
        key: Name of its file, by which users select it.
        title: The models, in words.
        model_types: Values of `model_type` in transformers' configs of the family.
        stacks: The mapping of each stack of layers, with look-ups.
        by_names: Whether tensor names alone may select it. False if another family has the same names.
        marks: Tensors that must exist if names alone are to select it. If two families fit equally well, the one with
            more marks beside its attention tensors is chosen.
        needs_config: Facts that its names do not determine, because other families have the same names. They are
            unknown unless there is a config, or the user selects the family.
        undetermined: Facts that neither its names nor a config determine. They are unknown unless the user selects the
            family.
        config_keys: Keys that a config without model_type must have to be used for this family. One of
            several suffices where "or" stands between them.
        own_keys: Keys that the family's own code writes into its config. Others may change the facts that they name.
    """

    key: str
    title: str
    model_types: tuple[str, ...] = ()
    stacks: tuple[dict[str, Any], ...] = ()
    by_names: bool = True
    marks: tuple[str, ...] = ()
    needs_config: tuple[str, ...] = ()
    undetermined: tuple[str, ...] = ()
    config_keys: tuple[str, ...] = ()
    own_keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class Unsupported:
    """Attention that has no W_QK = W_K W_Q^T and W_OV = W_O W_V of its own, or none that qkov reads.

    Attributes:
        title: The kind of attention, in words.
        reason: Why it is not read.
        model_types: Values of `model_type` in transformers' configs of such models.
        tensors: Names by which its layers are recognised.
        whole: Whether a model that has these tensors is not read at all, even if it has others.
    """

    title: str
    reason: str
    model_types: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()
    whole: bool = False


_UNSUPPORTED = "unsupported"


@cache
def architectures() -> dict[str, Architecture]:
    """Return every family by its key."""
    return {key: _architecture(key) for key in _texts() if key != _UNSUPPORTED}


def architecture_of(model_type: str) -> Architecture | None:
    """Return the family of a model_type, or None if there is none; only files that contain the word are parsed."""
    for key, text in _texts().items():
        if key != _UNSUPPORTED and f'"{model_type}"' in text and model_type in _architecture(key).model_types:
            return _architecture(key)
    return None


@cache
def unsupported() -> tuple[Unsupported, ...]:
    """Return the kinds of attention that are recognised and not read."""
    table = tomllib.loads(_texts()[_UNSUPPORTED])
    check_unsupported(table, f"families/{_UNSUPPORTED}.toml")
    return tuple(Unsupported(**_with_tuples(entry)) for entry in table["unsupported"])


@cache
def _texts() -> dict[str, str]:
    resources = sorted(_FAMILIES.iterdir(), key=lambda resource: resource.name)
    return {
        resource.name.removesuffix(".toml"): resource.read_text(encoding="utf-8")
        for resource in resources
        if resource.name.endswith(".toml")
    }


@cache
def _architecture(key: str) -> Architecture:
    return parse_family(key, _texts()[key])


def parse_family(key: str, text: str) -> Architecture:
    """Return the family that a family file describes.

    Args:
        key: Name of the file, without its suffix.
        text: The TOML in it.

    Raises:
        CallError: The file holds an unknown key, or a value of the wrong type; the message lists the known keys.
    """
    table = tomllib.loads(text)
    check_family(table, f"families/{key}.toml")
    return Architecture(key=key, **_with_tuples(table))


def _with_tuples(table: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in table.items()}


def skipped(names: Iterable[str]) -> dict[str, str]:
    """Return the layers of a file whose kind of attention is not read, in words, each with the reason."""
    names = list(names)
    reasons = {}
    for entry in unsupported():
        layers = _layers(entry, names)
        if layers:
            numbers = sorted(layer for layer in layers if layer is not None)
            where = "all"
            if numbers:
                where = f"layer{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
            reasons[f"{where} ({entry.title})"] = entry.reason
    return reasons


def skipped_layers(names: Iterable[str]) -> set[int]:
    """Return the numbers of the layers that `skipped` names."""
    names = list(names)
    return {layer for entry in unsupported() for layer in _layers(entry, names) if layer is not None}


def _layers(entry: Unsupported, names: Iterable[str]) -> set[int | None]:
    """Return the numbers of the layers of that kind; None stands for a layer without a number."""
    numbers = (match.groupdict().get("layer") for template in entry.tensors for match in named(template, names))
    return {None if number is None else int(number) for number in numbers}
