"""The store of a model in training: readable at any moment, refused where it is another's, gone on with where asked."""

import copy
import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from qkov.analyses.trajectories import RunStore, track
from qkov.analyses.trajectories.files import step_files
from qkov.analyses.trajectories.files.training_numbers import TrainingNumbers
from qkov.circuits import CallError, QkovError, open_model
from qkov.circuits.reading.saved_format import save_checkpoint
from qkov.probes import CircuitProbe
from qkov.reports.commands.main import run as qkov
from safetensors.torch import save

from ..waiting import next_lines
from .circuit_models import Classifier, language_loss, language_model, loss_of

ROOT = Path(__file__).resolve().parents[2]


def train(probe, model, steps, stepping=None, **scalars):
    stepping = stepping or torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        stepping.zero_grad()
        loss = loss_of(model, probe.steps)
        loss.backward()
        stepping.step()
        probe.step(loss, **scalars)


def page_of(run) -> str:
    page = run / "page.html"
    assert qkov(["report", str(run), "--out", str(page)]) == 0
    return page.read_text()


def test_the_store_holds_what_the_probe_holds(tmp_path):
    tables = []
    for store in (tmp_path / "run", None):
        model = Classifier()
        probe = CircuitProbe(model, store, every=2)
        train(probe, model, 4, rate=0.1)
        tables.append(probe.table())
    pd.testing.assert_frame_equal(*tables, check_like=True)
    described = RunStore(tmp_path / "run").description()
    assert described["source"] == "live: Classifier"
    assert described["recognised"] == "by its torch.nn.MultiheadAttention modules"
    assert described["reference_step"] == 0


def test_numbers_of_a_step_are_stored_once_and_change_no_file_of_rows(tmp_path):
    model = Classifier()
    probe = CircuitProbe(model, tmp_path / "run", every=1)
    train(probe, model, 1)
    files = sorted((tmp_path / "run" / "steps").iterdir())
    before = [file.read_bytes() for file in files]
    train(probe, model, 1, rate=0.1)
    train(probe, model, 1)
    probe.add_scalars(3, late=7.0)
    assert [file.read_bytes() for file in files] == before
    files = sorted((tmp_path / "run" / "steps").iterdir())
    assert len({tuple(sorted(pd.read_parquet(file).columns)) for file in files}) == 1
    keys = [json.loads(pq.read_schema(file).metadata[b"qkov"]) for file in files]
    assert [key["step"] for key in keys] == [0, 1, 2, 3]
    store = RunStore(tmp_path / "run")
    names = ["training_loss", "training_rate", "training_late"]
    told = store.table().groupby("step")[names].first()
    assert told.notna().to_numpy().tolist() == [
        [False, False, False],
        [True, False, False],
        [True, True, False],
        [True, False, True],
    ]
    assert store.rows_of(2)["training_rate"].tolist() == [0.1] * 4
    assert store.numbers()[3].keys() == {"loss", "late"}
    lines = [json.loads(line) for line in (tmp_path / "run" / "training.jsonl").read_text().splitlines()]
    assert [(line["step"], sorted(line["numbers"])) for line in lines] == [
        (1, ["loss"]),
        (2, ["loss", "rate"]),
        (3, ["loss"]),
        (3, ["late"]),
    ]


def test_a_store_whose_steps_were_gathered_is_read_resumed_and_killed_as_any_other(tmp_path, monkeypatch):
    monkeypatch.setattr(step_files, "_MOST_FILES", 3)
    tables = []
    for run in (None, tmp_path / "run"):
        model = Classifier()
        probe = CircuitProbe(model, run, every=1)
        train(probe, model, 7)
        tables.append(probe.table())
    pd.testing.assert_frame_equal(*tables, check_like=True)
    store = RunStore(tmp_path / "run")
    assert sorted(path.name for path in store.steps_folder.iterdir()) == [
        "step-000000006.parquet",
        "step-000000007.parquet",
        "steps-000000000-000000002.parquet",
        "steps-000000003-000000005.parquet",
    ]
    assert len(pd.read_parquet(store.steps_folder)) == 8 * 4
    assert store.steps() == [*range(8)]
    pd.testing.assert_frame_equal(
        store.rows_of(4).sort_values(["layer", "head", "circuit"], ignore_index=True),
        store.table().query("step == 4").reset_index(drop=True),
        check_like=True,
        check_dtype=False,
    )
    # A writer that was killed before it removed the files that it had gathered.
    rows = pq.read_table(store.steps_folder / "steps-000000003-000000005.parquet")
    pq.write_table(rows.filter(pc.field("step") == 4), store.path(4))
    assert len(store.table()) == 8 * 4
    probe = CircuitProbe(model, store.folder, every=1, start=7, resume=True)
    assert not store.path(4).exists()
    train(probe, model, 1)
    assert store.steps() == [*range(9)]
    pd.testing.assert_frame_equal(store.table().query("step < 8"), tables[0], check_like=True)


def test_a_reader_finds_all_rows_of_a_store_whose_files_are_gathered_meanwhile(tmp_path, monkeypatch):
    model = Classifier()
    train(CircuitProbe(model, tmp_path / "run", every=1), model, 4)
    store, writer = RunStore(tmp_path / "run"), RunStore(tmp_path / "run")
    wanted, read, reads = store.table(), store._tables, []

    def late(paths: list[Path]) -> pa.Table:
        reads.append(len(paths))
        if len(reads) == 1:
            monkeypatch.setattr(step_files, "_MOST_FILES", 3)
            writer.gather()
        return read(paths)

    monkeypatch.setattr(store, "_tables", late)
    pd.testing.assert_frame_equal(store.table(), wanted)
    # The files of five steps, which are gone, and then one file.
    assert reads == [5, 1]
    store.path(9).write_bytes(b"PAR1 and then nothing")
    with pytest.raises(QkovError, match="delete what is damaged"):
        store.table()
    with pytest.raises(QkovError, match="steps holds no rows of step 77: measure it, or ask for a step that it holds"):
        store.rows_of(77)


def test_steps_are_moved_aside_out_of_a_gathered_file(tmp_path, monkeypatch):
    monkeypatch.setattr(step_files, "_MOST_FILES", 3)
    model, saved = Classifier(), {}
    probe = CircuitProbe(model, tmp_path / "run", every=1)
    for step in range(1, 6):
        train(probe, model, 1)
        saved[step] = copy.deepcopy(model.state_dict())
    table = probe.table()
    model.load_state_dict(saved[4])
    with pytest.warns(UserWarning, match="its later steps, 1 of them, up to step 5, were moved to "):
        CircuitProbe(model, tmp_path / "run", every=1, start=4, resume=True)
    store = RunStore(tmp_path / "run")
    assert sorted(path.name for path in store.steps_folder.iterdir()) == [
        "steps-000000000-000000002.parquet",
        "steps-000000003-000000004.parquet",
    ]
    pd.testing.assert_frame_equal(store.table(), table.query("step <= 4"), check_like=True)
    [aside] = (store.folder / "moved_aside").iterdir()
    assert sorted(path.name for path in aside.iterdir()) == ["steps-000000003-000000005.parquet", "training.jsonl"]
    assert set(pq.read_table(aside / "steps-000000003-000000005.parquet")["step"].to_pylist()) == {3, 4, 5}
    assert max(store.numbers()) == 4


def test_a_report_is_drawn_as_training_goes_on(tmp_path):
    model = language_model("llama")
    run = tmp_path / "run"
    probe = CircuitProbe(model, run, every=1)
    stepping = torch.optim.SGD(model.parameters(), 0.1)
    at_start = page_of(run)
    assert "1 logged step, step 0" in at_start
    assert "The preconditioner at every logged step" not in at_start
    for step in range(2):
        stepping.zero_grad()
        language_loss(model, step).backward()
        stepping.step()
        probe.step(1.0)
    page = page_of(run)
    assert "3 logged steps, step 0 to 2" in page
    assert "the differences and the results on the logged steps themselves are those of such a group" in page
    assert "The preconditioner at every logged step" in page
    assert "unknown for W<sub>QK</sub> of layer 0: positions rotate queries and keys.</p>" in page
    drawn = [f"{figure} cosine of W_{name}" in page for figure in ("taken exact", "omega") for name in ("QK", "OV")]
    assert drawn == [True, True, False, True]


def test_a_report_says_where_gradients_are_of_no_product(tmp_path):
    model = Classifier()
    probe = CircuitProbe(model, tmp_path / "run", every=1)
    train(probe, model, 1)
    loss_of(model, 1).backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    probe.step()
    page = page_of(tmp_path / "run")
    assert "unknown for W<sub>OV</sub> of layer 0: the gradients of its factors do not belong to one product" in page
    assert "some are from an earlier step" in page


KILLED = """
import sys
import torch
from tests.probes.circuit_models import Classifier, loss_of
from qkov.probes import CircuitProbe

torch.set_num_threads(1)
model = Classifier()
probe = CircuitProbe(model, sys.argv[1], every=1)
stepping = torch.optim.SGD(model.parameters(), 0.1)
while True:
    stepping.zero_grad()
    loss = loss_of(model, probe.steps)
    loss.backward()
    stepping.step()
    probe.step(loss, **{f"told_{probe.steps // 5}": 1.0})
    print(probe.steps, flush=True)
"""


@pytest.mark.parametrize("steps", [1, 4, 17])
def test_a_killed_script_leaves_a_store_that_can_be_read_and_gone_on_with(tmp_path, steps):
    run = tmp_path / "run"
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(run)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as script:
        next_lines(script, steps)
        script.kill()
    store = RunStore(run)
    table, steps = store.table(), store.steps()
    assert steps == list(range(len(steps)))
    assert (table.groupby("step").size() == 4).all()
    assert table["finite"].all()
    assert f"{len(steps)} logged step" in page_of(run)
    model = Classifier()
    train(CircuitProbe(model, every=1000), model, len(steps) - 1)
    probe = CircuitProbe(model, run, every=1, start=len(steps) - 1, resume=True)
    train(probe, model, 1)
    assert store.steps() == [*steps, len(steps)]


def test_a_store_is_one_run_s(tmp_path):
    run = tmp_path / "run"
    model = Classifier()
    train(CircuitProbe(model, run, every=1), model, 2)
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    with pytest.raises(CallError, match=r"already holds the run live: Classifier: give another folder, or resume it"):
        CircuitProbe(model, run)
    with pytest.raises(CallError, match=r"was made with another source \(\"live: Classifier\" instead of \"live: GPT2"):
        CircuitProbe(language_model("gpt2"), run, resume=True)
    with pytest.raises(CallError, match="was made with other settings"):
        CircuitProbe(model, run, resume=True, heads=None, basis="raw", directions=directions())
    save_checkpoint(tmp_path / "saved", 0, list(open_model(model).layers()), {}, {})
    with pytest.raises(CallError, match=r"holds the run of a model in training, .*; give another --out$"):
        track(tmp_path / "saved", run)
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before
    track(tmp_path / "saved", tmp_path / "tracked")
    for resume in (False, True):
        with pytest.raises(CallError, match=r"already holds the run .*saved: give another folder$"):
            CircuitProbe(model, tmp_path / "tracked", resume=resume)


def directions() -> Any:
    from qkov.analyses.trajectories import TaskDirections
    from qkov.circuits import Circuit

    return TaskDirections("of a task", {name: Circuit(torch.eye(8, dtype=torch.float64)) for name in ("QK", "OV")})


def test_a_run_is_gone_on_with_from_an_earlier_step(tmp_path):
    straight, run = tmp_path / "straight", tmp_path / "run"
    for folder in (straight, run):
        model = Classifier()
        train(CircuitProbe(model, folder, every=1), model, 5)
    model = Classifier()
    train(CircuitProbe(model, every=10), model, 2)
    with pytest.warns(
        UserWarning, match="resumes from step 2: its later steps, 3 of them, up to step 5, were moved to"
    ):
        probe = CircuitProbe(model, run, every=1, start=2, resume=True)
    assert RunStore(run).steps() == [0, 1, 2]
    assert probe.steps == 2
    train(probe, model, 3)
    found, wanted = (RunStore(folder).table().set_index(["step", "head", "circuit"]) for folder in (run, straight))
    pd.testing.assert_frame_equal(found, wanted)
    assert set(found["reference"]) == {"step 0"}
    assert RunStore(run).description()["reference_step"] == 0


def test_weights_that_a_run_is_compared_with_are_demanded(tmp_path):
    run = tmp_path / "run"
    model = Classifier()
    train(CircuitProbe(model, run, every=1), model, 2)
    kept = run / "reference.safetensors"
    content = kept.read_bytes()
    kept.write_bytes(content[:-9])
    with pytest.raises(QkovError, match="with which the run is compared, is missing or damaged: give another folder"):
        CircuitProbe(model, run, start=2, resume=True)
    kept.write_bytes(save({"/0/W_Q": torch.zeros(1, 2, 3)}))
    with pytest.raises(
        QkovError, match=r"has a W_Q of shape .* in layer 0, but the store .* was begun with one of shape"
    ):
        CircuitProbe(model, run, start=2, resume=True)
    kept.write_bytes(content)
    assert RunStore(run).steps() == [0, 1, 2]
    CircuitProbe(model, run, start=2, resume=True)


def test_a_run_along_directions_keeps_no_weights(tmp_path):
    CircuitProbe(Classifier(), tmp_path / "run", directions=directions())
    assert not (tmp_path / "run" / "reference.safetensors").exists()


def test_a_run_that_is_to_be_gone_on_with_may_not_have_begun(tmp_path):
    CircuitProbe(Classifier(), tmp_path / "run", start=7, resume=True)
    assert RunStore(tmp_path / "run").steps() == [7]
    np.testing.assert_array_equal(RunStore(tmp_path / "run").table()["reference"], ["step 7"] * 4)


def test_columns_that_a_killed_writer_added_in_part_are_added_in_all_files(tmp_path, monkeypatch):
    monkeypatch.setattr(step_files, "_MOST_FILES", 2)
    run = tmp_path / "run"
    model = Classifier()
    train(CircuitProbe(model, run, every=1), model, 2)
    first = run / "steps" / "steps-000000000-000000001.parquet"
    table = pq.read_table(first)
    pq.write_table(table.append_column("new_figure", pa.nulls(len(table), pa.float64())), first)
    probe = CircuitProbe(model, run, every=1, start=2, resume=True)
    train(probe, model, 1, told=0.5)
    files = sorted((run / "steps").iterdir())
    assert len({tuple(sorted(pq.read_schema(file).names)) for file in files}) == 1
    assert "new_figure" in pq.read_schema(files[-1]).names
    told = probe.table().groupby("step")["training_told"].first()
    assert told.notna().tolist() == [False, False, False, True]


def test_a_store_of_the_format_before_keeps_its_numbers_when_it_is_resumed(tmp_path):
    """There the numbers of a step were in its rows."""
    run = tmp_path / "run"
    model = Classifier()
    train(CircuitProbe(model, run, every=1), model, 2)
    (run / "training.jsonl").unlink()
    for step, loss in enumerate((None, 1.0, 2.0)):
        path = run / "steps" / f"step-{step:09d}.parquet"
        table = pq.read_table(path)
        pq.write_table(table.append_column("training_loss", pa.array([loss] * len(table), pa.float64())), path)
    description = json.loads((run / "run.json").read_text())
    assert description["format"] == "qkov run store 3"
    (run / "run.json").write_text(json.dumps(description | {"format": "qkov run store 2"}))
    assert RunStore(run).table().groupby("step")["training_loss"].first().tolist()[1:] == [1.0, 2.0]
    probe = CircuitProbe(model, run, every=1, start=2, resume=True)
    train(probe, model, 1)
    losses = RunStore(run).table().groupby("step")["training_loss"].first()
    assert losses.tolist()[1:3] == [1.0, 2.0]
    assert losses[3] > 0
    assert RunStore(run).description()["format"] == "qkov run store 3"


@pytest.mark.parametrize("half", ['{"step": 2, "num', "", "x" * 10_000])
def test_half_a_line_of_a_killed_writer_does_not_count_and_is_removed(tmp_path, half):
    numbers = TrainingNumbers(tmp_path / "training.jsonl")
    assert numbers.by_step() == {}
    numbers.append(1, {"loss": 0.5})
    with numbers.path.open("a") as file:
        file.write(half)
    assert numbers.by_step() == {1: {"loss": 0.5}}
    numbers.append(2, {"loss": 0.25, "step": 7.0})
    numbers.append(1, {"loss": float("nan"), "rate": 1.0})
    assert str(numbers.by_step()) == "{1: {'loss': nan, 'rate': 1.0}, 2: {'loss': 0.25, 'step': 7.0}}"


@pytest.mark.parametrize(
    "line", ["[]", '{"step": 1}', '{"step": "x", "numbers": {}}', '{"step": 1, "numbers": {"a": []}}']
)
def test_damaged_numbers_are_named(tmp_path, line):
    numbers = TrainingNumbers(tmp_path / "training.jsonl")
    numbers.path.write_text(f"{line}\n")
    with pytest.raises(QkovError, match=r"training\.jsonl cannot be read as the numbers of a run"):
        numbers.by_step()


def test_a_full_disk_is_one_error_and_training_can_go_on(tmp_path):
    run = tmp_path / "run"
    model = Classifier()
    probe = CircuitProbe(model, run, every=1, on_error="raise")
    train(probe, model, 1)
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, most))
    try:
        with pytest.raises(QkovError, match=r"^step 2 could not be written to .*run \(File too large\): the steps"):
            train(probe, model, 1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, most))
        with pytest.raises(QkovError, match=r"^the start of the store could not be written to "):
            CircuitProbe(model, tmp_path / "other")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))
    assert RunStore(run).steps() == [0, 1]
    assert not list(run.rglob(".*"))
    train(probe, model, 1)
    assert RunStore(run).steps() == [0, 1, 3]
    # The step from before the last one alone, whatever came to nothing: that of gradient descent, at its rate.
    np.testing.assert_allclose(probe.table().query("step == 3")["taken_rate"], 0.1, rtol=0.1)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_store_is_resumed_from_a_step_that_is_stated_and_with_the_weights_of_that_step_alone(tmp_path):
    run, saved = tmp_path / "run", {}
    model = Classifier()
    probe = CircuitProbe(model, run, every=1)
    for step in range(5):
        saved[step] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        train(probe, model, 1)
    before = contents(run)
    with pytest.raises(CallError, match=r"run holds steps up to 5: state from which step training goes on, as start="):
        CircuitProbe(model, run, every=1, resume=True)
    with pytest.raises(
        CallError, match=r"^the weights are not those of step 3 of .*: the norm of [QO][KV] of layer 0, head 0"
    ):
        CircuitProbe(Classifier(), run, every=1, start=3, resume=True)
    assert contents(run) == before
    # Weights that were saved in bfloat16 are those of the step as well.
    model.load_state_dict({name: tensor.bfloat16().double() for name, tensor in saved[3].items()})
    with pytest.warns(UserWarning, match=r"its later steps, 2 of them, up to step 5, were moved to .*moved_aside"):
        CircuitProbe(model, run, every=1, start=3, resume=True)
    [aside] = (run / "moved_aside").iterdir()
    assert {file.name: file.read_bytes() for file in aside.iterdir()} == {
        "step-000000004.parquet": before["steps/step-000000004.parquet"],
        "step-000000005.parquet": before["steps/step-000000005.parquet"],
        "training.jsonl": before["training.jsonl"],
    }
    assert RunStore(run).steps() == [0, 1, 2, 3]


def test_a_step_that_the_store_has_no_row_of_cannot_be_compared(tmp_path):
    model = Classifier()
    train(CircuitProbe(model, tmp_path, every=2), model, 3)
    with pytest.warns(UserWarning, match="has no row of step 3, so whether these are the weights of its run at that"):
        probe = CircuitProbe(model, tmp_path, every=2, start=3, resume=True)
    train(probe, model, 1)
    assert RunStore(tmp_path).steps() == [0, 2, 3, 4]


def test_a_probe_whose_store_another_one_has_resumed_writes_no_more_and_says_so(tmp_path):
    model = Classifier()
    stepping = torch.optim.SGD(model.parameters(), 0.1)
    first = CircuitProbe(model, tmp_path, every=1, optimizer=stepping)
    train(first, model, 2, stepping)
    second = CircuitProbe(model, tmp_path, every=1, optimizer=stepping, start=2, resume=True)
    with pytest.warns(
        UserWarning, match="another probe writes to .* by now, so this one writes to it no more"
    ) as caught:
        train(second, model, 3, stepping)
    assert len(caught) == 1
    # The first one was to log three steps, the last of them when it is asked for next.
    assert (first.failures, second.failures) == (2, 0)
    assert RunStore(tmp_path).steps() == [0, 1, 2, 3, 4, 5]
    assert len(RunStore(tmp_path).table()) == 6 * 4


def test_a_store_that_is_deleted_while_the_model_is_trained_begins_again(tmp_path):
    run = tmp_path / "run"
    model = Classifier()
    probe = CircuitProbe(model, run, every=1)
    train(probe, model, 2)
    shutil.rmtree(run)
    with pytest.warns(
        UserWarning, match="run was deleted while the model was trained; it begins again, without the st"
    ):
        train(probe, model, 1)
    train(probe, model, 1)
    store = RunStore(run)
    assert store.steps() == [3, 4]
    assert store.description()["source"] == "live: Classifier"
    CircuitProbe(model, run, every=1, start=4, resume=True)
