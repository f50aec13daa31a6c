"""Sweeps over checkpoints at a distance: what is sent, what lies here meanwhile, and that nothing of it stays."""

import errno
import os
import tempfile
from pathlib import Path

import pandas as pd
import pytest
import torch
from qkov.analyses.trajectories import RunStore, keeping, track
from qkov.circuits import Checkpoint, QkovError, find_checkpoints
from qkov.circuits.architectures.mapping import parse_mapping
from qkov.circuits.storage.remote import RemotePlace
from safetensors.torch import save_file

from ..circuits.range_server import serving

STEPS = (0, 10, 200, 1000, 3000)
LAYERS, WIDTH = 3, 128
MAPPING = parse_mapping(
    {"layout": "linear", "heads": 4, "tensors": {role: f"layers.{{layer}}.attention.{role}.weight" for role in "QKVO"}},
    "the test",
)
#: Of the attention weights of a checkpoint.
BYTES = LAYERS * 4 * WIDTH * WIDTH * 4


def weights_of(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    tensors = {}
    for layer in range(LAYERS):
        for role in "QKVO":
            name = f"layers.{layer}.attention.{role}.weight"
            tensors[name] = torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH
        tensors[f"layers.{layer}.mlp.weight"] = torch.randn(8 * WIDTH, WIDTH, generator=generator)
    return tensors


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "run"
    folder.mkdir()
    for step in STEPS:
        save_file(weights_of(step), folder / f"step_{step}.safetensors")
    return folder


@pytest.fixture(scope="module")
def on_disk(run, tmp_path_factory) -> RunStore:
    return track(run, tmp_path_factory.mktemp("here") / "store", composition=True, mapping=MAPPING).store


@pytest.fixture
def temporary(tmp_path, monkeypatch) -> Path:
    """Where temporary files lie, of this process and of workers."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def header_size(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def stamps(address: str, traffic) -> int:
    """What is sent to know the versions of the checkpoints, which a sweep asks for once."""
    before = traffic.sent.total()
    for checkpoint in find_checkpoints(address):
        checkpoint.fingerprint()
    return traffic.sent.total() - before


def demand_same(store: RunStore, other: RunStore) -> None:
    assert store.steps() == other.steps()
    for mine, others in (
        (store.table(), other.table()),
        *((store.composition(step), other.composition(step)) for step in store.steps()),
    ):
        pd.testing.assert_frame_equal(mine.drop(columns="source"), others.drop(columns="source"), check_exact=True)


@pytest.mark.parametrize("workers", [1, 2])
def test_each_checkpoint_is_sent_once_and_the_table_is_the_same(run, on_disk, temporary, tmp_path, workers):
    with serving(run.parent) as (address, traffic):
        asked = stamps(f"{address}/run", traffic)
        traffic.sent.clear()
        store = track(f"{address}/run", tmp_path / "store", composition=True, mapping=MAPPING, workers=workers).store
        sent = traffic.sent.total() - asked
    headers = sum(header_size(run / f"step_{step}.safetensors") for step in STEPS)
    assert len(STEPS) * BYTES + headers <= sent <= 1.05 * len(STEPS) * BYTES + headers
    demand_same(store, on_disk)
    assert list(temporary.iterdir()) == []


def test_torch_files_are_copied_once(run, on_disk, temporary, tmp_path):
    served = tmp_path / "served"
    served.mkdir()
    for step in STEPS:
        torch.save(weights_of(step), served / f"step_{step}.pt")
    with serving(tmp_path) as (address, traffic):
        asked = stamps(f"{address}/served", traffic)
        traffic.sent.clear()
        store = track(f"{address}/served", tmp_path / "store", composition=True, mapping=MAPPING, workers=2).store
        assert traffic.sent.total() - asked == sum(path.stat().st_size for path in served.iterdir())
    demand_same(store, on_disk)
    assert list(temporary.iterdir()) == []


def test_no_more_lies_here_than_steps_to_come_need(run, temporary, tmp_path):
    held = []

    def look(_done, _total, step, _new):
        (folder,) = temporary.glob("*/kept")
        kept = {int(path.name) for path in folder.iterdir()}
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        held.append((step, kept, round(size / BYTES, 1)))

    with serving(run.parent) as (address, _):
        track(f"{address}/run", tmp_path / "store", mapping=MAPPING, progress=look)
    # The step that was just measured, the one before it, and the reference.
    assert held == [
        (0, {0, 3000}, 2),
        (10, {0, 10, 3000}, 3),
        (200, {10, 200, 3000}, 3),
        (1000, {200, 1000, 3000}, 3),
        (3000, {1000, 3000}, 2),
    ]


def test_a_run_that_is_gone_on_with_fetches_what_is_missing_once(run, on_disk, temporary, tmp_path):
    with serving(run.parent) as (address, traffic):
        store = track(f"{address}/run", tmp_path / "store", composition=True, mapping=MAPPING).store
        asked = stamps(f"{address}/run", traffic)
        store.path(3000).unlink()
        traffic.sent.clear()
        assert track(f"{address}/run", store.folder, composition=True, mapping=MAPPING).measured == [3000]
        sent = traffic.sent.total() - asked
    # The step, which is its own reference, and the one before; and of the first as much as shows that all is well.
    headers = sum(header_size(run / f"step_{step}.safetensors") for step in (0, 1000, 3000))
    wanted = 2 * BYTES + BYTES // LAYERS
    assert wanted + headers <= sent <= 1.05 * wanted + headers
    demand_same(store, on_disk)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("error", [QkovError, KeyboardInterrupt])
def test_nothing_stays_after_a_sweep_that_ends_early(run, temporary, tmp_path, workers, error):
    with serving(run.parent) as (address, traffic):

        def stop(*_):
            assert len(list(temporary.glob("*/kept/*"))) >= 2
            if error is KeyboardInterrupt:
                raise KeyboardInterrupt
            # A status that says that asking again is of no use.
            traffic.fails = 501

        with pytest.raises(error):
            track(f"{address}/run", tmp_path / "store", mapping=MAPPING, workers=workers, progress=stop)
    assert list(temporary.iterdir()) == []
    assert 1 <= len(RunStore(tmp_path / "store").steps()) < len(STEPS)


def test_nothing_stays_when_interrupted_as_it_reads(run, temporary, tmp_path, monkeypatch):
    real, calls = RemotePlace.fetch, []

    def fetch(place, ranges):
        calls.append(place.name)
        if len(calls) == 3 * LAYERS:
            raise KeyboardInterrupt
        return real(place, ranges)

    monkeypatch.setattr(RemotePlace, "fetch", fetch)
    with serving(run.parent) as (address, _), pytest.raises(KeyboardInterrupt):
        track(f"{address}/run", tmp_path / "store", mapping=MAPPING)
    assert list(temporary.iterdir()) == []


def test_nothing_stays_after_a_wrong_call(run, temporary, tmp_path):
    with serving(run.parent) as (address, _), pytest.raises(QkovError, match="no layer with rotary positions"):
        track(f"{address}/run", tmp_path / "store", mapping=MAPPING, rotary_offset=3)
    assert list(temporary.iterdir()) == []


def test_who_reads_after_the_end_puts_nothing_there(run, temporary):
    with serving(run.parent) as (address, _):
        checkpoint = Checkpoint(10, f"{address}/run/step_10.safetensors")
        with keeping.folder_for_keeping([checkpoint]) as folder:
            place = keeping.files_to_read(checkpoint, folder).weights
            content = place.read_bytes(0, 100)
            assert len(list((folder / "10").iterdir())) == 2
        assert list(temporary.iterdir()) == []
        assert place.read_bytes(0, 100) == content == (run / "step_10.safetensors").read_bytes()[:100]
    assert list(temporary.iterdir()) == []


def test_a_full_disk_costs_only_what_is_sent(run, on_disk, temporary, tmp_path, monkeypatch):
    real = os.replace

    def replace(source, target):
        if Path(target).is_relative_to(temporary):
            raise OSError(errno.ENOSPC, "No space left on device", str(target))
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with serving(run.parent) as (address, traffic):
        store = track(f"{address}/run", tmp_path / "store", composition=True, mapping=MAPPING).store
        assert traffic.sent.total() > 2 * len(STEPS) * BYTES
    demand_same(store, on_disk)
    assert list(temporary.iterdir()) == []


def refused(*_call, **_options):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_no_folder_can_be_made(run, on_disk, tmp_path, monkeypatch):
    monkeypatch.setattr(keeping, "TemporaryDirectory", refused)
    with serving(run.parent) as (address, _):
        store = track(f"{address}/run", tmp_path / "store", composition=True, mapping=MAPPING).store
    demand_same(store, on_disk)


def test_of_checkpoints_on_this_machine_nothing_is_kept(run, on_disk, tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(tempfile, "mkdtemp", lambda *call, **options: made.append((call, options)))
    demand_same(track(run, tmp_path / "store", composition=True, mapping=MAPPING).store, on_disk)
    assert made == []
