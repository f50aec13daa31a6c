"""Places at a distance of which what was once fetched is kept on this machine, for whoever wants it next."""

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np

from ..errors import QkovError
from .places import LocalPlace, Place
from .remote import RemotePlace

#: [start, stop) in bytes; without a stop, to the end of the file.
_Ranges = Sequence[tuple[int, int | None]]


class KeptPlace(Place):
    """A file or folder at a distance; byte ranges and whole copies of it are fetched once, then read from a folder.

    The processes and threads of this machine that are given the same folder fetch nothing twice: who wants what another
    is fetching waits for it. (On Windows they do not wait, and each that asks meanwhile fetches it too.) What was
    fetched of a file that has changed since is not found by those who open it now. Where nothing can be kept, as on a
    full disk or once the folder is gone, all is read from the place itself.
    """

    def __init__(self, place: Place, folder: Path) -> None:
        """Name what is at a distance, and where to keep it; the folder is made when needed, what is around it is not.

        Args:
            place: at a distance.
            folder: of this machine.
        """
        super().__init__(place.address)
        self.place, self.folder = place, folder

    @property
    def name(self) -> str:
        """The last part of the address."""
        return self.place.name

    @property
    def parent(self) -> Place | None:
        """The folder around it, kept likewise."""
        parent = self.place.parent
        return None if parent is None else KeptPlace(parent, self.folder)

    def child(self, name: str) -> Place:
        """Return what has that name in this folder, kept likewise."""
        return KeptPlace(self.place.child(name), self.folder)

    def is_file(self) -> bool:
        """Say whether a file is there."""
        return self.place.is_file()

    def is_folder(self) -> bool:
        """Say whether a folder is there."""
        return self.place.is_folder()

    def entries(self) -> list[Place]:
        """Return what the folder holds, as it is now."""
        return [KeptPlace(entry, self.folder) for entry in self.place.entries()]

    def size(self) -> int | None:
        """Return the file's size in bytes, or None where the place does not tell it."""
        return self.place.size()

    def stamp(self) -> str:
        """Return a hash that changes when the file does."""
        return self.place.stamp()

    def read_bytes(self, start: int = 0, stop: int | None = None) -> bytes:
        """Return a few bytes of the file, or all of them, fetched once."""

        def bring() -> list[np.ndarray]:
            return [np.frombuffer(self.place.read_bytes(start, stop), dtype=np.uint8)]

        return self._once([(start, stop)], bring)[0].tobytes()

    def fetch(self, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """Return the bytes of each range; those that were asked for together once are kept together."""
        return self._once(ranges, lambda: self.place.fetch(ranges))

    @contextmanager
    def local_copy(self) -> Iterator[Path]:
        """Give the path of a copy, which is made once and stays."""
        path = self._path("copy")
        with _one_at_a_time(path):
            if not path.is_file():
                with self.place.local_copy() as copy:
                    if not _moved(copy, path):
                        yield copy
                        return
        yield path

    def _once(self, ranges: _Ranges, bring: Callable[[], list[np.ndarray]]) -> list[np.ndarray]:
        path = self._path(json.dumps(ranges))
        with _one_at_a_time(path):
            contents = _kept(path, ranges)
            if contents is None:
                contents = bring()
                _keep(path, contents)
            return contents

    def _path(self, what: str) -> Path:
        named = json.dumps([self.address, self._sign, what])
        return self.folder / hashlib.blake2b(named.encode(), digest_size=16).hexdigest()

    @cached_property
    def _sign(self) -> str:
        # A web server's word is enough here: to look at the content, as its stamp does, costs bytes at every opening.
        return RemotePlace.stamp(self.place) if isinstance(self.place, RemotePlace) else self.place.stamp()


def _kept(path: Path, ranges: _Ranges) -> list[np.ndarray] | None:
    """What was kept of the ranges, one behind the other; a range to the end of the file is the only one."""
    kept = LocalPlace(path)
    try:
        lengths = [(kept.size() or 0) if stop is None else stop - start for start, stop in ranges]
        return kept.fetch(list(pairwise(accumulate(lengths, initial=0))))
    except QkovError:
        return None


def _keep(path: Path, contents: list[np.ndarray]) -> None:
    """Write all or nothing, one piece after the other; without a folder nothing, since it may be gone for good."""
    try:
        descriptor, partial = tempfile.mkstemp(dir=path.parent)
    except OSError:
        return
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(content.data for content in contents)
        os.replace(partial, path)
    except OSError:
        Path(partial).unlink(missing_ok=True)


def _moved(copy: Path, path: Path) -> bool:
    try:
        os.replace(copy, path)
    except OSError:
        return False
    return True


@contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    """Hold up others on this machine that want the same meanwhile; of one that is killed the system lets go."""
    descriptor = None
    try:
        with suppress(OSError):
            path.parent.mkdir(exist_ok=True)
            descriptor = os.open(path.with_suffix(".lock"), os.O_CREAT | os.O_RDWR)
            _lock(descriptor)
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _lock(descriptor: int) -> None:
    # Not by a library of locks: those make the folders that are missing, and this one is missing once it was deleted.
    if sys.platform != "win32":
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX)
