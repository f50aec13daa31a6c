"""Tracking a run asks each folder for its entries once; at a distance every question is a request."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from qkov.analyses.trajectories import track
from qkov.circuits import Checkpoint, find_checkpoints
from qkov.circuits.architectures.mapping import parse_mapping
from qkov.circuits.storage.places import LocalPlace
from safetensors.torch import save_file

from ..circuits.range_server import serving

STEPS = (500, 1000, 1500)
MAPPING = parse_mapping(
    {"layout": "linear", "heads": 2, "tensors": {role: f"layers.{{layer}}.{role}" for role in "QKVO"}}, "the test"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run as transformers' Trainer saves it."""
    run = tmp_path_factory.mktemp("served") / "run"
    for step in STEPS:
        folder = run / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        save_file(
            {f"layers.{n}.{role}": torch.randn(8, 8) for n in range(2) for role in "QKVO"}, folder / "model.safetensors"
        )
        (folder / "config.json").write_text('{"model_type": "gpt2"}')
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step, "log_history": []}))
        for name in ("optimizer.pt", "rng_state.pth", "scheduler.pt", "training_args.bin", "tokenizer.json"):
            (folder / name).touch()
    return run


@pytest.fixture
def questions(monkeypatch) -> Counter[tuple[str, str]]:
    """How often each path of this machine is asked what it is or what it holds."""
    asked: Counter[tuple[str, str]] = Counter()

    def counted(question, answer):
        def ask(place):
            asked[question, place.name] += 1
            return answer(place)

        return ask

    for question in ("is_file", "is_folder", "entries"):
        monkeypatch.setattr(LocalPlace, question, counted(question, getattr(LocalPlace, question)))
    return asked


def test_a_local_run_is_listed_once(run, questions, tmp_path):
    assert track(run, tmp_path / "store", mapping=MAPPING, workers=1).measured == list(STEPS)
    folders = ["run", *(f"checkpoint-{step}" for step in STEPS)]
    # Once the run itself, once each entry of the run; then whether the two files beside each weights are files.
    assert questions == Counter(
        {("entries", folder): 1 for folder in folders}
        | {("is_folder", folder): 1 for folder in folders}
        | {("is_file", "config.json"): len(STEPS), ("is_file", "trainer_state.json"): len(STEPS)}
    )


@pytest.mark.parametrize("workers", [1, 2])
def test_a_remote_run_is_listed_once(run, tmp_path, workers):
    with serving(run.parent) as (address, traffic):
        track(f"{address}/run", tmp_path / "store", mapping=MAPPING, workers=workers)
        requests = Counter(path for _, path in traffic.requests)
    folders = ["/run/", *(f"/run/checkpoint-{step}/" for step in STEPS)]
    assert {path: count for path, count in requests.items() if path.endswith("/")} == dict.fromkeys(folders, 1)
    # 89 with one worker and 117 with two when every opening looked for the files again.
    # The first and the last checkpoint are opened once more, since a sweep begins with those that can be read.
    assert requests.total() <= (55 if workers == 1 else 67)


def test_the_files_of_a_named_checkpoint_are_found_once(run, questions):
    folder = run / "checkpoint-500"
    checkpoint = Checkpoint(500, str(folder))
    assert checkpoint == find_checkpoints(folder)[0]
    questions.clear()
    assert checkpoint.fingerprint() == find_checkpoints(run)[0].fingerprint()
    questions.clear()
    checkpoint.fingerprint()
    assert questions == {}
    assert [place.name for place in checkpoint.files.sidecars] == ["config.json", "trainer_state.json"]


def test_a_config_that_is_a_folder_is_no_config(tmp_path):
    folder = tmp_path / "checkpoint-5"
    (folder / "config.json").mkdir(parents=True)
    save_file({"a": torch.ones(1)}, folder / "model.safetensors")
    (tmp_path / "params.json").write_text("{}")
    for run in (tmp_path, folder, folder / "model.safetensors"):
        (checkpoint,) = find_checkpoints(run)
        assert checkpoint.files.config is not None
        assert checkpoint.files.config.name == "params.json"
