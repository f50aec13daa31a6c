"""The run store: run.json, Parquet files of the steps, and the numbers of training, written whole or not at all."""

import io
import json
from collections.abc import Mapping as Dictionary
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow.dataset import dataset

from ...circuits.errors import CallError, named_input
from ...circuits.storage.atomic_write import remove_stale, write_atomically
from ...circuits.storage.places import LocalPlace
from .files.step_files import StepFiles
from .files.training_numbers import TrainingNumbers, with_numbers

FORMAT = "qkov run store 3"
#: Earlier formats that are read: in 2 every step has a file of its own, and numbers of training are in its rows.
_READ_TOO = ("qkov run store 2",)
_KEY = b"qkov"

#: The columns that state which circuit a row measures, and how.
IDENTITY = pa.schema(
    [
        ("source", pa.string()),
        ("step", pa.int64()),
        ("stated_step", pa.int64()),
        ("stack", pa.string()),
        ("layer", pa.int32()),
        ("head", pa.int32()),
        ("key_value_head", pa.int32()),
        ("circuit", pa.string()),
        ("basis", pa.string()),
        ("rotary_offset", pa.int32()),
        ("score_scale", pa.bool_()),
        ("qk_norm", pa.bool_()),
        ("rows", pa.int32()),
        ("columns", pa.int32()),
        ("rank_bound", pa.int32()),
        ("factorized", pa.bool_()),
        ("finite", pa.bool_()),
        ("previous_step", pa.int64()),
        ("reference", pa.string()),
    ]
)
#: The quantities that are not one number: lists, and names of optimizers.
NOT_NUMBERS = {
    "singular_values": pa.list_(pa.float64()),
    "adapter_singular_values": pa.list_(pa.float64()),
    "rotary_offsets": pa.list_(pa.int32()),
    "frobenius_norm_at_offsets": pa.list_(pa.float64()),
    "left_optimizer": pa.string(),
    "right_optimizer": pa.string(),
}
#: The columns of `composition/`, whose rows are scores of one kind between two heads.
COMPOSITION = pa.schema(
    [
        ("source", pa.string()),
        ("step", pa.int64()),
        ("stack", pa.string()),
        ("earlier_layer", pa.int32()),
        ("earlier_head", pa.int32()),
        ("later_layer", pa.int32()),
        ("later_head", pa.int32()),
        ("kind", pa.string()),
        ("basis", pa.string()),
        ("rotary_offset", pa.int32()),
        ("score", pa.float64()),
        ("chance", pa.float64()),
    ]
)
#: The columns of `contents/`, whose rows are layers.
CONTENTS = pa.schema(
    [
        ("source", pa.string()),
        ("step", pa.int64()),
        ("stack", pa.string()),
        ("layer", pa.int32()),
        ("shapes", pa.string()),
        ("digest", pa.string()),
        ("sketch", pa.list_(pa.float64())),
    ]
)


class RunStore:
    """A folder with run.json and `steps/step-000001000.parquet`, one file for each checkpoint.

    The file of a single checkpoint whose step is not known is `steps/step-unknown.parquet`; None stands for its step.
    Many steps of a model in training are gathered in one file, `steps/steps-000000000-000025500.parquet`, and the
    numbers of their steps, such as the loss, are in `training.jsonl`.

    Under the same names, `contents/` holds a hash of each layer's weights, and `composition/` the composition scores,
    if they were measured. The folders hold nothing but Parquet files, and the step is a column, so pandas, polars,
    DuckDB and `datasets` can read them as they are. Each file contains a key of what it was made from, and counts as
    done only as long as that key is current. Files are written in the store's own folder and moved when they are whole.

    Attributes:
        folder: The store's folder.
    """

    def __init__(self, folder: Path | str) -> None:
        """Name the store; nothing is read or written yet.

        Args:
            folder: The store's folder.
        """
        self.folder = Path(folder)
        self._files = StepFiles(self.steps_folder)
        self._numbers = TrainingNumbers(self.folder / "training.jsonl")

    @property
    def description_path(self) -> Path:
        """The path of run.json."""
        return self.folder / "run.json"

    @property
    def steps_folder(self) -> Path:
        """The folder of the Parquet files."""
        return self.folder / "steps"

    @property
    def composition_folder(self) -> Path:
        """The folder of the Parquet files with composition scores."""
        return self.folder / "composition"

    @property
    def contents_folder(self) -> Path:
        """The folder of the Parquet files with the hashes of the layers."""
        return self.folder / "contents"

    def path(self, step: int | None) -> Path:
        """Return the path of the file of a step."""
        return self._files.path(step)

    def composition_path(self, step: int | None) -> Path:
        """Return the path of the file with the composition scores of a step."""
        return StepFiles(self.composition_folder).path(step)

    def contents_path(self, step: int | None) -> Path:
        """Return the path of the file with the hashes of the layers at a step."""
        return StepFiles(self.contents_folder).path(step)

    def describe(self, description: dict[str, Any]) -> None:
        """Write run.json, and remove the unfinished files of writers that were killed."""
        content = json.dumps({"format": FORMAT, **description}, indent=1)
        write_atomically(self.description_path, content.encode())
        remove_stale(self.folder)

    def description(self) -> dict[str, Any]:
        """Return the content of run.json.

        Raises:
            CallError: The folder is not a run store.
        """
        if not self.description_path.is_file():
            raise CallError(f"{self.folder} is not a run store: it has no run.json")
        content = LocalPlace(self.description_path).read_bytes()
        with named_input(
            self.description_path, "the description of a run store", "track again into another folder", CallError
        ):
            description = json.loads(content)
        if not isinstance(description, dict) or description.get("format") not in (FORMAT, *_READ_TOO):
            raise CallError(f"{self.folder} is not a run store of this version: expected format {FORMAT!r} in run.json")
        return description

    def exists(self) -> bool:
        """Return whether there is a run.json."""
        return self.description_path.exists()

    def is_done(self, path: Path, key: str) -> bool:
        """Return whether a file of the store exists and was made from what a key states.

        Args:
            path: The path of the file.
            key: The key that `write` stored with it.
        """
        return path.is_file() and _key_of(path) == key

    def rows_in(self, path: Path, key: str) -> int | None:
        """Return the number of rows in a file of the store that was made from what a key states, or None.

        Args:
            path: The path of the file.
            key: The key that `write` stored with it.
        """
        footer = _footer(path) if path.is_file() else None
        return footer.num_rows if footer is not None and _key_in(footer) == key else None

    def write(self, step: int | None, key: str, rows: list[dict[str, Any]]) -> None:
        """Write the rows of a step.

        Args:
            step: The step.
            key: A text that states what the rows were made from.
            rows: One row for each layer, head and circuit.
        """
        self._write(self.path(step), key, _table(rows))

    def add_numbers(self, step: int, numbers: Dictionary[str, float]) -> None:
        """Note numbers of a step of training, which `table` and `rows_of` return in columns such as `training_loss`.

        Args:
            step: The step.
            numbers: The numbers by name.

        Raises:
            OSError: The disk is full, or cannot be written to.
        """
        if numbers:
            self._numbers.append(step, numbers)

    def numbers(self) -> dict[int, dict[str, float]]:
        """Return the numbers of the steps of training by step and name, as far as they were noted by `add_numbers`.

        Raises:
            QkovError: The file is damaged.
        """
        return self._numbers.by_step()

    def gather(self) -> None:
        """Gather the files of many steps into one, once opening them takes long.

        Raises:
            QkovError: A file is damaged.
        """
        self._files.gather(self._write_table)

    def remove_twice_written(self) -> None:
        """Remove the files of steps that were gathered by a writer that was killed meanwhile."""
        self._files.remove_twice_written()

    def add_columns(self, names: list[str]) -> None:
        """Add columns without values to the files that lack them, so that all files have the same columns."""
        types = {name: NOT_NUMBERS.get(name, pa.float64()) for name in names}
        self._files.add_columns(types, self._write_table)

    def columns(self) -> list[str]:
        """Return the columns of the files in `steps/`; none if there is no file.

        Raises:
            QkovError: The first file is damaged.
        """
        return self._files.columns()

    def move_aside(self, step: int) -> tuple[list[int], Path | None]:
        """Move all steps after this one, and their numbers, into a folder of their own in `moved_aside/`.

        Args:
            step: The last step that stays.

        Returns:
            The steps that were moved, and the folder; None if there was none to move.

        Raises:
            QkovError: A file is damaged.
        """
        later, folder = self._files.move_aside(step, self.folder / "moved_aside", self._write_table)
        if folder is not None:
            self._numbers.move_aside(step, folder)
        return later, folder

    def rows_of(self, step: int) -> pd.DataFrame:
        """Return the rows of one step.

        Raises:
            QkovError: The file is damaged, or there is none.
        """
        return with_numbers(self._files.read(self._tables, [step]).to_pandas(), self.numbers())

    def write_composition(self, step: int | None, key: str, columns: dict[str, Any]) -> None:
        """Write the composition scores of a step.

        Args:
            step: The step.
            key: A text that states what the scores were made from.
            columns: One column for each field of `COMPOSITION`.
        """
        self._write(self.composition_path(step), key, pa.Table.from_pydict(columns, schema=COMPOSITION))

    def write_contents(self, step: int | None, key: str, columns: dict[str, Any]) -> None:
        """Write the contents of the layers at a step; this comes before `write`, with the same key.

        Args:
            step: The step.
            key: The key of the rows of the step.
            columns: One column for each field of `CONTENTS`.
        """
        self._write(self.contents_path(step), key, pa.Table.from_pydict(columns, schema=CONTENTS))

    def contents(self) -> pd.DataFrame:
        """Return the contents of the layers: the columns of `CONTENTS`, with one row for each step, stack and layer.

        A step is missing if its contents are unknown: it was measured by a version that did not note them, by a probe,
        or from other files than its rows.

        Raises:
            QkovError: A file is damaged.
        """
        known = [
            self.contents_path(step)
            for step in self.steps()
            if self.contents_path(step).is_file() and _key_of(self.contents_path(step)) == _key_of(self.path(step))
        ]
        return self._tables(known).to_pandas() if known else CONTENTS.empty_table().to_pandas()

    def _write(self, path: Path, key: str, table: pa.Table) -> None:
        self._write_table(path, {_KEY: key.encode()}, table)

    def _write_table(self, path: Path, metadata: dict[bytes, bytes], table: pa.Table) -> None:
        buffer = io.BytesIO()
        pq.write_table(table.replace_schema_metadata(metadata), buffer)
        write_atomically(path, buffer.getvalue(), scratch=self.folder)

    def steps(self) -> list[int | None]:
        """Return the steps that the store holds, in order."""
        return self._files.steps()

    def table(self) -> pd.DataFrame:
        """Return all rows, sorted by step, stack, layer, head and circuit.

        Raises:
            CallError: The store holds no step yet.
            QkovError: A file is damaged.
        """
        if not self.steps():
            raise CallError(f"{self.folder} holds no measured checkpoint yet")
        with named_input(self.folder, "a run store", "delete what is damaged and track again"):
            return _sorted(with_numbers(self._files.read(self._tables).to_pandas(), self.numbers()))

    def composition_steps(self) -> list[int | None]:
        """Return the steps whose composition scores the store holds, in order."""
        return StepFiles(self.composition_folder).steps()

    def composition(self, step: int | None) -> pd.DataFrame:
        """Return the composition scores of a step, layer by layer.

        Raises:
            CallError: The scores were not measured.
            QkovError: The file is damaged.
        """
        path = self.composition_path(step)
        if not path.exists():
            raise CallError(f"{self.folder} holds no composition scores of step {step}; track with --composition")
        return self._tables([path]).to_pandas()

    def _tables(self, paths: list[Path]) -> pa.Table:
        with named_input(paths[0].parent, "the Parquet files of a run store", "delete what is damaged and track again"):
            return dataset([str(path) for path in paths], format="parquet").to_table()


def _key_of(path: Path) -> str | None:
    """Return what a file says it was made from; None if it cannot be read."""
    footer = _footer(path)
    return None if footer is None else _key_in(footer)


def _footer(path: Path) -> pq.FileMetaData | None:
    try:
        return pq.read_metadata(path)
    except Exception:  # A file that pyarrow cannot read, for whatever reason, is measured again.
        return None


def _key_in(footer: pq.FileMetaData) -> str:
    return (footer.metadata or {}).get(_KEY, b"").decode(errors="replace")


def table_of(
    rows: list[dict[str, Any]], numbers: Dictionary[int, Dictionary[str, float]] | None = None
) -> pd.DataFrame:
    """Return rows as `RunStore.table` would return them from a store.

    Args:
        rows: One row for each step, layer, head and circuit.
        numbers: The numbers of the steps of training by step and name.
    """
    return _sorted(with_numbers(_table(rows).to_pandas(), numbers or {}))


def _sorted(table: pd.DataFrame) -> pd.DataFrame:
    return table.sort_values(["step", "stack", "layer", "head", "circuit"], ignore_index=True)


def _table(rows: list[dict[str, Any]]) -> pa.Table:
    schema = IDENTITY
    for name in dict.fromkeys(column for row in rows for column in row):
        if name not in IDENTITY.names:
            schema = schema.append(pa.field(name, NOT_NUMBERS.get(name, pa.float64())))
    return pa.Table.from_pylist(rows, schema=schema)
