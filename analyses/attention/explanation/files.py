"""An explanation in a folder: one Parquet file for each table, and explanation.json, which is written last."""

import io
import json
from dataclasses import fields
from pathlib import Path

import pandas as pd

from ....circuits.errors import CallError, named_input
from ....circuits.storage.atomic_write import write_atomically
from .explanation import Explanation

FORMAT = "qkov explanation 3"
_DESCRIPTION = "explanation.json"
_TABLES = tuple(field.name for field in fields(Explanation) if field.name != "description")


def is_explanation(folder: Path) -> bool:
    """Return whether a folder holds a complete explanation."""
    return (folder / _DESCRIPTION).is_file()


def write_explanation(explanation: Explanation, folder: Path) -> None:
    """Write an explanation to a folder, one Parquet file for each table and explanation.json.

    An explanation that is already in the folder is replaced. Until all files are written the folder does not count as
    an explanation.

    Args:
        explanation: the explanation.
        folder: folder to write to; it is created if necessary.

    Raises:
        CallError: The folder cannot be written to.
    """
    tables = {name: _as_parquet(getattr(explanation, name)) for name in _TABLES}
    if folder.is_dir():
        (folder / _DESCRIPTION).unlink(missing_ok=True)
    for name, content in tables.items():
        write_atomically(folder / f"{name}.parquet", content)
    described = {"format": FORMAT, **explanation.description}
    write_atomically(folder / _DESCRIPTION, json.dumps(described, indent=1, allow_nan=False).encode())


def read_explanation(folder: Path) -> Explanation:
    """Return the explanation that `write_explanation` wrote to a folder.

    Raises:
        CallError: The folder holds no explanation, or one of another version of qkov.
        QkovError: A file is missing or damaged.
    """
    if not is_explanation(folder):
        raise CallError(f"{folder} holds no explanation; expected a folder that qkov explain wrote")
    with named_input(folder, "an explanation", "run qkov explain again"):
        description = dict(json.loads((folder / _DESCRIPTION).read_text()))
        tables = {name: pd.read_parquet(folder / f"{name}.parquet") for name in _TABLES}
    if description.pop("format", None) != FORMAT:
        raise CallError(f"{folder} was written by another version of qkov; run qkov explain again")
    return Explanation(description=description, **tables)


def _as_parquet(table: pd.DataFrame) -> bytes:
    content = io.BytesIO()
    table.to_parquet(content, index=False)
    return content.getvalue()
