"""Every operation on files fails in turn: each time one line, a whole store, and an undisturbed table after a rerun."""

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from markupsafe import Markup
from qkov.analyses.dynamics import Parameterization, Start
from qkov.analyses.studies.plan import Batch, Plan
from qkov.analyses.trajectories import RunStore
from qkov.analyses.trajectories import track as library_track
from qkov.circuits import QkovError
from qkov.circuits.reading.saved_format import save_checkpoint
from qkov.circuits.weights.attention_weights import AttentionWeights
from qkov.probes import CircuitProbe
from qkov.reports.commands.main import run as qkov

from ..probes.circuit_models import Classifier, loss_of
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


def whole(store: RunStore) -> list[int | None]:
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
        # A step is measured again if the one before it could not be read.
        assert set(library_track(run, store.folder).measured) >= {10, 20} - set(steps)
        pd.testing.assert_frame_equal(store.table(), expected, obj=failed)


class OneRun(Plan):
    """The shortest reproduction: one collapsed run to a loss near that of its start."""

    def batches(self) -> list[Batch]:
        start = Start.default(Parameterization.CACO)
        return [Batch("balanced", Parameterization.CACO, self.ratios, start)]


def test_every_operation_of_reproduce_fails_in_turn(tmp_path, capsys, monkeypatch):
    plan = OneRun(ratios=(1.0,), losses=(1.3,), step=0.2, checkpoints=2)
    monkeypatch.setattr("qkov.analyses.studies.plan.Plan.quick", lambda: plan)
    # Its workers are other processes, in which nothing fails.
    monkeypatch.setattr(
        "qkov.analyses.studies.training.done_by_workers", lambda work, items, _: (work(i) for i in items)
    )
    for name in ("analyses.studies.tables.all_tables", "reports.pages.reproduction_report.write_reproduction_report"):
        monkeypatch.setattr(f"qkov.{name}", lambda *_, **__: "")
    monkeypatch.setattr("qkov.reports.pages.reproduction_report.reproduction_summary", lambda _: {})

    def reproduce(name: str) -> int:
        return qkov(["reproduce", "--quick", "--out", str(tmp_path / name), "--json"])

    def store(name: str) -> RunStore:
        (batch,) = plan.batches()
        return RunStore(tmp_path / name / "stores" / batch.name(1.0))

    assert reproduce("undisturbed") == 0
    expected = store("undisturbed").table().drop(columns="source")
    count = count_of(lambda: reproduce("counted"), tmp_path)
    capsys.readouterr()
    for failing in range(1, count + 1):
        name, code = f"folder {failing}", CODES[failing % len(CODES)]
        with pytest.MonkeyPatch.context() as patch:
            faults = FileFaults(str(tmp_path), failing, code)
            faults.install(patch)
            status = reproduce(name)
        failed = f"{errno.errorcode[code]} at {faults.operations[failing - 1]}"
        said = capsys.readouterr().err.splitlines()
        assert status in ((0, 1, 2) if code == errno.EACCES else (0, 1)), (failed, said)
        assert len(said) == (status != 0), (failed, said)
        assert all(line.startswith("qkov: ") for line in said), (failed, said)
        whole(store(name))
        finished = tmp_path / name / "reproduction.json"
        assert status or json.loads(finished.read_text())["finished"]
        assert reproduce(name) == 0, (failed, capsys.readouterr().err)
        pd.testing.assert_frame_equal(store(name).table().drop(columns="source"), expected, obj=failed)
    capsys.readouterr()


@pytest.mark.filterwarnings("ignore:.* (resumes from|has no row of) step 0")
def test_every_operation_of_a_probe_fails_in_turn(tmp_path):
    def train(folder: Path, **resuming: Any) -> None:
        torch.manual_seed(0)
        model = Classifier()
        probe = CircuitProbe(model, folder, every=1, on_error="raise", **resuming)
        stepping = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(2):
            stepping.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            stepping.step()
            probe.step(loss)

    train(tmp_path / "undisturbed")
    expected = RunStore(tmp_path / "undisturbed").table()
    count = count_of(lambda: train(tmp_path / "counted"), tmp_path)
    for failing in range(1, count + 1):
        store, code = RunStore(tmp_path / f"store {failing}"), CODES[failing % len(CODES)]
        with pytest.MonkeyPatch.context() as patch:
            faults = FileFaults(str(tmp_path), failing, code)
            faults.install(patch)
            message = ""
            try:
                train(store.folder)
            except QkovError as error:
                message = str(error)
        failed = f"{errno.errorcode[code]} at {faults.operations[failing - 1]}"
        assert len(message.splitlines()) <= 1, failed
        steps = whole(store)
        assert message or steps == [0, 1, 2], failed
        train(store.folder, **({"resume": True, "start": 0} if store.exists() else {}))
        pd.testing.assert_frame_equal(store.table(), expected, obj=failed)
