"""Files on a web server, which has no folders, few signs of change, and quoted names."""

import hashlib
import re
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from ..errors import QkovError, reason
from .places import Place
from .remote import NotThereError, RemotePlace

#: How the address of a file ends; a server does not say which of its paths are folders.
_FILE = re.compile(r"[^/]\.[A-Za-z]\w*$")
#: The status codes of a server that has no such file, or does not tell strangers whether it has one.
_NONE_THERE = (403, 404, 410)


class WebPlace(RemotePlace):
    """The address of a file on a web server, or of an index page that lists the files of a folder."""

    @property
    def name(self) -> str:
        """The last part of the path."""
        return unquote(urlsplit(self.path).path.rstrip("/").rpartition("/")[2])

    @property
    def parent(self) -> "Place | None":
        """The folder that contains this place, or None at the top of the server."""
        parts = urlsplit(self.path)
        path = parts.path.rstrip("/")
        if not path:
            return None
        above = parts._replace(path=f"{path.rpartition('/')[0]}/", query="", fragment="").geturl()
        return WebPlace(self.system, above, above)

    def entries(self) -> list[Place]:
        """Return the files and folders to which the server's index page of a folder links."""
        folder = f"{self.path.rstrip('/')}/"
        with self._translated():
            listed = self.system.ls(folder, detail=True)
        infos = {}
        for info in listed:
            quoted = info["name"].removeprefix(folder).rstrip("/")
            # An index page also links to itself in other sort orders, and to deeper folders.
            if quoted and not set(quoted) & set("/?#"):
                infos[unquote(quoted)] = info
        return [self._child(name, infos[name]) for name in sorted(infos)]

    def stamp(self) -> str:
        """Return a hash of what the server says about the file, and of the file's first and last 64 KiB.

        Most servers say no more than the second of the last change.
        """
        digest = hashlib.blake2b(super().stamp().encode(), digest_size=16)
        for block in self._ends():
            digest.update(block)
        return digest.hexdigest()

    def _not_found(self, error: FileNotFoundError) -> QkovError:
        # fsspec also raises FileNotFoundError for a server that does not answer.
        cause = error.__cause__
        if cause is None or getattr(cause, "status", None) in _NONE_THERE:
            return NotThereError(f"{self.address} does not exist ({reason(error)})")
        return QkovError(f"{self.address} cannot be reached ({reason(cause)}): check the address and the connection")

    def _open_options(self) -> dict[str, Any]:
        # With its size the file need not be queried again each time.
        return {"size": self.size()}

    def _child(self, name: str, info: dict[str, Any] | None) -> Place:
        address = f"{self.path.rstrip('/')}/{quote(name)}"
        return WebPlace(self.system, address, address, info)

    def _kind(self) -> str | None:
        if self._info is None and not _FILE.search(urlsplit(self.path).path):
            return "directory"
        return super()._kind()


def web_options() -> dict[str, Any]:
    """Return the driver's options for web servers: a transfer may take long, but not the silence of a server."""
    from aiohttp import ClientTimeout

    return {"client_kwargs": {"timeout": ClientTimeout(total=None, sock_connect=30, sock_read=60)}}
