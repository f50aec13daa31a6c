"""What a loaded file holds, as a flat table: tensors, plain values, lists, and what is not read, each by its name."""

import dataclasses
from argparse import Namespace
from collections.abc import Mapping as Dictionary
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...errors import QkovError
from ..tensor_file import Plain
from .arrays import PickledArray
from .placeholders import ALLOWANCE, DamagedError, Named, Placeholder
from .stored import HeldTensor, Readable, StoredBytes, StoredSparse, StoredTensor

#: Name of the tensor of a file that holds nothing else.
ONLY = "tensor"
#: How deeply containers may be nested.
_DEEPEST = 100
#: Forms in which a tensor's numbers are not the weights themselves, by the word that the name of its class holds.
_FORMS = {
    "_rebuild_qtensor": "quantised by torch; dequantise it (tensor.dequantize()) and save it again",
    "_rebuild_wrapper_subclass": "a tensor in another library's form; convert it to a plain tensor and save it again",
    "DTensor": "distributed over processes (DTensor); gather it (full_tensor) and save it again",
    "_rebuild_nested_tensor": "a nested tensor, whose rows differ in length",
    "Params4bit": "quantised by bitsandbytes to 4 bits; dequantise the model and save it again",
    "Int8Params": "quantised by bitsandbytes to 8 bits; dequantise the model and save it again",
}


@dataclass
class Contents:
    """The contents of a file by name; the keys of nested containers are joined with dots.

    Attributes:
        tensors: The tensors and arrays.
        values: Plain values.
        lists: Lists of plain values.
        collections: The keys of each list and dictionary of containers that hold tensors, such as (0, 1, 2).
        containers: The entries of the file itself that are containers with tensors, such as `model` and `optimizer`.
        unread: What is not read, with the reason.
    """

    tensors: dict[str, Readable] = field(default_factory=dict)
    values: dict[str, Plain] = field(default_factory=dict)
    lists: dict[str, tuple[Plain, ...]] = field(default_factory=dict)
    collections: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    containers: list[str] = field(default_factory=list)
    unread: dict[str, str] = field(default_factory=dict)


def contents_of(loaded: Any, described_by: int, size: int) -> Contents:
    """Return what a file holds, by name.

    Args:
        loaded: What was loaded from it, inert or not.
        described_by: The number of bytes that describe the content, without those of the tensors, which bounds the
            work.
        size: The number of bytes of the file, which bounds its tensors.

    Raises:
        DamagedError: Containers hold themselves, are nested too deeply, or share their content too often.
    """
    walk = _Walk(described_by, size)
    if members_of(loaded) is None:
        walk.add(ONLY, loaded, ())
    else:
        inner = walk.enter("", loaded, ())
        # The parts of a module are one model.
        walk.contents.containers = [] if is_module(loaded) else [_text(key) for key in inner]
    walk.drop_ambiguous()
    return walk.contents


class _Walk:
    """A walk through nested containers that gives every entry its name."""

    def __init__(self, described_by: int, size: int) -> None:
        self.contents = Contents()
        self._size = size
        self._entries_left = described_by + ALLOWANCE // 8
        self._letters_left = 16 * described_by + 16 * ALLOWANCE
        self._ambiguous: set[str] = set()

    def enter(self, prefix: str, container: Any, outer: tuple[int, ...]) -> list[Any]:
        """Add the members of a container, and return the keys of those that are containers with tensors."""
        if id(container) in outer:
            raise DamagedError("it holds dictionaries that hold themselves")
        if len(outer) > _DEEPEST:
            raise DamagedError(f"its containers are nested more than {_DEEPEST} deep")
        members = members_of(container) or {}
        self._entries_left -= len(members)
        inside = (*outer, id(container))
        inner = []
        for key, value in members.items():
            name = f"{prefix}{_text(key)}"
            self._letters_left -= len(name)
            if self._entries_left < 0 or self._letters_left < 0:
                raise DamagedError("its containers share their content more often than a file of its size does")
            if self.add(name, value, inside):
                inner.append(key)
        if inner and _is_collection(container):
            self.contents.collections[prefix.removesuffix(".")] = tuple(inner)
        return inner

    def add(self, name: str, value: Any, outer: tuple[int, ...]) -> bool:
        """Add one entry, and return whether it is a container that holds tensors."""
        contents = self.contents
        # Most entries of a large file are plain containers, which need not be tried as anything else.
        is_container = type(value) in (dict, list, tuple)
        tensor = None if is_container else _tensor(value)
        if tensor is not None:
            self._add_tensor(name, tensor)
            return False
        plain = None if is_container else plain_of(value)
        if plain is not None:
            self._once(name, contents.values)
            contents.values[name] = plain
        elif not is_container and (form := _other_form(value)) is not None:
            contents.unread[name] = form
        elif isinstance(value, (list, tuple)) and value and all(isinstance(part, Plain) for part in value):
            contents.lists[name] = tuple(value)
        elif members_of(value) is not None:
            before = len(contents.tensors)
            self.enter(f"{name}.", value, outer)
            return len(contents.tensors) > before
        elif value is not None:
            contents.unread[name] = f"an object of {_kind(value)}, which only code could build"
        return False

    def _add_tensor(self, name: str, tensor: Readable) -> None:
        tensor.demand_bounded(self._size)
        self._once(name, self.contents.tensors)
        self.contents.tensors[name] = tensor
        if tensor.shape == () and (number := _number(tensor)) is not None:
            self.contents.values[name] = number

    def _once(self, name: str, table: Dictionary[str, Any]) -> None:
        if name in table:
            self._ambiguous.add(name)

    def drop_ambiguous(self) -> None:
        """Name the entries of which there are two under one name, and keep neither."""
        for name in self._ambiguous:
            self.contents.tensors.pop(name, None)
            self.contents.values.pop(name, None)
            self.contents.unread[name] = "two entries have this name, so it is not known which one is meant"


def members_of(value: Any) -> Dictionary[Any, Any] | None:
    """Return the members of a container by key, or None for anything else."""
    if isinstance(value, Dictionary):
        return value
    if isinstance(value, (list, tuple, set, frozenset)):
        return dict(enumerate(value))
    if isinstance(value, Placeholder):
        return _members_of_placeholder(value)
    if isinstance(value, nn.Module):
        return value.state_dict()
    if isinstance(value, (Namespace, SimpleNamespace)):
        return vars(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, Readable)):
        return {each.name: getattr(value, each.name, None) for each in dataclasses.fields(value)}
    return None


def _members_of_placeholder(value: Placeholder) -> Dictionary[Any, Any] | None:
    attributes = value.attributes
    if is_module(value):
        return _of_module(attributes)
    if value.elements and not attributes and not value.entries:
        return dict(enumerate(value.elements))
    return {**attributes, **value.entries} or None


def is_module(value: Any) -> bool:
    """Return whether something is a module of torch, or the placeholder of one."""
    if isinstance(value, Placeholder):
        return {"_parameters", "_buffers", "_modules"} <= value.attributes.keys()
    return isinstance(value, nn.Module)


def _of_module(attributes: Dictionary[Any, Any]) -> dict[Any, Any]:
    """Return what the state dict of a pickled module holds, from the attributes that torch.nn.Module keeps."""
    skipped = attributes.get("_non_persistent_buffers_set")
    skipped = skipped if isinstance(skipped, (list, set, tuple)) else ()
    parts = [attributes[part] for part in ("_parameters", "_buffers", "_modules")]
    members = {key: value for part in parts if isinstance(part, dict) for key, value in part.items()}
    return {key: value for key, value in members.items() if key not in skipped and value is not None}


def _is_collection(container: Any) -> bool:
    """Return whether the members of a container may be the same thing several times, as in a list."""
    if isinstance(container, (list, tuple)):
        return True
    return isinstance(container, Dictionary) and all(
        isinstance(key, (str, int, float)) and any(map(str.isdigit, str(key))) for key in container
    )


def _tensor(value: Any) -> Readable | None:
    if isinstance(value, (StoredTensor, StoredSparse)):
        return value
    if isinstance(value, PickledArray):
        return value.stored
    if isinstance(value, Tensor):
        return None if value.is_quantized else HeldTensor(value)
    if isinstance(value, np.ndarray):
        try:
            native = value.astype(value.dtype.newbyteorder("="), copy=False)
            return HeldTensor(torch.from_numpy(np.ascontiguousarray(native).reshape(value.shape)))
        except TypeError:
            return None
    return None


def _other_form(value: Any) -> str | None:
    """Return what a tensor is that cannot be read as it is, or None for anything else."""
    if isinstance(value, PickledArray):
        return f"an array of numpy of {value.kind}, which is not a type of numbers that can be read"
    if isinstance(value, np.ndarray):
        return f"an array of numpy of {value.dtype}, which is not a type of numbers that can be read"
    if isinstance(value, Tensor):
        return _FORMS["_rebuild_qtensor"]
    if isinstance(value, (StoredBytes, torch.UntypedStorage, torch.TypedStorage)):
        return "a storage of torch, which has no shape"
    if not isinstance(value, Placeholder):
        return None
    of_tensor = value.arguments and value.arguments[0] in ("torch._utils._rebuild_tensor_v2",)
    names = [value.name, *(each.name for each in value.arguments if isinstance(each, Named))]
    form = next((why for word, why in _FORMS.items() if any(word in name for name in names)), None)
    if form is None and (of_tensor or "_rebuild_" in value.name):
        return f"a tensor of {value.name}, and what its numbers mean is not known; save it as a plain tensor"
    return form


def plain_of(value: Any) -> Plain | None:
    """Return a plain value, or None for anything else."""
    if isinstance(value, Placeholder) and value.name.startswith("omegaconf."):
        value = value.attributes.get("_val")
    if isinstance(value, np.generic):
        value = value.item()
    return value if isinstance(value, Plain) else None


def _number(tensor: Readable) -> Plain | None:
    """Return the number in a tensor of no dimension, or None if it has no value or is complex."""
    try:
        number = tensor.read("a number").item()
    except (QkovError, RuntimeError):
        return None
    return number if isinstance(number, Plain) else None


def _text(key: Any) -> str:
    """Return a key as part of a name."""
    if isinstance(key, bytes):
        return key.decode("utf-8", "replace")
    return key.name if isinstance(key, (Named, Placeholder)) else str(key)


def _kind(value: Any) -> str:
    if isinstance(value, (Named, Placeholder)):
        return value.name
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
