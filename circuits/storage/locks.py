"""Locks on open files of this machine, which the system releases when their holder ends, however it ends."""

import sys


def locked(descriptor: int, wait: bool = True) -> bool:
    """Return whether this process holds the lock of an open file now; where there are no locks, it does not.

    Args:
        descriptor: The descriptor of the open file.
        wait: Wait while another process holds the lock.
    """
    if sys.platform == "win32":
        return False
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True
