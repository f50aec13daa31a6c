"""A web server on this machine that serves byte ranges of a folder and counts what it sends."""

import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from .local_server import running


class Traffic:
    """What the server sent, and how it is to behave.

    Attributes:
        sent: The bytes of content that were sent, by path.
        requests: The method and path of every request.
        serves_ranges: Whether to answer with the requested range, or always with the whole file.
        cuts: By how many bytes to shorten the answer to a range.
        fails: A status with which to answer every request.
        hangs_up: Whether to close the connection instead of answering.
        signs: Whether to send the time of a file's last change.
        codes: The value of the header X-Error-Code for a missing path, by a part of the path.
        is_hub: Whether to state the commit and the content hash of each of a model's files, as the hub does.
    """

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()
        self.requests: list[tuple[str, str]] = []
        self.serves_ranges = True
        self.cuts = 0
        self.fails: int | None = None
        self.hangs_up = False
        self.signs = True
        self.codes: dict[str, str] = {}
        self.is_hub = False


class _Handler(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, *call: object, traffic: Traffic, **options: str) -> None:
        self.traffic = traffic
        super().__init__(*call, **options)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        self.traffic.requests.append((self.command, self.path))
        path = Path(self.translate_path(self.path))
        if self.traffic.hangs_up:
            self.close_connection = True
        elif self.traffic.fails is not None:
            self.send_error(self.traffic.fails)
        elif not path.is_file():
            super().do_GET()
        else:
            self._send(path)

    do_HEAD = do_GET

    def _send(self, path: Path) -> None:
        content = path.read_bytes()
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked and self.traffic.serves_ranges:
            start, stop = int(asked[1]), min(int(asked[2]) + 1, len(content))
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(content)}")
            content = content[start : stop - self.traffic.cuts]
        else:
            self.send_response(200)
        if self.traffic.signs:
            self.send_header("Last-Modified", self.date_time_string(path.stat().st_mtime))
        if self.traffic.is_hub:
            # The folder of a revision is named by its commit, and by links with the names of branches and tags.
            self.send_header("X-Repo-Commit", path.parent.resolve().name)
            self.send_header("ETag", f'"{hashlib.sha1(path.read_bytes()).hexdigest()}"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            for start in range(0, len(content), 65536):
                part = content[start : start + 65536]
                # Counted first: a test may look as soon as it has the content.
                self.traffic.sent[self.path] += len(part)
                self.wfile.write(part)

    def end_headers(self) -> None:
        for part, code in self.traffic.codes.items():
            if part in self.path and not Path(self.translate_path(self.path)).exists():
                self.send_header("X-Error-Code", code)
        super().end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Say nothing."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of clients that hang up."""


@contextmanager
def serving(folder: Path) -> Iterator[tuple[str, Traffic]]:
    """Serve a folder; give its address and its traffic."""
    traffic = Traffic()
    server = _Server(("127.0.0.1", 0), partial(_Handler, directory=str(folder), traffic=traffic))
    with running(server) as address:
        yield address, traffic
