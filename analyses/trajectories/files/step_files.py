"""The Parquet files of a run's steps: one for each step, or one for many that were gathered."""

import json
import re
import tempfile
from collections.abc import Callable, Iterable
from collections.abc import Mapping as Dictionary
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ....circuits.errors import QkovError, named_input

#: What stands in a file's name in place of a step that is not known.
_UNKNOWN = "unknown"
#: The key of a gathered file's metadata under which its steps are listed.
_STEPS = b"qkov_steps"
#: Files are gathered once there are so many, or as many as hold so many rows.
_MOST_FILES, _MOST_ROWS = 256, 2**18

#: Writes a table with metadata to a path, whole or not at all.
Write = Callable[[Path, dict[bytes, bytes], pa.Table], None]


@dataclass(frozen=True)
class _Gathered:
    """A file of many steps."""

    path: Path
    steps: frozenset[int]


class StepFiles:
    """The files `step-000000100.parquet`, and `steps-000000000-000025500.parquet` for steps that were gathered.

    Where a step has a file of its own and is in a gathered one too, since a writer was killed between writing the one
    and removing the others, its own counts.

    Attributes:
        folder: The folder of the files.
    """

    def __init__(self, folder: Path) -> None:
        """Name the folder; nothing is read yet.

        Args:
            folder: The folder of the files.
        """
        self.folder = folder

    def path(self, step: int | None) -> Path:
        """Return the path of the file of a single step."""
        return self.folder / (f"step-{_UNKNOWN}.parquet" if step is None else f"step-{step:09d}.parquet")

    def steps(self) -> list[int | None]:
        """Return the steps that there are, in order; None, for one that is not known, is the last."""
        single, gathered = self._single(), (step for file in self._gathered() for step in file.steps)
        known: list[int | None] = [*sorted({*single, *gathered})]
        return known + [None] * self.path(None).is_file()

    def read(
        self, paths_to_table: Callable[[list[Path]], pa.Table], steps: Iterable[int | None] | None = None
    ) -> pa.Table:
        """Return the rows of some steps, each once.

        A writer may gather the files meanwhile, so that some are no longer there; they are then looked for again.

        Args:
            paths_to_table: Returns the rows of files.
            steps: The steps; all by default.

        Raises:
            QkovError: A file is damaged, or there are no rows of these steps.
        """
        wanted = None if steps is None else set(steps)
        while True:
            # A step that is gathered between the two looks is in both lists, and not in none.
            single = [*self._single(), *[None] * self.path(None).is_file()]
            try:
                return self._read(paths_to_table, [step for step in single if wanted is None or step in wanted], wanted)
            except QkovError:
                if single == [*self._single(), *[None] * self.path(None).is_file()]:
                    raise

    def _read(
        self, paths_to_table: Callable[[list[Path]], pa.Table], single: list[int | None], wanted: set[int | None] | None
    ) -> pa.Table:
        gathered = self._gathered()
        tables = [paths_to_table([self.path(step) for step in single])] if single else []
        for file in gathered:
            inside = file.steps - set(single) if wanted is None else (file.steps - set(single)) & wanted
            if inside:
                table = paths_to_table([file.path])
                if inside != file.steps:
                    table = table.filter(pc.field("step").isin(sorted(inside)))
                tables.append(table)
        if not tables:
            stated = "" if wanted is None else f" of step {', '.join(map(str, wanted))}"
            raise QkovError(f"{self.folder} holds no rows{stated}: measure it, or ask for a step that it holds")
        return pa.concat_tables(tables, promote_options="default")

    def gather(self, write: Write) -> None:
        """Gather files of single steps into one file, once there are so many that opening them takes long.

        Args:
            write: Writes a table.

        Raises:
            QkovError: A file is damaged.
        """
        single = self._single()
        if len(single) < 2:
            return
        if len(single) < _MOST_FILES and len(single) * self._rows_in(self.path(single[0])) < _MOST_ROWS:
            return
        self._write_gathered(single, pa.concat_tables([self._open(self.path(step)) for step in single]), write)
        for step in single:
            self.path(step).unlink()

    def add_columns(self, types: Dictionary[str, pa.DataType], write: Write) -> None:
        """Add columns without values to the files that lack them, so that all files have the same columns.

        Args:
            types: The types of the columns by name.
            write: Writes a table.

        Raises:
            QkovError: A file is damaged.
        """
        for path in self._paths():
            present = self._columns(path)
            missing = [name for name in types if name not in present]
            if missing:
                table = self._open(path)
                for name in missing:
                    table = table.append_column(name, pa.nulls(len(table), types[name]))
                write(path, dict(table.schema.metadata or {}), table)

    def columns(self) -> list[str]:
        """Return the columns of the files; none if there is no file.

        Raises:
            QkovError: The first file is damaged.
        """
        paths = self._paths()
        return self._columns(paths[0]) if paths else []

    def remove_twice_written(self) -> None:
        """Remove the files of single steps that are in a gathered file too."""
        inside = {step for file in self._gathered() for step in file.steps}
        for step in self._single():
            if step in inside:
                self.path(step).unlink()

    def move_aside(self, step: int, aside: Path, write: Write) -> tuple[list[int], Path | None]:
        """Move all steps after this one into a folder of their own.

        Args:
            step: The last step that stays.
            aside: The folder in which that folder is made.
            write: Writes a table.

        Returns:
            The steps that were moved, and the folder; None if there was none to move.

        Raises:
            QkovError: A file is damaged.
        """
        later = [number for number in self.steps() if number is not None and number > step]
        if not later:
            return [], None
        aside.mkdir(exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f"after-step-{step}-", dir=aside))
        for file in self._gathered():
            stays = sorted(number for number in file.steps if number <= step)
            if len(stays) == len(file.steps):
                continue
            table = self._open(file.path)
            file.path.rename(folder / file.path.name)
            if stays:
                self._write_gathered(stays, table.filter(pc.field("step") <= step), write)
        for number in self._single():
            if number > step:
                self.path(number).rename(folder / self.path(number).name)
        return later, folder

    def _single(self) -> list[int]:
        names = (re.fullmatch(r"step-([0-9]{1,18})", path.stem) for path in self.folder.glob("step-*.parquet"))
        return sorted({int(name[1]) for name in names if name and self.path(int(name[1])).is_file()})

    def _gathered(self) -> list[_Gathered]:
        paths = sorted(path for path in self.folder.glob("steps-*.parquet") if path.is_file())
        return [_Gathered(path, self._steps_in(path)) for path in paths]

    def _steps_in(self, path: Path) -> frozenset[int]:
        with named_input(path, "rows of a run store", "delete it"):
            listed: Any = json.loads((pq.read_metadata(path).metadata or {})[_STEPS])
            return frozenset(int(step) for step in listed)

    def _paths(self) -> list[Path]:
        return [file.path for file in self._gathered()] + [self.path(step) for step in self._single()]

    def _open(self, path: Path) -> pa.Table:
        with named_input(path, "rows of a run store", "delete it"):
            return pq.read_table(path)

    def _rows_in(self, path: Path) -> int:
        with named_input(path, "rows of a run store", "delete it"):
            return pq.read_metadata(path).num_rows

    def _columns(self, path: Path) -> list[str]:
        with named_input(path, "rows of a run store", "delete it"):
            return pq.read_schema(path).names

    def _write_gathered(self, steps: list[int], table: pa.Table, write: Write) -> None:
        path = self.folder / f"steps-{steps[0]:09d}-{steps[-1]:09d}.parquet"
        write(path, {_STEPS: json.dumps(steps).encode()}, table)
