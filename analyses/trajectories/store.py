"""The run store: run.json and one Parquet file for each checkpoint, written whole or not at all."""

import io
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow.dataset import dataset

from ...circuits.errors import CallError, named_input
from ...circuits.storage.atomic_write import remove_stale, write_atomically
from ...circuits.storage.places import LocalPlace

FORMAT = "qkov run store 2"
_KEY = b"qkov"
#: What stands in a file's name in place of a step that is not known.
_UNKNOWN = "unknown"

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
#: The quantities that are lists.
LISTS = {
    "singular_values": pa.list_(pa.float64()),
    "adapter_singular_values": pa.list_(pa.float64()),
    "rotary_offsets": pa.list_(pa.int32()),
    "frobenius_norm_at_offsets": pa.list_(pa.float64()),
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
        return self.steps_folder / _name(step)

    def composition_path(self, step: int | None) -> Path:
        """Return the path of the file with the composition scores of a step."""
        return self.composition_folder / _name(step)

    def contents_path(self, step: int | None) -> Path:
        """Return the path of the file with the hashes of the layers at a step."""
        return self.contents_folder / _name(step)

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
        if not isinstance(description, dict) or description.get("format") != FORMAT:
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

    def add_columns(self, names: list[str]) -> None:
        """Add columns without values to the files that lack them, so that all files have the same columns."""
        for path in map(self.path, self.steps()):
            table = self._open(path)
            missing = [name for name in names if name not in table.column_names]
            for name in missing:
                table = table.append_column(name, pa.nulls(len(table), LISTS.get(name, pa.float64())))
            if missing:
                self._write(path, (table.schema.metadata or {}).get(_KEY, b"").decode(), table)

    def columns(self) -> list[str]:
        """Return the columns of the files in `steps/`; none if there is no file.

        Raises:
            QkovError: The first file is damaged.
        """
        steps = self.steps()
        return self._open(self.path(steps[0])).column_names if steps else []

    def move_aside(self, step: int) -> tuple[list[int], Path | None]:
        """Move the files of all steps after this one into a folder of their own in `moved_aside/`.

        Args:
            step: The last step that stays.

        Returns:
            The steps that were moved, and the folder; None if there was none to move.
        """
        later = [number for number in self.steps() if number is not None and number > step]
        if not later:
            return [], None
        aside = self.folder / "moved_aside"
        aside.mkdir(exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f"after-step-{step}-", dir=aside))
        for number in later:
            self.path(number).rename(folder / _name(number))
        return later, folder

    def rows_of(self, step: int) -> pd.DataFrame:
        """Return the rows of one step.

        Raises:
            QkovError: The file is damaged.
        """
        return self._read([self.path(step)])

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
        return self._read(known) if known else CONTENTS.empty_table().to_pandas()

    def _write(self, path: Path, key: str, table: pa.Table) -> None:
        buffer = io.BytesIO()
        pq.write_table(table.replace_schema_metadata({_KEY: key.encode()}), buffer)
        write_atomically(path, buffer.getvalue(), scratch=self.folder)

    def steps(self) -> list[int | None]:
        """Return the steps that the store holds, in order."""
        return _steps(self.steps_folder)

    def table(self) -> pd.DataFrame:
        """Return all rows, sorted by step, stack, layer, head and circuit.

        Raises:
            CallError: The store holds no step yet.
            QkovError: A file is damaged.
        """
        steps = self.steps()
        if not steps:
            raise CallError(f"{self.folder} holds no measured checkpoint yet")
        with named_input(self.folder, "a run store", "delete what is damaged and track again"):
            return _sorted(self._read([self.path(step) for step in steps]))

    def composition_steps(self) -> list[int | None]:
        """Return the steps whose composition scores the store holds, in order."""
        return _steps(self.composition_folder)

    def composition(self, step: int | None) -> pd.DataFrame:
        """Return the composition scores of a step, layer by layer.

        Raises:
            CallError: The scores were not measured.
            QkovError: The file is damaged.
        """
        path = self.composition_path(step)
        if not path.exists():
            raise CallError(f"{self.folder} holds no composition scores of step {step}; track with --composition")
        return self._read([path])

    def _open(self, path: Path) -> pa.Table:
        with named_input(path, "rows of a run store", "delete it"):
            return pq.read_table(path)

    def _read(self, paths: list[Path]) -> pd.DataFrame:
        with named_input(paths[0].parent, "the Parquet files of a run store", "delete what is damaged and track again"):
            return dataset([str(path) for path in paths], format="parquet").to_table().to_pandas()


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


def table_of(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Return rows as `RunStore.table` would return them from a store."""
    return _sorted(_table(rows).to_pandas())


def _sorted(table: pd.DataFrame) -> pd.DataFrame:
    return table.sort_values(["step", "stack", "layer", "head", "circuit"], ignore_index=True)


def _table(rows: list[dict[str, Any]]) -> pa.Table:
    schema = IDENTITY
    for name in dict.fromkeys(column for row in rows for column in row):
        if name not in IDENTITY.names:
            schema = schema.append(pa.field(name, LISTS.get(name, pa.float64())))
    return pa.Table.from_pylist(rows, schema=schema)


def _name(step: int | None) -> str:
    return f"step-{_UNKNOWN}.parquet" if step is None else f"step-{step:09d}.parquet"


def _steps(folder: Path) -> list[int | None]:
    files = [path for path in folder.glob("step-*.parquet") if path.is_file()]
    names = (re.fullmatch(r"step-([0-9]{1,18})", path.stem) for path in files)
    known: list[int | None] = [*sorted({int(name[1]) for name in names if name})]
    return known + [None] * any(path.stem == f"step-{_UNKNOWN}" for path in files)
