"""Every operation on files fails in turn: each time one line, a whole store, and an undisturbed table after a rerun."""

import errno
import json
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from markupsafe import Markup
from qkov.analyses.trajectories import RunStore
from qkov.analyses.trajectories import track as library_track
from qkov.circuits.reading.saved_format import save_checkpoint
from qkov.circuits.weights.attention_weights import AttentionWeights
from qkov.reports.commands.main import run as qkov

from .file_faults import FileFaults

CODES = (errno.EIO, errno.ENOSPC, errno.EACCES)


@pytest.fixture(autouse=True)
def without_drawing(monkeypatch):
    """Reports are written whole but for their charts, which take seconds and touch no file."""
    monkeypatch.setattr("qkov.reports.pages.run_report.draw", lambda *_, **__: Markup(""))


def write_run(folder: Path) -> None:
    for step in (10, 20):
        generator = torch.Generator().manual_seed(step)
        drawn = [torch.randn(2, *shape, generator=generator) for shape in ((6, 3), (6, 3), (6, 3), (3, 6))]
        save_checkpoint(folder, step, [AttentionWeights(0, *drawn)], {"loss": 1 / step}, {"seed": 0})


def whole(store: RunStore) -> list[int]:
    """Return the steps of a store of which every file is whole."""
    for path in store.folder.rglob("*.parquet"):
        assert pq.read_table(path).num_rows
        assert json.loads(pq.read_schema(path).metadata[b"qkov"])
    if store.description_path.exists():
        assert store.description()["format"]
    assert not list(store.folder.rglob("*.partial"))
    return store.steps()


def count_of(work: Callable[[], object], folder: Path) -> int:
    with pytest.MonkeyPatch.context() as patch:
        faults = FileFaults(str(folder))
        faults.install(patch)
        work()
    operations = {operation.split()[0] for operation in faults.operations}
    assert operations >= {"open", "write", "replace", "mkdir"}
    return len(faults.operations)


def test_every_operation_of_track_fails_in_turn(tmp_path, capsys):
    run = tmp_path / "run"
    write_run(run)

    def track(name: str) -> int:
        return qkov(["track", str(run), "--out", str(tmp_path / name), "--json"])

    assert track("undisturbed") == 0
    expected = RunStore(tmp_path / "undisturbed").table()
    count = count_of(lambda: track("counted"), tmp_path)
    assert count > 30
    capsys.readouterr()
    for failing in range(1, count + 1):
        store = RunStore(tmp_path / f"store {failing}")
        code = CODES[failing % len(CODES)]
        with pytest.MonkeyPatch.context() as patch:
            faults = FileFaults(str(tmp_path), failing, code)
            faults.install(patch)
            status = track(store.folder.name)
        failed = f"{errno.errorcode[code]} at {faults.operations[failing - 1]}"
        said = capsys.readouterr().err.splitlines()
        # A folder that nobody may write to was the wrong one to give.
        assert status in ((0, 1, 2) if code == errno.EACCES else (0, 1)), (failed, said)
        assert len(said) == (status != 0), (failed, said)
        assert all(line.startswith("qkov: ") for line in said), (failed, said)
        steps = whole(store)
        assert status or steps == [10, 20], failed
        assert set(library_track(run, store.folder).measured) == {10, 20} - set(steps)
        pd.testing.assert_frame_equal(store.table(), expected, obj=failed)
