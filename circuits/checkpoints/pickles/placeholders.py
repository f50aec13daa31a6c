"""What stands in a pickle where a class, a function or an object of theirs would be."""

from collections.abc import Sequence
from typing import Any

#: What small files may hold and take in any case, so that their bounds do not depend on a few bytes.
ALLOWANCE = 65536
_SCALARS = (str, bytes, int, float, bool, type(None))


class DamagedError(ValueError):
    """The bytes are not a pickle that can be read; the message says why."""


class Budget:
    """Bounds the work on a file by the number of its bytes."""

    def __init__(self, size: int) -> None:
        """Allow some work for each byte.

        Args:
            size: The number of bytes.
        """
        self._left = 8 * size + ALLOWANCE

    def spend(self, work: int) -> None:
        """Count work whose result takes no bytes of the file, such as a copy of what is already there.

        Raises:
            DamagedError: It is more than the bytes of the file allow.
        """
        self._left -= work
        if self._left < 0:
            raise DamagedError("it repeats its content more often than a file of its size does")


class Named:
    """A class or function that a pickle names. It is neither imported nor called.

    Attributes:
        name: Its full name, such as "argparse.Namespace".
    """

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        """Store the name."""
        self.name = name


class Placeholder:
    """Stands for an object that only code could build, with everything that the pickle says about it.

    Attributes:
        name: The full name of the class or function that would build it.
        arguments: What it would be called with.
        state: What would become its attributes, or None.
        entries: The entries that would be set in it, as in a dictionary.
        elements: The elements that would be appended to it, as to a list.
    """

    __slots__ = ("arguments", "elements", "entries", "name", "state")

    def __init__(self, name: str, arguments: tuple[Any, ...] = ()) -> None:
        """Store the name and the arguments."""
        self.name = name
        self.arguments = arguments
        self.state: Any = None
        self.entries: dict[Any, Any] = {}
        self.elements: list[Any] = []

    def set_state(self, state: Any) -> None:
        """Keep the state that would become the object's attributes."""
        self.state = state

    @property
    def attributes(self) -> dict[Any, Any]:
        """The attributes of the object, as far as its state lists them."""
        states = self.state if isinstance(self.state, tuple) else (self.state,)
        return {key: value for state in states if isinstance(state, dict) for key, value in state.items()}


def dictionary(items: Sequence[Any]) -> dict[Any, Any]:
    """Return keys and values that follow one another as a dictionary.

    Raises:
        DamagedError: A key has no value.
    """
    if len(items) % 2:
        raise DamagedError("a key has no value")
    return {_key(key): value for key, value in zip(items[::2], items[1::2], strict=True)}


def _key(key: Any) -> Any:
    """Return a key that is hashed in a bounded time; anything but scalars and flat tuples becomes one of its own."""
    if isinstance(key, _SCALARS) or (isinstance(key, tuple) and all(isinstance(part, _SCALARS) for part in key)):
        return key
    return key if isinstance(key, (Named, Placeholder)) else Placeholder(type(key).__name__)
