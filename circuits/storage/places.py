"""Where checkpoints lie: on this machine, or behind any address that fsspec knows."""

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from io import FileIO
from pathlib import Path

import numpy as np

from ..errors import CallError, QkovError

#: How much of a file's beginning and end a stamp is made of.
BLOCK = 65536


class Place(ABC):
    """A file or a folder somewhere; nothing is asked of it before it has to be."""

    def __init__(self, address: str) -> None:
        """Remember the address."""
        self.address = address

    def __str__(self) -> str:
        """Return the address."""
        return self.address

    @property
    @abstractmethod
    def name(self) -> str:
        """The last part of the address."""

    @property
    def suffix(self) -> str:
        """The ending of the name, with its dot."""
        return Path(self.name).suffix

    @property
    @abstractmethod
    def parent(self) -> "Place | None":
        """The folder around it, or None at the top of a file system or repository."""

    @abstractmethod
    def child(self, name: str) -> "Place":
        """Return what has that name in this folder, whether or not it is there."""

    @abstractmethod
    def is_file(self) -> bool:
        """Say whether a file is there."""

    @abstractmethod
    def is_folder(self) -> bool:
        """Say whether a folder is there."""

    @abstractmethod
    def entries(self) -> "list[Place]":
        """Return what the folder holds, in the order of the names."""

    @abstractmethod
    def size(self) -> int | None:
        """Return the file's size in bytes, or None where the place does not tell it."""

    @abstractmethod
    def read_bytes(self, start: int = 0, stop: int | None = None) -> bytes:
        """Return a few bytes of the file, or all of them."""

    @abstractmethod
    def fetch(self, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """Return the bytes of each range [start, stop) in an array of its own, which may be written to.

        Raises:
            QkovError: the file ends before a range does, or cannot be read.
        """

    @abstractmethod
    def stamp(self) -> str:
        """Return a hash that changes when the file does."""

    def version(self) -> tuple[int, ...] | None:
        """Return what changes when the file is written, where that costs no request; None elsewhere or with no file."""
        return None

    def demand_version(self, version: tuple[int, ...] | None) -> None:
        """Refuse a file that is another one than it was; one that is gone is no other.

        Raises:
            QkovError: the file was written again.
        """
        if self.version() not in (version, None):
            raise QkovError(f"{self.address} was written again after it was opened: open it once more when it is whole")

    @abstractmethod
    def local_copy(self) -> AbstractContextManager[Path]:
        """Return a context that gives the path of the file on this machine; a copy is removed when it ends."""


class LocalPlace(Place):
    """A path on this machine, read without anything in between."""

    def __init__(self, path: Path) -> None:
        """Remember the path."""
        super().__init__(str(path))
        self.path = path

    @property
    def name(self) -> str:
        """The last part of the path; that of the folder one is in, for a path such as `.`."""
        return self.path.name or self.path.resolve().name

    @property
    def parent(self) -> "Place | None":
        """The folder around it."""
        parent = self.path.absolute().parent if self.path.name in ("", "..") else self.path.parent
        return LocalPlace(parent)

    def child(self, name: str) -> Place:
        """Return what has that name in this folder."""
        return LocalPlace(self.path / name)

    def is_file(self) -> bool:
        """Say whether a file is there."""
        return self.path.is_file()

    def is_folder(self) -> bool:
        """Say whether a folder is there."""
        return self.path.is_dir()

    def entries(self) -> list[Place]:
        """Return what the folder holds."""
        with self._told():
            return [LocalPlace(path) for path in sorted(self.path.iterdir())]

    def size(self) -> int | None:
        """Return the file's size in bytes."""
        with self._told():
            return self.path.stat().st_size

    def read_bytes(self, start: int = 0, stop: int | None = None) -> bytes:
        """Return a few bytes of the file, or all of them."""
        with self._told(), self.path.open("rb") as file:
            file.seek(start)
            return file.read() if stop is None else file.read(stop - start)

    def fetch(self, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """Return the bytes of each range."""
        with self._told(), self.path.open("rb", buffering=0) as file:
            return [self._read_whole(file, start, stop) for start, stop in ranges]

    def stamp(self) -> str:
        """Return a hash of the file's size, of the time it was last written, and of its first and last 64 KiB.

        Two reads, whatever the file's size. A file that was written again is taken for another one, were it the same.
        """
        with self._told(), self.path.open("rb") as file:
            status = os.fstat(file.fileno())
            digest = hashlib.blake2b(f"{status.st_size} {status.st_mtime_ns}".encode(), digest_size=16)
            digest.update(file.read(BLOCK))
            file.seek(max(0, status.st_size - BLOCK))
            digest.update(file.read(BLOCK))
        return digest.hexdigest()

    def version(self) -> tuple[int, ...] | None:
        """Return the file's size, and when it was last written."""
        try:
            status = self.path.stat()
        except OSError:
            return None
        return status.st_size, status.st_mtime_ns

    @contextmanager
    def local_copy(self) -> Iterator[Path]:
        """Give the path itself."""
        yield self.path

    def _read_whole(self, file: FileIO, start: int, stop: int) -> np.ndarray:
        file.seek(start)
        buffer = np.empty(stop - start, dtype=np.uint8)
        view, done = buffer.data, 0
        # One call brings 2 GiB at most.
        while done < len(view):
            got = file.readinto(view[done:])
            if not got:
                raise QkovError(f"{self.address} ends at byte {start + done}, before its tensors do: copy it again")
            done += got
        return buffer

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise CallError(f"{self.address} does not exist") from error
        except OSError as error:
            raise QkovError(f"{self.address} cannot be read ({error.strerror or error})") from error
