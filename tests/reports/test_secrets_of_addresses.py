"""Passwords, tokens and signatures in addresses are used, and neither stored nor printed."""

import json
from pathlib import Path

import pytest
import torch
from qkov.analyses.trajectories import RunStore, track
from qkov.circuits import QkovError, find_checkpoints, open_checkpoint
from qkov.reports.commands.main import run as qkov
from safetensors.torch import save

from ..circuits.scripted_server import Answer, Request, answering, without_waiting

SECRETS = ("hunter2", "SECRET", "c2lnbmF0dXJl", "someuser")


def weights(step: int) -> bytes:
    generator = torch.Generator().manual_seed(step)
    shapes = {"Q": (2, 6, 3), "K": (2, 6, 3), "V": (2, 6, 3), "O": (2, 3, 6)}
    return save({f"blocks.0.attn.W_{role}": torch.randn(*shape, generator=generator) for role, shape in shapes.items()})


@pytest.fixture(autouse=True)
def pauses(monkeypatch) -> list[float]:
    return without_waiting(monkeypatch)


def files(request: Request) -> Answer:
    """Serve weights to whoever has the password or a signature."""
    allowed = "Authorization" in request.headers or "Signature=" in request.path
    if not allowed:
        return Answer(401)
    path = request.path.partition("?")[0]
    if path == "/run/":
        links = "".join(f'<a href="step_{step}.safetensors">x</a>' for step in (1, 2))
        return Answer(content=links.encode(), headers={"Content-Type": "text/html"})
    name = path.rpartition("/")[2]
    return Answer(content=weights(len(name))) if name.endswith(".safetensors") else Answer(404)


def everything(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    "given",
    [
        "http://someuser:hunter2@HOST/model.safetensors?token=SECRET",
        "http://someuser:hunter2@HOST/run/",
        "http://HOST/model.safetensors?X-Amz-Credential=SECRET&X-Amz-Signature=c2lnbmF0dXJl",
    ],
)
def test_nothing_that_is_written_or_printed_holds_a_secret(tmp_path, monkeypatch, capsys, given):
    monkeypatch.chdir(tmp_path)
    with answering(files) as (address, _):
        run = given.replace("HOST", address.removeprefix("http://"))
        monkeypatch.setattr("sys.argv", ["qkov", "track", run])
        assert qkov(["track", run]) == 0
        assert qkov(["track", run, "--json"]) == 0
        assert qkov(["inspect", run]) == 0
        assert qkov(["inspect", run, "--json"]) == 0
        assert qkov(["track", run, "--basis", "folded"]) == 2
    printed = capsys.readouterr()
    (out,) = tmp_path.iterdir()
    assert out.name in ("qkov-model", "qkov-run")
    shown = everything(out) + (printed.out + printed.err).encode()
    for secret in SECRETS:
        assert secret.encode() not in shown
    source = RunStore(out).description()["source"]
    assert source.startswith(address)
    assert set(RunStore(out).table()["source"]) == {source}


@pytest.mark.parametrize("status", [401, 403, 404, 418, 500, "cut", "gone"])
def test_no_error_holds_a_secret(tmp_path, capsys, status):
    def answer(request: Request) -> Answer:
        if status == "cut":
            return Answer(content=weights(1)[:-5])
        return Answer(int(status), request.path.encode(), phrase=f"No {request.path}")

    with answering(answer) as (address, _):
        run = address.replace("//", "//someuser:hunter2@") + "/model.safetensors?token=SECRET&Signature=c2lnbmF0dXJl"
        if status == "gone":
            run = run.replace(address.rpartition(":")[2], "1")
        assert qkov(["track", run, "--out", str(tmp_path / "out")]) in (1, 2)
        with pytest.raises(QkovError) as failed:
            open_checkpoint(run)
    printed = capsys.readouterr()
    said = printed.out + printed.err + repr(failed.value) + repr(failed.value.__cause__)
    assert "/model.safetensors?..." in said
    for secret in SECRETS:
        assert secret not in said
    assert failed.value.__cause__ is None or status == "cut"


def test_an_address_that_is_signed_anew_resumes_its_store(tmp_path):
    with answering(files) as (address, _):
        signed = f"{address}/model.safetensors?X-Amz-Date={{0}}&X-Amz-Signature={{0}}SECRET"
        first = track(signed.format(1), tmp_path / "store")
        again = track(signed.format(2), tmp_path / "store")
        assert again.kept == first.measured
        with pytest.raises(QkovError, match=r"was made from .*, and this call reads .*other\.safetensors"):
            track(signed.format(3).replace("model", "other"), tmp_path / "store")
    description = json.loads((tmp_path / "store" / "run.json").read_text())
    assert description["source"] == f"{address}/model.safetensors?..."
    assert len(description["source_identity"]) == 32


def test_checkpoints_that_were_found_are_opened_with_what_let_them_be_found():
    with answering(files) as (address, _):
        first, second = find_checkpoints(f"{address.replace('//', '//someuser:hunter2@')}/run/")
        assert first.address == f"{address}/run/step_1.safetensors"
        assert "hunter2" not in repr(second)
        assert open_checkpoint(second.files).layer_keys == [("", 0)]
