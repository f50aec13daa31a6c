"""Engines: the same table whichever does the work, and nothing lost whoever is killed."""

import faulthandler
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil
import pytest
import torch
from qkov.analyses.trajectories import RunStore, engines, track
from qkov.analyses.trajectories.process_state import restored_process
from qkov.circuits import AttentionWeights, QkovError
from qkov.circuits.reading.saved_format import save_checkpoint

from ..waiting import next_lines, remaining_lines, until_ended

STEPS = (0, 10, 200, 1000)
#: Of the longer run: checkpoints, and heads of each.
COUNT, HEADS = 20, 48


def save(folder: Path, step: int, layers=2, heads=4, d_model=6, d_head=3) -> Path:
    generator = torch.Generator().manual_seed(step)
    shapes = {"W_Q": (d_model, d_head), "W_K": (d_model, d_head), "W_V": (d_model, d_head), "W_O": (d_head, d_model)}
    written = []
    for layer in range(layers):
        drawn: dict[str, Any] = {
            name: torch.randn(heads, *shape, generator=generator) for name, shape in shapes.items()
        }
        written.append(AttentionWeights(layer=layer, **drawn))
    return save_checkpoint(folder, step, written, {"loss": 1 / (1 + step)}, {})


@pytest.fixture(scope="module")
def small_run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("small") / "run"
    for step in STEPS:
        save(folder, step)
    return folder


@pytest.fixture(scope="module")
def long_run(tmp_path_factory) -> Path:
    """Many names of one checkpoint, each a good part of a second to measure."""
    folder = tmp_path_factory.mktemp("long") / "run"
    first = save(folder, 0, layers=1, heads=HEADS, d_model=64, d_head=48)
    for step in range(1, COUNT):
        os.link(first, folder / f"step_{step:09d}.safetensors")
    return folder


@pytest.fixture(scope="module")
def by_this_process(small_run, tmp_path_factory) -> RunStore:
    return track(small_run, tmp_path_factory.mktemp("here") / "store", composition=True).store


@pytest.mark.parametrize("engine", ["processes", "dask", "ray"])
def test_the_table_is_the_same_whichever_engine(small_run, by_this_process, tmp_path, engine):
    done = []
    tracked = track(
        small_run,
        tmp_path / "store",
        composition=True,
        engine=engine,
        workers=2,
        progress=lambda *figures: done.append(figures),
    )
    assert tracked.measured == list(STEPS)
    assert [(count, total, new) for count, total, _, new in done] == [(count, 4, True) for count in (1, 2, 3, 4)]
    assert {step for *_, step, _ in done} == set(STEPS)
    pd.testing.assert_frame_equal(tracked.store.table(), by_this_process.table(), check_exact=True)
    for step in STEPS:
        pd.testing.assert_frame_equal(
            tracked.store.composition(step), by_this_process.composition(step), check_exact=True
        )
    again = track(small_run, tmp_path / "store", composition=True, engine=engine, workers=2)
    assert (again.measured, again.kept) == ([], list(STEPS))


def test_relative_paths_start_where_each_sweep_is_called(small_run, tmp_path, monkeypatch):
    for name in ("first", "second"):
        folder = tmp_path / name
        shutil.copytree(small_run, folder / "run")
        monkeypatch.chdir(folder)
        assert track("run", "store", engine="processes", workers=2).measured == list(STEPS)
        assert RunStore(folder / "store").steps() == list(STEPS)


def test_a_cluster_is_reached_by_its_address(small_run, by_this_process, tmp_path):
    with threads_of_dask() as address:
        tracked = track(small_run, tmp_path / "store", engine="dask", address=address)
    pd.testing.assert_frame_equal(tracked.store.table(), by_this_process.table(), check_exact=True)


@contextmanager
def threads_of_dask() -> Iterator[str]:
    """The address of a cluster whose workers are threads of this process."""
    from distributed import LocalCluster

    options: dict[str, Any] = {
        "n_workers": 2,
        "threads_per_worker": 1,
        "processes": False,
        "dashboard_address": "127.0.0.1:0",
    }
    cluster: Any
    with LocalCluster(**options) as cluster:
        yield cluster.scheduler_address


def process_state() -> dict[str, Any]:
    """What an engine could leave changed in this process."""
    later: list[int] = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return {
        "environment": {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"},
        "logging": [logging.getLogger(name).level for name in ("", "distributed", "ray", "joblib", "loky")],
        "handlers": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)],
        "excepthook": sys.excepthook,
        "faulthandler": faulthandler.is_enabled(),
        "random": [np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()],
        "threads": (torch.get_num_threads(), later),
        "warnings": warnings.filters[0],
    }


@pytest.fixture
def own_settings():
    """Settings of a user's own, which no engine may change."""
    import distributed
    import joblib
    import ray

    assert joblib
    assert ray
    assert distributed
    level, handler, excepthook = (
        logging.getLogger("distributed").level,
        signal.getsignal(signal.SIGTERM),
        sys.excepthook,
    )
    had_faulthandler, threads = faulthandler.is_enabled(), torch.get_num_threads()
    logging.getLogger("distributed").setLevel(logging.INFO)
    signal.signal(signal.SIGTERM, lambda *_: None)
    sys.excepthook = lambda *_: None
    faulthandler.disable()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(threads)
    if had_faulthandler:
        faulthandler.enable()
    sys.excepthook = excepthook
    signal.signal(signal.SIGTERM, handler)
    logging.getLogger("distributed").setLevel(level)


@pytest.mark.parametrize("ending", ["success", "error", "interrupt"])
@pytest.mark.parametrize("engine", ["this process", "processes", "dask", "threads of dask", "ray"])
def test_an_engine_leaves_the_process_as_it_was(small_run, tmp_path, own_settings, engine, ending):
    if ending == "error":
        # Nothing can be written to the store.
        (tmp_path / "store").mkdir()
        (tmp_path / "store" / "contents").touch()

    def progress(*_):
        if ending == "interrupt":
            raise KeyboardInterrupt

    with ExitStack() as stack:
        options: dict[str, Any] = {"engine": engine, "workers": 1}
        if engine == "this process":
            options = {}
        elif engine == "processes":
            options = {"workers": 2}
        elif engine == "threads of dask":
            options = {"engine": "dask", "address": stack.enter_context(threads_of_dask())}
        expected = {"success": nullcontext(), "error": pytest.raises(QkovError, match="cannot be written to")}
        before = process_state()
        with expected.get(ending, pytest.raises(KeyboardInterrupt)):
            track(small_run, tmp_path / "store", progress=progress, **options)
        after = process_state()
    for name, value in before.items():
        assert after[name] == value, name


def test_python_s_random_numbers_go_on_as_if_an_engine_had_drawn_none():
    random.seed(5)
    expected = random.random()
    random.seed(5)
    with restored_process():
        random.random()
    assert random.random() == expected


@pytest.mark.parametrize("engine", ["processes", "dask"])
def test_what_goes_wrong_in_a_worker_is_told_as_it_is_here(tmp_path, engine):
    for step in STEPS:
        save(tmp_path / "run", step)
    save(tmp_path / "run", 200, d_model=8)
    tracked = track(tmp_path / "run", tmp_path / "store", engine=engine, workers=2)
    assert tracked.measured == [0, 10, 1000]
    message = "step_000000200.safetensors has a W_QK of shape (4, 8, 8) [head, rows, columns] and step_000001000"
    assert tracked.unusable[200].startswith(message)
    save(tmp_path / "run", 200)
    again = track(tmp_path / "run", tmp_path / "store")
    assert (again.measured, again.kept) == ([200, 1000], [0, 10])


def test_engines_that_cannot_be_had(small_run, tmp_path, monkeypatch):
    def refusal(**chosen) -> str:
        with pytest.raises(QkovError) as refused:
            track(small_run, tmp_path / "store", **chosen)
        return str(refused.value)

    assert refusal(engine="spark") == "the engine should be one of processes, dask, ray, got 'spark'"
    assert refusal(workers=0) == "workers should be at least 1, got 0"
    assert "processes run on this machine only" in refusal(address="tcp://10.0.0.1:8786")
    for engine, address in (("dask", "tcp://127.0.0.1:9"), ("ray", "127.0.0.1:9")):
        assert f"the cluster at {address} cannot be reached (Connection refused)" in refusal(
            engine=engine, address=address
        )
    monkeypatch.setattr(engines, "find_spec", lambda _: None)
    assert refusal(engine="dask") == "the engine dask needs the package distributed: pip install 'qkov[dask]'"
    assert refusal(engine="ray") == "the engine ray needs the package ray: pip install 'qkov[ray]'"
    assert not (tmp_path / "store").exists()


def test_clusters_are_imported_by_those_who_use_them():
    code = "import sys, qkov.analyses.trajectories.tracking; print({'ray', 'distributed', 'dask'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


SWEEP = textwrap.dedent(
    """
    import sys
    from qkov.analyses.trajectories import track
    from qkov.circuits import QkovError
    if __name__ == "__main__":
        try:
            track(sys.argv[1], sys.argv[2], workers=2, progress=lambda *counts: print(*counts, flush=True))
        except QkovError as error:
            sys.exit(f"qkov: {error}")
    """
)


def sweep(run: Path, store: Path) -> subprocess.Popen[str]:
    """A sweep in two workers, which prints a line for each step that is done."""
    script = store.parent / "sweep.py"
    script.write_text(SWEEP)
    command = [sys.executable, str(script), str(run), str(store)]
    # A session of its own, so that Ctrl-C can be sent to all of it.
    with (store.parent / "errors").open("w") as errors:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True)


@pytest.mark.parametrize("whom", ["one worker", "all workers", "the parent"])
def test_killed_in_the_middle_nothing_is_lost(long_run, tmp_path, whom):
    store = RunStore(tmp_path / "store")
    with sweep(long_run, store.folder) as parent:
        next_lines(parent, 3)
        children = psutil.Process(parent.pid).children(recursive=True)
        workers = [child for child in children if any("worker_processes" in word for word in child.cmdline())]
        assert len(workers) == 2
        for process in {"one worker": workers[:1], "all workers": workers, "the parent": [parent]}[whom]:
            process.kill()
        # A sweep that goes on for a moment still prints the steps that are done.
        remaining_lines(parent)
    until_ended(children)
    done = store.steps()
    assert 3 <= len(done) < COUNT
    errors = (tmp_path / "errors").read_text().strip().splitlines()
    if whom != "the parent":
        assert parent.returncode == 1
        assert len(errors) == 1
        counted = f"{len(done)} of {COUNT} checkpoints are measured and remain in the store"
        assert errors[-1].startswith(f"qkov: a worker was killed or ran out of memory: {counted}; run the same command")
    again = track(long_run, store.folder)
    assert again.kept == done
    assert sorted(again.kept + again.measured) == list(range(COUNT))
    assert len(pd.read_parquet(store.steps_folder)) == COUNT * HEADS * 2


def test_interrupted_the_workers_end_too(long_run, tmp_path, heard_interrupts):
    store = RunStore(tmp_path / "store")
    with sweep(long_run, store.folder) as parent:
        next_lines(parent, 3)
        children = psutil.Process(parent.pid).children(recursive=True)
        # As a terminal does: to the whole group at once.
        os.killpg(parent.pid, signal.SIGINT)
        remaining_lines(parent)
    until_ended(children)
    assert 3 <= len(store.steps()) < COUNT
    assert len(re.findall("^KeyboardInterrupt", (tmp_path / "errors").read_text(), flags=re.MULTILINE)) <= 1


def test_two_sweeps_at_once_end_with_every_row_once(long_run, tmp_path):
    store = RunStore(tmp_path / "store")
    with sweep(long_run, store.folder) as one, sweep(long_run, store.folder) as other:
        for process in (one, other):
            next_lines(process, COUNT)
    assert (one.returncode, other.returncode) == (0, 0)
    table = store.table()
    assert len(table) == COUNT * HEADS * 2
    assert not table.duplicated(["step", "stack", "layer", "head", "circuit"]).any()
