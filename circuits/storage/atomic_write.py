"""Files that appear whole or not at all."""

import os
import tempfile
import time
from pathlib import Path

from ..errors import CallError

#: A file is written in one go, so one that lay unfinished for so many seconds has lost its writer.
STALE = 3600


def write_atomically(path: Path, content: bytes, scratch: Path | None = None) -> None:
    """Write a file under a temporary name and rename it: a reader sees all of it or none.

    Args:
        path: of the file; folders that are missing are made.
        content: of the file.
        scratch: folder of the temporary name, on the same disk; the file's own where not given.

    Raises:
        CallError: the path is a folder, or lies in a place that cannot be written to.
    """
    if path.is_dir():
        raise CallError(f"{path} is a folder; expected the name of a file to write")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=scratch or path.parent, prefix=f".{path.name}.", suffix=".partial")
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        raise CallError(f"{path.parent} cannot be written to ({error.strerror}); choose another place") from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        # mkstemp makes files that only their owner may read; give this one the rights of any other new file.
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def remove_stale(scratch: Path) -> None:
    """Remove what killed writers left behind; another writer's unfinished file is younger, and stays."""
    for left in scratch.glob(".*.partial"):
        try:
            if time.time() - left.stat().st_mtime > STALE:
                left.unlink(missing_ok=True)
        except FileNotFoundError:
            continue


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
