"""Remote places whose bytes are kept on this machine once they were fetched."""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np

from ..errors import QkovError
from .locks import locked
from .places import LocalPlace, Place
from .remote import RemotePlace

#: Ranges [start, stop) in bytes; without a stop, to the end of the file.
_Ranges = Sequence[tuple[int, int | None]]


class KeptPlace(Place):
    """A remote file or folder; byte ranges and whole copies of it are fetched once and then read from a local folder.

    Processes and threads of this machine that share the folder fetch nothing twice: one that needs what another is
    fetching waits for it. (On Windows they do not wait, and each may fetch it.) What was fetched from a file that has
    changed since then is not used. If nothing can be kept, because the disk is full or the folder is gone, everything
    is read from the remote place.

    Attributes:
        place: The remote place.
        folder: The local folder.
    """

    def __init__(self, place: Place, folder: Path) -> None:
        """Wrap a remote place; nothing is fetched yet.

        Args:
            place: The remote place.
            folder: The local folder, which is created when needed; the folder that contains it must exist.
        """
        super().__init__(place.location)
        self.place, self.folder = place, folder

    @property
    def name(self) -> str:
        """The last part of the address."""
        return self.place.name

    @property
    def parent(self) -> Place | None:
        """The folder that contains this place, kept in the same way."""
        parent = self.place.parent
        return None if parent is None else KeptPlace(parent, self.folder)

    def child(self, name: str) -> Place:
        """Return the place with this name in the folder, kept in the same way."""
        return KeptPlace(self.place.child(name), self.folder)

    def is_file(self) -> bool:
        """Return whether a file exists at this place."""
        return self.place.is_file()

    def is_folder(self) -> bool:
        """Return whether a folder exists at this place."""
        return self.place.is_folder()

    def entries(self) -> list[Place]:
        """Return the current files and folders in the folder, sorted by name."""
        entries = [KeptPlace(entry, self.folder) for entry in self.place.entries()]
        self.refused_names = self.place.refused_names
        return list(entries)

    def not_found(self, expected: str) -> QkovError:
        """Return the error that says that nothing is at the remote place, or that access is refused."""
        return self.place.not_found(expected)

    def size(self) -> int | None:
        """Return the file's size in bytes, or None if it is not stated."""
        # Everything that is kept needs the sign, and the request for it brings the size along.
        _ = self._sign
        return self.place.size()

    def stamp(self) -> str:
        """Return a hash that changes when the file does."""
        return self.place.stamp()

    def read_bytes(self, start: int = 0, stop: int | None = None) -> bytes:
        """Return the bytes [start, stop) of the file, or all of them without a stop, fetched once."""

        def fetch_range() -> list[np.ndarray]:
            return [np.frombuffer(self.place.read_bytes(start, stop), dtype=np.uint8)]

        return self._once([(start, stop)], fetch_range)[0].tobytes()

    def fetch(self, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """Return the bytes of each range; ranges that were requested together are kept together."""
        return self._once(ranges, lambda: self.place.fetch(ranges))

    @contextmanager
    def local_copy(self) -> Iterator[Path]:
        """Give the path of a copy, which is made once and not removed; a file on this machine needs none."""
        if isinstance(self.place, LocalPlace):
            yield self.place.path
            return
        path = self._path("copy")
        with _one_at_a_time(path):
            if not path.is_file():
                with self.place.local_copy() as copy:
                    if not _moved(copy, path):
                        yield copy
                        return
        yield path

    def _once(self, ranges: _Ranges, fetch: Callable[[], list[np.ndarray]]) -> list[np.ndarray]:
        path = self._path(json.dumps(ranges))
        with _one_at_a_time(path):
            contents = _kept(path, ranges)
            if contents is None:
                contents = fetch()
                _keep(path, contents)
            return contents

    def _path(self, what: str) -> Path:
        key = json.dumps([self.location, self._sign, what])
        return self.folder / hashlib.blake2b(key.encode(), digest_size=16).hexdigest()

    @cached_property
    def _sign(self) -> str:
        # What a web server says is enough here: its stamp reads content, which would cost bytes at every opening.
        return RemotePlace.stamp(self.place) if isinstance(self.place, RemotePlace) else self.place.stamp()


def _kept(path: Path, ranges: _Ranges) -> list[np.ndarray] | None:
    """Return what was kept of the ranges, which are stored one after the other, or None if it was not kept."""
    kept = LocalPlace(path)
    try:
        lengths = [(kept.size() or 0) if stop is None else stop - start for start, stop in ranges]
        return kept.fetch(list(pairwise(accumulate(lengths, initial=0))))
    except QkovError:
        return None


def _keep(path: Path, contents: list[np.ndarray]) -> None:
    """Write all pieces one after the other, or nothing; a missing folder is not created again."""
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
    """Make others on this machine that need the same bytes wait; the lock of a killed process is released."""
    descriptor = None
    try:
        with suppress(OSError):
            path.parent.mkdir(exist_ok=True)
            # Lock libraries create missing folders, but this folder must stay missing once it was deleted.
            descriptor = os.open(path.with_suffix(".lock"), os.O_CREAT | os.O_RDWR)
            locked(descriptor)
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)
