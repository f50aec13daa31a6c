"""What is done with an input: each reader does what the commands do, up to the text that they print."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from markupsafe import Markup
from qkov.analyses.tasks import load_task
from qkov.analyses.trajectories import RunStore, circuit_table
from qkov.circuits import ReadingOptions, inspect_checkpoint, open_checkpoint, read_mapping
from qkov.circuits.checkpoints.runs import find_run
from qkov.reports.pages import run_report
from qkov.reports.terminal.inspection_text import inspection_lines

#: Circuits larger than this are read but not measured.
_LARGEST = 100_000


def _checkpoint(path: Path, folder: Path, options: ReadingOptions | None = None) -> None:
    run = find_run(path)
    _measure(open_checkpoint(run.checkpoints[-1].files, options), str(path))


def _mapping(path: Path, folder: Path) -> None:
    _checkpoint(folder / "weights.safetensors", folder, ReadingOptions(read_mapping(path)))


def _measure(opened: Any, address: str) -> None:
    facts = inspect_checkpoint(opened)
    lines = inspection_lines(facts)
    json.dumps(facts)
    assert all(isinstance(line, str) for line in lines)
    if sum(weights.W_Q.numel() for weights in opened.layers() if weights.W_Q is not None) < _LARGEST:
        circuit_table(opened)


def _task(name: str) -> Callable[[Path, Path], None]:
    def read(path: Path, folder: Path) -> None:
        task = load_task(name, path)
        assert task.examples

    return read


def _store(path: Path, folder: Path) -> None:
    store = RunStore(path)
    description = store.description()
    for step in store.steps():
        store.is_done(store.path(step), "another key")
    assert description
    assert len(store.table())
    for step in store.composition_steps():
        store.composition(step)


def _report(path: Path, folder: Path) -> None:
    # Drawing a report takes longer than an input may take, and is the same for all of them.
    with mock.patch.object(run_report, "draw", return_value=Markup("")):
        run_report.write_run_report([path], folder / "report.html")


READERS: dict[str, Callable[[Path, Path], None]] = {
    "checkpoint": _checkpoint,
    "mapping": _mapping,
    **{f"task {name}": _task(name) for name in ("lines", "hatexplain", "eraser", "squad", "agreement")},
    "store": _store,
    "report": _report,
}
