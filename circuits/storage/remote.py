"""Places that are reached through fsspec: object stores, the hub, archives, memory."""

import hashlib
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CallError, QkovError, reason
from ..public_addresses import without_secrets
from .places import BLOCK, Place
from .remote_names import refusal_of

#: The number of bytes that may be requested in addition, as a fraction of the bytes wanted.
SLACK = 0.05
#: The largest size of a merged request in bytes, so that several requests can run in parallel.
LARGEST = 16 * 2**20
#: The names under which drivers report something that changes with a file's content or version.
_SIGNS = (
    *("ETag", "etag", "Content-MD5", "content_md5", "md5Hash", "md5", "checksum", "blob_id", "lfs", "xet_hash"),
    *("generation", "VersionId", "version_id", "LastModified", "Last-Modified", "last_modified", "mtime", "modified"),
    *("updated", "created"),
)
#: How many requests run in parallel if the driver does not manage that itself.
_AT_ONCE = 8
#: Hub paths that begin with a word before the organisation.
_HUB_KINDS = ("datasets/", "models/", "spaces/", "buckets/", "kernels/")


def merged(
    ranges: Sequence[tuple[int, int]], slack: float = SLACK, largest: int = LARGEST
) -> list[tuple[tuple[int, int], list[int]]]:
    """Return requests that cover the ranges, merging neighbours, each with the indices of the ranges that it covers.

    Ranges of no bytes are not requested. Gaps between ranges are bridged, the smallest first, as long as all bridged
    bytes stay within the slack.

    Args:
        ranges: Ranges [start, stop) in bytes.
        slack: The number of bytes that may be bridged, as a fraction of the bytes wanted.
        largest: The largest size of a merged request, in bytes.
    """
    order = sorted((index for index, (start, stop) in enumerate(ranges) if stop > start), key=ranges.__getitem__)
    allowed = slack * sum(stop - start for start, stop in ranges)
    gaps = sorted((max(0, ranges[b][0] - ranges[a][1]), b) for a, b in pairwise(order))
    bridged = set()
    for gap, index in gaps:
        if gap <= allowed:
            allowed -= gap
            bridged.add(index)
    requests: list[tuple[tuple[int, int], list[int]]] = []
    for index in order:
        start, stop = ranges[index]
        if requests and index in bridged and max(stop, requests[-1][0][1]) - requests[-1][0][0] <= largest:
            (first, last), members = requests[-1]
            requests[-1] = (first, max(last, stop)), [*members, index]
        else:
            requests.append(((start, stop), [index]))
    return requests


class NotThereError(CallError):
    """There is nothing at this address."""


class RemotePlace(Place):
    """A path in an fsspec file system.

    Attributes:
        system: The fsspec file system.
        path: The path in the file system.
        hint: What to add to the message if nothing is found.
    """

    def __init__(self, system: Any, path: str, address: str, info: dict[str, Any] | None = None) -> None:
        """Store the path; nothing is requested yet.

        Args:
            system: The fsspec file system.
            path: The path as the file system names it.
            address: The address as it was given.
            info: What a listing said about the path, if one did.
        """
        super().__init__(address)
        self.system, self.path, self._info = system, path, info
        self.hint = ""

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rstrip("/").rpartition("/")[2]

    @property
    def parent(self) -> "Place | None":
        """The folder that contains this place, or None at the top of a bucket or repository."""
        path = self.path.rstrip("/")
        # On the hub, a repository's path consists of the organisation and the model's name.
        above = 1 + path.startswith(_HUB_KINDS) if self.location.startswith("hf://") else 0
        if path.count("/") <= above:
            return None
        first, mark, rest = self.location.partition("::")
        return type(self)(self.system, _above(path), _above(first.rstrip("/")) + mark + rest)

    def child(self, name: str) -> Place:
        """Return the place with this name in the folder, whether or not it exists."""
        return self._child(name, None)

    def is_file(self) -> bool:
        """Return whether a file exists at this place."""
        return self._kind() == "file"

    def is_folder(self) -> bool:
        """Return whether a folder exists at this place."""
        return self._kind() == "directory"

    def entries(self) -> list[Place]:
        """Return the current files and folders in the folder, sorted by name."""
        with self._translated():
            self.system.invalidate_cache(self.path)
            listed = self.system.ls(self.path, detail=True)
        return self._named({info["name"].rstrip("/").rpartition("/")[2]: info for info in listed})

    def size(self) -> int | None:
        """Return the file's size in bytes, or None if it is not stated."""
        if self._info is None or self._info.get("size") is None:
            with self._translated():
                self._info = self.system.info(self.path)
        return self._info.get("size")

    def read_bytes(self, start: int = 0, stop: int | None = None) -> bytes:
        """Return the bytes [start, stop) of the file, or all of them without a stop."""
        if stop is None:
            with self._translated():
                return self.system.cat_file(self.path)
        # Without a cache, so that no bytes are read ahead that nobody needs.
        with self._translated(), self.system.open(self.path, "rb", cache_type="none", **self._open_options()) as file:
            file.seek(start)
            content = file.read(stop - start)
        return self._whole(content, start, stop)

    def fetch(self, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """Return the bytes of each range; neighbours share a request, and requests run in parallel."""
        requests = merged(ranges)
        with self._translated():
            answers = self._answers([request for request, _ in requests])
        contents = [np.empty(0, dtype=np.uint8)] * len(ranges)
        for ((start, stop), members), answer in zip(requests, answers, strict=True):
            content = np.frombuffer(self._whole(answer, start, stop), dtype=np.uint8)
            for index in members:
                first, last = ranges[index]
                contents[index] = content[first - start : last - start].copy()
        return contents

    def stamp(self) -> str:
        """Return a hash of the file's size and of what the file system says about its version.

        If it says nothing about the version, the hash depends on the first and last 64 KiB of the file.
        """
        with self._translated():
            info = self._info = self.system.info(self.path)
        signs = {sign: str(info[sign]) for sign in _SIGNS if info.get(sign)}
        digest = hashlib.blake2b(f"{info.get('size')} {sorted(signs.items())}".encode(), digest_size=16)
        if not signs:
            for block in self._ends():
                digest.update(block)
        return digest.hexdigest()

    @contextmanager
    def local_copy(self) -> Iterator[Path]:
        """Give the path of a copy that is removed afterwards; its name has nothing to do with the name afar."""
        with tempfile.TemporaryDirectory(prefix="qkov-") as folder:
            copy = Path(folder) / "copy"
            with self._translated():
                self._copy_to(copy)
            yield copy

    def not_found(self, expected: str) -> QkovError:
        """Return the error that says that nothing is here, with what the driver said."""
        return CallError(f"{self.address} does not exist; expected {expected}{self.hint}")

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Turn whatever a driver raises into one line that names the address; every driver has errors of its own."""
        try:
            yield
        except QkovError:
            raise
        except Exception as error:
            failure = self._not_found(error) if isinstance(error, FileNotFoundError) else self._unreadable(error)
            # The error of a driver may repeat what lets the reader in.
            raise failure from (error if self.address == self.location else None)

    def _named(self, infos: dict[str, dict[str, Any]]) -> list[Place]:
        """Return the entries with a name of one file each, sorted; note the others."""
        refusals = {name: refusal_of(name) for name in infos}
        self.refused_names = {name: f"{refusal}: refused" for name, refusal in refusals.items() if refusal}
        return [self._child(name, infos[name]) for name in sorted(infos) if refusals[name] is None]

    def _said(self, error: BaseException) -> str:
        """Return what an error of the driver says, without secrets of the address."""
        return without_secrets(reason(error), self.location)

    def _unreadable(self, error: BaseException) -> QkovError:
        return QkovError(
            f"{self.address} cannot be read ({self._said(error)}): check the address and the connection, "
            f"or copy it to this machine and give the path of the copy{self.hint}"
        )

    def _ends(self) -> tuple[bytes, bytes]:
        """Return the first and the last 64 KiB of the file; a file that fits into one block is read once."""
        size = self.size() or 0
        first = self.read_bytes(0, min(size, BLOCK))
        return first, first if size <= BLOCK else self.read_bytes(size - BLOCK, size)

    def _not_found(self, error: FileNotFoundError) -> QkovError:
        return NotThereError(f"{self.address} does not exist ({self._said(error)}){self.hint}")

    def _open_options(self) -> dict[str, Any]:
        return {}

    def _copy_to(self, copy: Path) -> None:
        self.system.get_file(self.path, str(copy))

    def _child(self, name: str, info: dict[str, Any] | None) -> Place:
        # In a chain of addresses, such as zip://folder::s3://bucket/file.zip, the first path is the inner one.
        first, mark, rest = self.location.partition("::")
        if "://" not in first:
            first, mark, rest = self.location, "", ""
        return type(self)(self.system, _joined(self.path, name), _joined(first, name) + mark + rest, info)

    def _kind(self) -> str | None:
        try:
            if self._info is None:
                with self._translated():
                    self._info = self.system.info(self.path)
        except NotThereError:
            return None
        return self._info["type"]

    def _answers(self, requests: list[tuple[int, int]]) -> list[bytes]:
        if self.system.async_impl:
            starts, stops = ([request[end] for request in requests] for end in (0, 1))
            return self.system.cat_ranges([self.path] * len(requests), starts, stops, on_error="raise")
        if not self.location.startswith("hf://"):
            # Other drivers may not support several requests at once.
            return [self.read_bytes(*request) for request in requests]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return list(pool.map(lambda request: self.read_bytes(*request), requests))

    def _whole(self, content: bytes, start: int, stop: int) -> bytes:
        if len(content) != stop - start:
            raise QkovError(
                f"{self.address} was asked for bytes {start} to {stop} but returned {len(content)} bytes: it was cut "
                f"short, or its server does not serve ranges; copy it to this machine and give the path of the copy"
            )
        return content


def _above(path: str) -> str:
    above = path.rpartition("/")[0]
    # For example at the top of memory://.
    return f"{above}/" if above.endswith(":/") else above


def _joined(path: str, part: str) -> str:
    return f"{path}{part}" if path == "" or path.endswith("/") else f"{path}/{part}"
