"""Read how much memory this process holds, from Linux' /proc.

`ru_maxrss` is no substitute: it is inherited across exec, so a child reports the peak of a larger parent as its own.
"""

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

STATUS = Path("/proc/self/status")


def held_bytes() -> int:
    """Return the resident memory of this process."""
    return _field("VmRSS")


def peak_bytes() -> int:
    """Return the peak resident memory of this process since it began, or since `reset_peak`."""
    return _field("VmHWM")


def reset_peak() -> None:
    """Let the peak begin again at what this process holds now."""
    Path("/proc/self/clear_refs").write_text("5")


def rise(call: Callable[[], object]) -> int:
    """Return by how many bytes the peak of a call rises above what this process holds before."""
    gc.collect()
    reset_peak()
    before = held_bytes()
    call()
    return peak_bytes() - before


def printed_in_a_process(module: str, *arguments: str) -> int:
    """Return what a module prints, run as a process that gives every tensor back to the system when it is freed."""
    command = [sys.executable, "-m", module, *arguments]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    return int(subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout)


def _field(name: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])
