"""One contract for checkpoints, live models and layers in memory: what reads one of them reads all."""

from types import SimpleNamespace

import pytest
import torch
from qkov.analyses.trajectories import circuit_table
from qkov.circuits import AttentionSource, AttentionWeights, OpenHookedModel, inspect_checkpoint, open_checkpoint
from qkov.circuits import open_model as open_model_in_memory
from qkov.circuits.reading.saved_format import save_checkpoint
from qkov.circuits.weights.source import LayersInMemory

LAYERS, HEADS, D_MODEL, D_HEAD = 5, 2, 6, 3


def drawn() -> list[AttentionWeights]:
    generator = torch.Generator().manual_seed(0)

    def one(*shape: int) -> torch.Tensor:
        return torch.randn(HEADS, *shape, generator=generator)

    return [
        AttentionWeights(layer, one(D_MODEL, D_HEAD), one(D_MODEL, D_HEAD), one(D_MODEL, D_HEAD), one(D_HEAD, D_MODEL))
        for layer in range(LAYERS)
    ]


def checkpoint(tmp_path):
    save_checkpoint(tmp_path, 1, drawn(), {"loss": 2.0}, {})
    return open_checkpoint(tmp_path), {"loss": 2.0}


def hooked_model(_tmp_path):
    blocks = [
        SimpleNamespace(attn=SimpleNamespace(W_Q=weights.W_Q, W_K=weights.W_K, W_V=weights.W_V, W_O=weights.W_O))
        for weights in drawn()
    ]
    opened = open_model_in_memory(SimpleNamespace(cfg=SimpleNamespace(), blocks=blocks))
    assert isinstance(opened, OpenHookedModel)
    return opened, {}


def in_memory(_tmp_path):
    return LayersInMemory(drawn(), {"loss": 1.0}), {"loss": 1.0}


@pytest.fixture(params=[checkpoint, hooked_model, in_memory], ids=lambda kind: kind.__name__)
def opened(request, tmp_path):
    return request.param(tmp_path)


def test_every_source_keeps_the_contract(opened):
    source, scalars = opened
    assert isinstance(source, AttentionSource)
    assert source.layer_keys == [("", layer) for layer in range(LAYERS)]
    layers = list(source.layers())
    for weights, expected in zip(layers, drawn(), strict=True):
        for name in ("W_Q", "W_K", "W_V", "W_O"):
            assert torch.equal(getattr(weights, name), getattr(expected, name))
    assert source.scalars == scalars
    assert source.recognised
    assert source.address
    assert source.skipped == {}


def test_a_job_for_each_layer_gives_the_results_in_order(opened):
    source, _ = opened
    found = source.each_layer(lambda weights: (weights.layer, weights.qk().singular_values()))
    assert [layer for layer, _ in found] == list(range(LAYERS))
    for (_, values), weights in zip(found, source.layers(), strict=True):
        assert torch.equal(values, weights.qk().singular_values())


def test_every_source_is_inspected(opened):
    source, scalars = opened
    facts = inspect_checkpoint(source)
    assert facts["address"] == source.address
    assert facts["tensors"] == 4 * LAYERS
    assert facts["scalars"] == scalars
    assert facts["config"] is None
    (stack,) = facts["stacks"]
    assert [layer["layer"] for layer in stack["layers"]] == list(range(LAYERS))
    named = {} if isinstance(source, LayersInMemory) else {role: f"blocks.{{layer}}.attn.W_{role}" for role in "QKVO"}
    assert stack["tensors"] == named
    assert set(stack["layouts"]) == set(named)


def test_every_source_has_a_table(opened):
    table = circuit_table(opened[0])
    assert len(table) == 2 * HEADS * LAYERS
