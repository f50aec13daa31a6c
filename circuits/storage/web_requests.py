"""Requests to web servers: they are repeated while a server is busy, within limits, and redirections are noted."""

import asyncio
import time
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from itertools import count
from typing import Any
from urllib.parse import urlsplit

from aiohttp import ClientHandlerType, ClientRequest, ClientResponse, ClientSession, ClientTimeout

#: Within so many seconds a request is repeated.
DEADLINE = 120.0
#: The first pause in seconds; each further one is twice as long, up to the longest.
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
#: Seconds that any request may take, and the slowest transfer in bytes a second for which it may take longer.
_ANY_REQUEST, _SLOWEST = 600, 10_000
#: Seconds of silence after which a server counts as gone.
_UNTIL_CONNECTED, _SILENCE = 30, 60
#: Statuses of a server that may answer if it is asked again; 501 and 505 stay as they are.
_BUSY = {408, 425, 429, *range(500, 600)} - {501, 505}
_REDIRECTIONS = (301, 302, 303, 307, 308)

#: The host to which each host has sent a request on, if it is another one.
_sent_on: dict[str, str] = {}
#: When this process gave up repeating requests to a host.
_given_up: dict[str, float] = {}


def sent_on_from(address: str) -> str | None:
    """Return the host to which the host of an address sent requests of this process on, or None.

    Args:
        address: The address of a file on a web server.
    """
    return _sent_on.get(_host(address))


def allowed_time(size: int | None = None) -> ClientTimeout:
    """Return how long a request may take: longer for more bytes, so that a server which trickles is given up.

    Args:
        size: The number of bytes to transfer, if it is known to be large.
    """
    return ClientTimeout(total=_ANY_REQUEST + (size or 0) / _SLOWEST, sock_connect=_UNTIL_CONNECTED, sock_read=_SILENCE)


async def open_session(**options: Any) -> ClientSession:
    """Return a session whose requests are repeated while a server is busy.

    Args:
        **options: What the session is made with.
    """
    return ClientSession(middlewares=(_repeated,), **options)


def asked_pause(headers: Any) -> float | None:
    """Return for how many seconds an answer asks its reader to wait (Retry-After), or None.

    Args:
        headers: The headers of the answer, or None.
    """
    stated = str((headers or {}).get("Retry-After", "")).strip()
    if stated.isdecimal():
        return float(stated)
    try:
        date = parsedate_to_datetime(stated)
    except ValueError:
        return None
    zoned = date if date.tzinfo else date.replace(tzinfo=UTC)
    return max(0.0, (zoned - datetime.now(UTC)).total_seconds())


def status_in_words(status: int, headers: Any = None) -> str:
    """Return what a status means and what to do, in words of our own: a server's may be anything.

    Args:
        status: The status of the answer.
        headers: The headers of the answer.
    """
    try:
        named = f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        named = str(status)
    if status == HTTPStatus.UNAUTHORIZED:
        return f"{named}: the server asks for a login; put USER:PASSWORD@ before its name in the address"
    if status == HTTPStatus.FORBIDDEN:
        return f"{named}: the server refuses access, or has no such file; a signed link may have expired"
    if status in _BUSY:
        pause = asked_pause(headers)
        asked = "" if pause is None else f" and asks for a pause of {pause:.0f} s"
        return f"{named}, also after repeated requests{asked}; try again later"
    return named


async def _repeated(request: ClientRequest, handler: ClientHandlerType) -> ClientResponse:
    host, began = _host(str(request.url)), _now()
    # A host that stayed busy for one request is not waited for again with the next.
    if began - _given_up.get(host, began) > 2 * DEADLINE:
        del _given_up[host]
    deadline = _given_up.get(host, began) + DEADLINE
    for attempt in count():
        response = await handler(request)
        _note_redirection(request, response)
        if response.status not in _BUSY:
            _given_up.pop(host, None)
            return response
        pause = max(min(FIRST_PAUSE * 2**attempt, LONGEST_PAUSE), asked_pause(response.headers) or 0.0)
        if _now() + pause > deadline:
            _given_up.setdefault(host, began)
            return response
        response.release()
        await _pause(pause)
    raise AssertionError("a count never ends")


def _now() -> float:
    return time.monotonic()


async def _pause(seconds: float) -> None:
    await asyncio.sleep(seconds)


def _note_redirection(request: ClientRequest, response: ClientResponse) -> None:
    target = response.headers.get("Location", "")
    if response.status in _REDIRECTIONS and "://" in target:
        host, other = _host(str(request.url)), _host(target)
        if other != host:
            _sent_on[host] = other


def _host(address: str) -> str:
    return urlsplit(address).netloc.rpartition("@")[2].lower()
