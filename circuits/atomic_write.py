"""Files that appear whole or not at all."""

import os
import tempfile
from pathlib import Path

from .errors import CallError


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file under a temporary name beside its own and rename it: a reader sees all of it or none.

    Raises:
        CallError: the path is a folder, or lies in a place that cannot be written to.
    """
    if path.is_dir():
        raise CallError(f"{path} is a folder; expected the name of a file to write")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial")
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


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
