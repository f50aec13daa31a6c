"""Numbers that belong to a step and to no head, such as the loss: one line of JSON for each time they are noted."""

import json
from collections.abc import Mapping as Dictionary
from pathlib import Path
from typing import Any

import pandas as pd

from ....circuits.errors import named_input
from ....circuits.storage.atomic_write import write_atomically

#: What the names of the columns begin with.
PREFIX = "training_"


class TrainingNumbers:
    """The file `training.jsonl`, to which a line such as {"step": 100, "numbers": {"loss": 2.5}} is appended.

    What a later line states of a step replaces what an earlier one did. A line that a writer did not end, because it
    was killed, does not count, and the next writer removes it.

    Attributes:
        path: The path of the file.
    """

    def __init__(self, path: Path) -> None:
        """Name the file; nothing is read or written yet.

        Args:
            path: The path of the file.
        """
        self.path = path
        self._read_at: tuple[int, int] | None = None
        self._read: dict[int, dict[str, float]] = {}

    def append(self, step: int, numbers: Dictionary[str, float]) -> None:
        """Note numbers of a step.

        Args:
            step: The step.
            numbers: The numbers by name.

        Raises:
            OSError: The disk is full, or cannot be written to.
        """
        with self.path.open("a+b") as file:
            _remove_half_line(file)
            file.write(_line(step, numbers).encode())

    def by_step(self) -> dict[int, dict[str, float]]:
        """Return the numbers of each step by name.

        Raises:
            QkovError: The file is damaged.
        """
        if not self.path.is_file():
            return {}
        status = self.path.stat()
        if (status.st_mtime_ns, status.st_size) == self._read_at:
            return self._read
        found: dict[int, dict[str, float]] = {}
        for line in self.path.read_bytes().split(b"\n")[:-1]:
            with named_input(self.path, "the numbers of a run", "delete it"):
                noted = json.loads(line)
                numbers = {str(name): float(value) for name, value in noted["numbers"].items()}
                found.setdefault(int(noted["step"]), {}).update(numbers)
        self._read_at, self._read = (status.st_mtime_ns, status.st_size), found
        return found

    def move_aside(self, step: int, folder: Path) -> None:
        """Copy the file to a folder, and keep only the numbers of steps up to this one.

        Args:
            step: The last step that stays.
            folder: The folder.

        Raises:
            QkovError: The file is damaged.
        """
        if self.path.is_file():
            kept = {number: numbers for number, numbers in self.by_step().items() if number <= step}
            write_atomically(folder / self.path.name, self.path.read_bytes())
            write_atomically(self.path, "".join(map(_line, kept, kept.values())).encode())


def with_numbers(rows: pd.DataFrame, by_step: Dictionary[int, Dictionary[str, float]]) -> pd.DataFrame:
    """Return rows with the numbers of their steps, each in a column whose name begins with `training_`.

    Args:
        rows: Rows with a column `step`.
        by_step: The numbers of each step by name.
    """
    names = dict.fromkeys(name for numbers in by_step.values() for name in numbers)
    added = {}
    for name in names:
        column = f"{PREFIX}{name}"
        values = rows["step"].map({step: numbers.get(name) for step, numbers in by_step.items()}).astype(float)
        # Stores of earlier versions hold them in their rows.
        added[column] = values.fillna(rows[column]) if column in rows else values
    others = rows.drop(columns=[column for column in added if column in rows])
    return pd.concat([others, pd.DataFrame(added, index=rows.index)], axis=1)


def _line(step: int, numbers: Dictionary[str, float]) -> str:
    return json.dumps({"step": step, "numbers": {name: float(value) for name, value in numbers.items()}}) + "\n"


def _remove_half_line(file: Any) -> None:
    """Cut a file that is open for appending after its last end of a line."""
    size = file.seek(0, 2)
    start = size
    while start:
        start = max(0, start - 4096)
        file.seek(start)
        end = file.read(min(4096, size - start)).rfind(b"\n")
        if end >= 0:
            if start + end + 1 < size:
                file.truncate(start + end + 1)
            return
    file.truncate(0)
