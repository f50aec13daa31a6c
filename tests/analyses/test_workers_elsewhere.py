"""Workers in other folders, of other versions, or on other machines: what is counted is there, whole, and made here."""

import importlib.metadata
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest
from qkov.analyses.trajectories import RunStore, engines, track, worker_checks
from qkov.analyses.trajectories.engines import demand_whole
from qkov.analyses.trajectories.sweep import Measured, Measurement
from qkov.analyses.trajectories.worker_checks import Expectation, demand_met_here
from qkov.circuits import QkovError

from .test_engines import STEPS, save


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("caller") / "run"
    for step in STEPS:
        save(folder, step)
    return folder


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster of two processes."""
    from distributed import LocalCluster

    options: dict[str, Any] = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": "127.0.0.1:0"}
    with LocalCluster(**options) as started:
        yield started


def in_worker(cluster: Any, number: int, code: str) -> None:
    """Run a statement in one of the workers."""
    from distributed import Client

    with Client(cluster, set_as_default=False) as client:
        workers = sorted(client.nthreads())
        client.run(
            exec, f"import builtins, genericpath, importlib.metadata, os, pathlib; {code}", workers=[workers[number]]
        )


def test_workers_in_other_folders_write_into_the_caller_s_store(run, tmp_path, monkeypatch, cluster):
    expected = track(run, tmp_path / "here").store.table()
    for number, name in enumerate(("a", "b")):
        (tmp_path / name).mkdir()
        in_worker(cluster, number, f"os.chdir({str(tmp_path / name)!r})")
    monkeypatch.chdir(run.parent)
    monkeypatch.setattr(Measurement, "run", lambda *_: pytest.fail("the work is the workers'"))
    tracked = track("run", "store", engine="dask", address=cluster.scheduler_address)
    assert tracked.measured == list(STEPS)
    assert tracked.store.folder == Path("store")
    pd.testing.assert_frame_equal(RunStore(run.parent / "store").table(), expected, check_exact=True)
    assert [list((tmp_path / name).iterdir()) for name in ("a", "b")] == [[], []]
    assert list((run.parent / "store").glob(".*")) == []


@pytest.mark.parametrize(
    ("code", "undo", "message"),
    [
        (
            "importlib.metadata.old = importlib.metadata.version; importlib.metadata.version = lambda name: '0.0.9'",
            "importlib.metadata.version = importlib.metadata.old",
            rf"has qkov 0.0.9, and this process has {importlib.metadata.version('qkov')}: .* install the same version",
        ),
        (
            "importlib.metadata.old = importlib.metadata.version\n"
            "def version(name): return '1.0' if name == 'torch' else importlib.metadata.old(name)\n"
            "importlib.metadata.version = version; version.__globals__['importlib'] = importlib",
            "importlib.metadata.version = importlib.metadata.old",
            r"has torch 1\.0, and this process has ",
        ),
        (
            "pathlib.Path.old = pathlib.Path.read_text\n"
            "def read_text(path, **how): return 'x' if path.name[:6] == '.probe' else pathlib.Path.old(path, **how)\n"
            "pathlib.Path.read_text = read_text; read_text.__globals__['pathlib'] = pathlib",
            "pathlib.Path.read_text = pathlib.Path.old",
            r"does not see the store .*store \(it finds another file there\); give --out a folder that all",
        ),
        (
            "genericpath.old = genericpath.getsize; genericpath.getsize = lambda path: open('/none')",
            "genericpath.getsize = genericpath.old",
            r"does not see the run: .*step_000000000.safetensors \(No such file or directory\)",
        ),
    ],
    ids=["qkov", "torch", "store", "run"],
)
def test_a_worker_that_differs_is_named_before_anything_is_measured(run, tmp_path, cluster, code, undo, message):
    in_worker(cluster, 1, code)
    try:
        with pytest.raises(QkovError, match=message) as refused:
            track(run, tmp_path / "store", engine="dask", address=cluster.scheduler_address)
    finally:
        in_worker(cluster, 1, undo)
    assert "\n" not in str(refused.value)
    assert str(refused.value).startswith("the worker tcp://")
    assert RunStore(tmp_path / "store").steps() == []
    assert list((tmp_path / "store").glob(".*")) == []


def test_a_cluster_without_workers(run, tmp_path, monkeypatch):
    from distributed import LocalCluster

    monkeypatch.setattr(engines, "PATIENCE", 1)
    options: dict[str, Any] = {"n_workers": 0, "processes": False, "dashboard_address": "127.0.0.1:0"}
    cluster: Any
    with (
        LocalCluster(**options) as cluster,
        pytest.raises(QkovError, match=r"has no worker; start one with dask worker"),
    ):
        track(run, tmp_path / "store", engine="dask", address=cluster.scheduler_address)


def expectation(tmp_path: Path) -> Expectation:
    probe, part = tmp_path / "probe", tmp_path / "part"
    probe.write_text("seen")
    part.write_bytes(b"12345")
    packages = tuple((name, importlib.metadata.version(name)) for name in ("qkov", "torch", "numpy"))
    return Expectation(packages, str(tmp_path), str(probe), "seen", ((str(part), 5),))


def test_a_worker_that_joins_later_looks_by_itself(tmp_path, monkeypatch):
    expected = expectation(tmp_path)
    demand_met_here(expected)
    demand_met_here.cache_clear()
    (tmp_path / "part").write_bytes(b"1234")
    with pytest.raises(QkovError, match=r"does not see the run: .*part \(it finds another file there\)"):
        demand_met_here(expected)
    (tmp_path / "part").write_bytes(b"12345")
    (tmp_path / "probe").unlink()
    with pytest.raises(QkovError, match=r"does not see the store .* \(No such file or directory\)"):
        demand_met_here(expected)
    monkeypatch.setattr(worker_checks, "version", lambda _: "9")
    with pytest.raises(QkovError, match="has qkov 9, and this process has"):
        demand_met_here(expected)


def test_a_build_of_the_same_version_is_the_same_version(tmp_path):
    expected = expectation(tmp_path)
    answers = [question() for question in expected.questions()]
    answers[2] = answers[2].partition("+")[0] + "+cu124"
    expected.demand_met("w", answers)
    answers[1] = ModuleNotFoundError("qkov")
    with pytest.raises(QkovError, match=rf"the worker w \(in the folder {os.getcwd()}\) has no qkov; install qkov"):
        expected.demand_met("w", answers)


@pytest.mark.parametrize("loss", ["missing", "cut short", "of another key", "fewer rows"])
def test_a_file_that_is_not_whole_is_not_counted(run, tmp_path, monkeypatch, loss):
    real = Measurement.run

    def losing(measurement, opened) -> Measured:
        measured = real(measurement, opened)
        path = measurement.store.path(measurement.step)
        assert isinstance(measured, Measured)
        if measurement.step == 10 and loss == "missing":
            path.unlink()
        elif measurement.step == 10 and loss == "cut short":
            path.write_bytes(path.read_bytes()[:-100])
        elif measurement.step == 10 and loss == "of another key":
            pq.write_table(pq.read_table(path).replace_schema_metadata({"qkov": "another"}), path)
        elif measurement.step == 10:
            return Measured(measured.new, (3, *measured.rows[1:]))
        return measured

    monkeypatch.setattr(Measurement, "run", losing)
    with pytest.raises(
        QkovError, match=r"step-000000010.parquet is not what a worker wrote: .*give --out a folder"
    ) as lost:
        track(run, tmp_path / "store")
    assert "\n" not in str(lost.value)
    monkeypatch.undo()
    assert set(track(run, tmp_path / "store").store.steps()) == set(STEPS)


def test_a_file_that_a_network_shows_late_is_waited_for(run, tmp_path, monkeypatch):
    seen = [(None, None), (None, None), (5, 5)]
    monkeypatch.setattr(Measurement, "rows_in_store", lambda _: seen.pop(0))
    monkeypatch.setattr("time.sleep", lambda _: None)
    measurement = object.__new__(Measurement)
    object.__setattr__(measurement, "store", RunStore(tmp_path))
    demand_whole(measurement, Measured(True, (5, 5)), 10)
    assert seen == []
