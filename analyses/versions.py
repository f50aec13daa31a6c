"""The versions of the software on which measured values depend."""

import platform
from importlib.metadata import version


def versions() -> dict[str, str]:
    """Return the versions of Python, qkov, torch and numpy by name."""
    return {"python": platform.python_version(), **{name: version(name) for name in ("qkov", "torch", "numpy")}}
