"""What is read one after the other, the next piece of it while the last one is in use."""

from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from itertools import islice
from threading import Thread
from typing import TypeVar

Result = TypeVar("Result")


def read_ahead(readings: Iterable[Callable[[], Result]]) -> Generator[Result, None, None]:
    """Yield what each reading returns, in order; from the second on, the next begins as soon as one is done.

    Whoever wants the first alone has no other begun. A reading that fails raises where its result would come. Whoever
    stops in between does not wait for the one that was begun.
    """
    coming = iter(readings)
    for first in islice(coming, 1):
        yield first()
    begun = None
    for reading in coming:
        if begun is None:
            begun = _begin(reading)
            continue
        result, begun = begun.result(), _begin(reading)
        yield result
    if begun is not None:
        yield begun.result()


def _begin(reading: Callable[[], Result]) -> "Future[Result]":
    begun: Future[Result] = Future()

    def read() -> None:
        try:
            begun.set_result(reading())
        except BaseException as error:
            begun.set_exception(error)

    Thread(target=read, name="qkov reading", daemon=True).start()
    return begun
