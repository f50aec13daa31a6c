"""Checkpoints: found, ordered and read; every fault of a file in one line."""

import os
import pickle

import pytest
import torch
from qkov.circuits.attention_weights import AttentionWeights
from qkov.circuits.checkpoints import find_checkpoints, open_checkpoint
from qkov.circuits.errors import CallError, QkovError
from qkov.circuits.mapping import parse_mapping
from qkov.circuits.saved_format import save_checkpoint
from safetensors.torch import save_file


def state(generator: torch.Generator | None = None, layers: int = 2):
    return {
        f"layers.{layer}.{part}": torch.randn(12, 12, generator=generator) for layer in range(layers) for part in "qkvo"
    }


def mapping(**changes):
    return parse_mapping(
        {
            "heads": 3,
            "layout": "linear",
            "tensors": {role: f"layers.{{layer}}.{role.lower()}" for role in "QKVO"},
            **changes,
        },
        "a test",
    )


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


@pytest.mark.parametrize("kind", ["safetensors", "pt", "legacy.pt"])
def test_weights_are_those_of_the_file_layer_by_layer(tmp_path, kind):
    tensors = state(torch.Generator().manual_seed(0))
    path = tmp_path / f"step_1.{kind}"
    if kind == "safetensors":
        save_file(tensors, path)
    else:
        torch.save(tensors, path, _use_new_zipfile_serialization=kind == "pt")
    opened = open_checkpoint(path, mapping())
    assert opened.layer_numbers == [0, 1]
    for weights in opened.layers():
        W_Q, W_K, W_V, W_O = (tensors[f"layers.{weights.layer}.{part}"] for part in "qkvo")
        for head in range(3):
            rows = slice(4 * head, 4 * head + 4)
            qk = W_K[rows].double().T @ W_Q[rows].double()
            ov = W_O[:, rows].double() @ W_V[rows].double()
            torch.testing.assert_close(weights.qk()[head].dense(), qk, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(weights.ov()[head].dense(), ov, rtol=1e-12, atol=1e-12)


def test_nested_dictionaries_scalars_and_other_devices(tmp_path):
    path = tmp_path / "step_5.pt"
    nested = {"model": {"net": state()}, "val": {"loss": 1.5}, "step": 5, "done": True, "name": "x"}
    torch.save(nested, path)
    opened = open_checkpoint(path, mapping(prefix="model.net", scalars={"loss": "val.loss", "step": "step"}))
    assert opened.scalars == {"loss": 1.5, "step": 5.0}
    with pytest.raises(QkovError, match=r"no scalar missing, which a test names; it has step, val.loss"):
        _ = open_checkpoint(path, mapping(prefix="model.net", scalars={"loss": "missing"})).scalars


def test_only_some_tensors_give_only_some_circuits(tmp_path):
    save_file(state(), tmp_path / "a.safetensors")
    only_qk = mapping(tensors={"Q": "layers.{layer}.q", "K": "layers.{layer}.k"})
    (first, _) = open_checkpoint(tmp_path / "a.safetensors", only_qk).layers()
    assert list(first.circuits()) == ["QK"]
    with pytest.raises(CallError, match="layer 0 has no W_OV"):
        first.ov()
    with pytest.raises(CallError, match="layer 4 has no W_QK"):
        AttentionWeights(layer=4).qk()
    with pytest.raises(CallError, match="was given W_X; attention weights are W_Q, W_K"):
        AttentionWeights.of(4, {"W_X": torch.zeros(1, 2, 2)})


def test_own_checkpoints_come_back_with_factors_or_without(tmp_path):
    generator = torch.Generator().manual_seed(1)
    W_Q, W_K = (torch.randn(2, 5, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    W_OV = torch.randn(2, 4, 5, generator=generator, dtype=torch.float64)
    saved = AttentionWeights(layer=0, W_Q=W_Q, W_K=W_K, W_OV=W_OV)
    path = save_checkpoint(tmp_path, 12, [saved], {"loss": 0.5}, {"seed": 1})
    assert path.name == "step_000000012.safetensors"
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    opened = open_checkpoint(path)
    assert opened.scalars == {"loss": 0.5}
    (weights,) = opened.layers()
    assert weights.qk().right is not None
    assert weights.ov().right is None
    torch.testing.assert_close(weights.qk().dense(), W_K @ W_Q.mT)
    assert torch.equal(weights.ov().dense(), W_OV)


class WantsToRun:
    def __reduce__(self):
        return (os.mkdir, ("was_run",))


def faults(tmp_path):
    torch.save(state(), tmp_path / "whole.pt")
    save_file(state(), tmp_path / "whole.safetensors")
    for suffix in ("pt", "safetensors"):
        content = (tmp_path / f"whole.{suffix}").read_bytes()
        (tmp_path / f"half.{suffix}").write_bytes(content[: len(content) // 2])
        (tmp_path / f"empty.{suffix}").touch()
        (tmp_path / f"text.{suffix}").write_text("this is no checkpoint\n")
    content = (tmp_path / "whole.pt").read_bytes()
    torch.save(state(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    old = (tmp_path / "old.pt").read_bytes()
    (tmp_path / "half_old.pt").write_bytes(old[: len(old) // 2])
    torch.save([1, 2], tmp_path / "list.pt")
    (tmp_path / "code.pt").write_bytes(pickle.dumps({"a": WantsToRun()}, protocol=2))
    (tmp_path / "model.onnx").touch()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("half.pt", "cannot be read as a PyTorch file|no PyTorch file"),
        ("half_old.pt", "cut short"),
        ("half.safetensors", "cannot be read as safetensors"),
        ("empty.pt", "is empty"),
        ("empty.safetensors", "is empty"),
        ("text.pt", "is no PyTorch file"),
        ("text.safetensors", "cannot be read as safetensors"),
        ("list.pt", "holds a list; expected a dictionary of tensors"),
        ("code.pt", "wants to run code .*refused; .*--trust-pickle"),
        ("model.onnx", "ends in .onnx; expected one of .safetensors"),
        ("none.pt", "is not a file"),
        ("whole.pt", "are not recognised: the file holds layers.0.k.*--map"),
    ],
)
def test_faults_in_one_line(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    faults(tmp_path)
    with pytest.raises(QkovError, match=message):
        open_checkpoint(tmp_path / name)
    assert not (tmp_path / "was_run").exists()


def test_trust_is_given_knowingly(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"a": torch.zeros(2), "b": WantsToRun()}, tmp_path / "code.pt")
    with pytest.raises(QkovError, match="wants to run code"):
        open_checkpoint(tmp_path / "code.pt")
    assert not (tmp_path / "was_run").exists()
    with pytest.raises(QkovError, match="not recognised"):
        open_checkpoint(tmp_path / "code.pt", trust_pickle=True)
    assert (tmp_path / "was_run").exists()


def test_heads_that_do_not_agree_are_named(tmp_path):
    tensors = state(layers=1)
    tensors["layers.0.k"] = torch.randn(6, 12)
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(QkovError, match="W_Q has d_head = 4 and W_K has 2"):
        list(open_checkpoint(tmp_path / "a.safetensors", mapping()).layers())


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
