"""Work on a batch of matrices, spread over as many threads as torch has, each of which multiplies with one."""

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cache
from itertools import count
from typing import TypeVar

import numpy as np
import torch
from threadpoolctl import ThreadpoolController

Item = TypeVar("Item")
Result = TypeVar("Result")

#: That are in memory at a time, such as layers, however many threads there are.
ITEMS_AT_ONCE = 4
#: Just below the 32 megabytes from which glibc gives back every block.
_LARGEST_KEPT = 31 * 2**20


def in_threads(job: Callable[[int, int], Result], length: int) -> list[Result]:
    """Return what a job gives for the parts of range(length), in order: job(start, stop), each in a thread of its own.

    Products of many small matrices gain more from a thread for every few of them than from threads within each. numpy's
    and torch's own threads are set to one meanwhile, numpy's for the whole process.
    """
    threads = torch.get_num_threads()
    parts = max(1, min(threads, length))
    bounds = [length * part // parts for part in range(parts + 1)]
    with _one_numpy_thread():
        if parts == 1:
            return [job(0, length)]
        with _workers(threads, 1) as workers:
            return list(workers.map(job, bounds[:-1], bounds[1:]))


def side_by_side(job: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Return what a job gives for each item, in order; up to `ITEMS_AT_ONCE` of them at a time share torch's threads.

    An item is taken when a thread is free for it, and by one thread at a time, so that as many are in memory as are
    worked on. Once one fails, or the caller is interrupted, no more are begun. Whether torch keeps gradients is as for
    the caller; what else is set for the caller's thread alone, such as autocast, is not set within a job.
    """
    threads = torch.get_num_threads()
    at_once = min(threads, ITEMS_AT_ONCE)
    coming, numbers, results = iter(items), count(), {}
    taking, ended = threading.Lock(), threading.Event()
    with_gradient = torch.is_grad_enabled()

    def take() -> tuple[int, Item] | None:
        with taking:
            # Nothing here may hold on to an item, as enumerate would.
            for item in () if ended.is_set() else coming:
                return next(numbers), item
        return None

    def work() -> None:
        try:
            with torch.set_grad_enabled(with_gradient):
                while (taken := take()) is not None:
                    results[taken[0]] = job(taken[1])
                    # What comes next can lie where this one lay.
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
                working = []
                try:
                    working += [workers.submit(work) for _ in range(at_once)]
                    for each in working:
                        each.result()
                finally:
                    ended.set()
                    wait(working)
    return [results[index] for index in range(len(results))]


def _keep_freed_memory() -> None:
    """Let malloc keep what is freed for what comes next of the same size, as glibc does once a block so large is freed.

    Until then every large block is given back when freed, and memory that is new is slow to touch first.
    """
    np.empty(_LARGEST_KEPT, dtype=np.uint8)


@contextmanager
def _workers(number: int, threads_each: int) -> Iterator[ThreadPoolExecutor]:
    """Some worker threads that nobody else has meanwhile, so that nobody waits for what waits for them."""
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
        # A thread takes the common number when it first looks, whatever it was told before.
        torch.get_num_threads()
        torch.set_num_threads(threads_each)
        ready.wait()

    workers = ThreadPoolExecutor(number, "qkov", begin)
    try:
        for _ in range(number):
            workers.submit(int)
        ready.wait()
    except BaseException:
        # Those that wait would do so for ever, and be waited for when the process ends.
        ready.abort()
        workers.shutdown(wait=False, cancel_futures=True)
        raise
    finally:
        # torch keeps one number for each thread, and the last one that was set for threads to come.
        torch.set_num_threads(common)
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
    os.register_at_fork(after_in_child=_idle.clear)
