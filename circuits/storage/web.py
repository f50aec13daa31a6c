"""Files on a web server, which has no folders, few signs of change, and quoted names."""

import hashlib
import re
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from ..errors import QkovError
from .places import Place
from .remote import NotThereError, RemotePlace
from .remote_names import last_part
from .web_requests import allowed_time, open_session, sent_on_from, status_in_words

#: How the address of a file ends; a server does not say which of its paths are folders.
_FILE = re.compile(r"[^/]\.[A-Za-z]\w*$")
#: The statuses of a server that has no such file, and of one that does not tell strangers whether it has one.
_NONE_THERE, _REFUSED = (404, 410), (401, 403)


#: The first status that stands for an error.
_FIRST_ERROR = 400


class WebPlace(RemotePlace):
    """The address of a file on a web server, or of an index page that lists the files of a folder."""

    _refusal: QkovError | None = None

    @property
    def name(self) -> str:
        """The last part of the path."""
        return last_part(urlsplit(self.path).path)

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
        return self._named(infos)

    def stamp(self) -> str:
        """Return a hash of what the server says about the file, and of the file's first and last 64 KiB.

        Most servers say no more than the second of the last change.
        """
        digest = hashlib.blake2b(super().stamp().encode(), digest_size=16)
        for block in self._ends():
            digest.update(block)
        return digest.hexdigest()

    def not_found(self, expected: str) -> QkovError:
        """Return the error that says that nothing is here, or that the server refuses access."""
        return self._refusal or super().not_found(expected)

    def _not_found(self, error: FileNotFoundError) -> QkovError:
        # fsspec also raises FileNotFoundError for a server that does not answer.
        cause = error.__cause__
        status = getattr(cause, "status", None)
        if cause is None or status in _NONE_THERE:
            return NotThereError(f"{self.address} does not exist")
        failure = self._unreadable(cause)
        if status in _REFUSED:
            self._refusal = failure
            return NotThereError(str(failure))
        return failure

    def _unreadable(self, error: BaseException) -> QkovError:
        status = getattr(error, "status", None)
        other = sent_on_from(self.location)
        on_the_way = "" if other is None else f"; the server sent the request on to {other}"
        if isinstance(status, int) and status >= _FIRST_ERROR:
            said = status_in_words(status, getattr(error, "headers", None))
            return QkovError(f"{self.address} cannot be read ({said}){on_the_way}")
        if isinstance(error, TimeoutError):
            return QkovError(
                f"{self.address} cannot be read (the server fell silent, or sends too slowly): check the connection, "
                f"or copy it to this machine and give the path of the copy{on_the_way}"
            )
        return QkovError(f"{super()._unreadable(error)}{on_the_way}")

    def _open_options(self) -> dict[str, Any]:
        # With its size the file need not be queried again each time.
        return {"size": self.size()}

    def _copy_to(self, copy: Path) -> None:
        from fsspec.asyn import sync

        # The driver's own call takes the time that it may need for its own.
        fetch = partial(self.system._get_file, timeout=allowed_time(self.size()))
        sync(self.system.loop, fetch, self.path, str(copy))

    def _child(self, name: str, info: dict[str, Any] | None) -> Place:
        address = f"{self.path.rstrip('/')}/{quote(name)}"
        return WebPlace(self.system, address, address, info)

    def _kind(self) -> str | None:
        if self._info is None and not _FILE.search(urlsplit(self.path).path):
            return "directory"
        return super()._kind()


def web_options() -> dict[str, Any]:
    """Return the driver's options for web servers: how long an answer may take, and when a request is repeated."""
    return {"client_kwargs": {"timeout": allowed_time()}, "get_client": open_session}
