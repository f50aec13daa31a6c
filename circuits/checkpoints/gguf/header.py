"""The header of a GGUF file: the metadata, and where each tensor is. Its bytes bound the work, not what it states."""

import mmap
import struct
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, Literal

from ..pickles.placeholders import DamagedError
from ..pickles.stored import demand_sizes

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
#: The codes of struct for the types of numbers in the metadata, by GGUF's numbers for them.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _LIST = 8, 9
#: No model has more tensors, more entries in its metadata, or a longer list about its layers.
LARGEST_COUNT = 10_000
_MOST_DIMENSIONS = 4
_ALIGNMENT = "general.alignment"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor is in the file.

    Attributes:
        name: Its name in the file.
        kind: GGUF's number for the type of its elements.
        shape: Its shape, with the dimension last along which its numbers follow each other.
        begin: The byte at which it begins.
        size: The number of its bytes; None if the type is not known.
    """

    name: str
    kind: int
    shape: tuple[int, ...]
    begin: int
    size: int | None


@dataclass(frozen=True, slots=True)
class StoredList:
    """Where a list of the metadata is; those of the tokeniser take most of a header, and are not read.

    Attributes:
        kind: GGUF's number for the type of its values.
        length: The number of its values.
        begin: The byte at which they begin.
    """

    kind: int
    length: int
    begin: int


class Header:
    """What the header of a file says.

    Attributes:
        order: The order of the bytes of a number, as struct writes it.
        entries: The metadata; a list is where it is.
        tensors: The tensors.
    """

    def __init__(
        self, content: mmap.mmap, order: str, entries: dict[str, Any], tensors: tuple[StoredTensor, ...]
    ) -> None:
        """Store what was read."""
        self._content, self.order, self.entries, self.tensors = content, order, entries, tensors

    def value(self, name: str) -> Any:
        """Return the value of an entry of the metadata, None if there is none.

        Raises:
            DamagedError: It is a list that is longer than any about the layers of a model.
        """
        value = self.entries.get(name)
        if not isinstance(value, StoredList):
            return value
        if value.length > LARGEST_COUNT:
            raise DamagedError(f"{name} lists {value.length} values")
        cursor = _Cursor(self._content, self.order, value.begin)
        if value.kind == _TEXT:
            return [_text(cursor) for _ in range(value.length)]
        return list(cursor.numbers(f"{value.length}{_NUMBERS[value.kind]}"))


def read_header(content: mmap.mmap) -> Header:
    """Read the header of a file.

    Args:
        content: The bytes of the file.

    Raises:
        DamagedError: It is not a GGUF file, was cut short, or contradicts itself.
    """
    if content[:4] != _MAGIC:
        raise DamagedError("it does not begin with GGUF")
    # The number of a version is small, so that its bytes show their order.
    order = ">" if content[4:6] == b"\0\0" else "<"
    cursor = _Cursor(content, order)
    (version,) = cursor.numbers("I")
    if version not in _VERSIONS:
        raise DamagedError(f"its version is {version}; known are {', '.join(map(str, _VERSIONS))}")
    tensors, entries = cursor.numbers("QQ")
    if max(tensors, entries) > LARGEST_COUNT:
        raise DamagedError(f"it would hold {tensors} tensors and {entries} entries")
    metadata = _metadata(cursor, entries)
    described = [_described(cursor) for _ in range(tensors)]
    alignment = metadata.get(_ALIGNMENT, 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise DamagedError("its tensors are not aligned to a power of two")
    begin = cursor.at + -cursor.at % alignment
    return Header(content, order, metadata, _stored(described, begin, len(content)))


class _Cursor:
    """Reads what follows in the header."""

    def __init__(self, content: mmap.mmap, order: str, at: int = len(_MAGIC)) -> None:
        self.content, self.order, self.at = content, order, at

    def numbers(self, codes: str) -> tuple[Any, ...]:
        begin, form = self.at, f"{self.order}{codes}"
        self.skip(struct.calcsize(form))
        return struct.unpack_from(form, self.content, begin)

    def text(self) -> bytes:
        (length,) = self.numbers("Q")
        begin = self.at
        self.skip(length)
        return self.content[begin : self.at]

    def skip(self, length: int) -> None:
        self.at += length
        if self.at > len(self.content):
            raise DamagedError("it ends within its header")

    def skip_texts(self, count: int) -> None:
        """Skip several texts; each takes at least the eight bytes of its length, so that the file bounds the work."""
        content, at, end = self.content, self.at, len(self.content)
        order: Literal["little", "big"] = "little" if self.order == "<" else "big"
        for _ in range(count):
            at += 8 + int.from_bytes(content[at : at + 8], order)
            if at > end:
                raise DamagedError("it ends within its header")
        self.at = at


def _metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for _ in range(count):
        name = _name(cursor)
        if name in entries:
            raise DamagedError(f"it states {name} twice")
        (kind,) = cursor.numbers("I")
        entries[name] = _value(cursor, kind)
    return entries


def _value(cursor: _Cursor, kind: int) -> Any:
    """Return a value, or where it is if it is a list."""
    if kind in _NUMBERS:
        return cursor.numbers(_NUMBERS[kind])[0]
    if kind == _TEXT:
        return _text(cursor)
    if kind != _LIST:
        raise DamagedError(f"an entry has the unknown type {kind}")
    inner, length = cursor.numbers("IQ")
    stored = StoredList(inner, length, cursor.at)
    if inner in _NUMBERS:
        cursor.skip(length * struct.calcsize(_NUMBERS[inner]))
    elif inner == _TEXT:
        cursor.skip_texts(length)
    else:
        raise DamagedError(f"a list holds values of the unknown type {inner}")
    return stored


def _text(cursor: _Cursor) -> str:
    return cursor.text().decode(errors="replace")


def _name(cursor: _Cursor) -> str:
    try:
        return cursor.text().decode()
    except UnicodeDecodeError as error:
        raise DamagedError("a name in its header is not text") from error


def _described(cursor: _Cursor) -> tuple[str, int, tuple[int, ...], int]:
    """Return the name, the type, the shape and the offset of a tensor."""
    name = _name(cursor)
    (dimensions,) = cursor.numbers("I")
    if dimensions > _MOST_DIMENSIONS:
        raise DamagedError(f"{name} would have {dimensions} dimensions")
    # GGUF lists the dimension first along which the numbers follow each other.
    shape = cursor.numbers(f"{dimensions}Q")[::-1]
    kind, offset = cursor.numbers("IQ")
    return name, kind, shape, offset


def _stored(described: list[tuple[str, int, tuple[int, ...], int]], begin: int, end: int) -> tuple[StoredTensor, ...]:
    stored: dict[str, StoredTensor] = {}
    for name, kind, shape, offset in described:
        if name in stored:
            raise DamagedError(f"it names {name} twice")
        demand_sizes(shape, 1, end)
        size = _bytes(name, kind, shape)
        stop = begin + offset + (size or 0)
        if stop > end:
            raise DamagedError(f"{name} would end at byte {stop} of {end}")
        stored[name] = StoredTensor(name, kind, shape, begin + offset, size)
    held = sum(tensor.size or 0 for tensor in stored.values())
    if held > max(0, end - begin):
        raise DamagedError(f"its tensors would have {held} bytes, and {max(0, end - begin)} follow its header")
    return tuple(stored.values())


def _bytes(name: str, kind: int, shape: tuple[int, ...]) -> int | None:
    """Return the number of bytes of a tensor, None if its type is not known."""
    sizes = _block_sizes()
    if kind not in sizes:
        return None
    elements, size = sizes[kind]
    if (shape[-1] if shape else 1) % elements:
        raise DamagedError(f"{name} has shape {list(shape)}, whose rows blocks of {elements} numbers do not fill")
    return prod(shape) // elements * size


@cache
def _block_sizes() -> dict[int, tuple[int, int]]:
    """Return how many numbers and how many bytes a block has, by GGUF's number for the type."""
    from gguf.constants import GGML_QUANT_SIZES

    return {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()}
