"""Remote places whose content is kept on this machine: nothing is fetched twice, and every byte comes back."""

import errno
import json
import os
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from qkov.circuits import QkovError
from qkov.circuits.checkpoints.opening import open_weights
from qkov.circuits.storage.address import place_of
from qkov.circuits.storage.kept import KeptPlace
from qkov.circuits.storage.remote import RemotePlace
from safetensors.torch import save_file

from .range_server import serving

DTYPES = (
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.int8, torch.uint8, torch.int64, torch.bool, torch.complex64),
)


def bits(tensor):
    return tensor.contiguous().flatten().view(torch.uint8)


def of_every_dtype():
    """Make tensors of random bytes, including NaNs with a payload, and of shapes without dimensions or without size."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for dtype in DTYPES:
        content = torch.randint(256, (3, 5 * dtype.itemsize), dtype=torch.uint8, generator=generator)
        tensors[str(dtype)] = (content % 2).bool() if dtype is torch.bool else content.view(dtype)
    return tensors | {"scalar": torch.tensor(-0.0), "empty": torch.zeros(0, 4, dtype=torch.bfloat16)}


@pytest.fixture
def kept(tmp_path) -> Path:
    folder = tmp_path / "kept"
    folder.mkdir()
    return folder / "7"


@pytest.fixture
def served(tmp_path) -> Path:
    folder = tmp_path / "served"
    folder.mkdir()
    return folder


def opened(address, kept):
    return open_weights(KeptPlace(place_of(address), kept))


def demand_same(read, tensors):
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert read[name].shape == tensor.shape
        assert torch.equal(bits(read[name]), bits(tensor))


def test_tensors_come_back_bit_by_bit_and_are_sent_once(served, kept):
    tensors = of_every_dtype()
    save_file(tensors, served / "model.safetensors", metadata={"format": "pt"})
    with serving(served) as (address, traffic):
        file = opened(f"{address}/model.safetensors", kept)
        # The number without a dimension is a value of the file, and so it is read as the file is opened.
        once = (served / "model.safetensors").stat().st_size + tensors["scalar"].nbytes
        demand_same(file.read(list(tensors)), tensors)
        assert traffic.sent["/model.safetensors"] == once
        for again in (file, opened(f"{address}/model.safetensors", kept)):
            read = again.read(list(tensors))
            demand_same(read, tensors)
            # As tensors from the place itself, they may be written to without changing what the next one gets.
            read["torch.float32"].zero_()
            assert again.address == f"{address}/model.safetensors"
            assert again.metadata == {"format": "pt"}
            assert again.waits
        assert traffic.sent["/model.safetensors"] == once


def test_shards_and_sidecars_are_sent_once(served, kept):
    tensors = {"a": torch.arange(6.0), "b": torch.arange(8.0).reshape(2, 4)}
    for name, tensor in tensors.items():
        save_file({name: tensor}, served / f"{name}.safetensors")
    index = {"weight_map": {name: f"{name}.safetensors" for name in tensors}}
    (served / "model.safetensors.index.json").write_text(json.dumps(index))
    (served / "config.json").write_text('{"model_type": "test"}')
    (served / "trainer_state.json").write_text('{"log_history": [{"step": 5, "loss": 0.5}]}')
    with serving(served) as (address, traffic):
        for _ in range(3):
            file = opened(f"{address}/", kept)
            demand_same(file.read(["b", "a"]), tensors)
            assert (file.config, file.config_origin) == ({"model_type": "test"}, "config.json")
            assert file.scalars == {"loss": 0.5}
            assert dict(file.shapes) == {"a": (6,), "b": (2, 4)}
        sent = {path: count for path, count in traffic.sent.items() if path != "/"}
    assert sent == {f"/{path.name}": path.stat().st_size for path in served.iterdir()}


def test_a_lone_shard_is_reported_as_part_of_a_model(served, kept):
    save_file({"a": torch.ones(1)}, served / "model-00001-of-00002.safetensors")
    with serving(served) as (address, _):
        file = opened(f"{address}/model-00001-of-00002.safetensors", kept)
    assert "this file is one of 2 shards of a model" in str(file.partial)


def test_a_torch_file_is_copied_once(served, kept):
    tensors = {"weight": torch.randn(4, 4).to(torch.bfloat16), "bias": torch.randn(3)}
    torch.save({"model": tensors, "loss": 2.5, "config": {"n_head": 2}}, served / "step_5.pt")
    with serving(served) as (address, traffic):
        files = [opened(f"{address}/step_5.pt", kept) for _ in range(3)]
        assert traffic.sent["/step_5.pt"] == (served / "step_5.pt").stat().st_size
    for file in files:
        read = file.read(["model.weight", "model.bias"])
        demand_same({name.removeprefix("model."): tensor for name, tensor in read.items()}, tensors)
        assert file.scalars["loss"] == 2.5
        assert (file.config, file.config_origin) == ({"n_head": 2}, "config in the file")


def test_a_file_that_changed_is_fetched_anew(served, kept):
    path = served / "model.safetensors"
    save_file({"a": torch.ones(4), "b": torch.ones(4)}, path)
    with serving(served) as (address, _):
        assert opened(f"{address}/model.safetensors", kept).read(["a"])["a"].tolist() == [1] * 4
        save_file({"a": torch.zeros(4), "b": torch.zeros(4)}, path)
        os.utime(path, (1, 1))
        file = opened(f"{address}/model.safetensors", kept)
        assert file.read(["a"])["a"].tolist() == file.read(["b"])["b"].tolist() == [0] * 4


class FullFile:
    """A file on a disk without room."""

    def __init__(self, descriptor, _mode):
        self.descriptor = descriptor

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.close(self.descriptor)

    def writelines(self, _lines):
        no_room()


def no_room(*_call):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(("call", "full"), [("fdopen", FullFile), ("replace", no_room)])
def test_on_a_full_disk_everything_is_read_and_nothing_kept(served, kept, monkeypatch, call, full):
    tensors = {"a": torch.arange(1000.0)}
    save_file(tensors, served / "model.safetensors")
    torch.save(tensors, served / "step_5.pt")
    with serving(served) as (address, traffic), monkeypatch.context() as patched:
        patched.setattr(os, call, full)
        for _ in range(2):
            demand_same(opened(f"{address}/model.safetensors", kept).read(["a"]), tensors)
        assert traffic.sent["/model.safetensors"] == 2 * (served / "model.safetensors").stat().st_size
        assert {path.suffix for path in kept.iterdir()} == {".lock"}
        demand_same(opened(f"{address}/step_5.pt", kept).read(["a"]), tensors)


def test_without_its_folder_everything_is_read_and_no_folder_is_created(served, kept):
    tensors = {"a": torch.arange(10.0)}
    save_file(tensors, served / "model.safetensors")
    torch.save(tensors, served / "step_5.pt")
    with serving(served) as (address, _):
        for name in ("model.safetensors", "step_5.pt"):
            file = opened(f"{address}/{name}", kept.parent / "deleted" / "7")
            demand_same(file.read(["a"]), tensors)
    assert list(kept.parent.iterdir()) == []


def test_what_cannot_be_fetched_is_reported_and_not_kept(served, kept):
    save_file({"a": torch.ones(1000)}, served / "model.safetensors")
    with serving(served) as (address, traffic):
        file = opened(f"{address}/model.safetensors", kept)
        traffic.cuts = 3
        with pytest.raises(QkovError, match=rf"^{address}/model.safetensors was asked for bytes .* cut short"):
            file.read(["a"])
        traffic.cuts = 0
        assert file.read(["a"])["a"].sum() == 1000


def test_threads_that_want_the_same_at_once_fetch_it_once(served, kept, monkeypatch):
    tensors = {"a": torch.arange(1000.0)}
    save_file(tensors, served / "model.safetensors")
    fetched = []
    real = RemotePlace.fetch

    def slowly(place, ranges):
        fetched.append(place.name)
        # Time for the others to come and wait for the lock, which no event tells of.
        time.sleep(0.2)
        return real(place, ranges)

    monkeypatch.setattr(RemotePlace, "fetch", slowly)
    with serving(served) as (address, _), ThreadPoolExecutor(4) as threads:
        files = [opened(f"{address}/model.safetensors", kept) for _ in range(4)]
        for read in threads.map(lambda file: file.read(["a"]), files):
            demand_same(read, tensors)
    assert fetched == ["model.safetensors"]


STUCK = textwrap.dedent(
    """
    import sys, threading
    from pathlib import Path
    from qkov.circuits.storage.kept import KeptPlace
    from qkov.circuits.storage.address import place_of
    from qkov.circuits.storage.remote import RemotePlace
    from qkov.circuits.checkpoints.opening import open_weights

    def never(place, ranges):
        print("begun", flush=True)
        threading.Event().wait()

    RemotePlace.fetch = never
    open_weights(KeptPlace(place_of(sys.argv[1]), Path(sys.argv[2]))).read(["a"])
    """
)


@pytest.mark.skipif(sys.platform == "win32", reason="nobody waits for another there")
def test_a_fetching_process_is_waited_for_until_it_is_killed(served, kept):
    tensors = {"a": torch.arange(1000.0)}
    save_file(tensors, served / "model.safetensors")
    with serving(served) as (address, _), ThreadPoolExecutor(1) as threads:
        command = [sys.executable, "-c", STUCK, f"{address}/model.safetensors", str(kept)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
            try:
                assert other.stdout.readline() == "begun\n"
                read = threads.submit(opened(f"{address}/model.safetensors", kept).read, ["a"])
                with pytest.raises(TimeoutError):
                    read.result(timeout=0.5)
            finally:
                other.kill()
        demand_same(read.result(timeout=30), tensors)
