"""Work on a batch of matrices, spread over as many threads as torch has, each of which multiplies with one."""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import TypeVar

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
    with _one_numpy_thread():
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


@cache
def _numpy() -> ThreadpoolController:
    return ThreadpoolController().select(user_api="blas")


@contextmanager
def _one_numpy_thread() -> Iterator[None]:
    """One thread for each of numpy's products, unless another caller has set that, who sets it back.

    threadpoolctl lets only the thread that sets the number of all of them set it back, so that they cannot wait for the
    last caller: who began later may have more threads at the end, which costs time alone.
    """
    if not _numpy_is_set.acquire(blocking=False):
        yield
        return
    try:
        with _numpy().limit(limits=1):
            yield
    finally:
        _numpy_is_set.release()


_numpy_is_set = threading.Lock()


# Threads stay behind when a process is forked.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_workers.cache_clear)
