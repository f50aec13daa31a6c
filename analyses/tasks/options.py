"""Options of a task, checked by the signature of what they are for."""

import inspect
from collections.abc import Callable
from typing import Any

from ...circuits.errors import CallError


def checked_options(task: str, source: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that a source takes by name, if those are all.

    Raises:
        CallError: one is unknown, or one that has no default is missing; the message lists those there are.
    """
    known = {
        name: parameter
        for name, parameter in inspect.signature(source).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    unknown = sorted(set(options) - set(known))
    missing = [
        name for name, parameter in known.items() if parameter.default is parameter.empty and name not in options
    ]
    if unknown or missing:
        wrong = f"has no option {', '.join(unknown)}" if unknown else f"needs the option {', '.join(missing)}"
        raise CallError(f"task {task} {wrong}; its options here: {', '.join(known) or 'none'}")
    return options
