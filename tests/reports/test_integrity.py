"""What `qkov audit`, `qkov inspect` and the report of a tracked run say about a series that is not what it claims."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from qkov.analyses.trajectories import RunStore
from qkov.reports.commands import inspect as inspect_command
from qkov.reports.commands.main import run


def trainer_run(folder: Path, seeds: dict[int, int], frozen: bool = False) -> Path:
    """Folders as a Trainer writes them; weights are drawn from a seed for each step."""
    import transformers

    for step, seed in seeds.items():
        model: Any = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=50, bos_token_id=1, eos_token_id=1)
        )
        with torch.no_grad():
            for index, block in enumerate(model.transformer.h):
                torch.manual_seed(0 if frozen and index == 0 else seed)
                for parameter in block.attn.parameters():
                    # A run that is near itself: every checkpoint is a small change of the same model.
                    parameter.copy_(0.01 * torch.randn_like(parameter))
                torch.manual_seed(1)
                for parameter in block.attn.parameters():
                    parameter.add_(torch.randn_like(parameter))
        model.save_pretrained(folder / f"checkpoint-{step}")
        (folder / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return folder


SAME = {0: 5, 10: 6, 20: 7, 30: 5}
SENTENCE = "Steps 0 and 30 hold identical attention weights, to the bit."
FROZEN = "Layer 0 is frozen: its attention weights are identical in all 3 checkpoints, while other layers change."
SOUND = (
    "Checked 3 checkpoints, step 0 to 20: no two are identical, no layer is identical in several, and none is more "
    "than about 1.5 times as far from its neighbours as they are from each other (the first and the last have only "
    "one)."
)


def test_a_first_checkpoint_that_is_the_last_is_said_everywhere(tmp_path, capsys, monkeypatch):
    # R14
    monkeypatch.chdir(tmp_path)
    trainer_run(tmp_path / "run", SAME)
    assert run(["audit", "run"]) == 1
    assert capsys.readouterr().out == f"{SENTENCE}\n"
    assert run(["inspect", "run"]) == 0
    assert f"\n{SENTENCE}\n" in capsys.readouterr().out
    assert run(["inspect", "run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["integrity"]["findings"][0]["steps"] == [0, 30]
    assert run(["track", "run"]) == 0
    assert f'<p class="bad">{SENTENCE}</p>' in Path("qkov-run/report.html").read_text()
    capsys.readouterr()
    assert run(["audit", "qkov-run"]) == 1
    assert capsys.readouterr().out == f"{SENTENCE}\n"
    assert run(["audit", "run", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["findings"][0]["sentence"] == SENTENCE


def test_a_sound_run_is_said_to_be_sound(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer_run(tmp_path / "run", {0: 5, 10: 6, 20: 7})
    assert run(["audit", "run"]) == 0
    assert capsys.readouterr().out == f"{SOUND}\n"
    assert run(["inspect", "run"]) == 0
    assert SOUND in capsys.readouterr().out
    assert run(["track", "run"]) == 0
    page = Path("qkov-run/report.html").read_text()
    assert "identical" not in page
    assert "frozen" not in page
    capsys.readouterr()
    assert run(["audit", "qkov-run"]) == 0
    assert capsys.readouterr().out == f"{SOUND}\n"


def test_frozen_layers_are_stated_with_status_0(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer_run(tmp_path / "run", {0: 5, 10: 6, 20: 7}, frozen=True)
    assert run(["audit", "run"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == FROZEN
    assert run(["track", "run"]) == 0
    assert f'<p class="quiet">{FROZEN}</p>' in Path("qkov-run/report.html").read_text()


def test_what_is_unknown_is_said_to_be_unknown(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer_run(tmp_path / "run", SAME)
    assert run(["track", "run"]) == 0
    RunStore("qkov-run").contents_path(20).unlink()
    capsys.readouterr()
    unknown = "Step 20 was not checked: the store does not hold the content of its weights"
    assert run(["audit", "qkov-run"]) == 1
    assert unknown in capsys.readouterr().out
    assert run(["report", "qkov-run"]) == 0
    assert f'<p class="quiet">{unknown}' in Path("qkov-run/report.html").read_text()
    shutil.rmtree("qkov-run/contents")
    assert run(["report", "qkov-run"]) == 0
    page = Path("qkov-run/report.html").read_text()
    assert "Steps 0, 10, 20 and 30 were not checked: the store does not hold the content" in page
    capsys.readouterr()
    assert run(["audit", "qkov-run"]) == 2
    assert "does not hold the content of any layer" in capsys.readouterr().err


def test_a_large_run_is_compared_only_when_asked(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(inspect_command, "_COMPARED", 1000)
    trainer_run(tmp_path / "run", SAME)
    assert run(["inspect", str(tmp_path / "run")]) == 0
    printed = capsys.readouterr().out
    assert SENTENCE not in printed
    assert f"0.0 GiB in all: qkov audit {tmp_path / 'run'}\n" in printed


def test_a_file_beside_the_run_is_named(tmp_path, capsys):
    folder = tmp_path / "run"
    trainer_run(folder, {0: 5, 10: 6, 20: 7})
    (folder / "tmp-checkpoint-30").mkdir()
    assert run(["audit", str(folder)]) == 0
    assert "left out tmp-checkpoint-30: is unfinished" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [["audit"], ["audit", "nowhere/at/all"], ["audit", "run", "--map", "none.toml"], ["audit", "run", "--x"]],
)
def test_a_wrong_call_is_status_2(tmp_path, capsys, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    trainer_run(tmp_path / "run", {0: 5})
    capsys.readouterr()
    assert run(arguments) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_one_checkpoint_has_nothing_to_be_compared_with(tmp_path, capsys):
    trainer_run(tmp_path / "run", {40: 5})
    assert run(["audit", str(tmp_path / "run")]) == 0
    assert "there is nothing to compare it with" in capsys.readouterr().out
