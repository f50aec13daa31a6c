"""Models on the hub: their revisions as a run, read by byte ranges from a server that answers like the hub."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from qkov.circuits import CallError, QkovError, find_checkpoints
from qkov.circuits.checkpoints.opening import open_weights
from safetensors.torch import save_file

from ..imitated_hub import lay_out_hub, list_files
from .range_server import Traffic, serving

MODEL = "laboratory/tiny-160m"
REVISIONS = ("main", "step1000", "step0", "step512", "v1.0")

#: Prints for each call what it gives, or the kind of the error and its message.
SCRIPT = """
import json, sys
from qkov.circuits import QkovError, find_checkpoints
from qkov.circuits.checkpoints.runs import find_run
from qkov.circuits.checkpoints.opening import open_weights
for call in sys.argv[1:]:
    try:
        print(json.dumps(eval(call)))
    except QkovError as error:
        print(json.dumps([type(error).__name__, str(error)]))
"""


def hub(folder):
    """The answers of a hub as files: its refs, revisions, lists of files, and the files themselves."""
    files = lay_out_hub(folder, MODEL, branches=list(REVISIONS[:-1]), tags=list(REVISIONS[-1:]))
    for number, revision in enumerate(files.values()):
        weights = {
            "attention": torch.full((64,), float(number)),
            "mlp": torch.zeros(9000),
            "output": torch.full((32,), float(-number)),
        }
        save_file(weights, revision / "model.safetensors")
        (revision / "config.json").write_text('{"model_type": "gpt_neox"}')
    list_files(folder, MODEL, files)
    return folder


def ask(address: str, *calls: str) -> list:
    settings = {"HF_ENDPOINT": address, "HF_HUB_DISABLE_TELEMETRY": "1", "OMP_NUM_THREADS": "1"}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *calls],
        env=inherited | settings,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stderr == ""
    return [json.loads(line) for line in done.stdout.splitlines()]


def as_hub(traffic: Traffic) -> None:
    traffic.codes = {"/revision/": "RevisionNotFound", "/laboratory/none": "RepoNotFound"}


def test_revisions_make_a_run_and_only_requested_tensors_are_sent(tmp_path):
    with serving(hub(tmp_path)) as (address, traffic):
        as_hub(traffic)
        (found,) = ask(
            address,
            f"[(c.step, c.address, c.fingerprint(), open_weights(c.address).config['model_type'], "
            f"{{n: t.tolist() for n, t in open_weights(c.address).read(['attention', 'output']).items()}}) "
            f"for c in find_checkpoints('{MODEL}', revisions='step*')]",
        )
    assert [(step, where) for step, where, *_ in found] == [
        (step, f"hf://{MODEL}@step{step}") for step in (0, 512, 1000)
    ]
    assert len({fingerprint for _, _, fingerprint, _, _ in found}) == 3
    assert [config for *_, config, _ in found] == 3 * ["gpt_neox"]
    assert [values for *_, values in found] == [
        {"attention": 64 * [float(number)], "output": 32 * [float(-number)]} for number in (2, 3, 1)
    ]
    path = f"/{MODEL}/resolve/step512/model.safetensors"
    header = 8 + int.from_bytes((tmp_path / path[1:]).read_bytes()[:8], "little")
    # Opened twice, read once; and where the hub says what a file holds, no fingerprint asks for its bytes.
    assert traffic.sent[path] == 2 * header + 4 * (64 + 32)


def test_one_revision_and_the_main_one(tmp_path):
    with serving(hub(tmp_path)) as (address, _):
        assert ask(
            address,
            f"[(c.step, c.address) for c in find_checkpoints('{MODEL}@step1000')]",
            f"[[c.step for c in run.checkpoints] + sorted(run.left_out) for run in [find_run('{MODEL}', '*')]][0]",
            f"open_weights('{MODEL}').read(['attention'])['attention'][0].item()",
            f"list(open_weights('hf://{MODEL}@v1.0/model.safetensors').shapes)",
        ) == [[[1000, f"hf://{MODEL}@step1000"]], [0, 512, 1000, "main", "v1.0"], 0.0, ["attention", "mlp", "output"]]


def test_what_the_hub_does_not_have(tmp_path):
    faults = [
        (
            f"find_checkpoints('{MODEL}', revisions='epoch*')",
            "CallError",
            r"no revision of .* matches 'epoch\*'; it has main",
        ),
        ("find_checkpoints('laboratory/none', revisions='*')", "QkovError", "the hub has no model laboratory/none"),
        ("find_checkpoints('laboratory/none')", "CallError", "laboratory/none.* does not exist"),
        (f"open_weights('{MODEL}@step7')", "CallError", "step7 .*does not exist; expected a file"),
        (f"open_weights('hf://{MODEL}/none.safetensors')", "CallError", "none.safetensors does not exist"),
    ]
    with serving(hub(tmp_path)) as (address, traffic):
        as_hub(traffic)
        answers = ask(address, *(call for call, _, _ in faults))
    for (call, kind, message), (came, told) in zip(faults, answers, strict=True):
        assert came == kind, call
        assert re.search(message, told), told
        assert "\n" not in told


def test_a_hub_that_does_not_answer(tmp_path):
    with serving(tmp_path) as (address, _):
        pass
    for kind, told in ask(address, f"find_checkpoints('{MODEL}', revisions='*')", f"open_weights('{MODEL}')"):
        assert kind == "QkovError"
        assert "Connection refused" in told
        assert "\n" not in told


def test_offline_mode_is_reported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for call in (open_weights, find_checkpoints):
        with pytest.raises(QkovError, match=rf"HF_HUB_OFFLINE.*; there is no local path {MODEL}, either") as caught:
            call(MODEL)
        assert "\n" not in str(caught.value)
    with pytest.raises(
        QkovError, match=r"HF_HUB_OFFLINE is set, so the hub cannot be queried for .*; unset it or use a local path"
    ):
        find_checkpoints(MODEL, revisions="step*")


def test_only_models_on_the_hub_have_revisions(tmp_path):
    for run in (str(tmp_path), tmp_path, "s3://bucket/run", f"{MODEL}@main"):
        with pytest.raises(CallError, match=r"is not a model on the hub, and only those have revisions|needs a driver"):
            find_checkpoints(run, revisions="step*")
