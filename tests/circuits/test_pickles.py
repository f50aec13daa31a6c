"""Pickles read without running code: equal to what torch reads, with a name for what only code could build."""

import argparse
import builtins
import collections
import dataclasses
import importlib
import os
import pickle
import struct
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from qkov.circuits import QkovError
from qkov.circuits.checkpoints.opening import open_weights
from torch import nn


def every_form() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(6, 4, generator=generator)
    dtypes = (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16),
        *(torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn),
        *(torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64),
    )
    return {
        **{str(dtype): (4 * whole).to(dtype) for dtype in dtypes},
        "transposed": whole.T,
        "slice": whole[2:5, 1:3],
        "shared": whole,
        "repeated": torch.ones(1).expand(3, 4),
        "every second": torch.arange(10.0)[::2],
        "parameter": nn.Parameter(whole.clone()),
        "buffer": nn.Buffer(whole.clone()),
        "nothing": torch.zeros(0, 4),
        "number": torch.tensor(2.5),
        "conjugate": whole.to(torch.complex64).conj(),
        "negative": whole.to(torch.complex64).conj().imag,
        "sparse": whole.relu().to_sparse(),
        "nested": {"list": [whole, {"deep": whole * 2}], "tuple": (whole + 1,)},
    }


def flat(value: Any, name: str = "") -> dict[str, torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return {name: value}
    members = value.items() if isinstance(value, dict) else enumerate(value)
    return {
        key: tensor
        for part, member in members
        for key, tensor in flat(member, f"{name}.{part}" if name else str(part)).items()
    }


def assert_bits(read: torch.Tensor, expected: torch.Tensor):
    expected = expected.detach().resolve_conj().resolve_neg()
    expected = expected if expected.layout is torch.strided else expected.to_dense()
    assert read.dtype == expected.dtype
    assert read.shape == expected.shape
    assert torch.equal(
        read.reshape(-1).contiguous().view(torch.uint8), expected.reshape(-1).contiguous().view(torch.uint8)
    )


@pytest.mark.parametrize("zipped", [True, False])
def test_every_form_is_what_was_saved_to_the_bit(tmp_path, zipped):
    saved = every_form()
    torch.save(saved, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    file = open_weights(tmp_path / "a.pt")
    expected = flat(saved)
    assert set(file.shapes) == set(expected)
    for name, tensor in file.read(list(file.shapes)).items():
        assert_bits(tensor, expected[name])
    assert file.unread == {}
    assert file.values == {"number": 2.5}


def test_it_is_what_torch_reads(tmp_path):
    saved = {name: value for name, value in every_form().items() if name != "sparse"}
    torch.save(saved, tmp_path / "a.pt")
    by_torch = flat(torch.load(tmp_path / "a.pt", weights_only=True))
    file = open_weights(tmp_path / "a.pt")
    assert set(file.shapes) == set(by_torch)
    for name, tensor in file.read(list(file.shapes)).items():
        assert_bits(tensor, by_torch[name])


def test_a_training_state_of_modules_and_optimizers_is_what_torch_reads(tmp_path):
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32), 2, enable_nested_tensor=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 1, 16)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, tmp_path / "a.pt")
    by_torch = torch.load(tmp_path / "a.pt", weights_only=True)
    file = open_weights(tmp_path / "a.pt")
    read = file.read(list(file.shapes))
    for name, tensor in by_torch["model"].items():
        assert torch.equal(read[f"model.{name}"], tensor)
    for number, state in by_torch["optimizer"]["state"].items():
        for name, tensor in state.items():
            assert torch.equal(read[f"optimizer.state.{number}.{name}"], tensor)
    assert file.values["epoch"] == 3
    assert file.values["optimizer.param_groups.0.lr"] == 0.001
    assert file.values["optimizer.state.0.step"] == 1


@dataclasses.dataclass
class Settings:
    n_head: int = 4
    where: Path = Path("/tmp")


class Attributes(dict):
    pass


class WithSlots:
    __slots__ = ("rate",)

    def __init__(self):
        self.rate = 0.5


def test_what_stands_beside_the_weights_no_longer_hides_them(tmp_path):
    module = nn.Linear(2, 3)
    saved = {
        "model": {"w": torch.ones(2)},
        "args": argparse.Namespace(lr=0.1, n_head=2, where=Path("/tmp")),
        "simple": types.SimpleNamespace(depth=3),
        "settings": Settings(),
        "attributes": Attributes(width=8),
        "slots": WithSlots(),
        "counts": collections.Counter("aab"),
        "defaults": collections.defaultdict(list, x=5),
        "optimizer": torch.optim.SGD(module.parameters(), lr=0.25),
        "module": module,
        "scalar": np.float32(1.5),
        "bool": np.bool_(True),
        "losses": np.array([3.0, 2.0], dtype=">f4"),
        "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "callable": os.getcwd,
        "device": torch.device("cpu"),
        "size": torch.Size([2, 3]),
        "random": np.random.default_rng(0),
    }
    for protocol in (2, 3, 4, 5):
        torch.save(saved, tmp_path / "a.pt", pickle_protocol=protocol)
        file = open_weights(tmp_path / "a.pt")
        expected = {"model.w", "optimizer.param_groups.0.params.0", "optimizer.param_groups.0.params.1"}
        assert set(file.shapes) >= expected | {"module.weight", "module.bias", "losses", "fortran"}
        read = file.read(["losses", "fortran", "module.weight"])
        assert read["losses"].tolist() == [3.0, 2.0]
        assert read["fortran"].tolist() == [[0, 1, 2], [3, 4, 5]]
        assert torch.equal(read["module.weight"], module.weight)
        assert (file.config, file.config_origin) == ({"lr": 0.1, "n_head": 2}, "args in the file")
        found = {
            name: file.values[name]
            for name in ("args.lr", "simple.depth", "settings.n_head", "attributes.width", "slots.rate", "counts.a")
        }
        assert list(found.values()) == [0.1, 3, 4, 8, 0.5, 2]
        assert (file.values["scalar"], file.values["bool"], file.values["defaults.x"]) == (1.5, True, 5)
        assert file.values["optimizer.param_groups.0.lr"] == 0.25
        assert file.lists["size"] == (2, 3)
        assert "getcwd" in file.unread["callable"]


@pytest.mark.parametrize("protocol", range(6))
def test_plain_pickles_of_arrays(tmp_path, protocol):
    W_QK = np.random.default_rng(0).normal(size=(5, 5))
    path = tmp_path / "a.pkl"
    path.write_bytes(pickle.dumps(W_QK, protocol))
    file = open_weights(path)
    assert file.shapes == {"tensor": (5, 5)}
    np.testing.assert_array_equal(file.read(["tensor"])["tensor"].numpy(), W_QK)
    path.write_bytes(pickle.dumps({"a": [W_QK, W_QK.astype(np.float16)], "b": torch.arange(4)}, protocol))
    file = open_weights(path)
    assert file.shapes == {"a.0": (5, 5), "a.1": (5, 5), "b": (4,)}
    read = file.read(["a.1", "b"])
    np.testing.assert_array_equal(read["a.1"].numpy(), W_QK.astype(np.float16))
    assert read["b"].tolist() == [0, 1, 2, 3]


def test_a_bare_tensor_is_one_tensor(tmp_path):
    torch.save(torch.arange(3), tmp_path / "a.pt")
    assert open_weights(tmp_path / "a.pt").shapes == {"tensor": (3,)}


@pytest.mark.parametrize(
    ("made", "form"),
    [
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "quantised by torch"),
        (lambda: np.array([{}], dtype=object), "an array of numpy of Python objects"),
        (lambda: np.array(["a"]), "an array of numpy of the type U1"),
        (lambda: torch.ones(3).untyped_storage(), "a storage of torch"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "a nested tensor"),
        (lambda: os.getcwd, "an object of posix.getcwd"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_is_not_read_is_named(tmp_path, made, form):
    torch.save({"w": torch.ones(2), "other": made()}, tmp_path / "a.pt")
    file = open_weights(tmp_path / "a.pt")
    assert file.shapes == {"w": (2,)}
    assert file.unread["other"].startswith(form)


def test_nothing_is_imported_and_nothing_is_called(tmp_path, monkeypatch):
    def forbidden(*call, **options):
        raise AssertionError("the pickle was obeyed")

    module = types.ModuleType("qkov_test_module_of_a_stranger")
    vars(module)["Anything"] = type(
        "Anything", (), {"__reduce__": lambda _: (forbidden, ()), "__module__": module.__name__}
    )
    pickled = (
        b"\x80\x02}(X\x01\x00\x00\x00wcposix\nsystem\nX\x02\x00\x00\x00id\x85R"
        b"X\x01\x00\x00\x00xcqkov_test_module_of_a_stranger\nAnything\n)\x81}X\x01\x00\x00\x00aK\x01sb"
        b"X\x01\x00\x00\x00ncnumpy._core.multiarray\n_reconstruct\nX\x01\x00\x00\x00a\x85R"
        b"X\x01\x00\x00\x00tctorch._utils\n_rebuild_tensor_v2\n(NNNNNNtRu."
    )
    (tmp_path / "a.pkl").write_bytes(pickled)
    with monkeypatch.context() as watched:
        watched.setattr(builtins, "__import__", _only_known(__import__))
        watched.setattr(importlib, "import_module", forbidden)
        watched.setattr(os, "system", forbidden)
        watched.setitem(sys.modules, module.__name__, module)
        file = open_weights(tmp_path / "a.pkl")
    assert file.values == {"x.a": 1}
    assert file.unread["w"].startswith("an object of posix.system")


def _only_known(original):
    def importing(name, *rest):
        assert "stranger" not in name
        assert name != "posix"
        return original(name, *rest)

    return importing


def shared_lists(depth: int, times: int = 10) -> bytes:
    """Pickle a list whose members share one list, and so on, which has times ** depth members in all."""
    content = b"\x80\x02" + b"K\x01"
    for level in range(depth):
        content += b"q" + bytes([level]) + b"0" + b"](" + (b"h" + bytes([level])) * times + b"e"
    return content + b"."


def shared_dictionaries(depth: int) -> bytes:
    content = b"\x80\x02}X\x01\x00\x00\x00wcnumpy\ndtype\nX\x02\x00\x00\x00f4\x85Rs"
    for level in range(depth):
        names = b"".join(b"X\x01\x00\x00\x00" + bytes([97 + at]) + b"h" + bytes([level]) for at in range(8))
        content += b"q" + bytes([level]) + b"0}(" + names + b"u"
    return content + b"."


def shared_tuples(depth: int) -> bytes:
    """Pickle a dictionary whose key is a tuple that takes 2 ** depth steps to hash."""
    return b"\x80\x02})" + b"2\x86" * depth + b"K\x01s."


def test_containers_that_share_themselves_are_refused_quickly(tmp_path):
    for number, content in enumerate((shared_lists(30), shared_dictionaries(30), b"\x80\x02" + b"]" * 200_000)):
        path = tmp_path / f"{number}.pkl"
        path.write_bytes(content)
        with pytest.raises(QkovError, match=f"{number}.pkl") as caught:
            open_weights(path)
        assert "\n" not in str(caught.value)
    (tmp_path / "key.pkl").write_bytes(shared_tuples(60))
    assert list(open_weights(tmp_path / "key.pkl").values.values()) == [1]


def test_work_that_a_pickle_repeats_is_refused(tmp_path):
    text = b"X" + struct.pack("<I", 100_000) + b"a" * 100_000
    once = b"(h\x01X\x06\x00\x00\x00latin1tR0"
    repeated = b"\x80\x02" + text + b"q\x01" + b"".join([b"c_codecs\nencode\nq\x02" + once, *[b"h\x02" + once] * 1000])
    (tmp_path / "a.pkl").write_bytes(repeated + b"N.")
    with pytest.raises(QkovError, match="repeats its content"):
        open_weights(tmp_path / "a.pkl")


def test_containers_nested_too_deeply(tmp_path):
    nested: Any = torch.ones(1)
    for _ in range(150):
        nested = [nested]
    torch.save({"a": nested}, tmp_path / "a.pt")
    with pytest.raises(QkovError, match=r"a\.pt cannot be read: its containers are nested more than 100 deep"):
        open_weights(tmp_path / "a.pt")


@pytest.mark.parametrize(
    "shapes",
    [
        ((10**7, 3 * 10**7 + 1), (10**7 + 7, 10**7 + 9)),
        ((10**9, 10**9), (10**9, 10**9)),
        ((10**5, 10**5),),
    ],
)
def test_a_tensor_that_repeats_one_number_beyond_the_size_of_its_file(tmp_path, shapes):
    names = ("h.0.attn.c_attn.weight", "h.0.attn.c_proj.weight")
    saved = {name: torch.zeros(1).expand(shape) for name, shape in zip(names, shapes, strict=False)}
    torch.save(saved, tmp_path / "a.pt")
    with pytest.raises(
        QkovError, match=r"a\.pt cannot be read: a tensor of shape .* would be larger than the whole file"
    ):
        open_weights(tmp_path / "a.pt")


def test_other_claims_beyond_the_size_of_the_file(tmp_path):
    torch.save({"a": torch.ones(10**6, 10**6, device="meta")}, tmp_path / "meta.pt")
    indices = torch.tensor([[0], [10**6]])
    sparse = torch.sparse_coo_tensor(indices, torch.ones(1), (2, 2**30), check_invariants=True)
    torch.save({"a": sparse}, tmp_path / "sparse.pt")
    torch.save({"a": torch.zeros(0, 2**40)}, tmp_path / "empty.pt")
    for name in ("meta", "sparse", "empty"):
        with pytest.raises(QkovError, match=rf"{name}\.pt cannot be read: a tensor "):
            open_weights(tmp_path / f"{name}.pt")


def rewritten(path: Path, old: bytes, new: bytes) -> Path:
    """Replace bytes in the pickle of a file of torch.save."""
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in records.items():
            if name.endswith("data.pkl"):
                assert old in content
                content = content.replace(old, new)
            archive.writestr(name, content)
    return path


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"K\x02K\x03\x86", b"K\x09K\x03\x86", "a tensor of shape .* ends at byte"),
        (b"K\x06t", b"K\x60t", "a storage of 384 bytes has 24 in the file"),
        (b"K\x02K\x03\x86", b"J\xff\xff\xff\xffK\x03\x86", "is not a list of whole numbers"),
        (b"K\x02K\x03\x86", b"K\x02K\x03K\x01\x87", "do not fit each other"),
    ],
)
def test_a_tensor_that_lies_outside_its_storage(tmp_path, old, new, message):
    torch.save({"a": torch.ones(2, 3)}, tmp_path / "a.pt")
    with pytest.raises(QkovError, match=message):
        open_weights(rewritten(tmp_path / "a.pt", old, new))


def test_records_that_are_compressed_or_missing(tmp_path):
    torch.save({"a": torch.ones(2, 3)}, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(tmp_path / "b.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in records.items():
            archive.writestr(name, content)
    with pytest.raises(QkovError, match=r"is compressed, which torch\.save does not do"):
        open_weights(tmp_path / "b.pt")
    with zipfile.ZipFile(tmp_path / "c.pt", "w") as archive:
        archive.writestr("archive/data.pkl", records["a/data.pkl"])
    with pytest.raises(QkovError, match="its record archive/data/0 is missing"):
        open_weights(tmp_path / "c.pt")


@pytest.mark.parametrize("zipped", [True, False])
def test_every_cut_is_one_line(tmp_path, zipped):
    saved = {"model": {f"layers.{n}.q": torch.randn(12, 12) for n in range(3)}, "args": argparse.Namespace(a=1)}
    torch.save(saved, tmp_path / "whole.pt", _use_new_zipfile_serialization=zipped)
    content = (tmp_path / "whole.pt").read_bytes()
    path = tmp_path / "cut.pt"
    for length in range(1, len(content), 11):
        path.write_bytes(content[:length])
        with pytest.raises(QkovError, match=r"cut\.pt") as caught:
            open_weights(path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("zipped", [True, False])
def test_every_changed_byte_of_a_pickle_is_read_or_one_line(tmp_path, zipped):
    torch.save(
        {"model": {"q": torch.ones(2, 3)}, "args": argparse.Namespace(a=1), "x": np.float32(1), "y": np.ones(2)},
        tmp_path / "whole.pt",
        _use_new_zipfile_serialization=zipped,
    )
    content = bytearray((tmp_path / "whole.pt").read_bytes())
    path = tmp_path / "changed.pt"
    generator = np.random.default_rng(0)
    for at in generator.integers(0, min(len(content), 2000), 150):
        changed = content.copy()
        changed[at] = generator.integers(256)
        path.write_bytes(changed)
        message = refusal(path)
        assert message is None or ("changed.pt" in message and "\n" not in message)


def refusal(path: Path) -> str | None:
    """Return why a file is refused, or None if all of it is read."""
    try:
        file = open_weights(path)
        file.read(list(file.shapes))
    except QkovError as error:
        return str(error)
    return None
