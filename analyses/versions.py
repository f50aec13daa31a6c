"""The versions that figures depend on."""

import platform
from importlib.metadata import version


def versions() -> dict[str, str]:
    """Return the versions of what the figures depend on."""
    return {"python": platform.python_version(), **{name: version(name) for name in ("qkov", "torch", "numpy")}}
