"""The parts in which maps are measured, and rollout over some of the layers."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from qkov.analyses.attention import Rollout
from qkov.analyses.attention.maps.columns import Columns
from qkov.probes import AttentionProbe
from qkov.probes.attention.measures import QueryMeasures, _parts
from qkov.probes.maps.sides import Sides
from torch import nn

from ..analyses.tiny_models import Tiny, gpt2
from .plain_measures import plain_rollout


@pytest.mark.parametrize(
    ("maps", "queries", "keys", "parts"),
    [
        # A sixth of the numbers: two of twelve maps, one of six, or two of twelve where there is one query.
        (12, 8, 8, 6),
        (6, 4, 1, 6),
        (12, 1, 4, 6),
        # Less than a row is no part, so each query is one.
        (1, 5, 4, 5),
        (2, 5, 4, 10),
        # A sixth would be 4/3 of 2^20 numbers, which are 1024 of 2048 queries.
        (4, 2048, 1024, 8),
    ],
)
def test_maps_are_measured_in_parts_of_a_sixth_and_of_no_more_than_2_20_numbers(maps, queries, keys, parts):
    seen = np.zeros((maps, queries), dtype=int)
    sizes = []
    for some_maps, some_queries in _parts(maps, queries, keys):
        seen[some_maps, some_queries] += 1
        sizes.append(seen[some_maps, some_queries].size * keys)
    assert (seen == 1).all()
    assert len(sizes) == parts
    assert max(sizes) <= max(keys, min(2**20, maps * queries * keys // 6))


@pytest.mark.parametrize(("window", "shares"), [(4, [1 / 3, 2 / 4]), (3, [1 / 3, 2 / 3]), (2, [1 / 2, 1 / 2])])
def test_the_chance_of_queries_that_follow_a_dropped_key_is_over_the_keys_that_they_can_see(window, shares):
    # The keys are the columns 2 to 5, and the queries the last two of them.
    distances = torch.arange(2)[:, None] + 2 - torch.arange(4)
    seen = ((distances >= 0) & (distances < window))[None]
    # No weight tells what is seen.
    attention = torch.eye(4, dtype=torch.float64)[[1, 1]].expand(1, 3, 2, 4)
    ones, readout = torch.ones(1, 4, dtype=torch.bool), torch.tensor([1])
    sides = Sides(
        keys=ones,
        queries=ones[:, :2],
        asked=ones[:, :2],
        relevant=torch.tensor([[False, True, False, True]]),
        relevant_tokens=torch.tensor([2]),
        has_relevant=ones[:, :2],
        tokens=torch.tensor([6]),
        readout=readout,
        readable=ones[:, 0],
        columns=Columns(4, 2),
        positions=None,
        seen=seen,
        padded=False,
    )
    measured = QueryMeasures(attention, sides, ("relevant",), None)
    np.testing.assert_allclose(measured.values["chance"][0], [shares] * 3, atol=1e-12)
    np.testing.assert_allclose(measured.at("chance", sides), [[shares[1]] * 3], atol=1e-12)
    unseen = QueryMeasures(attention, replace(sides, seen=None), ("relevant",), None)
    assert "chance" not in unseen.values
    assert unseen.unknown == {"chance": "the layer was called with no mask that says which keys a query can see"}


class UpTo(nn.Module):
    """Runs as many of its layers as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2))

    def forward(self, vectors: torch.Tensor, depth: int) -> torch.Tensor:
        for layer in list(self.layers)[:depth]:
            vectors = vectors + layer(vectors, vectors, vectors)[0]
        return vectors


def test_rollout_is_left_out_where_a_call_does_not_run_every_layer():
    torch.manual_seed(0)
    model, vectors = UpTo().eval(), torch.randn(3, 5, 8)
    with torch.no_grad(), AttentionProbe(model, relevant=torch.arange(5) < 2, maps="all") as probe:
        model(vectors, 2)
        model(vectors, 1)
    maps = [torch.stack([probe.maps[layer, head][0] for head in range(2)], dim=1) for layer in range(2)]
    wanted = plain_rollout(maps, torch.ones(3, 5, dtype=torch.bool), [4, 4, 4])[:, :2].sum(dim=1)
    found = probe.examples()["rollout"].to_numpy()
    np.testing.assert_allclose(found[:3], wanted, atol=1e-6)
    assert np.isnan(found[3:]).all()


@pytest.mark.parametrize(("causal", "chance"), [(True, [0.0, 0.5, 2 / 3]), (False, [0.4, 0.4, 0.4])])
def test_the_chance_of_rollout_is_over_what_one_layer_sees(causal, chance):
    torch.manual_seed(0)
    model, vectors = nn.MultiheadAttention(8, 2, batch_first=True).eval(), torch.randn(3, 5, 8)
    mask = torch.ones(5, 5).triu(1).bool() if causal else None
    relevant = torch.tensor([0, 1, 1, 0, 0])
    with torch.no_grad(), AttentionProbe(model, relevant=relevant, readout=torch.tensor([0, 1, 2])) as probe:
        model(vectors, vectors, vectors, attn_mask=mask)
    np.testing.assert_allclose(probe.examples()["chance"], chance, atol=1e-6)


@pytest.mark.parametrize("layers", [range(1), range(1, 2), range(2), None])
def test_rollout_takes_the_layers_that_the_settings_name(layers):
    model: Any = Tiny("GPT2LMHeadModel", lambda: gpt2(attn_implementation="eager"), "").build()
    model.set_attn_implementation("eager")
    ids = torch.randint(8, 50, (3, 9), generator=torch.Generator().manual_seed(1))
    relevant = torch.arange(9) % 3 == 1
    settings = Rollout(residual=0.2, layers=layers)
    with torch.no_grad(), AttentionProbe(model, relevant=relevant, rollout=settings, rollout_rows=True) as probe:
        model(ids)
    with torch.no_grad():
        maps = list(model(ids, output_attentions=True).attentions)
    taken = [maps[layer] for layer in (layers or range(2))]
    wanted = plain_rollout(taken, torch.ones(3, 9, dtype=torch.bool), [8, 8, 8], residual=0.2)
    torch.testing.assert_close(torch.stack(probe.rollout_rows).double(), wanted, rtol=0, atol=1e-6)
    np.testing.assert_allclose(probe.examples()["rollout"], wanted[:, relevant].sum(dim=1), atol=1e-6)
