"""A server for this machine alone that answers with the page of a run in training, and with what changed in it."""

import errno
import json
import secrets
import socketserver
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from ...circuits.errors import CallError
from .content import content_of, page_of, title_of
from .reading import Reading, StoreReader, age_in_words

#: The only address that is listened on, and the names under which a browser may ask for it. A page from elsewhere whose
#: name was made to point to this address asks under that name, and is refused.
_ADDRESS = "127.0.0.1"
_NAMES = ("127.0.0.1", "localhost")
#: Seconds between two looks at the store, and how many times as long as the last reading took it rests at least.
_BETWEEN, _REST = 1.0, 4.0
#: Seconds after which a connection that says nothing is closed.
_SILENCE = 20.0


class WatchServer(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Serves the page of one run; the store is read by one thread, and requests are answered with what it made.

    Attributes:
        folder: The store's folder.
    """

    daemon_threads = True
    allow_reuse_address = ThreadingHTTPServer.allow_reuse_address

    def __init__(self, folder: Path, port: int = 0) -> None:
        """Listen, and read the store for the first time.

        Args:
            folder: The store's folder, which may not exist yet.
            port: The port; 0 takes a free one.

        Raises:
            CallError: The port is taken, or cannot be listened on.
        """
        self.folder = folder
        self._reader = StoreReader(folder)
        self._token = secrets.token_hex(4)
        self._count = 0
        self._is_closed = threading.Event()
        try:
            super().__init__((_ADDRESS, port), _Handler)
        except (OSError, OverflowError) as error:
            is_taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
            why = "another program listens on it" if is_taken else str(error)
            raise CallError(
                f"port {port} cannot be listened on ({why}): give another one as --port, or leave it out"
            ) from error
        self._reader.refresh()
        self._made = self._make()

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://{_ADDRESS}:{self.server_address[1]}/"

    def follow(self) -> None:
        """Read the store whenever it changes, until the server is closed."""
        while not self._is_closed.is_set():
            began = time.monotonic()
            if self._reader.refresh():
                self._made = self._make()
            self._is_closed.wait(max(_BETWEEN, _REST * (time.monotonic() - began)))

    def serve(self) -> None:
        """Answer requests and follow the store until it is interrupted."""
        threading.Thread(target=self.follow, daemon=True).start()
        try:
            self.serve_forever(poll_interval=0.2)
        finally:
            self._is_closed.set()
            self.server_close()

    def answer(self, have: str) -> dict[str, Any]:
        """Return what a page is told: its title, how old the last step is, and the content if it has another version.

        Args:
            have: The version that the page has.
        """
        version, title, content, reading = self._made
        return {
            "version": version,
            "title": title,
            "age": age_in_words(reading.changed),
            "content": None if have == version else content,
        }

    def page(self, nonce: str) -> str:
        """Return the whole page.

        Args:
            nonce: The value that lets the page's own script run.
        """
        reading = self._made[3]
        return page_of(reading, self.folder, self.answer(""), nonce)

    def _make(self) -> tuple[str, str, str, Reading]:
        self._count += 1
        reading = self._reader.reading
        return f"{self._token}-{self._count}", title_of(reading), content_of(reading), reading


class _Handler(BaseHTTPRequestHandler):
    """Answers two paths, / and /content; no part of a path ever names a file."""

    timeout = _SILENCE
    server_version = "qkov"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer with the page, or with what changed."""
        server = self.server
        assert isinstance(server, WatchServer)
        host = self.headers.get("Host", "").rsplit(":", 1)[0]
        asked = urlsplit(self.path)
        if host not in _NAMES:
            self._send(HTTPStatus.FORBIDDEN, "text/plain", f"this page is served to {' and '.join(_NAMES)} alone\n")
        elif asked.path == "/":
            nonce = secrets.token_urlsafe(12)
            self._send(HTTPStatus.OK, "text/html", server.page(nonce), nonce)
        elif asked.path == "/content":
            have = parse_qs(asked.query).get("have", [""])[0]
            self._send(HTTPStatus.OK, "application/json", json.dumps(server.answer(have)))
        else:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", "there is nothing here: the page is at /\n")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (http.server names them)
        """Print nothing for a request."""

    def _send(self, status: HTTPStatus, kind: str, text: str, nonce: str = "") -> None:
        content = text.encode()
        script = f"script-src 'nonce-{nonce}'; " if nonce else ""
        self.send_response(status)
        for name, value in (
            ("Content-Type", f"{kind}; charset=utf-8"),
            ("Content-Length", str(len(content))),
            ("Cache-Control", "no-store"),
            (
                "Content-Security-Policy",
                f"default-src 'none'; {script}style-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
                "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
            ),
            ("Cross-Origin-Resource-Policy", "same-origin"),
            ("Referrer-Policy", "no-referrer"),
            ("X-Content-Type-Options", "nosniff"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)
