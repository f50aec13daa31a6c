"""Read pieces one after another, each while the previous one is in use."""

from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from itertools import islice
from threading import Thread
from typing import TypeVar

Result = TypeVar("Result")


def read_ahead(readings: Iterable[Callable[[], Result]]) -> Generator[Result, None, None]:
    """Yield the result of each reading, in order. From the second on, a reading starts when the previous one is done.

    A caller that takes only the first result starts no other reading. A reading that fails raises where its result
    would come. A caller that stops early does not wait for the reading that has started.
    """
    remaining = iter(readings)
    for first in islice(remaining, 1):
        yield first()
    started = None
    for reading in remaining:
        if started is None:
            started = _start(reading)
            continue
        result, started = started.result(), _start(reading)
        yield result
    if started is not None:
        yield started.result()


def _start(reading: Callable[[], Result]) -> "Future[Result]":
    future: Future[Result] = Future()

    def read() -> None:
        try:
            future.set_result(reading())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=read, name="qkov reading", daemon=True).start()
    return future
