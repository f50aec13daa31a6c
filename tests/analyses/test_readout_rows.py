"""Attention at the readout, by layer and head, against the maps themselves."""

import re

import numpy as np
import pytest
import torch
from qkov.analyses.attention import last_layer, layer_mean, readout_rows
from qkov.analyses.attention.measures.readout_rows import ReadoutRows
from qkov.circuits import CallError, QkovError

from .toy_attention import ToyAttention, batch_of, kept_maps


@pytest.mark.parametrize("causal", [True, False])
def test_every_head_s_row_is_the_map_s_at_the_readout(causal):
    model, batch = ToyAttention(causal=causal), batch_of(6, 3)
    rows, maps = readout_rows(model, batch), kept_maps(model, batch)
    assert rows.shape == (2, 3, 4, 6)
    for example, length in enumerate((6, 3)):
        at = length - 1 if causal else 0
        for layer, attention in enumerate(maps):
            np.testing.assert_allclose(rows[example, layer], attention[example, :, at], rtol=1e-12)
    np.testing.assert_allclose(last_layer(model, batch), rows[:, -1].mean(dim=1), rtol=1e-12)
    np.testing.assert_allclose(layer_mean(model, batch), rows.mean(dim=(1, 2)), rtol=1e-12)


def test_heads_fused_otherwise_are_brought_to_sum_one():
    model, batch = ToyAttention(), batch_of(6)
    rows = readout_rows(model, batch)[0]
    highest = rows.amax(dim=1) / rows.amax(dim=1).sum(dim=1, keepdim=True)
    np.testing.assert_allclose(layer_mean(model, batch, "max")[0], highest.mean(dim=0), rtol=1e-12)
    np.testing.assert_allclose(last_layer(model, batch, (0.0, 0.0, 2.0, 0.0))[0], rows[-1, 2], rtol=1e-12)


def test_attention_on_padding_does_not_count():
    mask = torch.tensor([[True, True, True, False]])
    rows = ReadoutRows(mask, torch.tensor([2]))
    rows(0, torch.tensor([0.25, 0.125, 0.125, 0.5]).expand(1, 1, 4, 4))
    assert rows.rows().tolist() == [[[[0.5, 0.25, 0.25, 0]]]]


def test_what_cannot_be_read_is_refused():
    mask = torch.tensor([[True, True, False]])
    with pytest.raises(CallError, match=re.escape("position 2 of example 0")):
        ReadoutRows(mask, torch.tensor([2]))
    rows = ReadoutRows(mask, torch.tensor([1]))
    with pytest.raises(CallError, match="there is no attention map"):
        rows.rows()
    attention = torch.ones(1, 2, 3, 3)
    attention[0, 1, 1] = torch.tensor([0.0, 0.0, 1.0])
    with pytest.raises(QkovError, match=re.escape("layer 4, head 1: attention at the readout of example 0")):
        rows(4, attention)


def test_heads_that_attend_apart_have_no_min():
    class Apart(ToyAttention):
        def logits(self, *_, **asked):
            asked["maps"](0, torch.tensor([[[[1.0, 0], [1, 0]], [[1, 0], [0, 1]]]]))
            return torch.zeros(1, 3)

    model, batch = Apart(layers=1, heads=2), batch_of(2)
    assert last_layer(model, batch).tolist() == [[0.5, 0.5]]
    with pytest.raises(
        QkovError, match=r"layer 0: the heads together attend to no token of example 0 .* fuse by mean or max"
    ):
        last_layer(model, batch, "min")
