"""Checkpoints: found, ordered and read; every fault of a file in one line."""

import os

import pytest
import torch
from qkov.circuits.checkpoints import find_checkpoints
from qkov.circuits.errors import CallError
from safetensors.torch import save_file


def test_steps_are_in_numerical_order_wherever_the_number_stands(tmp_path):
    for name in ("model_step_1000.pt", "model_step_500.pt", "model_step_20.pt"):
        torch.save({}, tmp_path / name)
    (tmp_path / "log.txt").write_text("")
    assert [checkpoint.step for checkpoint in find_checkpoints(tmp_path)] == [20, 500, 1000]
    for names, steps in (
        (("pythia-70m-step3000.safetensors", "pythia-70m-step512.safetensors"), [512, 3000]),
        (("ckpt_7_of_100_step-40.bin", "ckpt_8_of_100_step-5.bin"), [5, 40]),
        (("v2_010.pth", "v2_009.pth"), [9, 10]),
        (("ckpt_1_loss_0.52.pt", "ckpt_2_loss_0.31.pt"), [1, 2]),
    ):
        folder = tmp_path / names[0]
        folder.mkdir()
        for name in names:
            (folder / name).touch()
        assert [checkpoint.step for checkpoint in find_checkpoints(folder)] == steps
    assert find_checkpoints(tmp_path / "model_step_20.pt")[0].step == 20


def test_names_that_do_not_tell_the_step_are_refused(tmp_path):
    for names in (("a1_b2.pt", "a2_b1.pt"), ("run_7.pt", "run.pt"), ("first.pt", "second.pt")):
        folder = tmp_path / names[0]
        folder.mkdir()
        for name in names:
            (folder / name).touch()
        with pytest.raises(CallError, match=r"do not say which number is the step; put 'step' before it"):
            find_checkpoints(folder)


def test_a_folder_that_holds_no_run(tmp_path):
    with pytest.raises(CallError, match="does not exist"):
        find_checkpoints(tmp_path / "none")
    (tmp_path / "notes.txt").touch()
    with pytest.raises(CallError, match=r"holds no checkpoint: expected files that end in .* found notes.txt"):
        find_checkpoints(tmp_path)
    (tmp_path / "final.pt").touch()
    assert find_checkpoints(tmp_path)[0].step == 0
    (tmp_path / "step_3.pt").touch()
    with pytest.raises(CallError, match=r"final.pt has no step in it"):
        find_checkpoints(tmp_path)
    (tmp_path / "final.pt").unlink()
    (tmp_path / "step_03.pt").touch()
    with pytest.raises(CallError, match="both of step 3"):
        find_checkpoints(tmp_path)


def test_a_fingerprint_changes_with_the_file(tmp_path):
    path = tmp_path / "step_1.safetensors"
    save_file({"a": torch.zeros(100_000)}, path)
    (checkpoint,) = find_checkpoints(path)
    before = checkpoint.fingerprint()
    assert checkpoint.fingerprint() == before
    # Changed where neither the first nor the last 64 KiB tell of it.
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    middle = checkpoint.fingerprint()
    assert middle != before
    written = path.stat()
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(written.st_atime_ns, written.st_mtime_ns))
    assert checkpoint.fingerprint() != middle
    content[-1] ^= 1
    content[20] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(written.st_atime_ns, written.st_mtime_ns))
    assert checkpoint.fingerprint() != middle
