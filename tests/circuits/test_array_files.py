"""Files of numpy's arrays: equal to what numpy reads, without pickles, and bounded by the bytes of the file."""

import struct
import zipfile

import numpy as np
import pytest
import torch
from qkov.circuits import QkovError, open_checkpoint
from qkov.circuits.architectures.mapping import parse_mapping
from qkov.circuits.checkpoints.opening import open_weights

ARRAYS = {
    "a": np.arange(6.0).reshape(2, 3),
    "big endian": np.arange(4, dtype=">i4"),
    "fortran": np.asfortranarray(np.arange(12, dtype=np.float32).reshape(3, 4)),
    "half": np.ones(3, np.float16),
    "flags": np.array([True, False]),
    "empty": np.zeros((0, 3)),
    "loss": np.float64(1.5),
    "count": np.array(7),
}


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_is_what_numpy_reads(tmp_path, save):
    save(tmp_path / "a.npz", **ARRAYS)
    file = open_weights(tmp_path / "a.npz")
    assert dict(file.shapes) == {name: array.shape for name, array in ARRAYS.items()}
    assert file.values == {"loss": 1.5, "count": 7}
    for name, tensor in file.read(list(ARRAYS)).items():
        np.testing.assert_array_equal(tensor.numpy(), ARRAYS[name])
        assert tensor.numpy().dtype == ARRAYS[name].dtype.newbyteorder("=")


@pytest.mark.parametrize("name", ["a", "big endian", "fortran"])
def test_npy_is_one_tensor(tmp_path, name):
    np.save(tmp_path / "a.npy", ARRAYS[name])
    file = open_weights(tmp_path / "a.npy")
    np.testing.assert_array_equal(file.read(["tensor"])["tensor"].numpy(), ARRAYS[name])


def test_one_circuit_in_a_file_is_read_by_a_mapping(tmp_path):
    W_QK = np.random.default_rng(0).normal(size=(5, 5))
    np.save(tmp_path / "a.npy", W_QK)
    mapping = parse_mapping({"tensors": {"QK": "tensor"}, "layout": {"QK": "key query"}}, "the mapping")
    (weights,) = open_checkpoint(tmp_path, mapping=mapping).layers()
    np.testing.assert_array_equal(weights.qk().dense()[0].numpy(), W_QK)


def test_arrays_count_where_there_are_no_other_weights(tmp_path):
    np.save(tmp_path / "history.npy", np.ones(3))
    assert open_weights(tmp_path).shapes == {"tensor": (3,)}
    torch.save({"w": torch.ones(2)}, tmp_path / "ckpt.pt")
    assert open_weights(tmp_path).shapes == {"w": (2,)}


def npy(header: str, data: bytes = b"", version: int = 1) -> bytes:
    length = struct.pack("<H" if version == 1 else "<I", len(header))
    return b"\x93NUMPY" + bytes([version, 0]) + length + header.encode() + data


def described(shape: str, dtype: str = "'<f8'") -> str:
    return f"{{'descr': {dtype}, 'fortran_order': False, 'shape': {shape}, }}\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (npy(described("(3,)"), bytes(16)), "ends at byte 24"),
        (npy(described("(10**9,)")), "cannot be read as a file of numpy arrays"),
        (npy(described("(1000000000, 1000000000)"), bytes(16)), "would be larger than the whole file"),
        (npy(described("(0, 1000000000000)")), "a tensor has shape"),
        (npy(described("(-3,)"), bytes(16)), "a tensor has shape"),
        (npy(described("(2,)", "'|O'"), b"\x80\x02cposix\nsystem\n"), "Python objects, which only a pickle describes"),
        (npy(described("(2,)", "[('a', '<f8')]"), bytes(16)), "which is not a type of numbers that can be read"),
        (npy(described("(2,)", "'<U3'"), bytes(24)), "which is not a type of numbers that can be read"),
        (npy("(" * 5000), "cannot be read as a file of numpy arrays"),
        (npy("{'a': 1}"), "cannot be read as a file of numpy arrays"),
        (npy("x" * 20000), "cannot be read as a file of numpy arrays"),
        (b"\x93NUMPY\x09\x00", "cannot be read as a file of numpy arrays"),
        (b"not an array", "cannot be read as a file of numpy arrays"),
        (b"PK\x03\x04 cut", "its directory is damaged"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_damaged_arrays(tmp_path, content, message):
    (tmp_path / "a.npy").write_bytes(content)
    with pytest.raises(QkovError, match=message) as caught:
        open_weights(tmp_path / "a.npy")
    assert "a.npy" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_compressed_record_that_claims_more_than_it_can_hold(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("a.npy", npy(described("(1000000,)"), bytes(8_000_000)))
    with pytest.raises(QkovError, match=r"its record a\.npy is not compressed as numpy compresses"):
        open_weights(tmp_path / "a.npz")
