"""The two layouts of torch.save, and plain pickles: the pickle is read, the numbers stay in the file."""

import mmap
import pickletools
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from .constructors import STORAGES
from .machine import InertUnpickler, Stream
from .placeholders import Budget, DamagedError, Named
from .stored import StoredBytes

#: The first number in a file of torch's oldest layout.
_MAGIC = 0x1950A86A20F9469CFC6C
#: The bytes in front of a record of a zip archive, without its name and its extra field.
_RECORD_HEADER = 30


class MappedFile(mmap.mmap):
    """A file mapped into memory, which zipfile and pickletools read as they read an open file."""

    def __new__(cls, path: Path) -> "MappedFile":
        """Map the file, which may be removed afterwards."""
        with path.open("rb") as file:
            return super().__new__(cls, file.fileno(), 0, access=mmap.ACCESS_READ)

    def seekable(self) -> bool:
        """Return that any place can be read."""
        return True


@dataclass(frozen=True)
class Loaded:
    """What a file holds.

    Attributes:
        content: The object in it.
        described_by: The number of bytes that describe it, without those of the tensors where they are apart.
        size: The number of bytes of the file.
    """

    content: Any
    described_by: int
    size: int


def load_archive(path: Path) -> Loaded:
    """Load a file of torch.save, or a plain pickle, without running code.

    Raises:
        DamagedError: The file is neither, or was cut short.
    """
    mapped = MappedFile(path)
    return _load(mapped, np.frombuffer(mapped, dtype=np.uint8))


def load_bytes(content: np.ndarray) -> Loaded:
    """Load the bytes of a file of torch.save, or of a plain pickle, without running code.

    Raises:
        DamagedError: They are neither, or were cut short.
    """
    return _load(BytesIO(content.tobytes()), content)


def _load(stream: Stream, content: np.ndarray) -> Loaded:
    if bytes(content[:4]) == b"PK\x03\x04":
        return _load_zip(stream, content)
    return Loaded(_load_pickles(stream, content), content.size, content.size)


def records(stream: Stream, content: np.ndarray) -> dict[str, np.ndarray | zipfile.ZipInfo]:
    """Return the bytes of each record of a zip archive by name, or what is known of it if it is compressed.

    Args:
        stream: The archive.
        content: Its bytes.

    Raises:
        DamagedError: The archive is damaged.
    """
    found: dict[str, np.ndarray | zipfile.ZipInfo] = {}
    try:
        opened: Any = stream
        directory = zipfile.ZipFile(opened).infolist()
    except Exception as error:  # zipfile raises errors of many kinds for directories that are damaged
        raise DamagedError(f"its directory is damaged: {error}") from error
    for record in directory:
        if record.filename in found:
            raise DamagedError(f"it holds two records named {record.filename}")
        if record.compress_type != zipfile.ZIP_STORED:
            found[record.filename] = record
            continue
        begin = record.header_offset + _RECORD_HEADER
        header = content[record.header_offset : begin].tobytes()
        if len(header) < _RECORD_HEADER or header[:4] != b"PK\x03\x04" or record.flag_bits & 1:
            raise DamagedError(f"its record {record.filename} is not where its directory says")
        begin += int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        if begin + record.file_size > len(content):
            raise DamagedError(f"its record {record.filename} ends after the file")
        found[record.filename] = content[begin : begin + record.file_size]
    return found


def _load_zip(archive: Stream, archived: np.ndarray) -> Loaded:
    found = records(archive, archived)
    pickles = [name for name in found if name.rpartition("/")[2] == "data.pkl"]
    if len(pickles) != 1:
        raise DamagedError("it is a zip archive without the data.pkl of torch.save")
    folder = pickles[0].removesuffix("data.pkl")
    content = _stored_record(found, pickles[0])
    order = bytes(_stored_record(found, f"{folder}byteorder")) if f"{folder}byteorder" in found else b"little"
    if order != b"little":
        raise DamagedError(f"its numbers are in the byte order {order[:10].decode('latin1')!r}, which is not read")
    storages = _Storages(lambda key: _stored_record(found, f"{folder}data/{key}"))
    stream = BytesIO(content.tobytes())
    machine = InertUnpickler(stream, Budget(content.size), storages.of_identifier, _load_nested)
    return Loaded(machine.load(), content.size, archived.size)


def _stored_record(found: dict[str, np.ndarray | zipfile.ZipInfo], name: str) -> np.ndarray:
    if name not in found:
        raise DamagedError(f"its record {name} is missing")
    record = found[name]
    if isinstance(record, zipfile.ZipInfo):
        raise DamagedError(f"its record {name} is compressed, which torch.save does not do")
    return record


class _Storages:
    """The storages of a file, each made once, whose bytes are looked up at once or filled in later."""

    def __init__(self, content: Callable[[str], np.ndarray] | None = None) -> None:
        self._content = content
        self.by_key: dict[str, StoredBytes] = {}

    def of_identifier(self, identifier: Any) -> Any:
        """Return the storage for the identifier that stands in a pickle."""
        if isinstance(identifier, tuple) and len(identifier) == 4 and identifier[0] == "module":
            return identifier[1]
        if not isinstance(identifier, tuple) or len(identifier) not in (5, 6) or identifier[0] != "storage":
            raise DamagedError("it refers to something outside that is not a storage")
        parts: list[Any] = list(identifier)
        kind, key, _, length, *view = parts[1:]
        if not isinstance(kind, Named) or not isinstance(key, (str, int)) or type(length) is not int or length < 0:
            raise DamagedError("the description of a storage is not complete")
        if view and view[0] is not None:
            raise DamagedError("it holds storages that are parts of others, as torch before 0.4 saved them")
        key = str(key)
        if key not in self.by_key:
            content = None if self._content is None else self._content(key)
            self.by_key[key] = StoredBytes(content, STORAGES.get(kind.name), length)
        return self.by_key[key]


def _load_nested(content: bytes, budget: Budget) -> Any:
    return _load_legacy(BytesIO(content), np.frombuffer(content, dtype=np.uint8), budget)


def _load_pickles(stream: Stream, content: np.ndarray) -> Any:
    """Load torch's oldest layout, which begins with a pickle of its magic number, or a single plain pickle."""
    budget = Budget(content.size)
    if bytes(content[:2]) == b"\x80\x02" and _first_number(stream) == _MAGIC:
        return _load_legacy(stream, content, budget)
    stream.seek(0)
    return InertUnpickler(stream, budget, _no_identifier, _load_nested).load()


def _first_number(stream: Stream) -> Any:
    stream.seek(0)
    opened: Any = stream  # a mapped file reads like an open one
    try:
        for opcode, argument, _ in pickletools.genops(opened):
            if opcode.name != "PROTO":
                return argument
    except ValueError:
        return None
    return None


def _load_legacy(stream: Stream, content: np.ndarray, budget: Budget) -> Any:
    if _first_number(stream) != _MAGIC:
        raise DamagedError("it is not a file of torch.save")
    stream.seek(0)
    storages = _Storages()
    finders = (_no_identifier, _no_identifier, _no_identifier, storages.of_identifier, _no_identifier)
    pickles = [InertUnpickler(stream, budget, finder, _load_nested).load() for finder in finders]
    _magic, _version, system, loaded, keys = pickles
    if isinstance(system, dict) and system.get("little_endian") is False:
        raise DamagedError("its numbers are in the byte order 'big', which is not read")
    if not isinstance(keys, list):
        raise DamagedError("its list of storages is missing")
    begin = stream.tell()
    for key in keys:
        storage = storages.by_key.get(str(key)) if isinstance(key, (str, int)) else None
        if storage is None or begin + 8 > content.size:
            raise DamagedError("its storages do not follow its pickle")
        length = int.from_bytes(content[begin : begin + 8].tobytes(), "little", signed=True)
        begin += 8
        if length != storage.length or begin + storage.bytes_claimed > content.size:
            raise DamagedError(f"it ends before its storage {str(key)[:40]} does")
        storage.content = content[begin : begin + storage.bytes_claimed]
        begin += storage.bytes_claimed
    return loaded


def _no_identifier(_: Any) -> Any:
    raise DamagedError("it refers to something outside of it")
