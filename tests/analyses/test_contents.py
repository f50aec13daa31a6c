"""The contents of layers in a run store: beside the rows, readable elsewhere, and unknown where they are missing."""

import shutil

import pandas as pd
import pytest
import torch
from qkov.analyses.trajectories import RunStore, track
from qkov.circuits import AttentionWeights, QkovError, open_checkpoint
from qkov.circuits.reading.saved_format import save_checkpoint
from qkov.circuits.weights.content import layer_content


def write_run(folder, seeds):
    """A run whose checkpoints are drawn from these seeds, by step."""
    for step, seed in seeds.items():
        generator = torch.Generator().manual_seed(seed)
        layers = [
            AttentionWeights(
                layer,
                **{name: torch.randn(2, 6, 3, generator=generator) for name in ("W_Q", "W_K", "W_V")},
                W_O=torch.randn(2, 3, 6, generator=generator),
            )
            for layer in range(2)
        ]
        save_checkpoint(folder, step, layers, {}, {})
    return folder


def test_track_notes_the_content_of_every_layer(tmp_path):
    store = track(write_run(tmp_path / "run", {0: 7, 10: 8, 20: 7}), tmp_path / "store").store
    contents = store.contents()
    assert list(contents[["step", "layer"]].itertuples(index=False, name=None)) == [
        (step, layer) for step in (0, 10, 20) for layer in (0, 1)
    ]
    for step in (0, 10, 20):
        rows = contents[contents["step"] == step]
        read = open_checkpoint(tmp_path / "run" / f"step_{step:09d}.safetensors").layers()
        for row, layer in zip(rows.to_dict("records"), read, strict=True):
            assert row["digest"] == layer_content(layer).digest
            assert list(row["sketch"]) == layer_content(layer).sketch.tolist()
    by_step = contents.groupby("step")["digest"].apply(tuple)
    assert by_step[0] == by_step[20] != by_step[10]
    assert list(pd.read_parquet(tmp_path / "store" / "contents")["digest"]) == list(contents["digest"])


@pytest.mark.parametrize("options", [{"basis": "folded"}, {"composition": True}, {"workers": 2}])
def test_the_content_is_that_of_the_weights_as_they_are_stored_whatever_is_measured(tmp_path, options):
    run = write_run(tmp_path / "run", {0: 7, 10: 8})
    plain = track(run, tmp_path / "plain").store.contents()
    other = track(run, tmp_path / "other", **options).store.contents()
    assert list(plain["digest"]) == list(other["digest"])


def test_a_store_without_contents_opens_and_its_content_is_unknown(tmp_path):
    run = write_run(tmp_path / "run", {0: 7, 10: 8})
    store = track(run, tmp_path / "store").store
    shutil.rmtree(store.contents_folder)
    assert store.contents().empty
    assert list(store.contents().columns) == ["source", "step", "stack", "layer", "shapes", "digest", "sketch"]
    assert len(store.table()) == 2 * 2 * 2 * 2
    write_run(run, {20: 9})
    assert track(run, tmp_path / "store").measured == [20]
    assert set(store.contents()["step"]) == {20}


def test_contents_of_other_files_than_the_rows_are_unknown(tmp_path):
    run = write_run(tmp_path / "run", {0: 7, 10: 8})
    store = track(run, tmp_path / "store").store
    store.write_contents(
        10, "another key", {name: [] for name in ("source", "step", "stack", "layer", "shapes", "digest", "sketch")}
    )
    assert set(store.contents()["step"]) == {0}


def test_damaged_contents_are_named(tmp_path):
    store = track(write_run(tmp_path / "run", {0: 7}), tmp_path / "store").store
    path = store.contents_path(0)
    content = path.read_bytes()
    # The end of a Parquet file holds its key; what is damaged here are the values in front of it.
    path.write_bytes(content[:4] + bytes(200) + content[204:])
    with pytest.raises(QkovError, match="damaged"):
        RunStore(tmp_path / "store").contents()
