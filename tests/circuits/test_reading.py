"""Reading a file's weights layer by layer, by a mapping or recognised, with every fault reported in one line."""

import json
import os
import pickle
import threading

import pytest
import torch
from qkov.circuits import AttentionWeights, CallError, QkovError, open_checkpoint
from qkov.circuits.architectures.mapping import parse_mapping
from qkov.circuits.checkpoints.opening import open_weights
from qkov.circuits.reading.saved_format import save_checkpoint
from qkov.circuits.storage.address import place_of
from qkov.circuits.storage.places import LocalPlace
from safetensors.torch import save as serialize
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


@pytest.mark.parametrize("kind", ["safetensors", "pt", "legacy.pt"])
def test_weights_are_those_of_the_file_layer_by_layer(tmp_path, kind):
    tensors = state(torch.Generator().manual_seed(0))
    path = tmp_path / f"step_1.{kind}"
    if kind == "safetensors":
        save_file(tensors, path)
    else:
        torch.save(tensors, path, _use_new_zipfile_serialization=kind == "pt")
    opened = open_checkpoint(path, mapping())
    assert opened.layer_keys == [("", 0), ("", 1)]
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
        ("half.pt", "cannot be read as a PyTorch file|not a PyTorch file"),
        ("half_old.pt", "cut short"),
        ("half.safetensors", "cannot be read as safetensors"),
        ("empty.pt", "is empty"),
        ("empty.safetensors", "is empty"),
        ("text.pt", "is not a PyTorch file"),
        ("text.safetensors", "cannot be read as safetensors"),
        ("list.pt", "holds a list without tensors; expected a dictionary of tensors"),
        ("code.pt", "wants to run code .*refused; .*--trust-pickle"),
        ("model.onnx", "model.onnx holds an ONNX graph"),
        ("none.pt", "none.pt does not exist; expected a file that ends in"),
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
    with pytest.raises(QkovError, match="not recognised"):
        open_checkpoint(tmp_path / "code.pt")
    assert not (tmp_path / "was_run").exists()
    with pytest.raises(QkovError, match="not recognised"):
        open_checkpoint(tmp_path / "code.pt", trust_pickle=True)
    assert (tmp_path / "was_run").exists()


def test_heads_that_do_not_agree_are_named(tmp_path):
    tensors = state(layers=1)
    tensors["layers.0.k"] = torch.randn(6, 12)
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(QkovError, match=r"layers\.0\.k has shape \(6, 12\), which does not fit 3 heads"):
        list(open_checkpoint(tmp_path / "a.safetensors", mapping()).layers())


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("kind", ["safetensors", "pt"])
def test_each_layer_gives_what_a_loop_over_layers_does(tmp_path, threads, kind):
    tensors = state(torch.Generator().manual_seed(0), layers=7)
    path = tmp_path / f"step_1.{kind}"
    (save_file if kind == "safetensors" else torch.save)(tensors, path)
    found = open_checkpoint(path, mapping()).each_layer(lambda weights: (weights.layer, weights.qk().singular_values()))
    assert [layer for layer, _ in found] == list(range(7))
    for layer, values in found:
        for head in range(3):
            W_Q, W_K = (tensors[f"layers.{layer}.{part}"][4 * head : 4 * head + 4].double() for part in "qk")
            wanted = torch.linalg.svdvals(W_K.T @ W_Q)[:4]
            torch.testing.assert_close(values[head], wanted, rtol=1e-9, atol=0)


def test_a_fault_in_a_layer_is_raised_by_each_layer_too(tmp_path, threads):
    tensors = state(layers=5) | {"layers.3.q": torch.randn(13, 12)}
    path = tmp_path / "step_1.safetensors"
    save_file(tensors, path)
    seen = []
    with pytest.raises(QkovError, match=r"layers.3.q has shape \(13, 12\), which does not fit"):
        open_checkpoint(path, mapping()).each_layer(lambda weights: seen.append(weights.layer))
    assert sorted(seen) in ([0, 1, 2], [0, 1, 2, 4])[:threads]


@pytest.mark.parametrize("kind", ["safetensors", "pt", "legacy.pt"])
def test_what_was_read_stays_when_the_file_is_written_again(tmp_path, kind):
    """The file is overwritten in place by a shorter one, as when training keeps only its last state."""
    path, tensors = tmp_path / f"last.{kind}", state(layers=3)

    def save(saved: dict[str, torch.Tensor]) -> None:
        if kind == "safetensors":
            path.write_bytes(serialize(saved))
        else:
            torch.save(saved, path, _use_new_zipfile_serialization=kind == "pt")

    save(tensors)
    opened = open_checkpoint(path, mapping())
    layers = opened.layers()
    first = next(layers)
    os.utime(path, ns=(1, 1))
    save({name: 0 * tensor for name, tensor in state(layers=1).items()})
    W_Q = tensors["layers.0.q"].view(3, 4, 12).mT
    assert torch.equal(first.W_Q, W_Q)
    with pytest.raises(QkovError, match=r"last.*was written again after it was opened; open it again"):
        next(layers)
    assert len(list(open_checkpoint(path, mapping()).layers())) == 1


@pytest.mark.parametrize("kind", ["pt", "safetensors"])
def test_a_file_that_is_written_again_while_it_is_read_is_refused(tmp_path, monkeypatch, kind):
    path = tmp_path / f"last.{kind}"
    (save_file if kind == "safetensors" else torch.save)(state(), path)
    opened = open_checkpoint(path, mapping())
    versions = iter([place_of(path).version(), (0, 0, 0)])
    monkeypatch.setattr(LocalPlace, "version", lambda _: next(versions))
    with pytest.raises(QkovError, match="was written again"):
        next(opened.layers())


def test_layers_are_read_side_by_side(tmp_path):
    path, together = tmp_path / "step_1.pt", threading.Barrier(2)
    torch.save(state(layers=4), path)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        # Nobody gets past the barrier alone.
        open_checkpoint(path, mapping()).each_layer(lambda _: together.wait(60))
    finally:
        torch.set_num_threads(before)


def test_a_file_that_is_deleted_after_it_was_opened(tmp_path):
    """A mapped file stays readable until it is released, as when a run keeps only its last checkpoints."""
    for kind in ("pt", "safetensors"):
        path, tensors = tmp_path / f"step_1.{kind}", state()
        (torch.save if kind == "pt" else save_file)(tensors, path)
        opened = open_checkpoint(path, mapping())
        path.unlink()
        if kind == "pt":
            assert torch.equal(next(opened.layers()).W_Q, tensors["layers.0.q"].view(3, 4, 12).mT)
        else:
            with pytest.raises(QkovError, match="does not exist"):
                next(opened.layers())


@pytest.mark.parametrize("changed", ["size", "time"])
def test_a_change_of_size_or_time_shows_that_a_file_was_written(tmp_path, changed):
    path = tmp_path / "file"
    path.write_bytes(b"one")
    os.utime(path, ns=(10**18, 10**18))
    version = place_of(path).version()
    path.write_bytes(b"other" if changed == "size" else b"two")
    os.utime(path, ns=(10**18, 10**18 + (changed == "time")))
    with pytest.raises(QkovError, match="was written again"):
        place_of(path).demand_version(version)


def test_shards_of_two_different_saves_are_refused(tmp_path):
    tensors = state()
    for layer in range(2):
        held = {name: tensor for name, tensor in tensors.items() if f".{layer}." in name}
        save_file(held, tmp_path / f"model-{layer}.safetensors")
    index = {name: f"model-{name.split('.')[1]}.safetensors" for name in tensors}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    file = open_weights(tmp_path / "model.safetensors.index.json")
    file.read(["layers.0.q"])
    save_file({name: 0 * tensor for name, tensor in tensors.items() if ".1." in name}, tmp_path / "model-1.safetensors")
    with pytest.raises(QkovError, match=r"model-1.safetensors was written again"):
        file.read(["layers.1.q"])
