"""The table of one checkpoint: from its file, opened, and from the model in memory, against the weights by hand."""

import threading

import numpy as np
import pytest
import torch
from pandas.testing import assert_frame_equal
from qkov.analyses.trajectories import circuit_table, track
from qkov.circuits import CallError, measure, open_checkpoint, open_model
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 50}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **SIZES))


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    return folder


def test_figures_are_those_of_the_weights(model, folder):
    table = circuit_table(folder)
    assert len(table) == 2 * 4 * 2
    row = table[(table["layer"] == 1) & (table["head"] == 3) & (table["circuit"] == "QK")].iloc[0]
    attention = model.model.layers[1].self_attn
    W_Q, W_K = (part.weight.detach().double().numpy() for part in (attention.q_proj, attention.k_proj))
    d_head = len(W_Q) // 4
    product = W_K[d_head : 2 * d_head].T @ W_Q[3 * d_head :]
    values = np.linalg.svd(product, compute_uv=False)[:d_head]
    np.testing.assert_allclose(row["singular_values"], values, rtol=1e-9)
    assert (row["key_value_head"], row["rank_bound"], row["basis"]) == (1, d_head, "raw")


@pytest.mark.parametrize("basis", ["raw", "folded"])
def test_every_way_in_gives_the_same_table(model, folder, basis):
    table = circuit_table(folder, basis=basis, rotary_offset=3)
    for source in (str(folder), open_checkpoint(folder), open_model(model), model):
        assert_frame_equal(circuit_table(source, basis=basis, rotary_offset=3), table)
    assert set(table["rotary_offset"].dropna()) == {3}


def test_the_columns_are_those_of_a_run_but_for_what_only_a_run_has(folder, tmp_path):
    table = circuit_table(folder)
    of_run = track(folder, tmp_path / "store").store.table()
    assert set(table) < set(of_run)
    assert {"step", "source", "relative_speed", "effective_ratio"}.isdisjoint(table)
    assert_frame_equal(of_run[list(table)], table)


def test_layers_side_by_side_give_the_same_table_to_the_bit(model, folder, tmp_path):
    """Of one model and of a run, whose checkpoints are read beside each other."""
    alone, alone_of_run = circuit_table(folder), track(folder, tmp_path / "alone").store.table()
    assert torch.get_num_threads() == 1
    torch.set_num_threads(2)
    try:
        assert_frame_equal(circuit_table(folder), alone, check_exact=True)
        assert_frame_equal(circuit_table(model), alone, check_exact=True)
        together = track(folder, tmp_path / "together").store.table()
    finally:
        torch.set_num_threads(1)
    assert_frame_equal(together, alone_of_run, check_exact=True)


def test_layers_are_measured_side_by_side(folder, monkeypatch):
    together = threading.Barrier(2)

    def both(circuit, **options):
        # Nobody gets past the barrier alone.
        together.wait(60)
        return measure(circuit, **options)

    monkeypatch.setattr("qkov.analyses.trajectories.measuring.measure", both)
    torch.set_num_threads(2)
    try:
        assert len(circuit_table(folder)) == 2 * 4 * 2
    finally:
        torch.set_num_threads(1)


def test_wrong_calls(folder, tmp_path):
    with pytest.raises(CallError, match="basis should be one of"):
        circuit_table(folder, basis="centred")
    with pytest.raises(CallError, match="nothing here"):
        circuit_table(tmp_path / "nothing here")
    with pytest.raises(CallError, match=r"expected a torch\.nn\.Module"):
        circuit_table(3)


def test_a_basis_that_a_file_does_not_have_is_refused_with_the_name_of_the_file(tmp_path):
    """Weights whose norm is unknown and whose means over d_model are zero were folded, so that raw ones are gone."""
    torch.manual_seed(0)
    tensors = {}
    for side in "qkv":
        weight = torch.randn(32, 32)
        tensors[f"layers.0.self_attn.{side}_proj.weight"] = weight - weight.mean(dim=1, keepdim=True)
    tensors["layers.0.self_attn.o_proj.weight"] = torch.randn(32, 32)
    save_file(tensors, tmp_path / "folded.safetensors")
    with pytest.raises(CallError, match=r"folded\.safetensors: layer 0 was read .*cannot be converted to raw"):
        circuit_table(tmp_path / "folded.safetensors", heads=4)
