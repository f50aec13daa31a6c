"""The Lightning that is installed, which is published as two packages."""

import sys
from importlib import import_module
from typing import Any

#: The packages that Lightning is published as; their classes differ.
_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def callback_class() -> Any:
    """Return the class of callbacks of the Lightning that is in use; None if there is none."""
    for name in sorted(_PACKAGES, key=lambda name: name not in sys.modules):
        try:
            return import_module(name).Callback
        except ImportError:
            continue
    return None
