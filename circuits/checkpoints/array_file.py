"""Files of numpy's arrays: .npy with one array, .npz with several. Pickled objects in them are never loaded."""

import zipfile
from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO
from typing import Any

import numpy as np
from torch import Tensor

from ..errors import QkovError, named_input
from ..storage.places import Place
from .pickles.archives import MappedFile, records
from .pickles.arrays import PickledType, array_tensor
from .pickles.contents import ONLY
from .pickles.placeholders import DamagedError
from .pickles.stored import StoredBytes, StoredTensor, demand_sizes
from .tensor_file import Plain, TensorFile

#: Longer headers count as damage, as in numpy itself.
_LARGEST_HEADER = 10_000
#: How many bytes a header and what stands in front of it take at most.
_BEGINNING = _LARGEST_HEADER + 20
#: No file has more bytes for each byte that deflate makes of it.
_MOST_COMPRESSED = 1032


class ArrayFile(TensorFile):
    """A file of numpy's arrays, mapped from the disk; compressed arrays are unpacked when they are read."""

    def __init__(self, place: Place) -> None:
        """Read the headers; a remote file is copied to this machine first, and the copy is removed once it is open.

        Args:
            place: The place of the file.

        Raises:
            QkovError: The file is damaged, or holds nothing but objects that only a pickle describes.
        """
        super().__init__(place.address)
        self._place, self._version = place, place.version()
        self._arrays: dict[str, StoredTensor] = {}
        self._packed: dict[str, zipfile.ZipInfo] = {}
        self._begins: dict[str, int] = {}
        with named_input(place.address, "a file of numpy arrays"):
            with place.local_copy() as path:
                self._mapped = MappedFile(path)
            self._read_headers()
        self.shapes = {name: array.shape for name, array in self._arrays.items()}
        if not self.shapes and self.unread:
            name, why = next(iter(self.unread.items()))
            raise QkovError(f"{place} holds no array that can be read: {name} is {why}; save arrays of numbers")
        numbers = self.read([name for name, shape in self.shapes.items() if shape == ()])
        plain = {name: number.item() for name, number in numbers.items()}
        self.values = {name: value for name, value in plain.items() if isinstance(value, Plain)}

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the arrays with these names as tensors.

        Raises:
            QkovError: An array is damaged, or the file was written again since it was opened.
        """
        self._place.demand_version(self._version)
        read = {name: self._array(name).read(f"{name} of {self.address}") for name in names}
        self._place.demand_version(self._version)
        return read

    def _read_headers(self) -> None:
        content = np.frombuffer(self._mapped, dtype=np.uint8)
        if self._mapped[:6] == b"\x93NUMPY":
            self._add(ONLY, content, content.size)
            return
        for record, held in records(self._mapped, content).items():
            name = record.removesuffix(".npy")
            if isinstance(held, zipfile.ZipInfo):
                self._packed[name] = held
                beginning = np.frombuffer(self._unpacked(held, _BEGINNING), dtype=np.uint8)
                self._add(name, beginning, held.file_size)
            else:
                self._add(name, held, held.size)

    def _add(self, name: str, content: np.ndarray, size: int) -> None:
        """Add an array by its header.

        Args:
            name: The name of the array.
            content: The bytes of its file, or those at its beginning.
            size: The number of bytes of its file.
        """
        stream = BytesIO(content[:_BEGINNING].tobytes())
        version = np.lib.format.read_magic(stream)
        if version == (1, 0):
            header = np.lib.format.read_array_header_1_0(stream, max_header_size=_LARGEST_HEADER)
        elif version == (2, 0):
            header = np.lib.format.read_array_header_2_0(stream, max_header_size=_LARGEST_HEADER)
        elif version == (3, 0):
            self.unread[name] = "an array of records"
            return
        else:
            raise DamagedError(f"{name} is of an unknown version of the format")
        shape, is_fortran, dtype = header
        begin = stream.tell()
        described = PickledType(dtype.str)
        kind = described.in_torch
        if dtype.hasobject:
            self.unread[name] = "Python objects, which only a pickle describes and which are not loaded"
        elif kind is None or dtype.names is not None:
            self.unread[name] = f"an array of {dtype}, which is not a type of numbers that can be read"
        else:
            demand_sizes(shape, 8 * kind.itemsize, size)
            self._arrays[name] = array_tensor(content[begin:], kind, shape, is_fortran, described.swapped)
            if name in self._packed:
                self._begins[name] = begin
            else:
                self._arrays[name].demand_bounded(size)

    def _array(self, name: str) -> StoredTensor:
        """Return an array whose bytes are at hand, unpacked if they are compressed."""
        array = self._arrays[name]
        if name not in self._packed:
            return array
        with named_input(f"{name} of {self.address}", "a compressed array"):
            packed = self._packed[name]
            content = np.frombuffer(self._unpacked(packed, packed.file_size), dtype=np.uint8)
            array = replace(array, storage=StoredBytes(content[self._begins[name] :], None, 0))
            array.demand_bounded(packed.file_size)
        return array

    def _unpacked(self, record: zipfile.ZipInfo, length: int) -> bytes:
        """Return the first bytes of a compressed record."""
        if record.compress_type != zipfile.ZIP_DEFLATED or record.file_size > _MOST_COMPRESSED * record.compress_size:
            raise DamagedError(f"its record {record.filename} is not compressed as numpy compresses")
        opened: Any = self._mapped
        with zipfile.ZipFile(opened) as archive, archive.open(record) as stream:
            return stream.read(length)
