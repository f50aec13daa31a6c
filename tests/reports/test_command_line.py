"""The command line: what it prints, and one clear line with status 1 or 2 for whatever is wrong."""

import html
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from qkov.analyses.trajectories import RunStore
from qkov.circuits import AttentionWeights
from qkov.circuits.reading.saved_format import save_checkpoint
from qkov.reports.commands.main import run

#: Mappings of checkpoints that others made.
MAPPINGS = Path(__file__).parents[1] / "data"
ACCEPTANCE = [
    "predict",
    "--parameterization",
    "CACO",
    "--ratio",
    "0.01",
    "--loss",
    "1e-4",
    "--classes",
    "20",
    "--class-tokens",
    "50",
    "--relevant",
    "5",
    "--background",
    "50",
    "--json",
]


def write_run(folder: Path, steps=(0, 5, 50), heads=2) -> Path:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        factors = {name: torch.randn(heads, 6, 3, generator=generator) for name in ("W_Q", "W_K", "W_V")}
        weights = AttentionWeights(layer=0, **factors, W_O=torch.randn(heads, 3, 6, generator=generator))
        save_checkpoint(folder, step, [weights], {"loss": 1.0}, {})
    return folder


def refused(capsys, arguments: list[str]) -> tuple[int, str]:
    """Run a call that has to fail, and return its status and its one line."""
    status = run(arguments)
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("qkov: ")
    assert "Traceback" not in captured.err
    return status, lines[0]


def test_predict_prints_the_figures_of_the_papers_simulation(capsys):
    # mu_OV 81.669, mu_QK 0.559 and alpha 0.149 are printed in the paper's Figure 4; the longer ones are the project's
    # reference values, computed at 30 digits.
    assert run(ACCEPTANCE) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["mu_ov"] == pytest.approx(81.66869863298372, rel=1e-9)
    assert printed["mu_qk"] == pytest.approx(0.558775704776382, rel=1e-9)
    assert printed["alpha"] == pytest.approx(0.14882971755615804, rel=1e-9)


def test_predict_for_people(capsys):
    assert run(["predict", "--loss", "1e-4", "--ratio", "0.01"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "uniform attention would put 0.0909" in lines[1]
    assert [line.split()[0] for line in lines[2:]] == ["CACO", "CAFO", "FACO", "FAFO"]
    assert "alpha 0.148830  mu_QK 0.558776  mu_OV 81.6687" in lines[2]


def test_track_inspect_and_report(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run")
    assert run(["track", "run", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert first == {
        "store": "qkov-run",
        "report": "qkov-run/report.html",
        "measured": [0, 5, 50],
        "kept": [],
        "left_out": {},
    }
    assert "Circuits over training" in Path(first["report"]).read_text()
    assert run(["track", "run"]) == 0
    captured = capsys.readouterr()
    assert "measured 0 checkpoints, kept 3" in captured.out
    assert "report: qkov-run/report.html" in captured.out
    assert "3 of 3, step 50 already measured" in captured.err
    assert run(["inspect", "run", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["steps"] == [0, 5, 50]
    assert facts["recognised"] == "as qkov's own format"
    (layer,) = facts["stacks"][0]["layers"]
    assert layer["heads"] == 2
    assert layer["circuits"]["QK"] == {
        "dtype": "float32",
        "rows": 6,
        "columns": 6,
        "rank_bound": 3,
        "factorized": True,
    }
    assert run(["inspect", "run/step_000000005.safetensors"]) == 0
    assert "W_OV: 6 x 6 per head, factors of inner width 3, float32" in capsys.readouterr().out
    write_run(tmp_path / "other", steps=(0, 7))
    assert run(["track", "other", "--out", "second"]) == 0
    capsys.readouterr()
    assert run(["report", "qkov-run", "second"]) == 0
    assert capsys.readouterr().out == "report: qkov-comparison.html\n"
    page = Path("qkov-comparison.html").read_text()
    assert "qkov-run" in page
    assert "second" in page


def test_track_by_workers_with_composition(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run")
    assert run(["track", "run", "--workers", "2", "--composition", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["measured"] == [0, 5, 50]
    assert RunStore("qkov-run").composition_steps() == [0, 5, 50]


def test_wrong_calls(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run")
    Path("text.pt").write_text("no checkpoint")
    Path("nothing.toml").write_text('layout = "linear"\nheads = 1\n[tensors]\nQ = "nowhere"\nK = "neither"\n')
    Path("broken.toml").write_text("=")
    Path("full").mkdir()
    Path("full/thesis.tex").touch()
    predict = ["predict", "--loss", "0.1"]
    for arguments, status, message in (
        (["track", "missing"], 2, "missing does not exist"),
        (["inspect", "missing"], 2, "missing does not exist"),
        (["track", "full"], 2, "full holds no checkpoint"),
        (["inspect", "text.pt"], 1, "text.pt is not a PyTorch file"),
        (["track", "text.pt"], 1, "text.pt is not a PyTorch file"),
        (["track", "run", "--map", "nothing.toml"], 1, "names no tensor of the file: it names nowhere, neither"),
        (["track", "run", "--map", "broken.toml"], 2, "cannot be read as TOML"),
        (["track", "run", "--map", "missing.toml"], 2, "missing.toml does not exist"),
        (
            ["track", "run", "--basis", "centred"],
            2,
            "basis should be one of raw, folded, folded_centred, got 'centred'",
        ),
        (["track", "run", "--rotary-offset", "3"], 2, "has no layer with rotary positions"),
        (["track", "run", "--engine", "spark"], 2, "the engine should be one of processes, dask, ray, got 'spark'"),
        (["track", "run", "--workers", "0"], 2, "workers should be at least 1, got 0"),
        (["track", "run", "--engine", "dask", "--address", "tcp://127.0.0.1:9"], 1, "127.0.0.1:9 cannot be reached"),
        (
            [*predict, "--relevant", "60"],
            2,
            "m, the number of class tokens in a sequence, must be at most b = 50, got 60",
        ),
        (["predict", "--loss", "3.5"], 2, "loss 3.5 is out of reach"),
        (["predict", "--loss", "-1"], 2, "is out of reach"),
        (["predict", "--loss", "nan"], 2, "loss nan is out of reach"),
        ([*predict, "--ratio", "0"], 2, "must be positive"),
        ([*predict, "--parameterization", "CACA"], 2, "'CACA' is not known; expected one of CACO, CAFO, FACO, FAFO"),
        ([*predict, "--query", "word"], 2, "--query should be one of token, class; got 'word'"),
        ([*predict, "--parameterization", "FAFO", "--start-qk", "0"], 2, "gradient flow never leaves the saddle at 0"),
        ([*predict, "--start-qk", "800"], 2, "mu_qk must lie between -600 and 600, got 800"),
        (["predict"], 2, "Missing option '--loss'"),
        (["predict", "--loss", "much"], 2, "--loss"),
        (["paint"], 2, "No such command 'paint'"),
        (["report", "full"], 2, "full is not a run store"),
        (["report", "run", "full"], 2, "is not a run store"),
        (["reproduce", "--out", "full"], 2, "full is not empty and was not written by qkov reproduce"),
        (["reproduce", "--out", "text.pt"], 2, "text.pt is a file"),
    ):
        got, line = refused(capsys, arguments)
        assert got == status, (arguments, line)
        assert message in line, (arguments, line)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken.toml", "full", "nothing.toml", "run", "text.pt"]


def test_a_full_disk_is_one_line(tmp_path, capsys, monkeypatch):
    write_run(tmp_path / "run")

    def full(source, target):
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr(os, "replace", full)
    status, line = refused(capsys, ["track", str(tmp_path / "run"), "--out", str(tmp_path / "store"), "--json"])
    assert status == 1
    assert "No space left on device" in line
    assert list((tmp_path / "store").rglob("*")) == []


@pytest.mark.parametrize("out", ["text.txt", "text.txt/sub", "locked/sub"])
def test_a_place_that_cannot_be_written_is_named(tmp_path, capsys, monkeypatch, out):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run")
    Path("text.txt").write_text("mine")
    real = Path.mkdir

    def mkdir(path, *arguments, **options):
        if "locked" in path.parts:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    status, line = refused(capsys, ["track", "run", "--out", out, "--json"])
    assert status == 2
    assert f"qkov: {out} cannot be written to" in line
    assert Path("text.txt").read_text() == "mine"
    monkeypatch.undo()
    assert run(["track", str(tmp_path / "run"), "--out", str(tmp_path / "store"), "--json"]) == 0
    capsys.readouterr()
    status, line = refused(capsys, ["report", str(tmp_path / "store"), "--out", str(tmp_path)])
    assert (status, line) == (2, f"qkov: {tmp_path} is a folder; expected the name of a file to write")


def test_json_is_json_where_a_figure_is_not_defined(tmp_path, capsys):
    weights = AttentionWeights(layer=0, W_QK=torch.zeros(1, 3, 3))
    save_checkpoint(tmp_path, 1, [weights], {"loss": float("nan"), "time": float("inf")}, {})
    assert run(["inspect", str(tmp_path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert printed["scalars"] == {"loss": None, "time": None}


def test_the_report_tells_its_command_so_that_it_can_be_pasted(tmp_path, capsys, monkeypatch):
    folder = write_run(tmp_path / "my run's")
    arguments = ["track", str(folder), "--out", str(tmp_path / "a store")]
    monkeypatch.setattr(sys, "argv", ["qkov", *arguments])
    assert run(None) == 0
    capsys.readouterr()
    (told,) = re.findall(r"<dt>command</dt><dd><code>(.*?)</code>", (tmp_path / "a store" / "report.html").read_text())
    assert shlex.split(html.unescape(told)) == ["qkov", *arguments]


def test_what_a_stranger_named_is_escaped(tmp_path, capsys):
    name = "<script>alert(1)</script>"
    folder = write_run(tmp_path / name.replace("/", "_"))
    assert run(["track", str(folder), "--out", str(tmp_path / "store")]) == 0
    page = (tmp_path / "store" / "report.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;" in page


def test_interrupted_it_says_so_and_goes_on_from_there(tmp_path, heard_interrupts):
    folder = write_run(tmp_path / "run", steps=range(400))
    command = [sys.executable, "-m", "qkov.reports", "track", str(folder), "--out", str(tmp_path / "store")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    store = RunStore(tmp_path / "store")
    # The first step is done.
    assert process.stderr.readline().startswith("track: 1 of 400")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    done = len(store.steps())
    assert process.returncode == 130
    assert 0 < done < 400
    assert errors.strip().splitlines()[-1].startswith("qkov: interrupted; no file was left half written")
    assert "Traceback" not in errors
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    assert re.search(rf"measured {400 - done} checkpoints, kept {done} ", finished.stdout)


def test_help_names_every_command(capsys):
    assert run([]) == 2
    assert "Commands:" in capsys.readouterr().out
    assert run(["--help"]) == 0
    printed = capsys.readouterr().out
    for command in ("reproduce", "predict", "inspect", "track", "report"):
        assert command in printed
    for command in ("reproduce", "predict", "inspect", "track", "report"):
        assert run([command, "--help"]) == 0
        assert "--json" in capsys.readouterr().out


def test_the_rope_run_from_the_command_line(strangers, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mapping, folder = str(MAPPINGS / "rope_toy.toml"), strangers / "rope_toy"
    steps = sorted(int(path.stem.removeprefix("model_step_")) for path in folder.iterdir())
    assert run(["track", str(folder), "--map", mapping, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["measured"] == steps
    page = Path("qkov-rope_toy/report.html").read_text()
    assert f"{len(steps)} checkpoints, step 1 to {steps[-1]}" in page
    assert "rotary positions" in page


@pytest.mark.parametrize(
    ("file", "layers", "heads", "inner"),
    [("brackets/brackets_model_state_dict.pt", 3, 2, 28), ("induction/induction_head_infinite.pth", 2, 4, 12)],
)
def test_other_layouts_of_strangers_by_a_mapping(strangers, tmp_path, capsys, file, layers, heads, inner):
    path, mapping = strangers / file, MAPPINGS / f"{Path(file).parent}.toml"
    assert run(["track", str(path), "--map", str(mapping), "--out", str(tmp_path / "store")]) == 0
    capsys.readouterr()
    table = RunStore(tmp_path / "store").table()
    assert (table["layer"].nunique(), table["head"].nunique()) == (layers, heads)
    assert set(table["rank_bound"]) == {inner}
    saved = torch.load(path, map_location="cpu", weights_only=True)
    saved = saved.get("model", saved)
    (prefix,) = {name.split(".0.attn.")[0] for name in saved if ".0.attn.W_Q" in name}
    for row in table[table["layer"] == layers - 1].to_dict("records"):
        W_Q, W_K, W_V, W_O = (saved[f"{prefix}.{layers - 1}.attn.W_{part}"].double().numpy() for part in "QKVO")
        head = row["head"]
        if prefix == "blocks":
            dense = {"QK": W_K[head] @ W_Q[head].T, "OV": W_O[head].T @ W_V[head].T}
        else:
            own = slice(inner * head, inner * (head + 1))
            dense = {"QK": W_K[head].T @ W_Q[head], "OV": W_O[:, own] @ W_V[head]}
        expected = np.linalg.svd(dense[row["circuit"]])[1][:inner]
        np.testing.assert_allclose(row["singular_values"], expected, rtol=1e-6, atol=1e-9)


def save_layer(path: Path, seed: int = 0, **values) -> None:
    """Save a layer with TransformerLens' names as training scripts do, with values beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    shapes = {"Q": (2, 6, 3), "K": (2, 6, 3), "V": (2, 6, 3), "O": (2, 3, 6)}
    state = {f"blocks.0.attn.W_{role}": torch.randn(shape, generator=generator) for role, shape in shapes.items()}
    torch.save({"model": state, **values}, path)


def test_a_model_whose_step_is_not_known_has_none(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_layer(Path("gpt2.pt"))
    assert run(["inspect", "gpt2.pt"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "gpt2.pt: 1 checkpoint, step unknown"
    assert run(["inspect", "gpt2.pt", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == [None]
    assert run(["track", "gpt2.pt", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["measured"] == [None]
    assert [path.name for path in Path("qkov-gpt2/steps").iterdir()] == ["step-unknown.parquet"]
    table = RunStore("qkov-gpt2").table()
    assert table["step"].isna().all()
    assert len(table) == 4
    page = Path("qkov-gpt2/report.html").read_text()
    assert "1 checkpoint, step unknown;" in page
    assert "step 0" not in page
    assert run(["track", "gpt2.pt"]) == 0
    assert "kept 1 already measured" in capsys.readouterr().out
    assert run(["report", "qkov-gpt2"]) == 0


def test_steps_from_files_are_printed_with_their_origin(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_layer(Path("run/best.pt"), 1, iter_num=500)
    save_layer(Path("run/last.pt"), 2, iter_num=700)
    save_layer(Path("run/other.pt"), 3)
    assert run(["inspect", "run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "run: 2 checkpoints, step 500 to 700",
        "  steps 500, 700: iter_num in the file",
        "left out other.pt: has no step in its name or in its file, unlike others",
    ]


def test_epochs_are_shown_as_epochs(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for epoch in (1, 3):
        save_layer(Path(f"run/epoch_{epoch}.pt"), epoch)
    assert run(["inspect", "run"]) == 0
    assert capsys.readouterr().out.startswith("run: 2 checkpoints, epoch 1 to 3\n")
    assert run(["track", "run"]) == 0
    assert "note: only epochs are known, so epochs take the place of steps" in capsys.readouterr().out
    page = Path("qkov-run/report.html").read_text()
    assert "2 checkpoints, epoch 1 to 3;" in page
    assert "per epoch" in page
    assert "per training step" not in page
    rows = RunStore("qkov-run").table()
    later = rows[rows["step"] == 3]
    earlier = rows[rows["step"] == 1]
    speed = later["change_norm"].to_numpy() / earlier["frobenius_norm"].to_numpy() / 2
    np.testing.assert_allclose(later["relative_speed"], speed)
    assert set(later["reference"]) == {"epoch 3"}


def test_seeds_are_refused_and_a_pattern_is_told(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for seed in (1, 2, 3, 4):
        save_layer(Path(f"seeds/model_seed{seed}.pt"), seed)
        save_layer(Path(f"odd/A_1_1_{100 * seed}.pt"), seed)
    save_layer(Path("odd/A_1_1_init.pt"))
    for command in ("inspect", "track", "audit"):
        status, line = refused(capsys, [command, "seeds"])
        assert status == 2
        assert "the names tell several seeds apart" in line
        assert "--step" in line
        assert refused(capsys, [command, "odd"])[0] == 2
        assert run([command, "odd", "--step", "A_1_1_{step}.pt", "--json"]) == 0
        printed = json.loads(capsys.readouterr().out)
        assert printed["checked" if command == "audit" else "steps" if command == "inspect" else "measured"] == [
            *(0, 100, 200, 300, 400)
        ]
    status, line = refused(capsys, ["track", "odd", "--step", "A_{epoch}.pt", "--out", "none"])
    assert status == 2
    assert not Path("none").exists()


def test_a_checkpoint_that_states_another_step_than_its_name_is_reported(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_layer(Path("run/step_10.pt"), 1, iter_num=10)
    save_layer(Path("run/step_20.pt"), 2, iter_num=25)
    assert run(["inspect", "run"]) == 0
    assert "note: step_20.pt is taken for step 20, but iter_num in the file is 25" in capsys.readouterr().out
    assert run(["track", "run"]) == 0
    assert "note: the checkpoint taken for step 20 states step 25" in capsys.readouterr().out
    assert "the checkpoint taken for step 20 states step 25" in Path("qkov-run/report.html").read_text()


def test_the_loss_of_a_trainer_is_in_the_store_and_in_the_report(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for step in (10, 20):
        folder = Path(f"run/checkpoint-{step}")
        save_layer(folder / "pytorch_model.bin", step)
        history = [{"step": 10, "loss": 2.5, "learning_rate": 1e-3}, {"step": 20, "loss": 1.5, "learning_rate": 5e-4}]
        state = {"global_step": step, "log_history": history[: step // 10]}
        (folder / "trainer_state.json").write_text(json.dumps(state))
    assert run(["track", "run"]) == 0
    table = RunStore("qkov-run").table()
    assert dict(zip(table["step"], table["training_loss"], strict=True)) == {10: 2.5, 20: 1.5}
    assert dict(zip(table["step"], table["training_learning_rate"], strict=True)) == {10: 1e-3, 20: 5e-4}
    assert "As saved with the weights." in Path("qkov-run/report.html").read_text()
