"""Architectures as data: the families whose attention is read, and what is named and skipped.

A file of `families/` is a mapping with holes: `{ config = "n_head" }` stands for what the config beside the weights
says under that key, or under the first of several that is there.
"""

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from .tensor_names import named

_FAMILIES = files(__name__.rpartition(".")[0]).joinpath("families")


@dataclass(frozen=True)
class Architecture:
    """One family of models whose attention tensors have the same names and layouts.

    Attributes:
        key: name of its file, by which it can be asked for.
        title: in words.
        model_types: what transformers calls the models of the family.
        stacks: the mapping of each stack, with holes.
        by_names: whether tensor names alone recognise it; families that share them with another leave it to that one.
        marks: tensors that have to be there for its names alone to recognise it. Of two families that fit as well, the
            one with more of them beside its attention's own is meant.
        needs_config: facts that its names do not tell, since other families have the same ones: a config does, or who
            asks for the family.
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
    """Attention that has no W_QK = W_K W_Q' and W_OV = W_O W_V, or none that is read here.

    Attributes:
        title: in words.
        reason: why not.
        model_types: what transformers calls such models.
        tensors: names by which its layers are known.
        whole: whether a model that has these tensors is of this kind as a whole, whatever others it has.
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
    """Return the family of a model_type, of all the files reading only those that have the word in them."""
    for key, text in _texts().items():
        if key != _UNSUPPORTED and f'"{model_type}"' in text and model_type in _architecture(key).model_types:
            return _architecture(key)
    return None


@cache
def unsupported() -> tuple[Unsupported, ...]:
    """Return what is named and skipped."""
    return tuple(Unsupported(**_with_tuples(entry)) for entry in tomllib.loads(_texts()[_UNSUPPORTED])["unsupported"])


@cache
def _texts() -> dict[str, str]:
    resources = sorted(_FAMILIES.iterdir(), key=lambda each: each.name)
    return {
        resource.name.removesuffix(".toml"): resource.read_text(encoding="utf-8")
        for resource in resources
        if resource.name.endswith(".toml")
    }


@cache
def _architecture(key: str) -> Architecture:
    return Architecture(key=key, **_with_tuples(tomllib.loads(_texts()[key])))


def _with_tuples(table: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in table.items()}


def skipped(names: Iterable[str]) -> dict[str, str]:
    """What of the file is attention of a kind that has no such circuits, and the reason."""
    found = {}
    for entry in unsupported():
        layers = _layers(entry, names)
        if layers:
            numbers = sorted(layer for layer in layers if layer is not None)
            where = (
                f"layers {', '.join(map(str, numbers))}"
                if len(numbers) > 1
                else f"layer {numbers[0]}"
                if numbers
                else "all"
            )
            found[f"{where} ({entry.title})"] = entry.reason
    return found


def skipped_layers(names: Iterable[str]) -> set[int]:
    """The numbers of the layers that `skipped` names."""
    return {layer for entry in unsupported() for layer in _layers(entry, names) if layer is not None}


def _layers(entry: Unsupported, names: Iterable[str]) -> set[int | None]:
    """The numbers of the layers of that kind; None for one without a number."""
    found = (match.groupdict().get("layer") for template in entry.tensors for match in named(template, names))
    return {None if layer is None else int(layer) for layer in found}
