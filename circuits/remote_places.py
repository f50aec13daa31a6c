"""Places that are reached through fsspec: object stores, web servers, the hub, memory."""

import hashlib
import re
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import numpy as np

from .errors import CallError, QkovError, reason
from .places import BLOCK, Place
from .ranges import merged

#: What drivers call the sign of a file's content or version.
_SIGNS = (
    *("ETag", "etag", "Content-MD5", "content_md5", "md5Hash", "md5", "checksum", "blob_id", "lfs", "xet_hash"),
    *("generation", "VersionId", "version_id", "Last-Modified", "LastModified", "last_modified", "mtime", "modified"),
    *("updated", "created"),
)
#: The end of a web address that is taken for that of a file.
_FILE = re.compile(r"://[^/]+/.*\.[A-Za-z]\w*$")
#: How many requests are under way at once, where a driver leaves that to us.
_AT_ONCE = 8


def remote_place(address: str) -> Place:
    """Return the place of an fsspec address.

    Raises:
        CallError: the kind of address is unknown, or its driver is not installed.
    """
    import fsspec
    from fsspec.registry import known_implementations

    protocol = address.split("::", 1)[0].split("://", 1)[0]
    try:
        system, path = fsspec.url_to_fs(address)
    except ImportError as error:
        driver = known_implementations.get(protocol, {}).get("class", "fsspec").split(".")[0]
        install = f"pip install {driver}" if driver != "fsspec" else str(error)
        raise CallError(f"{address} needs a driver for {protocol}:// that is not installed: {install}") from error
    except ValueError as error:
        raise CallError(
            f"{address} cannot be understood ({error}); expected a path, or an address such as s3://, hf:// or https://"
        ) from error
    except Exception as error:  # drivers raise errors of their own, at the latest when they look for credentials
        raise QkovError(f"{address} cannot be reached ({reason(error)})") from error
    return RemotePlace(system, path, address)


class RemotePlace(Place):
    """A path in a file system of fsspec."""

    def __init__(self, system: Any, path: str, address: str, info: dict[str, Any] | None = None) -> None:
        """Remember the path.

        Args:
            system: the fsspec file system.
            path: as the file system names it.
            address: as a user would.
            info: what a listing said of it, if one did.
        """
        super().__init__(address)
        self.system, self.path, self._info = system, path, info
        self._is_web = address.startswith(("http://", "https://"))

    @property
    def name(self) -> str:
        """The last part of the path."""
        name = self._without_query(self.path).rstrip("/").rpartition("/")[2]
        return unquote(name) if self._is_web else name

    @property
    def parent(self) -> "Place | None":
        """The folder around it, or None at the top of a bucket, a server or a repository."""
        # A server's name stands before the path of a web address, an organisation before the name of a hub model.
        above = {"http": 2, "https": 2, "hf": 1}.get(self.address.split("://")[0], 0)
        path = self._without_query(self.path).rstrip("/")
        if path.count("/") <= above:
            return None
        first, mark, rest = self.address.partition("::")
        address = _above(self._without_query(first).rstrip("/")) + mark + rest
        return RemotePlace(self.system, _above(path), address)

    def child(self, name: str) -> Place:
        """Return what has that name in this folder."""
        return self._child(name, None)

    def is_file(self) -> bool:
        """Say whether a file is there."""
        return self._kind() == "file"

    def is_folder(self) -> bool:
        """Say whether a folder is there."""
        return self._kind() == "directory"

    def entries(self) -> list[Place]:
        """Return what the folder holds, as it is now."""
        with self._told():
            self.system.invalidate_cache(self.path)
            path = f"{self.path.rstrip('/')}/" if self._is_web else self.path
            listed = self.system.ls(path, detail=True)
        found = {}
        for info in listed:
            name = info["name"].rstrip("/").rpartition("/")[2]
            # A web server's list links to itself in other orders.
            if info["name"].rstrip("/") != self.path.rstrip("/") and not (self._is_web and "?" in name):
                name = unquote(name) if self._is_web else name
                found[name] = self._child(name, info)
        return [found[name] for name in sorted(found)]

    def size(self) -> int | None:
        """Return the file's size in bytes, or None where the place does not tell it."""
        if self._info is None or self._info.get("size") is None:
            with self._told():
                self._info = self.system.info(self.path)
        return self._info.get("size")

    def read_bytes(self, start: int = 0, stop: int | None = None) -> bytes:
        """Return a few bytes of the file, or all of them."""
        if stop is None:
            with self._told():
                return self.system.cat_file(self.path)
        return self._read_range(start, stop)

    def fetch(self, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """Return the bytes of each range: neighbours in one request, the requests side by side."""
        requests = merged(ranges)
        with self._told():
            answers = self._answers([request for request, _ in requests])
        found: dict[int, np.ndarray] = {}
        for ((start, stop), members), answer in zip(requests, answers, strict=True):
            if len(answer) != stop - start:
                raise self._short(start, stop, len(answer))
            content = np.frombuffer(answer, dtype=np.uint8)
            for position in members:
                first, last = ranges[position]
                found[position] = content[first - start : last - start].copy()
        return [found[position] for position in range(len(ranges))]

    def stamp(self) -> str:
        """Return a hash of the size and of what the place says of the file's version.

        Where it says no more than the second of the last change, of the file's first and last 64 KiB as well.
        """
        with self._told():
            info = self.system.info(self.path)
        signs = {sign: str(info[sign]) for sign in _SIGNS if info.get(sign)}
        digest = hashlib.blake2b(f"{info.get('size')} {sorted(signs.items())}".encode(), digest_size=16)
        if not signs.keys() - {"Last-Modified"}:
            size = info.get("size") or 0
            digest.update(self.read_bytes(0, min(size, BLOCK)))
            digest.update(self.read_bytes(max(0, size - BLOCK), size))
        return digest.hexdigest()

    @contextmanager
    def local_copy(self) -> Iterator[Path]:
        """Give the path of a copy that is removed afterwards."""
        with tempfile.TemporaryDirectory(prefix="qkov-") as folder:
            copy = Path(folder) / self.name
            with self._told():
                self.system.get_file(self.path, str(copy))
            yield copy

    def _child(self, name: str, info: dict[str, Any] | None) -> Place:
        part = quote(name) if self._is_web else name
        # Of a chain of addresses, such as zip://folder::s3://bucket/file.zip, the first path is the one within.
        first, mark, rest = self.address.partition("::")
        if "://" not in first:
            first, mark, rest = self.address, "", ""
        return RemotePlace(self.system, _joined(self.path, part), _joined(first, part) + mark + rest, info)

    def _kind(self) -> str | None:
        if self._is_web and self._info is None and not _FILE.search(self._without_query(self.path)):
            # A web server does not tell what is a folder.
            return "directory"
        try:
            if self._info is None:
                with self._told():
                    self._info = self.system.info(self.path)
        except _NotThereError:
            return None
        return self._info["type"]

    def _answers(self, requests: list[tuple[int, int]]) -> list[bytes]:
        if self.system.async_impl:
            starts, stops = ([request[end] for request in requests] for end in (0, 1))
            return self.system.cat_ranges([self.path] * len(requests), starts, stops, on_error="raise")
        if not self.address.startswith("hf://"):
            # Drivers that are not written for it need not bear several requests at once.
            return [self._read_range(*request) for request in requests]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return list(pool.map(lambda request: self._read_range(*request), requests))

    def _read_range(self, start: int, stop: int) -> bytes:
        # Reading ahead would bring bytes that nobody asked for.
        with self._told(), self.system.open(self.path, "rb", cache_type="none") as file:
            file.seek(start)
            content = file.read(stop - start)
        if len(content) != stop - start:
            raise self._short(start, stop, len(content))
        return content

    def _short(self, start: int, stop: int, got: int) -> QkovError:
        return QkovError(
            f"{self.address} was asked for bytes {start} to {stop} and answered with {got} bytes: it is cut short, or "
            f"its server does not serve ranges; copy it here and give the path of the copy"
        )

    def _without_query(self, path: str) -> str:
        return urlsplit(path)._replace(query="", fragment="").geturl() if self._is_web else path

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Every driver has errors of its own: whatever one raises is told in a line."""
        try:
            yield
        except QkovError:
            raise
        except FileNotFoundError as error:
            # fsspec says "not found" of a web server that does not answer, too.
            cause = error.__cause__ if self._is_web else None
            if cause is None or getattr(cause, "status", None) in (403, 404, 410):
                raise _NotThereError(f"{self.address} does not exist ({reason(error)})") from error
            raise QkovError(f"{self.address} cannot be reached ({reason(cause)}): check the address") from error
        except Exception as error:
            raise QkovError(
                f"{self.address} cannot be read ({reason(error)}): check the address and the connection, "
                f"or copy it here and give the path of the copy"
            ) from error


class _NotThereError(CallError):
    """The place holds nothing."""


def _above(path: str) -> str:
    above = path.rpartition("/")[0]
    # At the top of memory://, say.
    return f"{above}/" if above.endswith(":/") else above


def _joined(path: str, part: str) -> str:
    return f"{path}{part}" if path == "" or path.endswith("/") else f"{path}/{part}"
