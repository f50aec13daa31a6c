"""The parts in which maps are measured, and rollout over some of the layers."""

from typing import Any

import numpy as np
import pytest
import torch
from qkov.analyses.attention import Rollout
from qkov.probes import AttentionProbe
from qkov.probes.attention.measures import _parts

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
