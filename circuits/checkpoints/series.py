"""Several checkpoints in one file: lists of state dicts, and dictionaries of them keyed by step or epoch."""

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .tensor_file import Plain, TensorFile

#: Words for what a series runs over, as they appear in the names of lists, dictionaries and their keys.
_WORDS = re.compile(r"step|epoch|iter|checkpoint|ckpt|snapshot|history|state_dicts", re.IGNORECASE)


@dataclass(frozen=True)
class Series:
    """A list or a dictionary in a file whose members hold tensors of the same names and shapes.

    Nested lists of layers look the same, so a series is one of checkpoints only as far as something says so.

    Attributes:
        name: The name of the list or dictionary, such as `checkpoints`; empty if it is the whole file.
        keys: The position of each member in the list, or its key in the dictionary.
        prefixes: The prefix of each member's tensors, such as `checkpoints.0`; `element_of` opens it.
        beside: The lists beside it that have one value for each member, such as `checkpoint_epochs`, by full name.
        values: The plain values that every member holds, such as its `step`, one for each member.
        is_named: Whether its name, its keys, a list beside it or a value of its members have a word for steps, epochs
            or checkpoints.
    """

    name: str
    keys: tuple[Any, ...]
    prefixes: tuple[str, ...]
    beside: Mapping[str, tuple[Plain, ...]]
    values: Mapping[str, tuple[Plain, ...]]
    is_named: bool


def series_in(file: TensorFile) -> list[Series]:
    """Return the lists and dictionaries in a file whose members hold tensors of the same names and shapes.

    The state of an optimizer is not among them. The members of a series within a series are left to the outer one.
    """
    if not file.collections:
        return []
    names, values = sorted(file.shapes), sorted(file.values)
    found: list[Series] = []
    for name, keys in sorted(file.collections.items(), key=lambda item: (item[0].count("."), item[0])):
        prefixes = tuple(f"{name}.{key}" if name else str(key) for key in keys)
        if "optim" in name.lower() or any(name.startswith(f"{prefix}.") for each in found for prefix in each.prefixes):
            continue
        members = [_under(prefix, names) for prefix in prefixes]
        shapes = [{part: file.shapes[f"{prefix}.{part}"] for part in members[0]} for prefix in prefixes[:1]]
        if any(
            parts != members[0] or {part: file.shapes[f"{prefix}.{part}"] for part in parts} != shapes[0]
            for prefix, parts in zip(prefixes, members, strict=True)
        ):
            continue
        of_members = [_under(prefix, values) for prefix in prefixes]
        common = [part for part in of_members[0] if all(part in parts for parts in of_members)]
        beside = _beside(file, name, len(keys))
        words = [other.rpartition(".")[2] for other in (name, *beside)]
        words += [*map(str, keys), *(part for part in common if "." not in part)]
        found.append(
            Series(
                name,
                keys,
                prefixes,
                beside,
                {part: tuple(file.values[f"{prefix}.{part}"] for prefix in prefixes) for part in common},
                any(_WORDS.search(word) for word in words),
            )
        )
    return found


def element_of(file: TensorFile, prefix: str) -> TensorFile:
    """Return one member of a series as a file of its own, whose names lack the prefix.

    Args:
        file: The file that holds the series.
        prefix: One of the prefixes of the series.
    """
    return SeriesElement(file, prefix)


class SeriesElement(TensorFile):
    """The tensors of a file under one prefix, by their names without it."""

    def __init__(self, file: TensorFile, prefix: str) -> None:
        """Take what stands under the prefix.

        Args:
            file: The file.
            prefix: The prefix, without the dot at its end.
        """
        super().__init__(f"{file.address} ({prefix})")
        self._file, self._prefix = file, prefix
        self.waits, self.metadata = file.waits, file.metadata
        self.config, self.config_origin, self.partial = file.config, file.config_origin, file.partial
        self.shapes = {name: file.shapes[f"{prefix}.{name}"] for name in _under(prefix, sorted(file.shapes))}
        self.values = _cut(file.values, prefix)
        self.lists, self.collections = _cut(file.lists, prefix), _cut(file.collections, prefix)
        self.unread = _cut(file.unread, prefix)

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the tensors with these names.

        Raises:
            QkovError: As for the file itself.
        """
        read = self._file.read([f"{self._prefix}.{name}" for name in names])
        return {name: read[f"{self._prefix}.{name}"] for name in names}


def _under(prefix: str, names: Sequence[str]) -> list[str]:
    """Return the names under a prefix without it, from sorted names."""
    begin = bisect_left(names, f"{prefix}.")
    stop = bisect_left(names, f"{prefix}/")  # the character after the dot
    return [name[len(prefix) + 1 :] for name in names[begin:stop]]


def _cut(table: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {name[len(prefix) + 1 :]: value for name, value in table.items() if name.startswith(f"{prefix}.")}


def _beside(file: TensorFile, name: str, length: int) -> dict[str, tuple[Plain, ...]]:
    """Return the lists and arrays beside a series that have as many values as it has members."""
    folder = name.rpartition(".")[0]
    lists = {
        other: values
        for other, values in file.lists.items()
        if name and other.rpartition(".")[0] == folder and len(values) == length
    }
    arrays = [
        other
        for other, shape in file.shapes.items()
        if name and other.rpartition(".")[0] == folder and shape == (length,)
    ]
    return lists | {other: tuple(tensor.tolist()) for other, tensor in file.read(arrays).items()}
