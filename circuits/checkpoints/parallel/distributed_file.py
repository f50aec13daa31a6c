"""Distributed checkpoints of torch: a .metadata file and the pieces of the tensors, read without running code."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import QkovError, named_input, reason
from ...storage.places import LocalPlace, Place
from ..pickles.archives import load_archive, load_bytes
from ..pickles.contents import contents_of
from ..pickles.placeholders import DamagedError, Placeholder
from ..pickles.stored import StoredTensor, demand_sizes, whole_numbers
from ..sharded_file import demand_inside
from ..tensor_file import TensorFile

#: Name of the file that says what each of the others holds.
METADATA = ".metadata"
#: The extension of the others.
PIECES = ".distcp"
#: Longer objects beside the tensors are not looked at.
_LONGEST_OBJECT = 65536


@dataclass(frozen=True)
class _Piece:
    """Where a part of a tensor, or an object, is stored."""

    file: str
    start: int
    stop: int
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()


class DistributedCheckpoint(TensorFile):
    """A folder that torch.distributed.checkpoint wrote, whose tensors are put together from their pieces."""

    def __init__(self, metadata: Place) -> None:
        """Read what the metadata says about each tensor, and the small objects beside them.

        Args:
            metadata: The place of the .metadata file.

        Raises:
            QkovError: The metadata is damaged, names files that are missing or outside its folder, or describes pieces
                that do not make up the tensors.
        """
        super().__init__(metadata.address)
        if metadata.parent is None:
            raise QkovError(f"{metadata} is not in a folder, so its files cannot be found")
        self._metadata, self._folder = metadata, metadata.parent
        self.waits = not isinstance(metadata, LocalPlace)
        with named_input(metadata.address, "the metadata of a distributed checkpoint"):
            with metadata.local_copy() as path:
                loaded = load_archive(path).content
            described = _table(loaded, "state_dict_metadata")
            stored = _stored_pieces(_table(loaded, "storage_data"))
            self._types = {name: _type_of(entry) for name, entry in described.items() if _is_tensor(entry)}
            self._pieces = {name: _pieces(name, described[name], stored) for name in self._types}
            self.shapes = {name: _size_of(described[name]) for name in self._types}
            self._demand_covered()
            self.containers = _containers(loaded)
        objects = {
            name: stored[name][None]
            for name in described
            if name not in self._types and None in stored.get(name, {}) and isinstance(name, str)
        }
        files = {piece.file for pieces in (*self._pieces.values(), objects.values()) for piece in pieces}
        for file in sorted(files):
            demand_inside(file, "a tensor", metadata)
            if not self._folder.child(file).is_file():
                raise QkovError(f"{self._folder.child(file)} is missing, but {metadata} names it; copy it as well")
        self._versions = {file: self._folder.child(file).version() for file in files}
        self._read_objects(
            {name: piece for name, piece in objects.items() if piece.stop - piece.start < _LONGEST_OBJECT}
        )
        known = {*self.values, *self.lists, *self.unread}
        self.unread |= dict.fromkeys(sorted(objects.keys() - known), "an object that holds no plain value")

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the tensors with these names, put together from their pieces.

        Raises:
            QkovError: A file is missing or damaged, or was written again since the metadata was read.
        """
        pieces = [piece for name in names for piece in self._pieces[name]]
        contents = dict(zip(map(id, pieces), self._fetch(pieces), strict=True))
        tensors = {}
        for name in names:
            with named_input(f"{name} of {self.address}", "pieces of a distributed checkpoint"):
                tensor = torch.empty(self.shapes[name], dtype=self._types[name])
                for piece in self._pieces[name]:
                    part = load_bytes(contents[id(piece)]).content
                    if not isinstance(part, StoredTensor) or part.shape != piece.sizes or part.dtype != tensor.dtype:
                        raise DamagedError(f"{piece.file} holds another tensor at byte {piece.start}")
                    part.demand_bounded(piece.stop - piece.start)
                    where = tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.sizes, strict=True))
                    tensor[where] = part.read(name)
                tensors[name] = tensor
        return tensors

    def _fetch(self, pieces: Sequence[_Piece]) -> list[np.ndarray]:
        """Return the bytes of each piece, with one request for each file."""
        contents: dict[int, np.ndarray] = {}
        for file in dict.fromkeys(piece.file for piece in pieces):
            place = self._folder.child(file)
            of_file = [(at, piece) for at, piece in enumerate(pieces) if piece.file == file]
            place.demand_version(self._versions[file])
            read = place.fetch([(piece.start, piece.stop) for _, piece in of_file])
            place.demand_version(self._versions[file])
            contents |= {at: content for (at, _), content in zip(of_file, read, strict=True)}
        return [contents[at] for at in range(len(pieces))]

    def _read_objects(self, objects: Mapping[str, _Piece]) -> None:
        """Take the plain values among the objects that stand beside the tensors, such as the step."""
        for (name, piece), content in zip(objects.items(), self._fetch(list(objects.values())), strict=True):
            try:
                held = contents_of({name: load_bytes(content).content}, piece.stop - piece.start, content.size)
            except (DamagedError, RecursionError) as error:
                self.unread[name] = f"an object that is damaged ({reason(error)})"
                continue
            self.values |= held.values
            self.lists |= held.lists
            self.unread |= held.unread

    def _demand_covered(self) -> None:
        """Refuse tensors that their pieces do not cover once."""
        for name, pieces in self._pieces.items():
            shape, stored = self.shapes[name], sum(piece.stop - piece.start for piece in pieces)
            demand_sizes(shape, 8 * self._types[name].itemsize, stored)
            inside = all(
                len(piece.offsets) == len(piece.sizes) == len(shape)
                and all(o + n <= whole for o, n, whole in zip(piece.offsets, piece.sizes, shape, strict=True))
                for piece in pieces
            )
            if not inside or sum(prod(piece.sizes) for piece in pieces) != prod(shape):
                raise DamagedError(f"its pieces of {name} do not make up a tensor of shape {list(shape)}")
            if len(pieces) > 1:
                covered = torch.zeros(shape, dtype=torch.bool)
                for piece in pieces:
                    covered[tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.sizes, strict=True))] = True
                if not covered.all():
                    raise DamagedError(f"its pieces of {name} overlap")


def is_distributed(names: Sequence[str]) -> bool:
    """Return whether the entries of a folder are those of a distributed checkpoint."""
    return METADATA in names and any(name.endswith(PIECES) for name in names)


def _table(loaded: Any, name: str) -> dict[Any, Any]:
    table = loaded.attributes.get(name) if isinstance(loaded, Placeholder) else None
    if not isinstance(table, dict):
        raise DamagedError(f"it has no table {name}")
    return table


def _containers(loaded: Any) -> tuple[str, ...]:
    """Return the first key of each nested entry, as the metadata lists the keys that its names join."""
    paths = loaded.attributes.get("planner_data") if isinstance(loaded, Placeholder) else None
    nested = (
        [path for path in paths.values() if isinstance(path, tuple) and len(path) > 1]
        if isinstance(paths, dict)
        else []
    )
    return tuple(dict.fromkeys(str(path[0]) for path in nested))


def _is_tensor(entry: Any) -> bool:
    return isinstance(entry, Placeholder) and entry.name.endswith("TensorStorageMetadata")


def _type_of(entry: Placeholder) -> torch.dtype:
    properties = entry.attributes.get("properties")
    state = properties.state if isinstance(properties, Placeholder) else None
    values = state.values() if isinstance(state, dict) else state if isinstance(state, tuple) else ()
    dtype = next((value for value in values if isinstance(value, torch.dtype)), None)
    if dtype is None:
        raise DamagedError("it does not say the type of a tensor")
    return dtype


def _size_of(entry: Placeholder) -> tuple[int, ...]:
    return whole_numbers(entry.attributes.get("size"))


def _stored_pieces(table: dict[Any, Any]) -> dict[str, dict[tuple[int, ...] | None, _Piece]]:
    """Return where everything is stored, by its name and the offsets of the piece."""
    stored: dict[str, dict[tuple[int, ...] | None, _Piece]] = {}
    for index, info in table.items():
        if not isinstance(index, Placeholder) or not isinstance(info, Placeholder):
            raise DamagedError("its table storage_data has entries of another form")
        name, offset = index.attributes.get("fqn"), index.attributes.get("offset")
        file, start, length = (info.attributes.get(key) for key in ("relative_path", "offset", "length"))
        if info.attributes.get("transform_descriptors"):
            raise DamagedError(f"{name} is stored in a transformed form, such as compressed")
        if not isinstance(name, str) or not isinstance(file, str):
            raise DamagedError("an entry of its table storage_data has no name or no file")
        start, length = whole_numbers((start, length))
        key = None if offset is None else whole_numbers(offset)
        stored.setdefault(name, {})[key] = _Piece(file, start, start + length)
    return stored


def _pieces(
    name: str, entry: Placeholder, stored: Mapping[str, Mapping[tuple[int, ...] | None, _Piece]]
) -> list[_Piece]:
    chunks = entry.attributes.get("chunks")
    if not isinstance(chunks, list) or not all(isinstance(chunk, Placeholder) for chunk in chunks):
        raise DamagedError(f"it does not say which pieces {name} has")
    pieces = []
    for chunk in chunks:
        offsets, sizes = (whole_numbers(chunk.attributes.get(key)) for key in ("offsets", "sizes"))
        held = stored.get(name, {})
        where = held.get(offsets) or (held.get(None) if len(chunks) == 1 else None)
        if where is None:
            raise DamagedError(f"it does not say where {name} at {list(offsets)} is stored")
        pieces.append(_Piece(where.file, where.start, where.stop, offsets, sizes))
    return pieces
