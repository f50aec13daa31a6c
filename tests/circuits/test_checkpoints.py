"""Checkpoints: found, ordered and fingerprinted, with every fault of a folder reported in one line."""

import json
import os
import pickle

import pytest
import torch
from qkov.circuits import CallError, QkovError, find_checkpoints
from qkov.circuits.checkpoints.runs import find_run
from safetensors.torch import save_file


def test_steps_are_in_numerical_order_wherever_the_number_stands(tmp_path):
    for name in ("model_step_1000.pt", "model_step_500.pt", "model_step_20.pt"):
        torch.save({}, tmp_path / name)
    (tmp_path / "log.txt").write_text("")
    assert [checkpoint.step for checkpoint in find_checkpoints(tmp_path)] == [20, 500, 1000]
    for names, steps in (
        (("pythia-70m-step3000.safetensors", "pythia-70m-step512.safetensors"), [512, 3000]),
        (("ckpt_7_of_100_step-40.bin", "ckpt_8_of_100_step-5.bin"), [5, 40]),
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
        with pytest.raises(CallError, match=r"not known which step each is of: .* --step 'NAME_\{step\}.pt'"):
            find_checkpoints(folder)


def test_a_folder_that_holds_no_run(tmp_path):
    with pytest.raises(CallError, match="does not exist"):
        find_checkpoints(tmp_path / "none")
    (tmp_path / "notes.txt").touch()
    with pytest.raises(CallError, match=r"holds no checkpoint: expected files that end in .* found notes.txt"):
        find_checkpoints(tmp_path)
    (tmp_path / "final.pt").touch()
    assert find_checkpoints(tmp_path)[0].step is None
    (tmp_path / "step_3.pt").touch()
    run = find_run(tmp_path)
    assert [checkpoint.step for checkpoint in run.checkpoints] == [3]
    assert run.left_out == {"final.pt": "has no step in its name or in its file, unlike others"}
    (tmp_path / "step_03.pt").touch()
    with pytest.raises(CallError, match="both of step 3"):
        find_checkpoints(tmp_path)


def weights(folder, *names):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or ("model.safetensors",):
        (folder / name).parent.mkdir(exist_ok=True)
        save_file({"a": torch.ones(1)}, folder / name)


def found(run):
    return [(checkpoint.step, checkpoint.name) for checkpoint in find_checkpoints(run)]


@pytest.mark.parametrize(
    ("names", "steps"),
    [
        (["epoch=3-step=500.ckpt", "epoch=2-step=400.ckpt"], [400, 500]),
        (["checkpoint_2_iter_90.pt", "checkpoint_3_iter_70.pt"], [70, 90]),
        (["checkpoint_epoch_3_loss_0.5.pt", "checkpoint_epoch_20_loss_0.1.pt"], [3, 20]),
        (["epoch=3-step=500.ckpt", "epoch=2-step=400.ckpt", "last.ckpt"], [400, 500]),
        (["checkpoint-7.pt", "checkpoint-10.pt", "step2_recipe.pt"], [7, 10]),
        (["ckpt-7-v2.pt", "ckpt-10-v3.pt"], [7, 10]),
        (["model3_000040.pt", "model4_000050.pt"], None),
        (["gpt2_model_000040.pt", "gpt2_model_000050.pt"], [40, 50]),
    ],
)
def test_the_most_reliable_word_for_a_step_counts(tmp_path, names, steps):
    for name in names:
        (tmp_path / name).touch()
    if steps is None:
        with pytest.raises(CallError, match="not known which step each is of"):
            find_checkpoints(tmp_path)
    else:
        assert [checkpoint.step for checkpoint in find_checkpoints(tmp_path)] == steps


def test_the_folders_of_a_trainer_are_in_numerical_order(tmp_path):
    for step in (1000, 500, 20):
        weights(tmp_path / f"checkpoint-{step}", "model.safetensors", "optimizer.pt", "rng_state.pth")
    weights(tmp_path / "checkpoint-2000", "optimizer.pt")
    weights(tmp_path / "tmp-checkpoint-3000")
    weights(tmp_path / "best")
    (tmp_path / "runs").mkdir()
    (tmp_path / "training_args.bin").touch()
    run = find_run(tmp_path)
    assert [checkpoint.step for checkpoint in run.checkpoints] == [20, 500, 1000]
    assert run.checkpoints[0].address == str(tmp_path / "checkpoint-20")
    assert run.left_out == {
        "checkpoint-2000": "holds no weights (yet)",
        "tmp-checkpoint-3000": "is unfinished",
        "best": "has no step in its name or in its file, unlike others",
    }


@pytest.mark.parametrize("final_step", [None, 1000, 1200])
def test_a_final_model_above_its_checkpoints_counts_if_the_trainer_says_its_step(tmp_path, final_step):
    for step in (500, 1000):
        weights(tmp_path / f"checkpoint-{step}")
    weights(tmp_path)
    if final_step is not None:
        (tmp_path / "trainer_state.json").write_text(json.dumps({"global_step": final_step}))
    run = find_run(str(tmp_path))
    assert [checkpoint.step for checkpoint in run.checkpoints] == [500, 1000] + [1200] * (final_step == 1200)
    if final_step == 1200:
        assert run.checkpoints[-1].address == str(tmp_path)
        assert run.left_out == {}
    else:
        assert list(run.left_out) == ["model.safetensors"]


def test_a_final_model_may_be_of_a_step_before_the_last(tmp_path):
    for step in (500, 1000):
        weights(tmp_path / f"checkpoint-{step}")
    weights(tmp_path)
    (tmp_path / "trainer_state.json").write_text('{"global_step": 700}')
    assert [step for step, _ in found(tmp_path)] == [500, 700, 1000]


@pytest.mark.parametrize(
    ("names", "steps"),
    [
        (["step1000", "step512", "step3"], [3, 512, 1000]),
        (["global_step9", "global_step10"], [9, 10]),
        (["iter_0000200", "iter_0000100"], [100, 200]),
        (["run"], [None]),
    ],
)
def test_folders_of_other_names(tmp_path, names, steps):
    for name in names:
        weights(tmp_path / "experiment" / name, "pytorch_model.bin")
    assert [checkpoint.step for checkpoint in find_checkpoints(tmp_path / "experiment")] == steps


def test_the_folder_of_one_model_is_one_checkpoint(tmp_path):
    model = tmp_path / "model"
    weights(model, *(f"model-0000{part}-of-00003.safetensors" for part in (1, 2, 3)))
    map_of = {name: f"model-0000{part}-of-00003.safetensors" for part, name in enumerate("abc", start=1)}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": map_of}))
    weights(model / "onnx")
    weights(model / "original", "consolidated.00.pth")
    assert found(model) == [(None, "model")]
    (model / "trainer_state.json").write_text('{"global_step": 40}')
    assert found(model) == [(40, "model")]
    model.rename(tmp_path / "checkpoint-500")
    assert found(tmp_path / "checkpoint-500") == [(40, "checkpoint-500")]
    (tmp_path / "checkpoint-500" / "trainer_state.json").unlink()
    assert found(tmp_path / "checkpoint-500") == [(500, "checkpoint-500")]


def test_a_lone_file_takes_its_step_from_its_name_or_its_folder(tmp_path):
    weights(tmp_path / "checkpoint-500", "model.safetensors")
    weights(tmp_path / "checkpoint-600", "pythia_70m.pt")
    weights(tmp_path / "other", "v2.pt")
    weights(tmp_path / "more", "model_step_7.pt")
    assert found(tmp_path / "checkpoint-500" / "model.safetensors") == [(500, "model.safetensors")]
    assert found(tmp_path / "checkpoint-600") == [(600, "pythia_70m.pt")]
    assert found(tmp_path / "other") == [(None, "v2.pt")]
    assert found(tmp_path / "more") == [(7, "model_step_7.pt")]
    weights(tmp_path / "run" / "checkpoint-9", "model_step_7.pt")
    weights(tmp_path / "run" / "checkpoint-8", "model_step_7.pt")
    assert [step for step, _ in found(tmp_path / "run")] == [8, 9]


def test_files_beside_folders_of_checkpoints_are_left_out_with_the_reason(tmp_path):
    weights(tmp_path / "checkpoint-5")
    weights(tmp_path, "best.pt")
    run = find_run(tmp_path)
    assert [checkpoint.step for checkpoint in run.checkpoints] == [5]
    assert run.left_out == {"best.pt": "is beside folders of checkpoints"}


def test_a_refused_checkpoint_is_left_out_and_a_run_of_them_gives_the_first_reason(tmp_path):
    for step in (5, 10):
        weights(tmp_path / f"checkpoint-{step}", "adapter_model.safetensors")
    with pytest.raises(
        QkovError, match=r"no checkpoint that can be read: checkpoint-10 cannot be read: .*PEFT adapter"
    ):
        find_checkpoints(tmp_path)
    weights(tmp_path / "checkpoint-20")
    weights(tmp_path / "checkpoint-30", "a.pt", "b.pt")
    run = find_run(tmp_path)
    assert [checkpoint.step for checkpoint in run.checkpoints] == [20]
    assert list(run.left_out) == ["checkpoint-10", "checkpoint-30", "checkpoint-5"]
    assert "holds 2 files of weights" in run.left_out["checkpoint-30"]


@pytest.mark.parametrize("name", ["tmp-checkpoint-5", "checkpoint-5"])
def test_a_run_that_has_only_begun(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(QkovError, match=rf"no checkpoint that can be read: {name} (is unfinished|holds no weights)"):
        find_checkpoints(tmp_path)


def test_a_run_of_deepspeed_says_how_to_merge_it(tmp_path):
    (tmp_path / "global_step5").mkdir()
    (tmp_path / "global_step5" / "zero_pp_rank_0_mp_rank_00_model_states.pt").touch()
    (tmp_path / "zero_to_fp32.py").touch()
    with pytest.raises(QkovError, match=r"python \S+/zero_to_fp32.py \S+ OUT"):
        find_checkpoints(tmp_path)


def test_folders_of_the_same_step(tmp_path):
    weights(tmp_path / "checkpoint-5")
    weights(tmp_path / "checkpoint-05")
    with pytest.raises(CallError, match=r"checkpoint-05 and checkpoint-5 in .* are both of step 5"):
        find_checkpoints(tmp_path)


def test_a_checkpoint_travels_to_another_process(tmp_path):
    weights(tmp_path / "checkpoint-5")
    (checkpoint,) = find_checkpoints(tmp_path)
    assert pickle.loads(pickle.dumps(checkpoint)) == checkpoint


def test_runs_of_strangers(strangers):
    steps = [checkpoint.step for checkpoint in find_checkpoints(strangers / "rope_toy")]
    assert steps[:4] == [1, 500, 1000, 1500]
    assert steps == sorted(int(path.stem.removeprefix("model_step_")) for path in (strangers / "rope_toy").iterdir())
    for name in ("brackets", "induction"):
        assert [checkpoint.step for checkpoint in find_checkpoints(strangers / name)] == [None]


def test_a_fingerprint_changes_with_the_file(tmp_path):
    path = tmp_path / "step_1.safetensors"
    save_file({"a": torch.zeros(100_000)}, path)
    (checkpoint,) = find_checkpoints(path)
    before = checkpoint.fingerprint()
    assert checkpoint.fingerprint() == before
    # The change is outside the first and the last 64 KiB.
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


@pytest.mark.parametrize(
    "changed", ["model-2.safetensors", "model.safetensors.index.json", "config.json", "trainer_state.json"]
)
def test_a_fingerprint_changes_with_every_file_that_makes_a_checkpoint(tmp_path, changed):
    folder = tmp_path / "checkpoint-5"
    weights(folder, "model-1.safetensors", "model-2.safetensors", "optimizer.pt")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text("{}")
    (folder / "trainer_state.json").write_text("{}")
    (checkpoint,) = find_checkpoints(folder)
    before = checkpoint.fingerprint()
    (folder / "optimizer.pt").write_bytes(b"other")
    assert checkpoint.fingerprint() == before
    (folder / changed).write_bytes((folder / changed).read_bytes() + b" ")
    assert checkpoint.fingerprint() != before
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(CallError, match=r"model-1.safetensors does not exist"):
        checkpoint.fingerprint()
