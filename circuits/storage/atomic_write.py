"""Write files that appear completely or not at all."""

import os
import tempfile
import time
from pathlib import Path

from ..errors import CallError

#: A file is written in one go, so the writer of a file that is unfinished for so many seconds was killed.
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
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=scratch or path.parent, prefix=f".{path.name}.", suffix=".partial")
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        raise CallError(f"{path.parent} cannot be written to ({error.strerror}); choose another folder") from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        # mkstemp creates files that only their owner can read; give this one the permissions of any new file.
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def remove_stale(scratch: Path) -> None:
    """Remove the temporary files of writers that were killed; the file of a running writer is younger and stays."""
    for partial in scratch.glob(".*.partial"):
        try:
            if time.time() - partial.stat().st_mtime > STALE:
                partial.unlink(missing_ok=True)
        except FileNotFoundError:
            continue


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
