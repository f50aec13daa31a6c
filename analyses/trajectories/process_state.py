"""Puts back what the engines change in this process while they work."""

import faulthandler
import logging
import os
import random
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

#: torch keeps one number of threads for each thread, and the number that was set last for threads that start later.
_setting_threads = threading.Lock()


@contextmanager
def restored_process(*loggers: str) -> Iterator[None]:
    """Restore the state of the process when the block ends, whether it succeeds, fails or is interrupted.

    Dask and Ray change the environment, and with it every process that the user starts later; Ray replaces the handler
    of SIGTERM and `sys.excepthook` and enables `faulthandler`; Dask draws from Python's random numbers.

    Args:
        *loggers: The names of the loggers whose levels are restored.
    """
    environment, random_state, excepthook = dict(os.environ), random.getstate(), sys.excepthook
    levels = {name: logging.getLogger(name).level for name in loggers}
    handler, had_faulthandler = signal.getsignal(signal.SIGTERM), faulthandler.is_enabled()
    try:
        yield
    finally:
        for name in set(os.environ) - set(environment):
            del os.environ[name]
        os.environ.update(environment)
        random.setstate(random_state)
        sys.excepthook = excepthook
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        # Only the main thread may set a handler; no other thread lets Ray replace it.
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
        if not had_faulthandler:
            faulthandler.disable()


@contextmanager
def interrupts_ignored_by_children() -> Iterator[None]:
    """Let the processes that start in this block ignore Ctrl-C, which a terminal sends to every process of its group.

    This process ends them itself when it is interrupted.
    """
    handler = signal.getsignal(signal.SIGINT)
    # None stands for a handler that was not set from Python, and which Python therefore cannot restore.
    if handler is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Let this thread use one thread of torch in the block, and leave all other threads as they are.

    A worker of a cluster can be a thread of the user's own process.
    """
    with _setting_threads:
        count = torch.get_num_threads()
        torch.set_num_threads(1)
        # The number for threads that start later can be set back only by another thread.
        restoring = threading.Thread(target=torch.set_num_threads, args=(count,))
        restoring.start()
        restoring.join()
    try:
        yield
    finally:
        with _setting_threads:
            torch.set_num_threads(count)
