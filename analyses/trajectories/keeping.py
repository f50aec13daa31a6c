"""Keeps what a sweep reads of remote checkpoints on this machine's disk as long as later steps need it."""

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from ...circuits.checkpoints.files import CheckpointFiles
from ...circuits.checkpoints.runs import Checkpoint
from ...circuits.storage.address import place_of
from ...circuits.storage.kept import KeptPlace
from ...circuits.storage.places import LocalPlace


@contextmanager
def folder_for_keeping(checkpoints: Iterable[Checkpoint]) -> Iterator[Path | None]:
    """Create a temporary folder on this machine, which is deleted however the sweep ends.

    Workers on other machines do not find the folder; each of them reads all that it needs over the network.

    Args:
        checkpoints: The checkpoints of the sweep.

    Yields:
        The folder, or None if all checkpoints are on this machine or no folder can be created.
    """
    temporary = None
    if not all(isinstance(place_of(checkpoint.address), LocalPlace) for checkpoint in checkpoints):
        with suppress(OSError):
            temporary = TemporaryDirectory(prefix="qkov-", ignore_cleanup_errors=True)
            _kept_in(temporary).mkdir()
    if temporary is None:
        yield None
        return
    with temporary:
        try:
            yield _kept_in(temporary)
        finally:
            # Renamed first, so that a worker that is still reading cannot add files while the folder is emptied.
            with suppress(OSError):
                _kept_in(temporary).rename(Path(temporary.name) / "no longer kept")


def files_to_read(checkpoint: Checkpoint, folder: Path | None) -> CheckpointFiles:
    """Return the files to open to read a checkpoint.

    Args:
        checkpoint: The checkpoint.
        folder: The folder in which to keep what is fetched, or None to keep nothing.
    """
    if folder is None:
        return checkpoint.files
    return checkpoint.files.converted(lambda place: KeptPlace(place, folder / str(checkpoint.step)))


def drop_all_but(folder: Path, steps: set[int | None]) -> None:
    """Delete what is kept of all checkpoints but those of some steps.

    Args:
        folder: The folder in which files are kept.
        steps: The steps whose files stay.
    """
    names = {str(step) for step in steps}
    for kept in folder.glob("*"):
        if kept.name not in names:
            shutil.rmtree(kept, ignore_errors=True)


def _kept_in(temporary: TemporaryDirectory[str]) -> Path:
    return Path(temporary.name) / "kept"
