"""The type checker of the tests: beartype, which makes one checker for all functions of the same signature.

A probe makes its hooks anew for every module at every call, and making a checker takes longer than what a hook does.
"""

from typing import Any

from beartype import beartype

_CHECKERS: dict[Any, Any] = {}


def checked(function: Any) -> Any:
    """Return beartype's checker of a signature.

    Args:
        function: A function that jaxtyping has made of the signature; it has no body of its own.
    """
    if function.__defaults__ or function.__kwdefaults__:
        return beartype(function)
    signature = (function.__module__, function.__qualname__, function.__code__, *function.__annotations__.items())
    try:
        if signature not in _CHECKERS:
            _CHECKERS[signature] = beartype(function)
        return _CHECKERS[signature]
    except TypeError:
        # An annotation has no hash.
        return beartype(function)
