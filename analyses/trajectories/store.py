"""The run store: one Parquet file a checkpoint, written whole or not at all, and run.json beside them."""

import io
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow.dataset import dataset

from ...circuits.atomic_write import write_atomically
from ...circuits.errors import CallError, QkovError

FORMAT = "qkov run store 1"
_KEY = b"qkov"

#: What says which circuit a row measures, and how.
IDENTITY = pa.schema(
    [
        ("source", pa.string()),
        ("step", pa.int64()),
        ("layer", pa.int32()),
        ("head", pa.int32()),
        ("circuit", pa.string()),
        ("basis", pa.string()),
        ("rotary_offset", pa.int32()),
        ("score_scale", pa.bool_()),
        ("rows", pa.int32()),
        ("columns", pa.int32()),
        ("rank_bound", pa.int32()),
        ("factorized", pa.bool_()),
        ("finite", pa.bool_()),
        ("previous_step", pa.int64()),
        ("reference", pa.string()),
    ]
)


class RunStore:
    """A folder with run.json and `steps/step-000001000.parquet`, one file a checkpoint.

    The Parquet files lie in a folder of their own, with the step as a column: so pandas, polars, DuckDB and
    `datasets` read `steps/` as it is. A file carries the key of what it was made from; it counts as done only while
    that key holds.
    """

    def __init__(self, folder: Path | str) -> None:
        """Name the store's folder; nothing is read or written yet."""
        self.folder = Path(folder)

    @property
    def description_path(self) -> Path:
        """Where run.json is."""
        return self.folder / "run.json"

    @property
    def steps_folder(self) -> Path:
        """Where the Parquet files are."""
        return self.folder / "steps"

    def path(self, step: int) -> Path:
        """Return where the figures of a step are."""
        return self.steps_folder / f"step-{step:09d}.parquet"

    def describe(self, description: dict[str, Any]) -> None:
        """Write run.json."""
        content = json.dumps({"format": FORMAT, **description}, indent=1)
        write_atomically(self.description_path, content.encode())

    def description(self) -> dict[str, Any]:
        """Read run.json.

        Raises:
            CallError: the folder is no run store.
        """
        try:
            described = json.loads(self.description_path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CallError(f"{self.folder} is no run store: its run.json is missing or damaged") from error
        if not isinstance(described, dict) or described.get("format") != FORMAT:
            raise CallError(f"{self.folder} is no run store of this version: expected format {FORMAT!r} in run.json")
        return described

    def exists(self) -> bool:
        """Say whether there is a run.json."""
        return self.description_path.exists()

    def is_done(self, step: int, key: str) -> bool:
        """Say whether the figures of a step are there and were made from what the key says."""
        path = self.path(step)
        if not path.exists():
            return False
        try:
            metadata = pq.read_schema(path).metadata or {}
        except (pa.ArrowInvalid, OSError):
            return False
        return metadata.get(_KEY, b"").decode() == key

    def write(self, step: int, key: str, rows: list[dict[str, Any]]) -> None:
        """Write the figures of a step: one row for each layer, head and circuit."""
        measured = [name for name in rows[0] if name not in IDENTITY.names]
        types = {"singular_values": pa.list_(pa.float64())}
        schema = IDENTITY
        for name in measured:
            schema = schema.append(pa.field(name, types.get(name, pa.float64())))
        table = pa.Table.from_pylist(rows, schema=schema.with_metadata({_KEY: key.encode()}))
        buffer = io.BytesIO()
        pq.write_table(table, buffer)
        write_atomically(self.path(step), buffer.getvalue())

    def steps(self) -> list[int]:
        """Return the steps that are there, in order."""
        return sorted(int(path.stem.rpartition("-")[2]) for path in self.steps_folder.glob("step-*.parquet"))

    def table(self) -> pd.DataFrame:
        """Return all rows in the order of step, layer, head and circuit.

        Raises:
            CallError: the store has no figures yet.
            QkovError: a file is damaged; it is named.
        """
        steps = self.steps()
        if not steps:
            raise CallError(f"{self.folder} holds no measured checkpoint yet")
        paths = [str(self.path(step)) for step in steps]
        try:
            table = dataset(paths, format="parquet").to_table().to_pandas()
        except (pa.ArrowInvalid, OSError) as error:
            raise QkovError(f"a file in {self.steps_folder} is damaged ({error}): delete it and track again") from error
        return table.sort_values(["step", "layer", "head", "circuit"], ignore_index=True)
