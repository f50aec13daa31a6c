"""Run stores that are wrong: in run.json, in the bytes of a Parquet file, or in its columns."""

import io
import json
import random
import tempfile
from functools import cache
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from qkov.analyses.trajectories import track

from .inputs import Input
from .mutations import STRINGS, as_json, mutated_bytes, mutated_table


def store_input(order: random.Random) -> Input:
    """A store of two steps of which one file is wrong."""
    files = dict(whole_store())
    parquet = [name for name in files if name.endswith(".parquet")]
    match order.randrange(4):
        case 0 | 1:
            files["run.json"] = as_json(mutated_table(json.loads(files["run.json"]), order), order)
        case 2:
            name = order.choice(parquet)
            files[name] = mutated_bytes(files[name], order)
        case _:
            name = order.choice(parquet)
            files[name] = _with_other_columns(files[name], order)
    if order.random() < 0.1:
        step = order.choice(("", " ", "a", "-1", "9" * 30, "\x1b[31m", "a\nb", "٣", "3"))
        files[f"steps/step-{step}.parquet"] = files[parquet[0]]
    return Input("report" if order.random() < 0.3 else "store", files)


@cache
def whole_store() -> dict[str, bytes]:
    """Return the files of an undamaged store, which is made once."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "run").mkdir()
        for step in (1, 2):
            torch.manual_seed(step)
            tensors = {f"blocks.0.attn.W_{role}": torch.randn(2, 8, 4) for role in "QKV"}
            torch.save(tensors | {"blocks.0.attn.W_O": torch.randn(2, 4, 8)}, folder / "run" / f"step_{step}.pt")
        track(folder / "run", folder / "store", composition=True)
        store = folder / "store"
        return {str(path.relative_to(store)): path.read_bytes() for path in sorted(store.rglob("*")) if path.is_file()}


def _with_other_columns(content: bytes, order: random.Random) -> bytes:
    table = pq.read_table(io.BytesIO(content))
    for _ in range(order.choice((1, 2))):
        position = order.randrange(table.num_columns)
        name = table.column_names[position]
        match order.randrange(5):
            case 0:
                table = table.remove_column(position)
            case 1:
                table = table.set_column(position, name, pa.nulls(len(table)))
            case 2:
                values = pa.array([order.choice(STRINGS).encode("utf-8", "ignore").decode() for _ in range(len(table))])
                table = table.set_column(position, name, values)
            case 3:
                number = order.choice((float("nan"), float("inf"), 1e308, -1.0, 0.0))
                table = table.set_column(position, name, pa.array([number] * len(table)))
            case 4:
                table = table.append_column(order.choice(STRINGS[:10]) or name, table.column(position))
    table = table.slice(0, order.choice((0, 1, len(table)))) if order.random() < 0.2 else table
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    return buffer.getvalue()
