"""What the fuzzers share: an input as files in a folder, and the kinds of inputs by name."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Input:
    """An input for one reader.

    Attributes:
        reader: Which of `readers.READERS` reads it.
        files: The content of each file by its path in the input's folder.
        address: Which of the files, or of the folders, is read; "" for the folder itself.
    """

    reader: str
    files: dict[str, bytes]
    address: str = ""

    @property
    def size(self) -> int:
        """The number of bytes of all files."""
        return sum(map(len, self.files.values()))

    def write(self, folder: Path) -> None:
        """Write the files into a folder."""
        for name, content in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


#: Makes an input of one kind.
Generator = Callable[[random.Random], Input]
