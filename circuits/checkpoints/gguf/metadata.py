"""What the metadata of a GGUF file state about its architecture, each value of the type that it should have."""

from typing import Any

from ...errors import QkovError
from .header import Header

#: Entries that name the model, or the one of which it was made.
_NAMES = ("general.name", "general.basename", "general.finetune", "general.base_model.", "general.source.")


class Metadata:
    """The entries of one architecture, whose names begin with its own.

    Attributes:
        address: The address of the file, for messages.
        architecture: The architecture that the file names.
    """

    def __init__(self, header: Header, address: str) -> None:
        """Store the entries.

        Args:
            header: The header of the file.
            address: The address of the file.

        Raises:
            QkovError: They name no architecture.
        """
        self._header, self.address = header, address
        architecture = header.value("general.architecture")
        if not isinstance(architecture, str):
            raise QkovError(f"{address} names no architecture (general.architecture); convert the model again")
        self.architecture = architecture

    def value(self, key: str) -> Any:
        """Return what is stated under a key, None if nothing is.

        Args:
            key: The key without the name of the architecture.
        """
        return self._header.value(f"{self.architecture}.{key}")

    def whole(self, key: str) -> int | None:
        """Return a whole number, None if it is not stated.

        Raises:
            QkovError: Something else is stated.
        """
        value = self.value(key)
        if value is not None and (type(value) is not int or value < 0):
            raise self._refused(key, "a whole number")
        return value

    def number(self, key: str) -> float | None:
        """Return a number, None if it is not stated.

        Raises:
            QkovError: Something else is stated.
        """
        value = self.value(key)
        if value is not None and type(value) not in (int, float):
            raise self._refused(key, "a number")
        return value

    def by_layer(self, key: str) -> int | list[int] | None:
        """Return a whole number, or one for each layer; None if it is not stated.

        Raises:
            QkovError: Something else is stated.
        """
        value = self.value(key)
        numbers = value if isinstance(value, list) else [value]
        if value is not None and not all(type(number) is int and number >= 0 for number in numbers):
            raise self._refused(key, "a whole number, or one for each layer")
        return value[0] if isinstance(value, list) and len(set(value)) == 1 else value

    def is_named(self, word: str) -> bool:
        """Return whether the name of the model, or that of the one of which it was made, holds a word.

        Args:
            word: The word in small letters.
        """
        named = (value for name, value in self._header.entries.items() if name.startswith(_NAMES))
        return any(word in value.lower() for value in named if isinstance(value, str))

    def _refused(self, key: str, expected: str) -> QkovError:
        return QkovError(
            f"{self.address} states {self.architecture}.{key} = {self.value(key)!r:.80}, where {expected} is "
            f"expected; convert the model again"
        )
