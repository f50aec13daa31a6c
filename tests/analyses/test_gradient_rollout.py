"""Gradient rollout against a dense loop over retained gradients, finite differences and hand cases."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from qkov.analyses.attention import Batch, gradient_rollout
from qkov.analyses.attention.measures.gradient_rollout import weighted_maps
from qkov.circuits import CallError, QkovError

from .toy_attention import PAD, ToyAttention, batch_of


def labelled(batch, *labels):
    return Batch.of([replace(example, label=label) for example, label in zip(batch.examples, labels, strict=True)], PAD)


def dense_relevance(model, example, chosen, normalised):
    """R of one example by itself, its layers multiplied out, through retained gradients."""
    batch = Batch.of([example], PAD)
    maps = []

    def retain(layer, attention):
        attention.retain_grad()
        maps.append(attention)

    embedded = model.embed(batch.tokens).clone().requires_grad_()
    log_probability = model.logits(batch.tokens, batch.mask, maps=retain, embedded=embedded)[0].log_softmax(dim=0)
    (log_probability.max() if chosen == "predicted" else log_probability[example.label]).backward()
    length = len(example.tokens)
    relevance, own = np.eye(length), np.eye(length)
    for attention in maps:
        weighted = (attention * attention.grad).clamp(min=0)[0].mean(dim=0).detach().numpy()
        step = np.eye(length) + weighted
        scale = step.sum(axis=1, keepdims=True) if normalised else 1
        relevance, own = step / scale @ relevance, np.eye(length) / scale @ own
    row = (relevance - own)[int(model.readout(batch.mask)[0])]
    return row / row.sum()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("target", ["predicted", "label"])
@pytest.mark.parametrize("normalised", [False, True])
def test_rows_are_those_of_a_dense_loop_over_each_example(causal, target, normalised):
    model = ToyAttention(causal=causal)
    batch = labelled(batch_of(7, 3, 5), 0, 2, 1)
    found = gradient_rollout(model, batch, target, normalised=normalised)
    assert found.dtype == torch.float64
    for row, example in zip(found, batch.examples, strict=True):
        expected = dense_relevance(model, example, target, normalised)
        # The identity's 1 cancels in the dense loop.
        np.testing.assert_allclose(row[: len(expected)], expected, rtol=1e-8, atol=1e-12)
        assert row[len(expected) :].count_nonzero() == 0


class Steered(ToyAttention):
    """One layer of one head whose map is given, and a class's log-odds linear in it."""

    def __init__(self, attention, values):
        super().__init__(layers=1, heads=1)
        self.attention, self.values = torch.tensor([[attention]], dtype=torch.float64), values

    def logits(self, *_, **asked):
        attention = self.attention + 0 * asked["embedded"].sum()
        asked["maps"](0, attention)
        odds = (attention[0, 0, -1] * torch.tensor(self.values, dtype=torch.float64)).sum()
        return torch.stack([odds, -odds])[None]


def test_one_layer_by_hand():
    # log p = log sigmoid(2 z), z = sum a_j v_j; its gradient for a_j is 2 (1 - p) v_j: relevance goes as (a_j v_j)^+.
    model = Steered([[0.5, 0.5, 0], [1, 0, 0], [0.25, 0.25, 0.5]], [4.0, -3.0, 1.0])
    batch = labelled(batch_of(3), 0)
    assert gradient_rollout(model, batch, "label")[0].tolist() == pytest.approx([1 / 1.5, 0, 0.5 / 1.5], rel=1e-14)
    z = 4 * 0.25 - 3 * 0.25 + 0.5
    expected = 2 / (1 + np.exp(2 * z)) * np.array([1, 0, 0.5])
    np.testing.assert_allclose(weighted_maps(model, batch, "label")[0][0, 2], expected, rtol=1e-14)
    assert gradient_rollout(model, labelled(batch, 1), "label")[0].tolist() == [0, 1, 0]


def test_a_sure_prediction_keeps_its_ranking_though_its_gradient_is_tiny():
    model = Steered([[1, 0], [0.5, 0.5]], [30.0, 10.0])
    batch = labelled(batch_of(2), 0)
    assert weighted_maps(model, batch)[0].sum() < 1e-14
    assert gradient_rollout(model, batch)[0].tolist() == pytest.approx([0.75, 0.25], rel=1e-12)


def test_where_nothing_speaks_for_the_target_the_row_is_zero():
    model = Steered([[1, 0], [0.5, 0.5]], [-1.0, -2.0])
    assert gradient_rollout(model, labelled(batch_of(2), 0), "label").tolist() == [[0, 0]]


def test_frozen_weights_change_nothing_and_get_no_gradient():
    model, batch = ToyAttention(), batch_of(5)
    expected = gradient_rollout(model, batch)
    model.unembedding.requires_grad_()
    with torch.no_grad():
        assert torch.equal(gradient_rollout(model, batch), expected)
    assert model.unembedding.grad is None


def test_what_has_no_gradient_or_no_label_is_refused():
    class GivesOthers(ToyAttention):
        def __init__(self, given):
            super().__init__()
            self.given = given

        def logits(self, *batch, **asked):
            maps = asked.pop("maps")
            return super().logits(*batch, **asked, maps=lambda layer, map_: maps(layer, self.given(map_)))

    with pytest.raises(QkovError, match="map of layer 0 of toy carries no gradient"):
        gradient_rollout(GivesOthers(torch.detach), batch_of(3))
    with pytest.raises(QkovError, match="prediction of toy does not depend on the map of layer 0 that it gave"):
        gradient_rollout(GivesOthers(torch.clone), batch_of(3))
    for label, said in ((None, "has no label"), (3, "has the label 3; expected one of its 3 alternatives, from 0")):
        with pytest.raises(CallError, match=f"example 0 {said}"):
            gradient_rollout(ToyAttention(), Batch.of([replace(batch_of(3).examples[0], label=label)], PAD), "label")
