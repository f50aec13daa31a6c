"""Waiting for what other processes do; a deadline only ends a test that would otherwise hang."""

import os
import select
import subprocess
import threading
from collections.abc import Iterable
from itertools import islice

import psutil


def next_lines(process: subprocess.Popen[str], count: int = 1, seconds: float = 120) -> list[str]:
    """The next lines that a process prints to its standard output, without their ends."""
    assert process.stdout is not None
    watchdog = threading.Timer(seconds, process.kill)
    watchdog.start()
    try:
        lines = [line.rstrip("\n") for line in islice(process.stdout, count)]
    finally:
        watchdog.cancel()
    assert len(lines) == count, f"it ended, or printed only {lines} within {seconds} seconds"
    return lines


def remaining_lines(process: subprocess.Popen[str], seconds: float = 120) -> list[str]:
    """All that a process still prints to its standard output until it closes it."""
    assert process.stdout is not None
    watchdog = threading.Timer(seconds, process.kill)
    watchdog.start()
    try:
        return [line.rstrip("\n") for line in process.stdout]
    finally:
        watchdog.cancel()


def tell(process: subprocess.Popen[str]) -> None:
    """Let a process that reads a line from its standard input go on."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def until_ended(processes: Iterable[psutil.Process], seconds: float = 60) -> None:
    """Return once all of these processes have ended, whoever started them."""
    for process in processes:
        try:
            descriptor = os.pidfd_open(process.pid)
        except ProcessLookupError:
            continue
        try:
            ended, _, _ = select.select([descriptor], [], [], seconds)
        finally:
            os.close(descriptor)
        assert ended, f"{process} still runs after {seconds} seconds"
