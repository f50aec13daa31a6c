"""Work on a batch of matrices, spread over as many threads as torch has, each of which multiplies with one."""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, cached_property
from typing import Any, TypeVar

import torch
from threadpoolctl import ThreadpoolController

Result = TypeVar("Result")


def in_threads(job: Callable[[int, int], Result], count: int) -> list[Result]:
    """Return what a job gives for the parts of range(count), in order: job(start, stop), each in a thread of its own.

    Products of many small matrices gain more from a thread for every few of them than from threads within each. numpy's
    and torch's own threads are set to one meanwhile, numpy's for the whole process.
    """
    threads = torch.get_num_threads()
    parts = max(1, min(threads, count))
    bounds = [count * part // parts for part in range(parts + 1)]
    with _numpy_threads.single():
        if parts == 1:
            return [job(0, count)]
        return list(_workers(threads).map(job, bounds[:-1], bounds[1:]))


@cache
def _workers(threads: int) -> ThreadPoolExecutor:
    ready = threading.Barrier(threads + 1)

    def begin() -> None:
        # A thread takes the common number when it first looks, whatever it was told before.
        torch.get_num_threads()
        torch.set_num_threads(1)
        ready.wait()

    workers = ThreadPoolExecutor(threads, "qkov", begin)
    for _ in range(threads):
        workers.submit(int)
    ready.wait()
    # torch keeps one number for each thread, and the last one that was set for threads to come.
    torch.set_num_threads(threads)
    return workers


class _NumpyThreads:
    """How many threads numpy's products have, set to one while anybody works here and set back after the last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._working = 0
        self._limit: Any = None

    @cached_property
    def _controller(self) -> ThreadpoolController:
        return ThreadpoolController().select(user_api="blas")

    @contextmanager
    def single(self) -> Iterator[None]:
        with self._lock:
            self._working += 1
            if self._working == 1:
                self._limit = self._controller.limit(limits=1)
        try:
            yield
        finally:
            with self._lock:
                self._working -= 1
                if self._working == 0:
                    self._limit.restore_original_limits()


_numpy_threads = _NumpyThreads()


def _begin_anew() -> None:
    """Threads, and whoever held the lock, stay behind when a process is forked."""
    global _numpy_threads
    _workers.cache_clear()
    _numpy_threads = _NumpyThreads()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
