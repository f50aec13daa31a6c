"""A web server on this machine that answers as a test says, and a clock that no test waits for."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from qkov.circuits.storage import web_requests

from .local_server import running


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]


@dataclass
class Answer:
    """An answer; the length and, for part of the content, the range are added."""

    status: int = 200
    content: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    phrase: str | None = None


@contextmanager
def answering(answer: Callable[[Request], Answer]) -> Iterator[tuple[str, list[Request]]]:
    """Serve what a function answers; give the server's address and the requests so far."""
    requests: list[Request] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            request = Request(self.command, self.path, dict(self.headers))
            requests.append(request)
            chosen = answer(request)
            content, status, headers = chosen.content, chosen.status, dict(chosen.headers)
            asked = self.headers.get("Range", "").removeprefix("bytes=").split("-")
            if status == 200 and len(asked) == 2:
                start, stop = int(asked[0]), min(int(asked[1]) + 1, len(content))
                headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
                content, status = content[start:stop], 206
            self.send_response(status, chosen.phrase)
            for name, value in (headers | {"Content-Length": str(len(content))}).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Say nothing."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            """Say nothing of clients that hang up."""

    server = Server(("127.0.0.1", 0), Handler)
    with running(server) as address:
        yield address, requests


def without_waiting(monkeypatch: Any) -> list[float]:
    """Let the pauses between requests pass at once on a clock of their own; give the pauses so far."""
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(web_requests, "_pause", pause)
    monkeypatch.setattr(web_requests, "_now", lambda: sum(pauses))
    monkeypatch.setattr(web_requests, "_given_up", {})
    monkeypatch.setattr(web_requests, "_sent_on", {})
    return pauses
