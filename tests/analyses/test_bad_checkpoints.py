"""One bad checkpoint does not stop a sweep: it is left out with the reason, and measured once it can be read."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from qkov.analyses.trajectories import RunStore, TaskDirections, track
from qkov.circuits import CallError, Circuit, QkovError
from qkov.circuits.architectures.mapping import parse_mapping
from qkov.circuits.checkpoints.safetensors_file import SafetensorsFile
from qkov.reports.commands.main import run as run_command
from safetensors.torch import save_file

STEPS = (10, 20, 30, 40, 50)


def tensors_of(step: int, layers: int = 2, d_model: int = 6) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        f"blocks.{layer}.attn.W_{role}": torch.randn(2, *shape, generator=generator)
        for layer in range(layers)
        for role, shape in {"Q": (d_model, 3), "K": (d_model, 3), "V": (d_model, 3), "O": (3, d_model)}.items()
    }


def write_step(run: Path, step: int, **shape: int) -> Path:
    """A folder of one checkpoint, in two files of weights."""
    folder = run / f"checkpoint-{step}"
    folder.mkdir(parents=True, exist_ok=True)
    tensors = tensors_of(step, **shape)
    shards = {name: f"part-{index % 2}.safetensors" for index, name in enumerate(tensors)}
    for shard in set(shards.values()):
        save_file({name: tensor for name, tensor in tensors.items() if shards[name] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    return folder


@pytest.fixture
def run(tmp_path) -> Path:
    for step in STEPS:
        write_step(tmp_path / "run", step)
    return tmp_path / "run"


def table_of(store: RunStore) -> pd.DataFrame:
    return store.table().drop(columns="source")


def undisturbed(tmp_path: Path, steps: tuple[int, ...]) -> pd.DataFrame:
    """What a sweep finds in a run that has nothing but these steps."""
    for step in steps:
        write_step(tmp_path / "undisturbed", step)
    return table_of(track(tmp_path / "undisturbed", tmp_path / "undisturbed-store").store)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def rename(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()
    save_file({"a.b": torch.ones(3)}, folder / "model.safetensors")


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda folder: truncate(folder / "part-1.safetensors"), "cannot be read as safetensors"),
    "half written": (lambda folder: (folder / "part-0.safetensors").unlink(), "part-0.safetensors does not exist"),
    "index cut short": (lambda folder: truncate(folder / "model.safetensors.index.json"), "index"),
    "other names": (lambda folder: rename(folder), "names .* not recognised"),
    "another shape": (
        lambda folder: write_step(folder.parent, int(folder.name.split("-")[1]), d_model=8),
        r"has a W_QK of shape \(2, 8, 8\)",
    ),
    "a layer less": (
        lambda folder: write_step(folder.parent, int(folder.name.split("-")[1]), layers=1),
        "should have the same layers",
    ),
    "a config that is none": (lambda folder: (folder / "config.json").write_text('{"a": '), "config.json"),
}


@pytest.mark.parametrize(("fault", "workers"), [*((fault, 1) for fault in FAULTS), ("another shape", 2)])
def test_a_bad_checkpoint_in_the_middle(run, tmp_path, fault, workers):
    spoil, why = FAULTS[fault]
    spoil(run / "checkpoint-30")
    tracked = track(run, tmp_path / "store", workers=workers)
    rest = tuple(step for step in STEPS if step != 30)
    assert (tracked.measured, tracked.kept) == (list(rest), [])
    assert list(tracked.unusable) == [30]
    pd.testing.assert_frame_equal(table_of(tracked.store), undisturbed(tmp_path, rest), check_exact=True)
    description = tracked.store.description()
    assert list(description["left_out"]) == ["checkpoint-30"]
    assert description["reference_step"] == 50
    with pytest.raises(QkovError, match=why):
        raise QkovError(description["left_out"]["checkpoint-30"])
    again = track(run, tmp_path / "store", workers=workers)
    assert (again.measured, again.kept, list(again.unusable)) == ([], list(rest), [30])
    for old in (run / "checkpoint-30").iterdir():
        old.unlink()
    write_step(run, 30)
    repaired = track(run, tmp_path / "store", workers=workers)
    # The next one is compared with the one before it.
    assert (repaired.measured, repaired.unusable) == ([30, 40], {})
    assert repaired.store.description()["left_out"] == {}
    pd.testing.assert_frame_equal(
        table_of(repaired.store), table_of(track(run, tmp_path / "fresh").store), check_exact=True
    )


@pytest.mark.parametrize("bad", [(10, 20), (40, 50), (20, 30), (10, 30, 50)])
def test_bad_checkpoints_anywhere(run, tmp_path, bad):
    for step in bad:
        truncate(run / f"checkpoint-{step}" / "part-0.safetensors")
    tracked = track(run, tmp_path / "store")
    rest = tuple(step for step in STEPS if step not in bad)
    assert (tracked.measured, list(tracked.unusable)) == (list(rest), list(bad))
    pd.testing.assert_frame_equal(table_of(tracked.store), undisturbed(tmp_path, rest), check_exact=True)


def test_the_last_that_can_be_read_is_the_reference_until_the_last_can(run, tmp_path):
    last = write_step(run, 60)
    (last / "part-1.safetensors").unlink()
    tracked = track(run, tmp_path / "store")
    assert tracked.store.description()["reference_step"] == 50
    assert track(run, tmp_path / "store").kept == list(STEPS)
    write_step(run, 60)
    write_step(run, 70)
    # As if 60 had been readable at once: the store was begun when it was the last.
    later = track(run, tmp_path / "store")
    assert later.measured == [*STEPS, 60, 70]
    assert set(later.store.table()["reference"]) == {"step 60"}


def test_a_bad_last_checkpoint_that_is_deleted_changes_nothing(run, tmp_path):
    last = write_step(run, 60)
    truncate(last / "part-1.safetensors")
    track(run, tmp_path / "store")
    shutil.rmtree(last)
    again = track(run, tmp_path / "store")
    assert (again.kept, again.unusable) == (list(STEPS), {})
    assert set(again.store.table()["reference"]) == {"step 50"}


def test_a_reference_that_fails_only_as_it_is_read(run, tmp_path, monkeypatch):
    read = SafetensorsFile.read

    def spoiled(file, names):
        if "checkpoint-50" in file.address:
            raise QkovError(f"{file.address} ends before its tensors do")
        return read(file, names)

    monkeypatch.setattr(SafetensorsFile, "read", spoiled)
    tracked = track(run, tmp_path / "store")
    assert tracked.measured == list(STEPS[:-1])
    assert list(tracked.unusable) == [50]
    assert tracked.store.description()["reference_step"] == 40
    pd.testing.assert_frame_equal(table_of(tracked.store), undisturbed(tmp_path, STEPS[:-1]), check_exact=True)


def test_a_reference_that_rows_were_compared_with_must_stay_readable(run, tmp_path):
    track(run, tmp_path / "store")
    truncate(run / "checkpoint-50" / "part-1.safetensors")
    with pytest.raises(
        QkovError, match=r"compares circuits with step 50, which cannot be read any more \(.*restore it"
    ):
        track(run, tmp_path / "store")
    assert RunStore(tmp_path / "store").steps() == list(STEPS)


def test_no_checkpoint_can_be_read(run, tmp_path):
    for step in STEPS:
        truncate(run / f"checkpoint-{step}" / "part-1.safetensors")
    message = r"checkpoint-10/.*the other 4 checkpoints of the run cannot be measured either"
    with pytest.raises(QkovError, match=message) as failed:
        track(run, tmp_path / "store")
    assert not isinstance(failed.value, CallError)
    assert not (tmp_path / "store").exists()


def test_a_call_that_suits_no_checkpoint_is_a_wrong_call_and_leaves_the_store_free(run, tmp_path):
    names = {role: f"blocks.{{layer}}.attn.W_{role}" for role in "QKVO"}
    wrong = {"layout": "transformer_lens", "tensors": names, "scalars": {"loss": "none"}}
    with pytest.raises(QkovError, match="has no scalar none"):
        track(run, tmp_path / "store", mapping=parse_mapping(wrong, "m"))
    directions = TaskDirections("wrong", {name: Circuit(torch.zeros(5, 6)) for name in ("QK", "OV")})
    with pytest.raises(CallError, match=r"must have the circuit's shape"):
        track(run, tmp_path / "store", directions=directions)
    tracked = track(run, tmp_path / "store", basis="raw")
    assert tracked.measured == list(STEPS)
    assert tracked.store.description()["settings"]["reading"]["mapping"] is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"heads": 2}, "was made with reading.heads null, and this call has 2; give"),
        (
            {"heads": 2, "prefix": "x"},
            "was made with reading.heads null, and this call has 2, and 1 more setting differs;",
        ),
        ({"family": "gpt2", "heads": 2, "prefix": "x"}, "and 2 more settings differ; give another --out, or delete it"),
    ],
)
def test_a_refusal_names_the_setting_that_differs(run, tmp_path, changed, message):
    track(run, tmp_path / "store")
    with pytest.raises(CallError, match=message) as refused:
        track(run, tmp_path / "store", **changed)
    assert len(str(refused.value)) < 300


def test_a_long_setting_is_shortened(run, tmp_path):
    track(run, tmp_path / "store")
    names = {role: f"blocks.{{layer}}.attn.W_{role}" for role in "QKVO"}
    with pytest.raises(CallError) as refused:
        track(run, tmp_path / "store", mapping=parse_mapping({"layout": "transformer_lens", "tensors": names}, "m"))
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize("as_json", [False, True])
def test_the_command_measures_the_rest_and_says_so_in_one_line(run, tmp_path, capsys, as_json):
    truncate(run / "checkpoint-30" / "part-1.safetensors")
    rename(run / "checkpoint-40")
    out = tmp_path / "out"
    assert run_command(["track", str(run), "--out", str(out), *["--json"] * as_json]) == 1
    printed = capsys.readouterr()
    *_, line = printed.err.strip().splitlines()
    assert line.startswith("qkov: 2 of 5 checkpoints could not be measured (step 30, 40); the first: ")
    assert "Traceback" not in printed.err
    if as_json:
        result: dict[str, Any] = json.loads(printed.out)
        assert list(result["left_out"]) == ["checkpoint-30", "checkpoint-40"]
        assert result["measured"] == [step for step in STEPS if step not in (30, 40)]
    else:
        assert "measured 3 checkpoints, kept 0 already measured\nleft out checkpoint-30: " in printed.out
    assert "checkpoint-30: " in (out / "report.html").read_text()
    for step in (30, 40):
        for old in (run / f"checkpoint-{step}").iterdir():
            old.unlink()
        write_step(run, step)
    assert run_command(["track", str(run), "--out", str(out)]) == 0
    assert "measured 3 checkpoints, kept 2 already measured" in capsys.readouterr().out


def test_identical_and_bad_checkpoints_together(run, tmp_path):
    for part in ("part-0.safetensors", "part-1.safetensors"):
        (run / "checkpoint-20" / part).write_bytes((run / "checkpoint-10" / part).read_bytes())
    truncate(run / "checkpoint-30" / "part-1.safetensors")
    (run / "checkpoint-50" / "part-0.safetensors").unlink()
    tracked = track(run, tmp_path / "store")
    assert list(tracked.unusable) == [30, 50]
    table = tracked.store.table()
    assert (table[table["step"] == 20]["change_norm"] == 0).all()
    assert (table[table["step"] == 40]["previous_step"] == 20).all()
