"""Safetensors files, read by byte ranges: the header first, then the requested tensors."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import QkovError
from ..storage.places import LocalPlace, Place
from .pickles.placeholders import DamagedError
from .pickles.stored import demand_sizes
from .tensor_file import Plain, TensorFile

#: Larger headers count as damage, as in safetensors itself.
LARGEST_HEADER = 100_000_000

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
if hasattr(torch, "float8_e8m0fnu"):  # torch 2.6 does not have it.
    _DTYPES["F8_E8M0"] = torch.float8_e8m0fnu


@dataclass(frozen=True)
class _Stored:
    """Where a tensor is in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class SafetensorsFile(TensorFile):
    """A local or remote safetensors file; the header is read when it is opened, a tensor when it is requested."""

    def __init__(self, place: Place) -> None:
        """Read the header.

        Raises:
            QkovError: The file is not a safetensors file, was cut short, or has an inconsistent header.
        """
        super().__init__(place.address)
        self._place, self._version = place, place.version()
        self.waits = not isinstance(place, LocalPlace)
        header, begin = _read_header(place)
        self.metadata = _metadata(header.pop("__metadata__", {}), place)
        self._stored = {name: _stored(name, entry, begin, place) for name, entry in header.items()}
        _demand_whole(self._stored, begin, place)
        self.shapes = {name: stored.shape for name, stored in self._stored.items()}
        self.values = self._numbers()

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the tensors with these names; no other bytes of the file are read.

        Raises:
            QkovError: A tensor has a dtype that torch does not have, the bytes cannot be read, or the file was written
                again since it was opened.
        """
        wanted = {name: self._stored[name] for name in names}
        for name, stored in wanted.items():
            if stored.dtype not in _DTYPES:
                raise QkovError(
                    f"{name} in {self.address} has dtype {stored.dtype}, which cannot be read; "
                    f"convert it to one of {', '.join(_DTYPES)}"
                )
        self._place.demand_version(self._version)
        contents = self._place.fetch([(stored.start, stored.stop) for stored in wanted.values()])
        self._place.demand_version(self._version)
        return {
            name: _tensor(content, _DTYPES[stored.dtype]).reshape(stored.shape)
            for (name, stored), content in zip(wanted.items(), contents, strict=True)
        }

    def _numbers(self) -> dict[str, Plain]:
        """Return the tensors of no dimension as plain values."""
        names = [name for name, stored in self._stored.items() if stored.shape == () and stored.dtype in _DTYPES]
        numbers = {name: tensor.item() for name, tensor in self.read(names).items()} if names else {}
        return {name: number for name, number in numbers.items() if isinstance(number, Plain)}


def _tensor(content: np.ndarray, dtype: torch.dtype) -> Tensor:
    # torch cannot view an empty array as another dtype.
    return torch.from_numpy(content).view(dtype) if content.size else torch.empty(0, dtype=dtype)


def _read_header(place: Place) -> tuple[dict[str, Any], int]:
    """Return the header, and the byte at which the tensors begin."""
    size = place.size()
    if size is not None and size < 8:
        raise _damaged(place, f"it has {size} bytes, fewer than the length of a header")
    length = int.from_bytes(place.read_bytes(0, 8), "little")
    if length > LARGEST_HEADER or (size is not None and 8 + length > size):
        raise _damaged(place, f"its header would have {length} bytes")
    content = place.read_bytes(8, 8 + length)
    try:
        header = json.loads(content, object_pairs_hook=_unique)
    except _TwiceError as error:
        raise _damaged(place, str(error)) from error
    except (ValueError, RecursionError) as error:
        raise _damaged(place, "its header is not JSON") from error
    if not isinstance(header, dict):
        raise _damaged(place, "its header is not a table of tensors")
    return header, 8 + length


class _TwiceError(Exception):
    """A name stands twice in a header."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise _TwiceError(f"its header names {name} twice")
    return table


def _metadata(entry: Any, place: Place) -> dict[str, str]:
    if not isinstance(entry, dict) or not all(isinstance(value, str) for value in entry.values()):
        raise _damaged(place, "its metadata is not a table of strings")
    return entry


def _stored(name: str, entry: Any, begin: int, place: Place) -> _Stored:
    try:
        dtype, shape, (first, last) = str(entry["dtype"]), tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(place, f"its header does not say where {name} is") from error
    if not all(type(number) is int for number in (*shape, first, last)):
        raise _damaged(place, f"the shape and the offsets of {name} are not whole numbers")
    start, stop = begin + first, begin + last
    if min((*shape, start - begin, stop - start)) < 0:
        raise _damaged(place, f"{name} has shape {list(shape)} and offsets {start - begin} to {stop - begin}")
    if dtype in _DTYPES and stop - start != prod(shape) * _DTYPES[dtype].itemsize:
        raise _damaged(place, f"{name} of shape {list(shape)} and dtype {dtype} has {stop - start} bytes")
    try:
        # Even a type that is not known takes at least one bit for each number.
        demand_sizes(shape, 8 * _DTYPES[dtype].itemsize if dtype in _DTYPES else 1, stop - start)
    except DamagedError as error:
        raise _damaged(place, f"{name}: {error}") from error
    return _Stored(dtype, shape, start, stop)


def _demand_whole(stored: dict[str, _Stored], begin: int, place: Place) -> None:
    """Refuse tensors that do not follow each other without gaps up to the end of the file."""
    end = begin
    for name, tensor in sorted(stored.items(), key=lambda item: (item[1].start, item[1].stop)):
        if tensor.start != end:
            raise _damaged(place, f"{name} begins at byte {tensor.start}, but the tensor before it ends at {end}")
        end = tensor.stop
    size = place.size()
    if size is not None and size != end:
        raise _damaged(place, f"it has {size} bytes, but its tensors end at {end}")


def _damaged(place: Place, why: str) -> QkovError:
    return QkovError(
        f"{place.address} cannot be read as safetensors ({why}): it was cut short or is another kind of file; "
        f"copy it again"
    )
