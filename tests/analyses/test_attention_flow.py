"""Attention flow against networkx, closed forms of one and two layers, and rollout."""

import networkx as nx
import numpy as np
import pytest
import torch
from qkov.analyses.attention import FusedMaps, Rollout, attention_flow, rollout
from qkov.analyses.attention.measures.attention_flow import flow_row

from .toy_attention import ToyAttention, batch_of, kept_maps


def dyadic_maps(layers, tokens, causal, seed):
    """Maps whose rows are multiples of 1/64 and sum to 1, many of their entries zero: flows of them are exact."""
    generator = np.random.default_rng(seed)
    maps = []
    for _ in range(layers):
        shares = [generator.dirichlet(np.full(query + 1 if causal else tokens, 0.4)) for query in range(tokens)]
        rows = [np.pad(generator.multinomial(64, share), (0, tokens - len(share))) for share in shares]
        maps.append(torch.tensor(np.array(rows) / 64))
    return maps


def networkx_flow(maps, readout, token):
    graph = nx.DiGraph()
    for layer, attention in enumerate(maps):
        for query, key in attention.nonzero().tolist():
            graph.add_edge((layer + 1, query), (layer, key), capacity=float(attention[query, key]))
    graph.add_node((0, token))
    return nx.maximum_flow_value(graph, (len(maps), readout), (0, token))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("layers", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(3))
def test_flows_are_networkx_s(causal, layers, seed):
    tokens = 6
    maps = dyadic_maps(layers, tokens, causal, seed)
    for readout in (2, tokens - 1):
        expected = [networkx_flow(maps, readout, token) for token in range(tokens)]
        assert flow_row(maps, readout).tolist() == expected


def test_one_layer_s_flow_is_its_attention_and_two_layers_have_a_closed_form():
    generator = torch.Generator().manual_seed(0)
    first, second = torch.rand(2, 7, 7, generator=generator, dtype=torch.float64).softmax(dim=-1)
    # Rounding of 7, and of 14, capacities.
    np.testing.assert_allclose(flow_row([first], 3), first[3], atol=1 / 2**31)
    paths = torch.minimum(second[3][:, None], first).sum(dim=0)
    np.testing.assert_allclose(flow_row([first, second], 3), paths, atol=14 / 2**31)


def test_identity_sends_all_to_the_readout():
    assert flow_row([torch.eye(4, dtype=torch.float64)] * 3, 2).tolist() == [0, 0, 1, 0]


@pytest.mark.parametrize("residual", [0.0, 0.5])
@pytest.mark.parametrize("causal", [True, False])
def test_flow_of_a_model_is_that_of_its_mixed_maps_and_at_least_its_rollout(residual, causal):
    model, batch, settings = ToyAttention(causal=causal), batch_of(6, 4), Rollout(residual=residual)
    found, rolled = attention_flow(model, batch, settings), rollout(model, batch, settings)
    maps = kept_maps(model, batch)
    for example, length in enumerate((6, 4)):
        readout = length - 1 if causal else 0
        mixed = [
            residual * torch.eye(length) + (1 - residual) * attention[example, :, :length, :length].mean(dim=0)
            for attention in maps
        ]
        flows = [networkx_flow(mixed, readout, token) for token in range(length)]
        edges = 2 * length + length**2
        np.testing.assert_allclose(found[example, :length], np.array(flows) / sum(flows), atol=edges / 2**30)
        # Rollout's own flows fit into the pipes.
        assert (np.array(flows) >= rolled[example, :length].numpy() - 1e-12).all()
        assert found[example, length:].count_nonzero() == 0
    np.testing.assert_allclose(found.sum(dim=1), 1, rtol=1e-12)


def test_a_long_deep_flow_stays_within_its_bound():
    torch.manual_seed(0)
    tokens, layers = 40, 6
    kept = FusedMaps(torch.ones(1, tokens, dtype=torch.bool), Rollout(residual=0.1))
    for layer in range(layers):
        kept(layer, (4 * torch.randn(1, 2, tokens, tokens, dtype=torch.float64)).softmax(dim=-1))
    mixed = kept.mixed(0)
    found = flow_row(mixed, 5)
    bound = ((layers - 2) * tokens**2 + 2 * tokens) / 2**31
    for token in (0, 5, 39):
        assert abs(float(found[token]) - networkx_flow(mixed, 5, token)) <= bound
