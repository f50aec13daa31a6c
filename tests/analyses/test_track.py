"""Tracking: figures against dense algebra in float64, and a store that survives whatever happens to it."""

import json
import os
import subprocess
import sys
import textwrap
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from qkov.analyses.trajectories import RunStore, TaskDirections, sweep, track
from qkov.analyses.trajectories.motion import effective_ratio, motion
from qkov.circuits import AttentionWeights, CallError, Circuit, QkovError
from qkov.circuits.architectures.mapping import parse_mapping
from qkov.circuits.live.lens_models import open_run_checkpoint
from qkov.circuits.reading.saved_format import save_checkpoint
from qkov.circuits.storage.atomic_write import temporary_file
from safetensors.torch import save_file

from ..waiting import next_lines, tell

STEPS = (0, 10, 200, 1000)


def weights(step: int, layers: int = 2, heads: int = 2, d_model: int = 6, d_head: int = 3) -> list[AttentionWeights]:
    generator = torch.Generator().manual_seed(step)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(heads, *shape, generator=generator)

    return [
        AttentionWeights(
            layer=layer,
            W_Q=drawn(d_model, d_head),
            W_K=drawn(d_model, d_head),
            W_V=drawn(d_model, d_head),
            W_O=drawn(d_head, d_model),
        )
        for layer in range(layers)
    ]


def write_run(folder, steps=STEPS, **shape):
    for step in steps:
        save_checkpoint(folder, step, weights(step, **shape), {"loss": 1 / (1 + step)}, {"seed": 0})
    return folder


def dense(layer: AttentionWeights, head: int) -> dict[str, np.ndarray]:
    W_Q, W_K, W_V, W_O = (getattr(layer, name)[head].double().numpy() for name in ("W_Q", "W_K", "W_V", "W_O"))
    return {"QK": W_K @ W_Q.T, "OV": W_O.T @ W_V.T}


def test_every_row_is_dense_algebra_of_the_files(tmp_path):
    track(write_run(tmp_path / "run"), tmp_path / "store")
    table = RunStore(tmp_path / "store").table()
    assert len(table) == len(STEPS) * 2 * 2 * 2
    assert list(table["step"].unique()) == list(STEPS)
    for row in table.to_dict("records"):
        C = dense(weights(row["step"])[row["layer"]], row["head"])[row["circuit"]]
        last = dense(weights(STEPS[-1])[row["layer"]], row["head"])[row["circuit"]]
        singular = np.linalg.svd(C)[1][:3]
        np.testing.assert_allclose(row["singular_values"], singular, rtol=1e-7)
        assert row["frobenius_norm"] == pytest.approx(np.linalg.norm(C), rel=1e-10)
        assert row["nuclear_norm"] == pytest.approx(singular.sum(), rel=1e-7)
        assert row["reference_scale"] == pytest.approx((C * last).sum() / (last * last).sum(), rel=1e-9)
        cosine = (C * last).sum() / np.linalg.norm(C) / np.linalg.norm(last)
        assert row["reference_cosine"] == pytest.approx(cosine, rel=1e-9)
        assert row["reference"] == "step 1000"
        assert (row["rows"], row["columns"], row["rank_bound"]) == (6, 6, 3)
        assert row["basis"] == "raw"
        assert row["finite"]
        assert row["factorized"]
        assert np.isnan(row["copying_score"]) == (row["circuit"] == "QK")
        assert row["training_loss"] == 1 / (1 + row["step"])
        position = STEPS.index(row["step"])
        if position == 0:
            assert np.isnan(row["change_norm"])
            assert np.isnan(row["effective_ratio"])
            continue
        before = STEPS[position - 1]
        assert row["previous_step"] == before
        speeds = {}
        for circuit in ("QK", "OV"):
            now, old = (dense(weights(step)[row["layer"]], row["head"])[circuit] for step in (row["step"], before))
            speeds[circuit] = np.linalg.norm(now - old) / np.linalg.norm(old) / (row["step"] - before)
            if circuit == row["circuit"]:
                assert row["change_norm"] == pytest.approx(np.linalg.norm(now - old), rel=1e-9)
                assert row["previous_scale"] == pytest.approx((now * old).sum() / (old * old).sum(), rel=1e-8)
        assert row["relative_speed"] == pytest.approx(speeds[row["circuit"]], rel=1e-9)
        assert row["effective_ratio"] == pytest.approx(speeds["QK"] / speeds["OV"], rel=1e-9)


def test_task_directions_are_the_reference_where_given_also_as_a_sweep_is_resumed(tmp_path):
    generator = torch.Generator().manual_seed(9)
    directions = {name: torch.randn(6, 6, generator=generator, dtype=torch.float64) for name in ("QK", "OV")}
    named = TaskDirections("mine", {name: Circuit(direction) for name, direction in directions.items()})
    track(write_run(tmp_path / "run"), tmp_path / "store", directions=named)
    for row in RunStore(tmp_path / "store").table().to_dict("records"):
        C = dense(weights(row["step"])[row["layer"]], row["head"])[row["circuit"]]
        R = directions[row["circuit"]].numpy()
        assert row["reference_scale"] == pytest.approx((C * R).sum() / (R * R).sum(), rel=1e-9)
        assert row["reference"] == "mine"
    assert track(tmp_path / "run", tmp_path / "store", directions=named).kept == list(STEPS)
    write_run(tmp_path / "run", [2000])
    again = track(tmp_path / "run", tmp_path / "store", directions=named)
    assert (again.measured, again.kept) == ([2000], list(STEPS))
    assert set(again.store.table()["reference"]) == {"mine"}
    assert again.store.description()["reference_step"] is None
    other = TaskDirections("mine", {name: Circuit(2 * direction) for name, direction in directions.items()})
    with pytest.raises(
        CallError, match=r'was made with directions.hash "[0-9a-f]+", and this call has "[0-9a-f]+"; give'
    ):
        track(tmp_path / "run", tmp_path / "store", directions=other)
    wrong = TaskDirections("wrong", {name: Circuit(torch.zeros(5, 6)) for name in ("QK", "OV")})
    with pytest.raises(CallError, match=r"must have the circuit's shape \[2, 6, 6\].* got \[5, 6\]"):
        track(tmp_path / "run", tmp_path / "other", directions=wrong)


def test_a_store_does_not_mix_steps_that_are_known_and_not_known(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    for step in (10, 20):
        state = {f"blocks.0.attn.W_{role}": torch.randn(1, 4, 2) for role in "QKV"}
        torch.save(state | {"blocks.0.attn.W_O": torch.randn(1, 2, 4)}, run / f"model_{step:06d}.pt")
        if step == 10:
            assert track(run, tmp_path / "alone").measured == [None]
    with pytest.raises(CallError, match="the step of its checkpoint was not known, and it is known now; give another"):
        track(run, tmp_path / "alone")
    assert track(run, tmp_path / "both").measured == [10, 20]
    (run / "model_000010.pt").unlink()
    with pytest.raises(CallError, match="the step of its checkpoint was known, and it is not known now; give another"):
        track(run, tmp_path / "both")


def test_the_store_reads_as_it_is_elsewhere(tmp_path):
    store = track(write_run(tmp_path / "run"), tmp_path / "store").store
    expected = store.table()
    by_pandas = pd.read_parquet(tmp_path / "store" / "steps")
    assert list(by_pandas["step"]) == list(expected["step"])
    assert list(by_pandas.columns) == list(expected.columns)
    description = json.loads((tmp_path / "store" / "run.json").read_text())
    assert [checkpoint["step"] for checkpoint in description["checkpoints"]] == list(STEPS)
    assert description["versions"]["torch"] == metadata.version("torch")


def test_a_second_call_measures_only_what_is_new(tmp_path):
    run = write_run(tmp_path / "run", STEPS[:3])
    first = track(run, tmp_path / "store")
    assert (first.measured, first.kept) == ([0, 10, 200], [])
    times = {path.name: path.stat().st_mtime_ns for path in first.store.steps_folder.iterdir()}
    assert track(run, tmp_path / "store").kept == [0, 10, 200]
    write_run(run, [1000])
    again = track(run, tmp_path / "store")
    assert (again.measured, again.kept) == ([1000], [0, 10, 200])
    assert all((again.store.steps_folder / name).stat().st_mtime_ns == at for name, at in times.items())
    # The reference stays the one that the store was begun with, so that the old rows stay true.
    assert set(again.store.table()["reference"]) == {"step 200"}


def test_a_file_that_changed_is_measured_again_and_so_is_the_one_after(tmp_path):
    run = write_run(tmp_path / "run")
    track(run, tmp_path / "store")
    save_checkpoint(run, 10, weights(77), {"loss": 0.0}, {"seed": 0})
    assert track(run, tmp_path / "store").measured == [10, 200]


def test_a_reference_that_changed_has_all_steps_measured_again(tmp_path):
    run = write_run(tmp_path / "run")
    track(run, tmp_path / "store")
    save_checkpoint(run, STEPS[-1], weights(77), {"loss": 0.0}, {"seed": 0})
    assert track(run, tmp_path / "store").measured == list(STEPS)


def test_what_the_run_no_longer_holds_stays_measured(tmp_path):
    run = write_run(tmp_path / "run")
    track(run, tmp_path / "store")
    (run / "step_000000010.safetensors").unlink()
    again = track(run, tmp_path / "store")
    assert again.measured == [200]
    assert again.store.steps() == list(STEPS)
    assert again.store.description()["no_longer_there"] == [10]
    assert set(again.store.table().query("step == 200")["previous_step"]) == {0}


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float16])
def test_short_floats_are_measured_as_the_numbers_they_hold(tmp_path, dtype):
    W_Q, W_K = (factor.to(dtype) for factor in (weights(1)[0].W_Q, weights(1)[0].W_K) if factor is not None)
    save_file({"q": W_Q, "k": W_K}, tmp_path / "model.safetensors")
    mapping = parse_mapping({"layout": "transformer_lens", "tensors": {"Q": "q", "K": "k"}}, "m")
    table = track(tmp_path / "model.safetensors", tmp_path / "store", mapping=mapping).store.table()
    for row in table.to_dict("records"):
        C = W_K[row["head"]].double().numpy() @ W_Q[row["head"]].double().numpy().T
        assert row["frobenius_norm"] == pytest.approx(np.linalg.norm(C), rel=1e-10)
        assert row["finite"]


def test_a_store_is_of_one_run_and_one_way_of_measuring(tmp_path):
    run = write_run(tmp_path / "run")
    track(run, tmp_path / "store")
    with pytest.raises(CallError, match=f"was made from {run}, and this call reads {tmp_path / 'other'}; give another"):
        track(write_run(tmp_path / "other"), tmp_path / "store")
    mapping = parse_mapping(
        {"layout": "transformer_lens", "tensors": {"Q": "blocks.{layer}.attn.W_Q", "K": "blocks.{layer}.attn.W_K"}}, "m"
    )
    with pytest.raises(CallError, match=r"was made with reading.mapping null, and this call has \{.*; give another"):
        track(run, tmp_path / "store", mapping=mapping)
    (run / "step_000001000.safetensors").unlink()
    with pytest.raises(CallError, match=r"compares circuits with step 1000, which .* no longer holds"):
        track(run, tmp_path / "store")


def test_a_wrong_mapping_leaves_no_store_behind(tmp_path):
    run = write_run(tmp_path / "run")
    mapping = parse_mapping({"layout": "linear", "heads": 2, "tensors": {"Q": "nothing", "K": "neither"}}, "m")
    with pytest.raises(QkovError, match="names no tensor"):
        track(run, tmp_path / "store", mapping=mapping)
    assert not (tmp_path / "store").exists()


def test_a_damaged_head_is_flagged_and_the_rest_measured(tmp_path):
    run = write_run(tmp_path / "run", STEPS[:2])
    broken = weights(1000)
    broken[1].circuits()["QK"].left[0, 2, 1] = torch.nan
    broken[0].circuits()["OV"].left[1, 0, 0] = torch.inf
    save_checkpoint(run, 300, broken, {"loss": 0.1}, {"seed": 0})
    save_checkpoint(run, 1000, weights(1000), {"loss": 0.1}, {"seed": 0})
    table = track(run, tmp_path / "store").store.table()
    damaged = table[~table["finite"]]
    assert {tuple(row) for row in damaged[["step", "layer", "head", "circuit"]].to_numpy()} == {
        (300, 1, 0, "QK"),
        (300, 0, 1, "OV"),
    }
    assert damaged["frobenius_norm"].isna().all()
    assert table[table["finite"]]["frobenius_norm"].notna().all()


def test_zero_and_rank_deficient_factors_are_measured(tmp_path):
    run = tmp_path / "run"
    zero = [AttentionWeights(0, W_Q=torch.zeros(1, 6, 3), W_K=torch.zeros(1, 6, 3))]
    save_checkpoint(run, 0, zero, {}, {})
    one = torch.zeros(1, 6, 3)
    one[0, 0, 0] = 2.0
    save_checkpoint(run, 1, [AttentionWeights(layer=0, W_Q=one, W_K=one)], {}, {})
    table = track(run, tmp_path / "store").store.table()
    np.testing.assert_array_equal(table["singular_values"][0], [0, 0, 0])
    np.testing.assert_allclose(table["singular_values"][1], [4, 0, 0], atol=1e-12)
    assert table["frobenius_norm"].tolist() == [0, 4]
    assert np.isnan(table["relative_speed"][1])
    assert table["change_norm"][1] == pytest.approx(4)


@pytest.mark.parametrize("failing", [6, 7])
def test_a_full_disk_loses_nothing_that_was_written(tmp_path, monkeypatch, failing):
    # The first file is run.json; after it, each step has its contents and then its rows.
    run = write_run(tmp_path / "run")
    real = os.replace
    calls = []

    def replace(source, target):
        calls.append(target)
        if len(calls) == failing:
            raise OSError(28, "No space left on device", str(target))
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(OSError, match="No space left"):
        track(run, tmp_path / "store")
    monkeypatch.undo()
    assert RunStore(tmp_path / "store").steps() == [0, 10]
    assert list((tmp_path / "store").rglob("*.partial")) == []
    assert track(run, tmp_path / "store").measured == [200, 1000]


STEPPED_TRACK = textwrap.dedent(
    """
    import sys
    from qkov.analyses.trajectories import track
    def progress(done, count, step, is_new):
        print(step, flush=True)
        sys.stdin.readline()
    track(sys.argv[1], sys.argv[2], progress=progress)
    """
)


def start_tracking(run, store):
    """A sweep that prints each step once it is done, and waits to be told before it goes on."""
    command = [sys.executable, "-c", STEPPED_TRACK, str(run), str(store)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_killed_in_the_middle_and_run_again_it_completes_without_measuring_twice(tmp_path):
    run = write_run(tmp_path / "run", range(0, 200, 10))
    store = RunStore(tmp_path / "store")
    with start_tracking(run, store.folder) as process:
        for _ in range(3):
            next_lines(process)
            tell(process)
        process.kill()
    done = store.steps()
    assert 3 <= len(done) <= 4
    times = {step: store.path(step).stat().st_mtime_ns for step in done}
    again = track(run, store.folder)
    assert again.kept == done
    assert sorted(again.kept + again.measured) == list(range(0, 200, 10))
    assert all(store.path(step).stat().st_mtime_ns == at for step, at in times.items())
    assert not store.table().duplicated(["step", "stack", "layer", "head", "circuit"]).any()


def test_two_at_once_end_with_every_row_once(tmp_path):
    run = write_run(tmp_path / "run", range(0, 100, 10))
    with start_tracking(run, tmp_path / "store") as one, start_tracking(run, tmp_path / "store") as other:
        for _ in range(10):
            for process in (one, other):
                next_lines(process)
            for process in (one, other):
                tell(process)
    assert (one.returncode, other.returncode) == (0, 0)
    table = RunStore(tmp_path / "store").table()
    assert len(table) == 10 * 8
    assert not table.duplicated(["step", "stack", "layer", "head", "circuit"]).any()


def test_stores_that_are_none(tmp_path):
    with pytest.raises(CallError, match=r"is not a run store: it has no run\.json"):
        RunStore(tmp_path).description()
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(CallError, match="is not a run store of this version"):
        RunStore(tmp_path).description()
    with pytest.raises(CallError, match="holds no measured checkpoint yet"):
        RunStore(tmp_path).table()
    store = track(write_run(tmp_path / "run"), tmp_path / "store").store
    store.path(10).write_bytes(b"PAR1 and then nothing")
    with pytest.raises(QkovError, match="cannot be read as the Parquet files"):
        store.table()
    assert track(tmp_path / "run", tmp_path / "store").measured == [10]


def test_motion_of_a_known_step():
    old = torch.diag(torch.tensor([3.0, 4.0], dtype=torch.float64))
    new = torch.diag(torch.tensor([6.0, 4.0], dtype=torch.float64))
    figures = motion(Circuit(new[None]), Circuit(old[None]), steps=6)
    assert figures["change_norm"].item() == pytest.approx(3)
    assert figures["relative_speed"].item() == pytest.approx(3 / 5 / 6)
    assert figures["previous_scale"].item() == pytest.approx((18 + 16) / 25)
    assert figures["previous_cosine"].item() == pytest.approx(34 / 5 / 52**0.5)
    assert effective_ratio({"QK": [0.2], "OV": [0.1]}, 0) == pytest.approx(2)
    assert np.isnan(effective_ratio({"QK": [0.2]}, 0))
    assert np.isnan(effective_ratio({"QK": [0.2], "OV": [0.0]}, 0))
    assert np.isnan(effective_ratio({"QK": [0.0], "OV": [0.2]}, 0))


def test_a_frozen_circuit_has_not_moved():
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(2, 50, 8, generator=generator), torch.randn(2, 8, 50, generator=generator)
    moved = left.clone()
    moved[1, 3, 4] += 1e-6
    figures = motion(Circuit(moved, right), Circuit(left, right.clone()), steps=1)
    assert figures["change_norm"][0] == 0
    expected = (moved[1] - left[1]).double() @ right[1].double()
    assert figures["change_norm"][1].item() == pytest.approx(expected.norm().item(), rel=1e-6)
    assert motion(Circuit(left @ right), Circuit(left @ right), 1)["change_norm"].tolist() == [0, 0]
    assert motion(Circuit(left @ right), Circuit(left, right), 1)["change_norm"].max() < 1e-4


def grouped_tensors(step: int) -> dict[str, torch.Tensor]:
    """A layer of Qwen3's kind: four query heads on two key-value heads, rotary positions, QK-norm."""
    generator = torch.Generator().manual_seed(step)

    def drawn(*shape):
        return torch.randn(*shape, generator=generator)

    return {
        "model.layers.0.self_attn.q_proj.weight": drawn(4 * 6, 10),
        "model.layers.0.self_attn.k_proj.weight": drawn(2 * 6, 10),
        "model.layers.0.self_attn.v_proj.weight": drawn(2 * 6, 10),
        "model.layers.0.self_attn.o_proj.weight": drawn(10, 4 * 6),
        "model.layers.0.self_attn.q_norm.weight": 1 + drawn(6) / 4,
        "model.layers.0.self_attn.k_norm.weight": 1 + drawn(6) / 4,
        "model.layers.0.input_layernorm.weight": 1 + drawn(10) / 4,
    }


def write_grouped_run(run, steps=(100, 500)):
    config = {"model_type": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}
    config |= {"hidden_size": 10, "num_hidden_layers": 1, "rope_theta": 100.0, "rms_norm_eps": 1e-6}
    for step in steps:
        folder = run / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config))
        save_file(grouped_tensors(step), folder / "model.safetensors")
    return run


def grouped_heads(step: int, basis: str, offset: int) -> dict[str, np.ndarray]:
    """W_Q and W_O of the four heads, W_K and W_V of the two, [head, d_model, d_head], in float64."""
    tensors = {name.split(".")[-2]: tensor.double().numpy() for name, tensor in grouped_tensors(step).items()}
    gain = tensors["input_layernorm"] if basis == "folded" else np.ones(10)
    W_Q, W_K, W_V = ((tensors[f"{side}_proj"] * gain).reshape(-1, 6, 10).transpose(0, 2, 1) for side in ("q", "k", "v"))
    # Pair i, dimensions i and i + 3, turns by the angle offset * 100^(-2i/6).
    turns = np.exp(1j * offset * 100.0 ** (-np.arange(3) / 3))
    turned = (W_Q[..., :3] + 1j * W_Q[..., 3:]) * turns
    W_O = tensors["o_proj"].reshape(10, 4, 6).transpose(1, 0, 2)
    return {"W_Q": np.concatenate([turned.real, turned.imag], axis=-1), "W_K": W_K, "W_V": W_V, "W_O": W_O}


@pytest.mark.parametrize(("basis", "offset"), [("raw", 0), ("folded", 7)])
def test_grouped_heads_in_any_basis_and_at_any_offset_are_dense_algebra(tmp_path, basis, offset):
    run = write_grouped_run(tmp_path / "run")
    table = track(run, tmp_path / "store", basis=basis, rotary_offset=offset).store.table()
    assert len(table) == 2 * 4 * 2
    assert table["qk_norm"].all()
    assert set(table["stack"]) == {""}
    assert list(table["head"] // 2) == list(table["key_value_head"])
    assert set(table["basis"]) == {basis}
    for row in table.to_dict("records"):
        factors = grouped_heads(row["step"], basis, offset)
        head, group = row["head"], row["key_value_head"]
        mates = slice(2 * group, 2 * group + 2)
        if row["circuit"] == "QK":
            assert row["rotary_offset"] == offset
            left, right = factors["W_K"][group], factors["W_Q"][head].T
            whole_left, whole_right = left, np.concatenate(list(factors["W_Q"][mates])).T
        else:
            assert np.isnan(row["rotary_offset"])
            left, right = factors["W_O"][head], factors["W_V"][group].T
            whole_left, whole_right = np.concatenate(list(factors["W_O"][mates])), right
        s = np.linalg.svd(left @ right)[1][:6]
        np.testing.assert_allclose(row["singular_values"], s, rtol=1e-6)
        assert row["effective_rank"] == pytest.approx(np.exp(-(s / s.sum() * np.log(s / s.sum())).sum()), rel=1e-6)
        whole = np.linalg.svd(whole_left @ whole_right)[1][:6]
        p, q = whole_left.shape[0], whole_right.shape[1]
        assert row["omega_largest"] == pytest.approx(2 * whole[0], rel=1e-6)
        assert row["omega_mean"] == pytest.approx((1 / p + 1 / q) * whole.sum(), rel=1e-6)
        assert row["omega_self"] == pytest.approx(2 * (whole**3).sum() / (whole**2).sum(), rel=1e-6)
        A, B = whole_left.T @ whole_left, whole_right @ whole_right.T
        unbalanced = np.linalg.norm(A - B) / (np.linalg.norm(A) + np.linalg.norm(B))
        assert row["imbalance"] == pytest.approx(unbalanced, rel=1e-6)
        U, values, _ = np.linalg.svd(whole_left @ whole_right, full_matrices=False)
        root, exact = (U * values) @ U.T, whole_left @ whole_left.T
        cosine = (root * exact).sum() / np.linalg.norm(root) / np.linalg.norm(exact)
        assert row["agreement_rows_cosine"] == pytest.approx(cosine, rel=1e-6)


def test_a_layer_of_torch_whose_keys_and_values_have_other_widths(tmp_path):
    (tmp_path / "run").mkdir()
    modules = {}
    for step in (0, 100):
        torch.manual_seed(step)
        modules[step] = torch.nn.MultiheadAttention(12, 2, kdim=5, vdim=7).double()
        torch.save(modules[step].state_dict(), tmp_path / "run" / f"step_{step}.pt")
    track(tmp_path / "run", tmp_path / "store", heads=2)
    table = RunStore(tmp_path / "store").table()
    assert len(table) == 2 * 2 * 2
    for row in table.to_dict("records"):
        state = {name: tensor.numpy() for name, tensor in modules[row["step"]].state_dict().items()}
        of_head = slice(6 * row["head"], 6 * row["head"] + 6)
        if row["circuit"] == "QK":
            C = state["k_proj_weight"][of_head].T @ state["q_proj_weight"][of_head]
        else:
            C = state["out_proj.weight"][:, of_head] @ state["v_proj_weight"][of_head]
        assert (row["rows"], row["columns"]) == C.shape
        np.testing.assert_allclose(row["singular_values"], np.linalg.svd(C)[1][:6], rtol=1e-9, atol=1e-9)
        assert np.isnan(row["copying_score"])


def test_rotary_models_have_the_norm_at_many_offsets(tmp_path):
    table = track(write_grouped_run(tmp_path / "run"), tmp_path / "store").store.table()
    for row in table.to_dict("records"):
        if row["circuit"] == "OV":
            assert row["rotary_offsets"] is None
            continue
        assert list(row["rotary_offsets"]) == [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
        for offset, norm in zip(row["rotary_offsets"], row["frobenius_norm_at_offsets"], strict=True):
            factors = grouped_heads(row["step"], "raw", offset)
            C = factors["W_K"][row["key_value_head"]] @ factors["W_Q"][row["head"]].T
            assert norm == pytest.approx(np.linalg.norm(C), rel=1e-9)


def test_a_damaged_head_takes_the_figures_of_its_group_with_it_and_no_others(tmp_path):
    run = write_grouped_run(tmp_path / "run", [500])
    tensors = grouped_tensors(500)
    tensors["model.layers.0.self_attn.q_proj.weight"][6 + 2, 3] = torch.nan
    save_file(tensors, run / "checkpoint-500" / "model.safetensors")
    table = track(run, tmp_path / "store", basis="folded", composition=True).store.table()
    qk = table[table["circuit"] == "QK"]
    assert qk["finite"].tolist() == [True, False, True, True]
    assert qk["frobenius_norm"].isna().tolist() == [False, True, False, False]
    assert qk["imbalance"].isna().tolist() == [True, True, False, False]
    assert table[table["circuit"] == "OV"]["imbalance"].notna().all()


def test_composition_scores_lie_beside_the_figures(tmp_path):
    run = write_run(tmp_path / "run", layers=3)
    track(run, tmp_path / "store")
    tracked = track(run, tmp_path / "store", composition=True)
    assert tracked.measured == list(STEPS)
    store = tracked.store
    assert store.composition_steps() == list(STEPS)
    assert track(run, tmp_path / "store", composition=True).kept == list(STEPS)
    assert track(run, tmp_path / "store").kept == list(STEPS)
    scores = store.composition(200)
    assert len(scores) == 3 * 3 * 2 * 2
    assert set(scores["chance"]) == {6**-0.5}
    layers = weights(200, layers=3)
    for row in scores.to_dict("records"):
        earlier = dense(layers[row["earlier_layer"]], row["earlier_head"])["OV"]
        later = dense(layers[row["later_layer"]], row["later_head"])
        reader = {"Q": later["QK"], "K": later["QK"].T, "V": later["OV"]}[row["kind"]]
        score = np.linalg.norm(reader @ earlier) / np.linalg.norm(reader) / np.linalg.norm(earlier)
        assert row["score"] == pytest.approx(score, rel=1e-6)
        assert row["earlier_layer"] < row["later_layer"]
    with pytest.raises(CallError, match="holds no composition scores of step 7; track with --composition"):
        store.composition(7)


def test_a_run_of_one_layer_has_no_composition(tmp_path):
    store = track(write_run(tmp_path / "run", [5], layers=1), tmp_path / "store", composition=True).store
    assert store.composition(5).empty
    assert track(tmp_path / "run", tmp_path / "store", composition=True).kept == [5]


def test_what_cannot_be_measured_so_leaves_no_store_behind(tmp_path):
    run = write_run(tmp_path / "run")
    wrong: dict[str, Any]
    for wrong, message in (
        ({"basis": "centred"}, "basis should be one of raw, folded, folded_centred, got 'centred'"),
        ({"rotary_offset": 3}, "has no layer with rotary positions, so W_QK is the same at every offset"),
    ):
        with pytest.raises(CallError, match=message):
            track(run, tmp_path / "store", **wrong)
    assert not (tmp_path / "store").exists()


def test_run_json_says_how_it_was_read_and_what_was_left_out(tmp_path):
    run = write_grouped_run(tmp_path / "run")
    (run / "checkpoint-700").mkdir()
    described = track(run, tmp_path / "store", basis="folded").store.description()
    assert "qwen3" in described["recognised"]
    assert described["left_out"] == {"checkpoint-700": "holds no weights (yet)"}
    assert described["skipped"] == {}
    assert described["settings"]["basis"] == "folded"
    with pytest.raises(CallError, match='was made with basis "folded", and this call has "raw"; give another --out'):
        track(run, tmp_path / "store")


def test_each_checkpoint_is_opened_once_for_a_measurement(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run", layers=3)
    opened = []

    def noted(checkpoint, options, files):
        opened.append(files)
        return open_run_checkpoint(checkpoint, options, files)

    monkeypatch.setattr(sweep, "open_run_checkpoint", noted)
    track(run, tmp_path / "store", composition=True)
    # The first and the reference once to see that all is well; then the reference, which is held, and each step.
    assert [files.weights.name for files in opened] == [
        f"step_{step:09d}.safetensors" for step in (0, 1000, 1000, 0, 10, 200)
    ]


def test_what_killed_writers_left_disturbs_nobody_and_goes(tmp_path):
    run = write_run(tmp_path / "run")
    store = track(run, tmp_path / "store").store
    old, young = (store.folder / f".step-000000010.parquet.{name}.partial" for name in ("old", "young"))
    for left in (old, young):
        left.write_bytes(b"PAR1")
    os.utime(old, (0, 0))
    with temporary_file(store.folder, "step-000000010.parquet", b"PAR1") as written:
        # Of a writer on this machine it is known at once whether it lives.
        killed = written.with_name(written.name.replace(".partial", "x.partial"))
        killed.write_bytes(b"PAR1")
        assert track(run, store.folder).kept == list(STEPS)
        assert not old.exists()
        assert not killed.exists()
        assert written.exists()
    assert not written.exists()
    # Another machine may be writing this one.
    assert young.exists()
    assert len(pd.read_parquet(store.steps_folder)) == len(store.table())


def test_files_are_written_outside_the_folder_that_others_read(tmp_path, monkeypatch):
    sources = []
    real = os.replace

    def replace(source, target):
        sources.append(Path(source))
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    track(write_run(tmp_path / "run"), tmp_path / "store")
    assert {source.parent for source in sources[len(STEPS) :]} == {tmp_path / "store"}


def test_the_rope_run_of_a_stranger(strangers, tmp_path):
    mapping = parse_mapping(
        {
            "prefix": "model_state_dict",
            "layout": "linear",
            "heads": 1,
            "rotary": True,
            "tensors": {role: f"W_{role}.weight" for role in "QKVO"},
            "scalars": {"val_loss": "val_loss"},
        },
        "rope_toy",
    )
    folder = strangers / "rope_toy"
    table = track(folder, tmp_path / "store", mapping=mapping).store.table()
    steps = list(table["step"].unique())
    assert steps == sorted(int(path.stem.removeprefix("model_step_")) for path in folder.iterdir())
    assert set(table[table["circuit"] == "QK"]["rotary_offset"]) == {0}
    for step in (1, 1000, steps[-1]):
        loaded = torch.load(folder / f"model_step_{step}.pt", map_location="cpu", weights_only=True)
        tensors = {name: tensor.double().numpy() for name, tensor in loaded["model_state_dict"].items()}
        # nn.Linear computes x W', so that score = (W_K x_key) . (W_Q x_query) and output = W_O W_V x.
        qk = tensors["W_K.weight"].T @ tensors["W_Q.weight"]
        ov = tensors["W_O.weight"] @ tensors["W_V.weight"]
        for circuit, C in (("QK", qk), ("OV", ov)):
            row = table[(table["step"] == step) & (table["circuit"] == circuit)].iloc[0]
            np.testing.assert_allclose(row["singular_values"], np.linalg.svd(C)[1][:2], rtol=1e-7)
            assert row["training_val_loss"] == loaded["val_loss"]
