"""Places of files and folders: on this machine, or at any address that fsspec supports."""

import errno
import hashlib
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from io import BufferedReader, FileIO
from pathlib import Path

import numpy as np

from ..errors import CallError, QkovError, reason
from ..public_addresses import public_address

#: What the operating system says of a path at which there is nothing, and can be nothing.
_NOTHING_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
#: How many bytes of a file's beginning and of its end a stamp depends on.
BLOCK = 65536


class Place(ABC):
    """A file or folder at some address. Nothing is requested before it is needed.

    Attributes:
        location: The path or address as it was given, with what lets its reader in.
        address: The same without passwords, tokens and signatures, as it may be shown and stored.
        refused_names: Why names that `entries` met are refused, by name; a file on this machine has no such name.
    """

    def __init__(self, location: str) -> None:
        """Store the location."""
        self.location = location
        self.address = public_address(location)
        self.refused_names: dict[str, str] = {}

    def __str__(self) -> str:
        """Return the address."""
        return self.address

    def __repr__(self) -> str:
        """Return the kind of place and its address."""
        return f"{type(self).__name__}({self.address!r})"

    @property
    @abstractmethod
    def name(self) -> str:
        """The last part of the address."""

    @property
    def suffix(self) -> str:
        """The extension of the name, with its dot."""
        return Path(self.name).suffix

    @property
    @abstractmethod
    def parent(self) -> "Place | None":
        """The folder that contains this place, or None at the top of a file system or repository."""

    @abstractmethod
    def child(self, name: str) -> "Place":
        """Return the place with this name in the folder, whether or not it exists."""

    @abstractmethod
    def is_file(self) -> bool:
        """Return whether a file exists at this place."""

    @abstractmethod
    def is_folder(self) -> bool:
        """Return whether a folder exists at this place."""

    def not_found(self, expected: str) -> QkovError:
        """Return the error that says that neither a file nor a folder is here, or that access is refused.

        Args:
            expected: What should be here.
        """
        return CallError(f"{self.address} does not exist; expected {expected}")

    @abstractmethod
    def entries(self) -> "list[Place]":
        """Return the files and folders in the folder, sorted by name.

        Raises:
            QkovError: The folder cannot be listed.
        """

    @abstractmethod
    def size(self) -> int | None:
        """Return the file's size in bytes, or None if it is not stated."""

    @abstractmethod
    def read_bytes(self, start: int = 0, stop: int | None = None) -> bytes:
        """Return the bytes [start, stop) of the file, or all of them without a stop.

        Raises:
            QkovError: The file cannot be read.
        """

    @abstractmethod
    def fetch(self, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """Return the bytes of each range [start, stop) as an array of its own, which may be written to.

        Raises:
            QkovError: The file ends before a range does, or cannot be read.
        """

    @abstractmethod
    def stamp(self) -> str:
        """Return a hash that changes when the file does.

        Raises:
            QkovError: The file cannot be read.
        """

    def version(self) -> tuple[int, ...] | None:
        """Return a value that changes when the file is written.

        It is None if there is no file, or if asking would take a request.
        """
        return None

    def demand_version(self, version: tuple[int, ...] | None) -> None:
        """Refuse a file that was written since it had this version; a file that is gone is not refused.

        Raises:
            QkovError: The file was written again.
        """
        if self.version() not in (version, None):
            raise QkovError(f"{self.address} was written again after it was opened; open it again once it is complete")

    @abstractmethod
    def local_copy(self) -> AbstractContextManager[Path]:
        """Return a context that gives the path of the file on this machine; a copy is removed when the context ends."""


class LocalPlace(Place):
    """A path on this machine, read directly.

    Attributes:
        path: The path.
    """

    def __init__(self, path: Path) -> None:
        """Store the path."""
        super().__init__(str(path))
        self.path = path

    @property
    def name(self) -> str:
        """The last part of the path; for a path such as `.`, the name of the folder that it stands for."""
        return self.path.name or self.path.resolve().name

    @property
    def parent(self) -> "Place | None":
        """The folder that contains this place."""
        parent = self.path.absolute().parent if self.path.name in ("", "..") else self.path.parent
        return LocalPlace(parent)

    def child(self, name: str) -> Place:
        """Return the place with this name in the folder, whether or not it exists."""
        return LocalPlace(self.path / name)

    def is_file(self) -> bool:
        """Return whether the path is a regular file."""
        return stat.S_ISREG(self._mode())

    def is_folder(self) -> bool:
        """Return whether the path is a folder."""
        return stat.S_ISDIR(self._mode())

    def not_found(self, expected: str) -> QkovError:
        """Return the error that says that nothing is here, or something that is neither a file nor a folder."""
        if self.path.exists():
            return CallError(f"{self.address} is not a file and not a folder; expected {expected}")
        return super().not_found(expected)

    def entries(self) -> list[Place]:
        """Return the files and folders in the folder, sorted by name."""
        with self._translated():
            return [LocalPlace(path) for path in sorted(self.path.iterdir())]

    def size(self) -> int | None:
        """Return the file's size in bytes."""
        with self._translated():
            status = self.path.stat()
        self._demand_regular(status.st_mode)
        return status.st_size

    def read_bytes(self, start: int = 0, stop: int | None = None) -> bytes:
        """Return the bytes [start, stop) of the file, or all of them without a stop."""
        with self._opened() as file:
            file.seek(start)
            if stop is None:
                return file.readall()
            with BufferedReader(file) as buffered:
                return buffered.read(stop - start)

    def fetch(self, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """Return the bytes of each range."""
        with self._opened() as file:
            return [self._read_whole(file, start, stop) for start, stop in ranges]

    def stamp(self) -> str:
        """Return a hash of the file's size, its modification time, and its first and last 64 KiB.

        This takes two reads whatever the file's size. A file that was written again counts as changed even if its
        content is the same.
        """
        with self._opened() as file:
            status = os.fstat(file.fileno())
            digest = hashlib.blake2b(f"{status.st_size} {status.st_mtime_ns}".encode(), digest_size=16)
            digest.update(file.read(BLOCK))
            file.seek(max(0, status.st_size - BLOCK))
            digest.update(file.read(BLOCK))
        return digest.hexdigest()

    def version(self) -> tuple[int, ...] | None:
        """Return the file's size and modification time."""
        try:
            status = self.path.stat()
        except (OSError, ValueError):
            return None
        return status.st_size, status.st_mtime_ns

    @contextmanager
    def local_copy(self) -> Iterator[Path]:
        """Give the path itself."""
        yield self.path

    def _mode(self) -> int:
        """Return the kind and the permissions of what is at the path, 0 if nothing is there or can be."""
        try:
            with self._translated():
                return self.path.stat().st_mode
        except QkovError as error:
            cause = error.__cause__
            # No file system has a name with a zero byte, half a character, or thousands of characters.
            if isinstance(cause, ValueError) or (isinstance(cause, OSError) and cause.errno in _NOTHING_THERE):
                return 0
            raise

    @contextmanager
    def _opened(self) -> Iterator[FileIO]:
        """Open the file unbuffered, if it is a regular one: reading a pipe or a device might never end.

        The file is opened without waiting, since opening a pipe waits for its writer.
        """
        with self._translated():
            descriptor = os.open(self.path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
            try:
                self._demand_regular(os.fstat(descriptor).st_mode)
            except BaseException:
                os.close(descriptor)
                raise
            with FileIO(descriptor) as file:
                yield file

    def _demand_regular(self, mode: int) -> None:
        if not stat.S_ISREG(mode):
            kind = "a folder" if stat.S_ISDIR(mode) else "a pipe, a device or a socket"
            raise QkovError(f"{self.address} is {kind}; expected a regular file")

    def _read_whole(self, file: FileIO, start: int, stop: int) -> np.ndarray:
        file.seek(start)
        buffer = np.empty(stop - start, dtype=np.uint8)
        view, done = buffer.data, 0
        # One call reads 2 GiB at most.
        while done < len(view):
            got = file.readinto(view[done:])
            if not got:
                raise QkovError(f"{self.address} ends at byte {start + done}, before its tensors do; copy it again")
            done += got
        return buffer

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Turn errors of the operating system into one line that names the address."""
        try:
            yield
        except FileNotFoundError as error:
            raise CallError(f"{self.address} does not exist") from error
        except (OSError, ValueError) as error:
            raise QkovError(f"{self.address} cannot be read ({reason(error)})") from error
