"""A short campaign in CI, and planted faults that the fuzzers have to notice."""

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from qkov.circuits import QkovError

from .campaign import KINDS, again, input_numbered, keep
from .inputs import Input
from .readers import READERS
from .worker import Outcome, outcomes

ROOT = Path(__file__).resolve().parents[2]


def test_two_thousand_inputs_are_read_or_refused_in_one_line(tmp_path):
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.fuzz", "--inputs", "2000", "--seed", "1", "--keep", tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert "2000 inputs, 0 findings" in process.stdout
    # Inputs that were all refused at the door would show nothing.
    assert {kind for kind in KINDS if re.search(rf"^{kind}: \d+ read$", process.stdout, re.MULTILINE)} == {*KINDS}


def test_an_input_depends_on_its_number_and_the_seed_alone():
    """Files of torch.save are not compared: the older format holds addresses in memory."""
    for number in range(2 * len(KINDS)):
        kind, item = input_numbered(3, number)
        assert kind == list(KINDS)[number % len(KINDS)]
        if not any(name.endswith((".pt", ".pth", ".ckpt", ".bin")) for name in item.files):
            assert item == input_numbered(3, number)[1]


def raises(error):
    def read(path, folder):
        raise error

    return read


def reads(path, folder):
    assert path.name == "input"


def starts_a_process(path, folder):
    subprocess.run(["true"], check=True)


def ends(path, folder):
    os._exit(3)


def spins(path, folder):
    begun = time.process_time()
    while time.process_time() < begun + 100:
        pass


def grows(path, folder):
    assert len(bytearray(os.urandom(1)) * 200_000_000)


def writes_outside(path, folder):
    (folder.parent.parent / "elsewhere").write_text("a")


def reads_outside(path, folder):
    Path("/etc/passwd").read_text()


def connects(path, folder):
    with socket.socket() as other:
        other.connect_ex(("127.0.0.1", 9))


def compiles(path, folder):
    exec(compile("a = 1", "/tmp/foreign.py", "exec"), {})


@pytest.mark.parametrize(
    ("reader", "kind"),
    [
        (reads, "read"),
        (raises(QkovError("input/a.txt is not what it should be")), "refused"),
        (raises(QkovError("something is not what it should be")), "names no input"),
        (raises(KeyError("a")), "traceback"),
        (raises(SystemExit(0)), "traceback"),
        (spins, "over time"),
        (grows, "over memory"),
        (writes_outside, "outside"),
        (reads_outside, "outside"),
        (connects, "outside"),
        (compiles, "outside"),
        (starts_a_process, "outside"),
        (ends, "died"),
    ],
)
def test_a_planted_fault_is_noticed(tmp_path, monkeypatch, reader, kind):
    monkeypatch.setitem(READERS, "planted", reader)
    items = [(number, lambda: Input("planted", {"a.txt": b"abc"})) for number in (7, 8)]
    found = list(outcomes(items, tmp_path))
    # The fault of an input does not keep the next one from being read.
    assert [(number, outcome.kind) for number, outcome in found] == [(7, kind), (8, kind)]


def test_a_finding_is_kept_so_that_it_can_be_read_again(tmp_path, monkeypatch):
    monkeypatch.setitem(READERS, "planted", raises(KeyError("a")))
    monkeypatch.setattr("tests.fuzz.campaign.undamaged", list)
    keep(Input("planted", {"a/b.txt": b"abc"}, "a"), tmp_path / "kept")
    outcome = again(tmp_path / "kept")
    assert isinstance(outcome, Outcome)
    assert outcome.kind == "traceback"
    assert "KeyError: 'a'" in outcome.what
