"""Value norms against vectors formed one by one, and against what a transformer's attention puts out."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from qkov.analyses.attention import Rollout, value_norms
from qkov.analyses.attention.measures.value_norms import TokenValues, ValueNorms
from qkov.circuits import AttentionFacts, AttentionWeights, CallError, open_model

from .toy_attention import ToyAttention, batch_of, kept_maps


def vectors(inputs, weights):
    """f_h(x_j) in numpy, [head, position, d_model], of one example."""
    formed = []
    for head in range(weights.heads):
        of = head // weights.group_size
        values = inputs @ weights.W_V[of].numpy()
        if weights.b_V is not None:
            values = values + weights.b_V[of].numpy()
        if weights.facts.clip_qkv is not None:
            values = np.clip(values, -weights.facts.clip_qkv, weights.facts.clip_qkv)
        formed.append(values @ weights.W_O[head].numpy())
    return np.array(formed)


def kept_inputs(model, batch):
    inputs = {}
    with torch.no_grad():
        model.logits(batch.tokens, batch.mask, inputs=inputs.__setitem__)
    return list(inputs.values())


SHAPES = {
    "as many values as heads": {},
    "grouped": {"heads": 4, "key_value_heads": 2},
    "one value for all": {"heads": 3, "key_value_heads": 1},
    "clipped": {"clip": 0.4},
    "d_head above d_model": {"d_model": 3, "d_head": 5},
}


def test_values_of_another_width_carry_what_torch_puts_out():
    torch.manual_seed(0)
    attention = torch.nn.MultiheadAttention(24, 3, kdim=20, vdim=28, batch_first=True).double()
    torch.nn.init.normal_(attention.in_proj_bias)
    (weights,) = open_model(attention).layers()
    read = torch.randn(2, 5, 28, dtype=torch.float64)
    # Whatever asks, a key that is alone has all the attention of each head.
    alone = read.flatten(0, 1)[:, None]
    with torch.no_grad():
        output, _ = attention(torch.zeros(10, 1, 24).double(), torch.zeros(10, 1, 20).double(), alone)
    carried = TokenValues.of(read, weights).over_heads(torch.ones(2, 3, 1, 5))
    expected = torch.linalg.vector_norm(output - attention.out_proj.bias.detach(), dim=-1)
    torch.testing.assert_close(carried.flatten(), expected.flatten(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shape", SHAPES)
def test_norms_are_those_of_vectors_formed_one_by_one(shape):
    model, batch = ToyAttention(**SHAPES[shape]), batch_of(5, 4)
    for weights, inputs, attention in zip(
        model.attention_weights(), kept_inputs(model, batch), kept_maps(model, batch), strict=True
    ):
        found = TokenValues.of(inputs, weights)
        for example in range(2):
            alpha, f = attention[example].numpy(), vectors(inputs[example].numpy(), weights)
            np.testing.assert_allclose(found.norms[example], np.linalg.norm(f, axis=-1), rtol=1e-10)
            carried = alpha[..., None] * f[:, None]
            by_head = np.linalg.norm(carried, axis=-1)
            np.testing.assert_allclose(found.per_head(attention)[example], by_head, rtol=1e-10)
            together = np.linalg.norm(carried.sum(axis=0), axis=-1)
            np.testing.assert_allclose(found.over_heads(attention)[example], together, rtol=1e-7, atol=1e-9)


def test_collapsed_circuits_are_their_factors_product():
    model, batch = ToyAttention(), batch_of(5)
    first, inputs = model.blocks[0], kept_inputs(model, batch)[0]
    factored = TokenValues.of(inputs, AttentionWeights(layer=0, W_V=first["W_V"], W_O=first["W_O"]))
    collapsed = TokenValues.of(inputs, AttentionWeights(layer=0, W_OV=(first["W_V"] @ first["W_O"]).mT))
    np.testing.assert_allclose(collapsed.products, factored.products, rtol=1e-10, atol=1e-12)


def test_heads_that_write_against_each_other_cancel_and_orthogonal_ones_add_as_vectors():
    eye = torch.eye(2, dtype=torch.float64)
    inputs = torch.tensor([[[3.0, 0.0], [0.0, 4.0]]], dtype=torch.float64)
    attention = torch.full((1, 2, 2, 2), 0.5, dtype=torch.float64)

    def over_heads(other):
        weights = AttentionWeights(layer=0, W_V=torch.stack([eye, eye]), W_O=torch.stack([eye, other]))
        return TokenValues.of(inputs, weights).over_heads(attention)[0].tolist()

    assert over_heads(-eye) == [[0, 0], [0, 0]]
    assert over_heads(eye) == [[3, 4], [3, 4]]
    turned = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
    np.testing.assert_allclose(over_heads(turned), [[3 / 2**0.5, 4 / 2**0.5]] * 2, rtol=1e-15)


def test_equal_values_in_one_layer_leave_attention_as_it_is():
    # All tokens the same: every value has one norm, and rows brought to sum 1 are the attention itself.
    model, batch = ToyAttention(layers=1, heads=1), batch_of(6)
    batch.tokens.fill_(4)
    found = value_norms(model, batch, Rollout(residual=0.0))
    np.testing.assert_allclose(found[0], kept_maps(model, batch)[0][0, 0, 5], rtol=1e-12)


@pytest.mark.parametrize("by_head", [False, True])
def test_the_row_is_the_dense_product_of_norms_brought_to_sum_one(by_head):
    model, batch = ToyAttention(heads=4, key_value_heads=2), batch_of(6, 4)
    found = value_norms(model, batch, Rollout(residual=0.25), by_head=by_head)
    inputs, maps = kept_inputs(model, batch), kept_maps(model, batch)
    for example, length in enumerate((6, 4)):
        product = np.eye(length)
        for weights, read, attention in zip(model.attention_weights(), inputs, maps, strict=True):
            alpha = attention[example, :, :length, :length].numpy()
            carried = alpha[..., None] * vectors(read[example, :length].numpy(), weights)[:, None]
            norms = np.linalg.norm(carried, axis=-1).mean(0) if by_head else np.linalg.norm(carried.sum(0), axis=-1)
            norms = norms / norms.sum(axis=-1, keepdims=True)
            product = (0.75 * norms + 0.25 * np.eye(length)) @ product
        np.testing.assert_allclose(found[example, :length], product[-1], rtol=1e-9)
        assert found[example, length:].count_nonzero() == 0


def test_heads_are_summed_before_the_norm_unless_they_are_asked_for_one_by_one():
    model, batch = ToyAttention(layers=1), batch_of(5)
    read, attention = kept_inputs(model, batch)[0], kept_maps(model, batch)[0]
    carried = attention[0].numpy()[..., None] * vectors(read[0].numpy(), model.attention_weights()[0])[:, None]
    kept: dict[int, torch.Tensor] = {}
    norms = ValueNorms(model.attention_weights(), kept.__setitem__)
    norms.inputs(0, read)
    norms.maps(0, attention)
    assert kept[0].shape == (1, 1, 5, 5)
    np.testing.assert_allclose(kept[0][0, 0], np.linalg.norm(carried.sum(0), axis=-1), rtol=1e-7)
    settings = Rollout(residual=0.25)
    assert torch.equal(value_norms(model, batch, settings), value_norms(model, batch, settings, by_head=False))


def test_weights_and_inputs_that_do_not_serve_are_refused():
    inputs = torch.ones(1, 2, 3)
    first = ToyAttention().attention_weights()[0]
    with pytest.raises(CallError, match="layer 3 has no W_OV"):
        TokenValues.of(inputs, AttentionWeights(layer=3, W_Q=first.W_Q, W_K=first.W_K))
    with pytest.raises(CallError, match="is cross-attention"):
        TokenValues.of(inputs, replace(first, facts=AttentionFacts(cross=True)))
    norms = ValueNorms([first], {}.__setitem__)
    with pytest.raises(CallError, match="map of layer 0 came before its inputs"):
        norms.maps(0, torch.ones(1, 4, 2, 2))
    with pytest.raises(CallError, match="weights for 1 layers, and inputs came for layer 1"):
        norms.inputs(1, inputs)
    with pytest.raises(CallError, match="use by_head=True"):
        value_norms(ToyAttention(), batch_of(3), Rollout(heads=(1.0, 1.0, 1.0, 1.0)))
