"""Lets one operation on the files below a folder fail: the n-th open, read, write, rename, listing and so on.

The operations are those of Python: of `os`, and of files that `open` returns. What pyarrow opens in C++ (it reads
Parquet files), and what is read from a mapped file, does not fail here.
"""

import builtins
import io
import os
from collections.abc import Callable
from typing import Any

import pytest

#: The functions of `os` whose first argument is a path, with the name of the operation.
_OF_PATHS = {
    "open": "open",
    "mkdir": "mkdir",
    "rename": "rename",
    "replace": "replace",
    "scandir": "list",
    "listdir": "list",
    "unlink": "unlink",
    "remove": "unlink",
    "chmod": "chmod",
}
_OF_DESCRIPTORS = {"fsync": "fsync", "write": "write", "read": "read"}


class FileFaults:
    """Counts the operations on the files below a folder, and lets one of them fail.

    Attributes:
        operations: The operations so far, in words.
    """

    def __init__(self, folder: str, failing: int | None = None, code: int = 0) -> None:
        """Choose the operation.

        Args:
            folder: The folder.
            failing: The number of the operation that fails, from 1 on; None for none.
            code: The error of the operating system.
        """
        self.folder, self.failing, self.code = folder, failing, code
        self.operations: list[str] = []
        self._descriptors: set[int] = set()

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Replace the functions through which Python works on files."""
        for name, operation in _OF_PATHS.items():
            patch.setattr(os, name, self._of_path(operation, getattr(os, name)))
        for name, operation in _OF_DESCRIPTORS.items():
            patch.setattr(os, name, self._of_descriptor(operation, getattr(os, name)))
        faulty = _faulty_file(self)
        patch.setattr(builtins, "open", self._opening(builtins.open, faulty))
        patch.setattr(io, "open", builtins.open)
        patch.setattr("qkov.circuits.storage.places.FileIO", faulty)

    def note(self, operation: str, path: Any) -> None:
        """Count an operation, and fail if it is the chosen one.

        Raises:
            OSError: It is.
        """
        self.operations.append(f"{operation} {path}")
        if len(self.operations) == self.failing:
            raise OSError(self.code, os.strerror(self.code), str(path))

    def covers(self, path: Any) -> bool:
        """Return whether a path or a descriptor belongs to the folder."""
        if isinstance(path, int):
            return path in self._descriptors
        try:
            return os.path.abspath(os.fsdecode(path)).startswith(self.folder)
        except (TypeError, ValueError):
            return False

    def _of_path(self, operation: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any = ".", *arguments: Any, **options: Any) -> Any:
            covered = self.covers(path)
            if covered:
                self.note(operation, path)
            result = real(path, *arguments, **options)
            if covered and operation == "open":
                self._descriptors.add(result)
            return result

        return call

    def _of_descriptor(self, operation: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(descriptor: int, *arguments: Any) -> Any:
            if self.covers(descriptor):
                self.note(operation, f"descriptor {descriptor}")
            return real(descriptor, *arguments)

        return call

    def _opening(self, real: Callable[..., Any], faulty: type[io.FileIO]) -> Callable[..., Any]:
        def opened(
            file: Any,
            mode: str = "r",
            buffering: int = -1,
            encoding: str | None = None,
            errors: str | None = None,
            newline: str | None = None,
            closefd: bool = True,
            opener: Any = None,
        ) -> Any:
            if not self.covers(file):
                return real(file, mode, buffering, encoding, errors, newline, closefd, opener)
            if not isinstance(file, int):
                self.note("open", file)
            raw = faulty(file, mode.replace("b", "").replace("t", ""), closefd, opener)
            if buffering == 0:
                return raw
            kinds = ((raw.readable() and raw.writable(), io.BufferedRandom), (raw.writable(), io.BufferedWriter))
            buffered = next((kind for holds, kind in kinds if holds), io.BufferedReader)(raw)
            return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding, errors, newline)

        return opened


def _faulty_file(faults: FileFaults) -> type[io.FileIO]:
    class FaultyFile(io.FileIO):
        def read(self, size: int | None = -1, /) -> Any:
            faults.note("read", self.name)
            return super().read(-1 if size is None else size)

        def readall(self) -> Any:
            faults.note("read", self.name)
            return super().readall()

        def readinto(self, buffer: Any) -> Any:
            faults.note("read", self.name)
            return super().readinto(buffer)

        def write(self, content: Any) -> int:
            faults.note("write", self.name)
            return super().write(content)

    return FaultyFile
