"""The table of a comparison as a file."""

import io
from pathlib import Path

import pandas as pd

from ....circuits.errors import CallError
from ....circuits.storage.atomic_write import write_atomically
from .models import ModelComparison


def write_changes(comparison: ModelComparison, path: Path) -> None:
    """Write the table of a comparison, whole or not at all.

    Args:
        comparison: The comparison.
        path: The path of the file, whose name says the format: .parquet or .csv.

    Raises:
        CallError: The name ends in neither, or the path cannot be written to.
    """
    demand_table_format(path)
    named = {"base": comparison.base, "tuned": comparison.tuned}
    table = comparison.table.assign(**named)[[*named, *comparison.table.columns]]
    content = table.to_csv(index=False).encode() if path.suffix == ".csv" else _parquet(table)
    write_atomically(path, content)


def demand_table_format(path: Path) -> None:
    """Refuse the name of a table whose format is not known.

    Raises:
        CallError: The name ends in neither .parquet nor .csv.
    """
    if path.suffix not in (".parquet", ".csv"):
        raise CallError(f"{path} should end in .parquet or .csv, which says the format of the table")


def _parquet(table: pd.DataFrame) -> bytes:
    buffer = io.BytesIO()
    table.to_parquet(buffer, index=False)
    return buffer.getvalue()
