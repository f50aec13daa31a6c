"""Write files that appear completely or not at all."""

import os
import re
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import CallError
from .locks import locked

#: A file is written in one go, so the writer of a file that is unfinished for so many seconds was killed, on whichever
#: machine it was.
STALE = 3600


def write_atomically(path: Path, content: bytes, scratch: Path | None = None) -> None:
    """Write a file under a temporary name and rename it, so that a reader sees all of it or nothing.

    Args:
        path: The path of the file; missing folders are created.
        content: The bytes to write.
        scratch: The folder for the temporary file, on the same disk; by default the folder of the file itself.

    Raises:
        CallError: The path is a folder, or cannot be written to.
    """
    if path.is_dir():
        raise CallError(f"{path} is a folder; expected the name of a file to write")
    with _translated(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    with temporary_file(scratch or path.parent, path.name, content) as temporary:
        # Temporary files can be read by their owner alone; give this one the permissions of any new file.
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)


@contextmanager
def temporary_file(folder: Path, name: str, content: bytes) -> Iterator[Path]:
    """Give a file with some content that is removed at the end, unless it was renamed.

    What is left of it when this process is killed, `remove_stale` removes.

    Args:
        folder: The folder of the file.
        name: What its name begins with.
        content: The bytes to write.

    Yields:
        The path of the file.

    Raises:
        CallError: The folder cannot be written to.
    """
    descriptor, temporary = _created(folder, name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            # A network file system reports here that the disk is full.
            os.fsync(descriptor)
            if sys.platform != "win32":
                # The file is locked while it is open, as a sign that its writer lives.
                yield temporary
        if sys.platform == "win32":
            yield temporary
    finally:
        if temporary.exists():
            with suppress(OSError):
                temporary.unlink()


def remove_stale(scratch: Path) -> None:
    """Remove the temporary files of writers that were killed; those of running writers stay."""
    for partial in scratch.glob(".*.partial"):
        with suppress(OSError):
            remove_if_stale(partial)


def remove_if_stale(partial: Path) -> bool:
    """Remove a temporary file if its writer was killed, and return whether it did.

    Whether a process of this machine still writes it is known at once. A file of another machine has to be old.

    Args:
        partial: The path of the file.

    Raises:
        OSError: The file cannot be opened or removed.
    """
    if _here() in partial.name:
        descriptor = os.open(partial, os.O_RDWR)
        try:
            if locked(descriptor, wait=False):
                partial.unlink()
                return True
        finally:
            os.close(descriptor)
    if time.time() - partial.stat().st_mtime <= STALE:
        return False
    partial.unlink(missing_ok=True)
    return True


def _created(folder: Path, name: str) -> tuple[int, Path]:
    while True:
        with _translated(folder):
            descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=f".{name}{_here()}", suffix=".partial")
        locked(descriptor)
        if sys.platform == "win32" or os.fstat(descriptor).st_nlink:
            return descriptor, Path(temporary)
        # Before it was locked, another process took it for the file of a writer that was killed.
        os.close(descriptor)


def _here() -> str:
    """The part of a temporary file's name that says on which machine it is written."""
    return f".{re.sub('[^A-Za-z0-9-]', '-', socket.gethostname())[:40]}."


@contextmanager
def _translated(folder: Path) -> Iterator[None]:
    try:
        yield
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        raise CallError(f"{folder} cannot be written to ({error.strerror}); choose another folder") from error


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
