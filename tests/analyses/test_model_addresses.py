"""`explain` takes the addresses that inspect and track take: runs, names on the hub, and GGUF files."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from qkov.analyses.attention import load_model, load_tokeniser
from qkov.analyses.attention.models.addresses import ModelAddress, model_address
from qkov.circuits import CallError, QkovError
from qkov.circuits.checkpoints.runs import find_run
from qkov.reports.commands.main import run

from .pairs import bert_tokenizer, classifier_of_pairs

IDS = torch.tensor([[2, 5, 6, 3]])


def write_checkpoint(folder: Path, step: int | None, number: float) -> Any:
    """Write a checkpoint as transformers' Trainer does, with weights that depend on a number."""
    model = classifier_of_pairs()
    with torch.no_grad():
        model.classifier.weight.mul_(number)
    model.save_pretrained(folder)
    if step is not None:
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step, "log_history": []}))
    return model


def write_run(folder: Path, *, tokenizer: str = "checkpoints") -> dict[int, Any]:
    models = {
        step: write_checkpoint(folder / f"checkpoint-{step}", step, number)
        for number, step in ((1, 90), (2, 600), (3, 1000))
    }
    places = [folder] if tokenizer == "run" else [folder / f"checkpoint-{step}" for step in models]
    for place in places:
        bert_tokenizer(folder / "as_written").save_pretrained(place)
    shutil.rmtree(folder / "as_written")
    return models


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def demand_same(folder: Path | str, model: Any) -> Any:
    adapted = load_model(str(folder))
    with torch.no_grad():
        torch.testing.assert_close(adapted.logits(IDS, IDS > 0), logits_of(model), rtol=1e-5, atol=1e-6)
    return adapted


@pytest.mark.parametrize("tokenizer", ["checkpoints", "run"])
def test_the_last_checkpoint_of_a_run_is_loaded_and_said(tmp_path, tokenizer):
    models = write_run(tmp_path, tokenizer=tokenizer)
    adapted = demand_same(tmp_path, models[1000])
    assert adapted.name == str(tmp_path / "checkpoint-1000") == find_run(tmp_path).checkpoints[-1].address
    wanted = f"{tmp_path} is a run: used checkpoint-1000 (step 1000), the last of its 3 checkpoints"
    assert adapted.chosen_checkpoint == wanted
    assert load_tokeniser(tmp_path)("the cat")["input_ids"] == IDS[0].tolist()
    # One of its checkpoints is a model like any other.
    one = demand_same(tmp_path / "checkpoint-90", models[90])
    assert one.chosen_checkpoint is None


def test_the_model_in_the_folder_of_a_run_counts_if_its_step_is_known(tmp_path):
    write_run(tmp_path)
    final = write_checkpoint(tmp_path, 1200, 7)
    adapted = demand_same(tmp_path, final)
    assert "used the model in the folder itself (step 1200), the last of its 4 checkpoints" in adapted.chosen_checkpoint


def test_the_model_in_the_folder_of_a_run_is_left_out_aloud_if_its_step_is_not_known(tmp_path):
    models = write_run(tmp_path)
    write_checkpoint(tmp_path, None, 7)
    adapted = demand_same(tmp_path, models[1000])
    assert adapted.chosen_checkpoint.endswith(
        "; left out model.safetensors, which has no trainer_state.json that says its step"
    )


def test_an_unfinished_folder_is_left_out_aloud(tmp_path):
    models = write_run(tmp_path)
    (tmp_path / "tmp-checkpoint-1100").mkdir()
    adapted = demand_same(tmp_path, models[1000])
    assert adapted.chosen_checkpoint.endswith("; left out tmp-checkpoint-1100, which is unfinished")


def empty(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def truncated(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])


def without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def half_a_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "be')


def without_a_shard(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"classifier.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("fault", [empty, truncated, without_config, half_a_config, without_a_shard])
def test_a_broken_last_checkpoint_is_refused_by_its_name(tmp_path, fault, capsys, monkeypatch):
    write_run(tmp_path / "run")
    fault(tmp_path / "run" / "checkpoint-1000")
    with pytest.raises(QkovError, match="checkpoint-1000") as caught:
        load_model(tmp_path / "run")
    assert "\n" not in str(caught.value)
    monkeypatch.chdir(tmp_path)
    Path("mine.jsonl").write_text('{"text": "the cat", "label": 0}')
    assert run(["explain", "run", "lines", "--data", "mine.jsonl"]) in (1, 2)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "checkpoint-1000" in printed.err.splitlines()[-1]
    assert "Traceback" not in printed.err


def test_a_broken_earlier_checkpoint_does_not_matter(tmp_path):
    models = write_run(tmp_path)
    empty(tmp_path / "checkpoint-600")
    adapted = demand_same(tmp_path, models[1000])
    assert (
        "the last of its 2 checkpoints; left out checkpoint-600, which holds no weights (yet)"
        in adapted.chosen_checkpoint
    )


def test_a_run_whose_only_checkpoint_is_broken_is_refused(tmp_path):
    write_checkpoint(tmp_path / "checkpoint-5", 5, 1)
    empty(tmp_path / "checkpoint-5")
    with pytest.raises(QkovError, match="checkpoint-5 holds no weights"):
        load_model(tmp_path)
    write_checkpoint(tmp_path / "checkpoint-5", 5, 1)
    assert "(step 5), its only checkpoint" in str(load_model(tmp_path).chosen_checkpoint)


def test_the_command_says_which_checkpoint_was_used(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run")
    Path("mine.jsonl").write_text('{"text": "the cat", "pair": "a dog", "label": 0, "relevant": [[0, 3]]}')
    arguments = ["explain", "run", "lines", "--data", "mine.jsonl", "--methods", "rollout"]
    assert run(arguments) == 0
    said = "run is a run: used checkpoint-1000 (step 1000), the last of its 3 checkpoints"
    assert capsys.readouterr().out.splitlines()[0] == said
    assert said in (tmp_path / "qkov-run-lines" / "report.html").read_text()
    assert run([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["chosen_checkpoint"] == said
    assert run(["explain", "run/checkpoint-90", "lines", "--data", "mine.jsonl", "--methods", "rollout"]) == 0
    assert "is a run" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("address", "name", "options", "shown"),
    [
        ("gpt2", "gpt2", {}, "gpt2"),
        ("org/model", "org/model", {}, "org/model"),
        ("org/model@step1000", "org/model", {"revision": "step1000"}, "org/model@step1000"),
        ("gpt2@refs%2Fpr%2F1", "gpt2", {"revision": "refs/pr/1"}, "gpt2@refs/pr/1"),
        ("hf://org/model", "org/model", {}, "org/model"),
        ("hf://org/model@v1/checkpoint-5", "org/model", {"revision": "v1", "subfolder": "checkpoint-5"}, None),
        ("hf://org/model/q8.gguf", "org/model", {"gguf_file": "q8.gguf"}, None),
    ],
)
def test_names_on_the_hub(address, name, options, shown, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = model_address(address)
    assert (found.name, dict(found.options)) == (name, options)
    assert found.shown == (shown or address.removeprefix("hf://"))
    seen = []
    found.loaded_by(lambda given, **more: seen.append((given, more)), dtype="float32")
    assert seen == [(name, {**options, "dtype": "float32"})]


def test_a_revision_is_loaded_by_its_name(tmp_path, monkeypatch):
    """The hub's part is played by folders: `from_pretrained` is called with the name and the revision."""
    monkeypatch.chdir(tmp_path)
    revisions = {None: tmp_path / "main", "step5": tmp_path / "five"}
    models = {
        revision: write_checkpoint(folder, None, number)
        for number, (revision, folder) in enumerate(revisions.items(), 1)
    }
    for loader in (transformers.AutoConfig, transformers.AutoModelForSequenceClassification):
        own = loader.from_pretrained

        def from_hub(name: str, *, own: Any = own, revision: str | None = None, **options: Any) -> Any:
            return own(str(revisions[revision]) if name == "org/model" else name, **options)

        monkeypatch.setattr(loader, "from_pretrained", from_hub)
    assert demand_same("org/model@step5", models["step5"]).name == "org/model@step5"
    assert demand_same("org/model", models[None]).name == "org/model"


def test_addresses_on_other_machines_are_refused_in_one_line(tmp_path):
    for address in ("memory://model", "https://example.org/model"):
        with pytest.raises(
            CallError, match="is on another machine, and explain runs the model; copy its folder"
        ) as caught:
            load_model(address)
        assert "\n" not in str(caught.value)
    write_checkpoint(tmp_path / "model", None, 1)
    assert load_model(f"file://{tmp_path}/model").name == str(tmp_path / "model")


def test_a_gguf_file_and_the_folder_of_one(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    wanted = ModelAddress(str(tmp_path), (("gguf_file", "model.gguf"),))
    assert model_address(tmp_path / "model.gguf") == model_address(tmp_path) == wanted
    assert wanted.shown == str(tmp_path / "model.gguf")
    with pytest.raises(QkovError, match=r"model\.gguf cannot be read as a model of transformers") as caught:
        load_model(tmp_path)
    assert "\n" not in str(caught.value)
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(CallError, match=r"has no config\.json"):
        load_model(tmp_path)
