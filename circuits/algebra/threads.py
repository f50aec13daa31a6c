"""Work on a batch of matrices, spread over as many threads as torch has; each thread multiplies with one thread."""

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cache
from itertools import count, pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from threadpoolctl import ThreadpoolController

Item = TypeVar("Item")
Result = TypeVar("Result")

#: The largest number of items, such as layers, in memory at a time, however many threads there are.
ITEMS_AT_ONCE = 4
#: Just below 32 megabytes; glibc returns every block of that size or more to the system.
_LARGEST_KEPT = 31 * 2**20
#: How long a caller waits for its threads until it looks whether it has been interrupted.
_SECONDS_UNTIL_HEARD = 0.1


def in_threads(job: Callable[[int, int], Result], length: int) -> list[Result]:
    """Run a job on parts of range(length) in parallel threads: job(start, stop).

    Products of many small matrices gain more from one thread for every few matrices than from threads within each
    product. The thread counts of numpy and torch are set to one during the work, numpy's for the whole process. When a
    part fails, the others are waited for.

    Args:
        job: Called with the start and stop of each part, in a thread of its own.
        length: The length of the range.

    Returns:
        What the job returned for each part, in order.
    """
    threads = torch.get_num_threads()
    parts = max(1, min(threads, length))
    bounds = [length * part // parts for part in range(parts + 1)]
    with _one_numpy_thread():
        if parts == 1:
            return [job(0, length)]
        with _workers(threads, 1) as workers:
            futures = []
            try:
                futures += [workers.submit(job, *part) for part in pairwise(bounds)]
                _wait_for(futures)
            finally:
                wait(futures)
            return [future.result() for future in futures]


def side_by_side(job: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Run a job on each item in parallel threads; up to `ITEMS_AT_ONCE` jobs at a time share torch's threads.

    An item is taken when a thread is free, and by one thread at a time, so no more items are in memory than are worked
    on. When a job fails or the caller is interrupted, no further job starts. Jobs record gradients if the caller does;
    other settings of the caller's thread, such as autocast, do not apply in a job.

    Args:
        job: Called with each item.
        items: The items, taken lazily.

    Returns:
        What the job returned for each item, in order.
    """
    threads = torch.get_num_threads()
    at_once = min(threads, ITEMS_AT_ONCE)
    coming, numbers, results = iter(items), count(), {}
    taking, ended = threading.Lock(), threading.Event()
    with_gradient = torch.is_grad_enabled()

    def take() -> tuple[int, Item] | None:
        with taking:
            # Nothing here may keep a reference to an item, as enumerate would.
            for item in () if ended.is_set() else coming:
                return next(numbers), item
        return None

    def work() -> None:
        try:
            with torch.set_grad_enabled(with_gradient):
                while (taken := take()) is not None:
                    results[taken[0]] = job(taken[1])
                    # The memory of this item can be reused for the next one.
                    del taken
        except BaseException:
            ended.set()
            raise

    _keep_freed_memory()
    with _one_numpy_thread():
        if at_once == 1:
            work()
        else:
            with _workers(at_once, threads // at_once) as workers:
                futures = []
                try:
                    futures += [workers.submit(work) for _ in range(at_once)]
                    _wait_for(futures)
                finally:
                    ended.set()
                    wait(futures)
    return [results[index] for index in range(len(results))]


def _wait_for(futures: list[Future[Any]]) -> None:
    """Wait until all futures are done, or until one failed, and raise its error.

    An interrupt that arrives just before Python begins to wait for a lock is only noticed when the wait ends. The
    futures end with the last item, so the wait has to be cut into short ones.
    """
    pending = set(futures)
    while pending:
        done, pending = wait(pending, timeout=_SECONDS_UNTIL_HEARD, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()


def _keep_freed_memory() -> None:
    """Make malloc keep freed blocks for later allocations of the same size, as glibc does after it freed a large block.

    Otherwise every large block is returned to the system when freed, and the first access to new memory is slow.
    """
    np.empty(_LARGEST_KEPT, dtype=np.uint8)


@contextmanager
def _workers(number: int, threads_each: int) -> Iterator[ThreadPoolExecutor]:
    """Reserve worker threads that nobody else uses meanwhile, so that no caller waits for threads that wait for it."""
    idle = _idle.setdefault((number, threads_each), [])
    try:
        workers = idle.pop()
    except IndexError:
        workers = _started(number, threads_each)
    try:
        yield workers
    finally:
        idle.append(workers)


_idle: dict[tuple[int, int], list[ThreadPoolExecutor]] = {}


def _started(number: int, threads_each: int) -> ThreadPoolExecutor:
    common, ready = torch.get_num_threads(), threading.Barrier(number + 1)

    def begin() -> None:
        # A thread adopts the common number on its first look, whatever was set before.
        torch.get_num_threads()
        torch.set_num_threads(threads_each)
        ready.wait()

    workers = ThreadPoolExecutor(number, "qkov", begin)
    try:
        for _ in range(number):
            workers.submit(int)
        ready.wait()
    except BaseException:
        # Waiting threads would never end, and the process would wait for them when it exits.
        ready.abort()
        workers.shutdown(wait=False, cancel_futures=True)
        raise
    finally:
        # torch keeps a number for each thread; new threads get the number that was set last.
        torch.set_num_threads(common)
    return workers


@cache
def _numpy() -> ThreadpoolController:
    return ThreadpoolController().select(user_api="blas")


@contextmanager
def _one_numpy_thread() -> Iterator[None]:
    """Limit numpy's products to one thread, unless another caller has already done so and will restore the number.

    With threadpoolctl, only the caller that set the limit can restore it, and it does not wait for later callers. A
    caller that started later may have more threads at the end, which only costs time.
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


# A forked process does not inherit threads.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_idle.clear)
