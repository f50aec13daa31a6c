"""Files of weights as other libraries write them, with every fault reported in one line."""

import json
import os
import pickle
import struct
import zipfile
from io import FileIO

import numpy as np
import pytest
import torch
from qkov.circuits import CallError, QkovError, open_checkpoint
from qkov.circuits.checkpoints.opening import open_weights
from qkov.circuits.storage.address import place_of
from safetensors.torch import save_file
from torch import nn

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.bool, torch.complex64),
]


def one_line(caught) -> str:
    message = str(caught.value)
    assert message
    assert "\n" not in message
    return message


def test_every_dtype_is_what_the_safetensors_library_wrote(tmp_path):
    generator = torch.Generator().manual_seed(0)
    tensors = {str(dtype): (4 * torch.randn(3, 5, generator=generator)).to(dtype) for dtype in DTYPES}
    tensors |= {"no rows": torch.zeros(0, 4), "scalar": torch.tensor(3.5)}
    save_file(tensors, tmp_path / "a.safetensors", {"made": "here"})
    file = open_weights(tmp_path / "a.safetensors")
    assert file.metadata == {"made": "here"}
    assert file.shapes == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert file.values == {"scalar": 3.5}
    assert file.config is None
    read = file.read(list(tensors))
    assert list(read) == list(tensors)
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert read[name].shape == tensor.shape
        assert bits(read[name]) == bits(tensor)


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.flatten().view(torch.uint8).tolist() if tensor.numel() else []


def test_only_requested_tensors_are_read(tmp_path, monkeypatch):
    save_file({"a": torch.ones(1000), "b": torch.ones(10**6), "c": torch.ones(10)}, tmp_path / "a.safetensors")
    file = open_weights(tmp_path / "a.safetensors")
    read = []

    class Counting(FileIO):
        def readinto(self, buffer):
            read.append(super().readinto(buffer))
            return read[-1]

    monkeypatch.setattr("qkov.circuits.storage.places.FileIO", Counting)
    assert file.read(["c", "a"])["a"].sum() == 1000
    assert sum(read) == 4 * 1010


def header(entries: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(shape: list[int], start: int, stop: int, dtype: str = "F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"1234567", "7 bytes, fewer than the length of a header"),
        (header({}, length=2**62), "its header would have 4611686018427387904 bytes"),
        (header({}, length=50), "its header would have 50 bytes"),
        (header(b"not json"), "its header is not JSON"),
        (header(b"\xff\xfe{}"), "its header is not JSON"),
        (header([1, 2]), "its header is not a table of tensors"),
        (header({"__metadata__": {"a": 1}}), "its metadata is not a table of strings"),
        (header({"a": {"dtype": "F32", "shape": [1]}}, bytes(4)), "does not say where a is"),
        (header({"a": 5}), "does not say where a is"),
        (header({"a": entry([-1], 0, 4)}, bytes(4)), r"a has shape \[-1\]"),
        (header({"a": entry([1], 4, 0)}, bytes(4)), "a has shape .* offsets 4 to 0"),
        (header({"a": entry([3], 0, 8)}, bytes(8)), r"a of shape \[3\] and dtype F32 has 8 bytes"),
        (header({"a": entry([2], 0, 8)}, bytes(7)), "its tensors end at"),
        (header({"a": entry([2], 0, 8)}, bytes(9)), "its tensors end at"),
        (header({"a": entry([1], 0, 4), "b": entry([1], 8, 12)}, bytes(12)), "b begins at byte"),
        (header({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, bytes(12)), "b begins at byte"),
        (header({"a": entry([10**7, 3 * 10**7 + 1], 0, 0, "F4")}), r"a: a tensor of shape .* larger than"),
        (header({"a": entry([10**9, 10**9], 0, 4, "F4")}, bytes(4)), r"a: a tensor of shape .* larger than"),
        (header({"a": entry([0, 2**40], 0, 0)}), r"a: a tensor has shape"),
        (header({"a": entry([0, 2**20, 2**20], 0, 0)}), r"a: a tensor of shape .* larger than"),
        (header({"a": entry([2**62, 2**62], 0, 4, "F4")}, bytes(4)), r"a: a tensor has shape"),
        (header({"a": entry([1.0], 0, 4)}, bytes(4)), "the shape and the offsets of a are not whole numbers"),
        (header({"a": entry(["1"], 0, 4)}, bytes(4)), "the shape and the offsets of a are not whole numbers"),
        (header({"a": entry([True], 0, 4)}, bytes(4)), "the shape and the offsets of a are not whole numbers"),
        (header(b'{"a": %s, "a": %s}' % ((json.dumps(entry([1], 0, 4)).encode(),) * 2), bytes(4)), "names a twice"),
        (header(b'{"a": {"dtype": "F32", "shape": [1], "shape": [2]}}'), "names shape twice"),
    ],
)
def test_a_damaged_safetensors_file(tmp_path, content, message):
    path = tmp_path / "step_1.safetensors"
    path.write_bytes(content)
    with pytest.raises(QkovError, match=message) as caught:
        open_weights(path)
    assert one_line(caught).startswith(f"{path} cannot be read as safetensors")
    assert "copy it again" in one_line(caught)


def test_every_cut_of_a_safetensors_file_is_noticed(tmp_path):
    save_file({"a": torch.ones(3), "b": torch.ones(2, 2)}, tmp_path / "whole.safetensors")
    content = (tmp_path / "whole.safetensors").read_bytes()
    for length in range(len(content)):
        (tmp_path / "cut.safetensors").write_bytes(content[:length])
        with pytest.raises(QkovError) as caught:
            open_weights(tmp_path / "cut.safetensors")
        one_line(caught)


def test_a_file_that_shrinks_after_it_was_opened(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(1000)}, path)
    file = open_weights(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(QkovError, match="before its tensors do; copy it again"):
        place_of(path).fetch([(3900, 4070)])
    with pytest.raises(QkovError, match="was written again after it was opened"):
        file.read(["a"])
    path.unlink()
    with pytest.raises(CallError, match="does not exist"):
        file.read(["a"])


def test_a_dtype_that_torch_does_not_have_is_reported_on_request(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(
        header({"a": entry([1], 0, 4), "b": entry([3], 4, 7, "F7_X")}, struct.pack("<f", 2.5) + bytes(3))
    )
    file = open_weights(tmp_path / "a.safetensors")
    assert file.shapes["b"] == (3,)
    assert file.read(["a"])["a"].item() == 2.5
    with pytest.raises(QkovError, match=r"b in .* has dtype F7_X, which cannot be read"):
        file.read(["b"])


@pytest.mark.parametrize("zipped", [True, False])
def test_a_torch_file_is_a_flat_table_with_its_plain_values(tmp_path, zipped):
    weights = torch.randn(4, 3)
    saved = {
        "model": {"a": weights, "deep": {"b": weights.T}},
        "args": {"n_head": 4, "bias": False, "name": "x"},
        "loss": 1.5,
        "steps": [1, 2],
        7: torch.zeros(1),
    }
    torch.save(saved, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    file = open_weights(tmp_path / "a.pt")
    assert file.shapes == {"model.a": (4, 3), "model.deep.b": (3, 4), "7": (1,)}
    assert file.values == {"args.n_head": 4, "args.bias": False, "args.name": "x", "loss": 1.5}
    assert file.scalars == {"args.n_head": 4.0, "loss": 1.5}
    assert file.lists == {"steps": (1, 2)}
    assert (file.config, file.config_origin) == ({"n_head": 4, "bias": False, "name": "x"}, "args in the file")
    read = file.read(["model.deep.b", "model.a"])
    assert torch.equal(read["model.a"], weights)
    assert torch.equal(read["model.deep.b"], weights.T)


@pytest.mark.parametrize(
    ("saved", "config", "origin"),
    [
        ({"model_args": {"n_head": 4}, "config": {"lr": 0.1}}, {"n_head": 4}, "model_args in the file"),
        (
            {"config": {"n_head": 4, "dtype": torch.float32, "inner": [1]}},
            {"n_head": 4, "inner": [1]},
            "config in the file",
        ),
        ({"hyper_parameters": {"heads": 2}}, {"heads": 2}, "hyper_parameters in the file"),
        ({"config": "x"}, None, None),
    ],
)
def test_the_config_within_a_torch_file(tmp_path, saved, config, origin):
    torch.save(saved | {"w": torch.zeros(1)}, tmp_path / "a.pt")
    file = open_weights(tmp_path / "a.pt")
    assert (file.config, file.config_origin) == (config, origin)


class WantsToRun:
    def __reduce__(self):
        return (os.mkdir, ("was_run",))


def faults(tmp_path):
    state = {"layers.0.q": torch.randn(12, 12), "layers.0.k": torch.randn(12, 12)}
    torch.save(state, tmp_path / "whole.pt")
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for name in ("whole", "old"):
        content = (tmp_path / f"{name}.pt").read_bytes()
        (tmp_path / f"half_{name}.pt").write_bytes(content[: len(content) // 2])
    for suffix in ("pt", "safetensors", "bin"):
        (tmp_path / f"empty.{suffix}").touch()
        (tmp_path / f"text.{suffix}").write_text("this is no checkpoint\n")
    torch.save([1, 2], tmp_path / "list.pt")
    (tmp_path / "code.pt").write_bytes(pickle.dumps({"a": WantsToRun()}, protocol=2))
    torch.save({"a": nn.ReLU()}, tmp_path / "module.pt")
    with zipfile.ZipFile(tmp_path / "other.pt", "w") as archive:
        archive.writestr("a.txt", "no tensors")
    for name in ("model.onnx", "model.gguf", "flax_model.msgpack", "tf_model.h5", "weights.json", "no_suffix"):
        (tmp_path / name).touch()
    (tmp_path / "folder").mkdir()


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("half_whole.pt", QkovError, "cannot be read as a PyTorch file|not a PyTorch file"),
        ("half_old.pt", QkovError, "cut short"),
        ("other.pt", QkovError, "cannot be read as a PyTorch file"),
        ("empty.pt", QkovError, "is empty"),
        ("empty.safetensors", QkovError, "is empty"),
        ("text.pt", QkovError, "is not a PyTorch file"),
        ("text.bin", QkovError, "is not a PyTorch file"),
        ("text.safetensors", QkovError, "cannot be read as safetensors"),
        ("list.pt", QkovError, "holds a list without tensors; expected a dictionary of tensors"),
        ("code.pt", QkovError, "wants to run code .*mkdir.*refused; .*--trust-pickle"),
        ("module.pt", QkovError, "module.pt holds a dict without tensors; expected a dictionary of tensors"),
        ("model.onnx", CallError, "ONNX graph"),
        ("model.gguf", QkovError, "is empty"),
        ("flax_model.msgpack", CallError, "Flax weights: .*safetensors"),
        ("tf_model.h5", CallError, "TensorFlow weights: .*safetensors"),
        ("weights.json", CallError, "ends in .json; expected one of .safetensors"),
        ("no_suffix", CallError, "ends in nothing; expected one of .safetensors"),
        ("none.pt", CallError, "does not exist"),
        ("folder", QkovError, "holds no checkpoint: expected files that end in .*, found nothing"),
    ],
)
def test_faults_in_one_line(tmp_path, monkeypatch, name, kind, message):
    monkeypatch.chdir(tmp_path)
    faults(tmp_path)
    with pytest.raises(QkovError, match=message) as caught:
        open_weights(tmp_path / name)
    assert isinstance(caught.value, CallError) == (kind is CallError)
    assert name in one_line(caught)
    assert not (tmp_path / "was_run").exists()


def test_trust_is_given_knowingly(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"a": torch.ones(2), "b": WantsToRun()}, "code.pt")
    file = open_weights("code.pt")
    assert file.shapes == {"a": (2,)}
    assert file.unread == {"b": "an object of posix.mkdir, which only code could build"}
    assert not (tmp_path / "was_run").exists()
    assert torch.equal(open_weights("code.pt", trust_pickle=True).read(["a"])["a"], torch.ones(2))
    assert (tmp_path / "was_run").exists()
    torch.save(nn.Linear(2, 3), "model.pt")
    assert open_weights("model.pt", trust_pickle=True).shapes == {"weight": (3, 2), "bias": (3,)}


def test_a_path_that_nobody_may_read(tmp_path, monkeypatch):
    save_file({"a": torch.ones(1)}, tmp_path / "a.safetensors")

    def refuse(*call, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.open", refuse)
    with pytest.raises(QkovError, match=r"a.safetensors cannot be read \(Permission denied\)"):
        open_weights(tmp_path / "a.safetensors")


def test_what_is_read_may_be_written_to(tmp_path):
    save_file({"a": torch.ones(3)}, tmp_path / "a.safetensors")
    file = open_weights(tmp_path / "a.safetensors")
    file.read(["a"])["a"].mul_(2)
    np.testing.assert_array_equal(file.read(["a"])["a"].numpy(), 1)


def test_a_sparse_tensor_is_filled_with_zeros(tmp_path):
    pruned = torch.tensor([[0.0, 2.0], [0.0, 0.0]])
    torch.save({"a": pruned.to_sparse()}, tmp_path / "a.pt")
    assert torch.equal(open_weights(tmp_path / "a.pt").read(["a"])["a"], pruned)


def test_a_tensor_that_was_saved_without_its_values(tmp_path):
    torch.save({"a": torch.ones(2, device="meta")}, tmp_path / "a.pt")
    with pytest.raises(QkovError, match=r"a of .*a\.pt has no values in memory \(device meta\)"):
        open_weights(tmp_path / "a.pt").read(["a"])


def test_dictionaries_that_hold_themselves(tmp_path):
    saved = {"a": torch.ones(2)}
    saved["itself"] = saved
    torch.save(saved, tmp_path / "a.pt")
    with pytest.raises(QkovError, match=r"a\.pt holds dictionaries that hold themselves"):
        open_weights(tmp_path / "a.pt")


def test_headers_nested_too_deeply(tmp_path):
    deep = b"[" * 100_000
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(deep)) + deep)
    with pytest.raises(QkovError, match="its header is not JSON"):
        open_weights(tmp_path / "a.safetensors")
    (tmp_path / "model.safetensors.index.json").write_bytes(deep)
    with pytest.raises(QkovError, match="is not an index"):
        open_weights(tmp_path / "model.safetensors.index.json")


def test_shapes_that_no_bytes_stand_behind_take_no_time(tmp_path):
    shapes = {"h.0.attn.c_attn.weight": [10**7, 3 * 10**7 + 1], "h.0.attn.c_proj.weight": [10**7 + 7, 10**7 + 9]}
    for number, dtype in enumerate(("F4", "F32", "F4_OF_SOME_KIND")):
        path = tmp_path / f"{number}.safetensors"
        path.write_bytes(header({name: entry(shape, 0, 0, dtype) for name, shape in shapes.items()}))
        with pytest.raises(QkovError, match="cannot be read as safetensors"):
            open_checkpoint(path)


def test_only_regular_files_are_opened(tmp_path):
    for suffix in ("safetensors", "pt", "npy", "pkl"):
        os.mkfifo(tmp_path / f"a.{suffix}")
        with pytest.raises(QkovError, match=rf"a\.{suffix}"):
            open_weights(tmp_path / f"a.{suffix}")
    with pytest.raises(QkovError, match=r"/dev/zero"):
        open_weights("/dev/zero")


def test_tensors_of_no_dimension_under_the_names_of_a_family(tmp_path):
    names = [f"layers.0.self_attn.{part}_proj.weight" for part in "qkvo"]
    save_file({name: torch.tensor(1.0) for name in names}, tmp_path / "a.safetensors")
    with pytest.raises(QkovError, match="are not recognised"):
        open_checkpoint(tmp_path / "a.safetensors", heads=1)
