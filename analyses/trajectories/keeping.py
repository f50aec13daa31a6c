"""What a sweep reads of checkpoints at a distance, kept on this machine's disk while steps to come still need it."""

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
    """Give a folder among this machine's temporary files, which goes however the sweep ends.

    None is given where all checkpoints lie on this machine, and where no folder can be made. Workers on other machines
    do not find the folder, and each of them reads all that it needs over the network.
    """
    around = None
    if not all(isinstance(place_of(checkpoint.address), LocalPlace) for checkpoint in checkpoints):
        with suppress(OSError):
            around = TemporaryDirectory(prefix="qkov-", ignore_cleanup_errors=True)
            _kept_in(around).mkdir()
    if around is None:
        yield None
        return
    with around:
        try:
            yield _kept_in(around)
        finally:
            # By another name nobody who is still reading finds it, to put something in while it is emptied.
            with suppress(OSError):
                _kept_in(around).rename(Path(around.name) / "no longer kept")


def files_to_read(checkpoint: Checkpoint, folder: Path | None) -> CheckpointFiles:
    """Return the files to open to read a checkpoint.

    Args:
        checkpoint: The checkpoint.
        folder: The folder in which to keep what is fetched, or None to keep nothing.
    """
    if folder is None:
        return checkpoint.files
    return checkpoint.files.converted(lambda place: KeptPlace(place, folder / str(checkpoint.step)))


def drop_all_but(folder: Path, steps: set[int]) -> None:
    """Delete what is kept of other checkpoints than those of the steps."""
    for kept in folder.glob("*"):
        if int(kept.name) not in steps:
            shutil.rmtree(kept, ignore_errors=True)


def _kept_in(around: TemporaryDirectory[str]) -> Path:
    return Path(around.name) / "kept"
