"""Read how much memory this process holds, from Linux' /proc.

`ru_maxrss` is no substitute: it is inherited across exec, so a child reports the peak of a larger parent as its own.
"""

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


def _field(name: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])
