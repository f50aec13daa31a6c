"""What a run store holds while it grows, read again when its files have changed and no more of it than is new."""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from ...analyses.trajectories.store import NOT_NUMBERS, RunStore
from ...circuits.errors import QkovError

#: The most steps whose rows are held; of more, every second one is left out, or three of four, and so on.
MOST_STEPS = 200


@dataclass(frozen=True)
class Reading:
    """What a store held when it was read last.

    Attributes:
        description: The content of run.json; empty if it could not be read.
        steps: All steps that the store holds.
        rows: The rows of the last step and of at most `MOST_STEPS` others; None if there are none.
        changed: When a file of the store was written last, in seconds since 1970; None if there is none.
        problem: Why the store could not be read, in words; empty if it could.
    """

    description: dict[str, Any]
    steps: tuple[int, ...] = ()
    rows: pd.DataFrame | None = None
    changed: float | None = None
    problem: str = ""


class StoreReader:
    """Reads a store as it grows: rows that were read stay, and the last step is read again, since its loss may follow.

    Attributes:
        folder: The store's folder.
        reading: What was read last.
    """

    def __init__(self, folder: Path, most: int = MOST_STEPS) -> None:
        """Name the store; nothing is read yet.

        Args:
            folder: The store's folder, which may not exist yet.
            most: The most steps whose rows are held beside the last one.
        """
        self.folder = folder
        self.reading = Reading({}, problem=_absent(folder))
        self._store, self._most = RunStore(folder), most
        self._stamp: object = None
        self._held: dict[int, pd.DataFrame] = {}

    def refresh(self) -> bool:
        """Read what has changed, and return whether anything has."""
        stamp, changed = _stamp(self.folder)
        if stamp == self._stamp:
            return False
        try:
            self.reading = self._read(changed)
            self._stamp = stamp
        except (QkovError, OSError) as error:
            # A writer may be at work, so a store that cannot be read is read again, whether or not it changes.
            problem = str(error) if stamp else _absent(self.folder)
            last = self.reading
            self.reading = Reading(last.description, last.steps, last.rows, changed, problem)
            return last != self.reading
        return True

    def _read(self, changed: float | None) -> Reading:
        description = self._store.description()
        if description.get("writer") != self.reading.description.get("writer"):
            # Another probe has resumed the run, and may have written steps anew.
            self._held = {}
        steps = tuple(step for step in self._store.steps() if step is not None)
        if not steps:
            return Reading(description, changed=changed)
        stride = 1
        while len(steps) > self._most * stride:
            stride *= 2
        wanted = dict.fromkeys((*steps[::stride], steps[-1]))
        last = max(self._held, default=None)
        held = {}
        for step in wanted:
            is_known = step in self._held and step != last
            held[step] = self._held[step] if is_known else self._rows_of(step)
        rows = pd.concat([held[step].dropna(axis=1, how="all") for step in wanted], ignore_index=True)
        self._held = held
        return Reading(description, steps, rows, changed)

    def _rows_of(self, step: int) -> pd.DataFrame:
        return self._store.rows_of(step).drop(columns=list(NOT_NUMBERS), errors="ignore")


def age_in_words(changed: float | None, now: float | None = None) -> str:
    """Return how long ago something happened, such as "12 s ago".

    Args:
        changed: When, in seconds since 1970; None for never.
        now: The present time; by default this machine's.
    """
    if changed is None:
        return "never"
    seconds = max(int((time.time() if now is None else now) - changed), 0)
    if seconds < 120:
        return f"{seconds} s ago"
    if seconds < 7200:
        return f"{seconds // 60} min ago"
    if seconds < 172_800:
        return f"{seconds // 3600} h ago"
    return f"{seconds // 86_400} days ago"


def _absent(folder: Path) -> str:
    return f"There is no run store in {folder} yet."


def _stamp(folder: Path) -> tuple[object, float | None]:
    """Return what changes when a file in the folder or one of its folders does, and when the last one was written."""
    found: list[tuple[str, int, int]] = []
    for place in (folder, *_folders_in(folder)):
        try:
            with os.scandir(place) as entries:
                for entry in entries:
                    if entry.is_file():
                        status = entry.stat()
                        found.append((entry.path, status.st_mtime_ns, status.st_size))
        except OSError:
            # A file was replaced, or a folder moved, while it was looked at: the next look will see how it is.
            continue
    return frozenset(found), max((written / 1e9 for _, written, _ in found), default=None)


def _folders_in(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.path for entry in entries if entry.is_dir()]
    except OSError:
        return []
