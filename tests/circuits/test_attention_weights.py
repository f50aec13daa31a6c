"""A layer's circuits, bases, offsets and groups, compared with dense algebra and gradient flow in float64."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from qkov.circuits import (
    AttentionFacts,
    AttentionWeights,
    CallError,
    Norm,
    Preconditioner,
    Rotary,
    agreement,
    exact_step,
    imbalance,
)

from .forward_pass import attend

D_MODEL, D_HEAD, TOKENS = 12, 4, 6
WEIGHTS = ("W_Q", "W_K", "W_V", "W_O")
#: Products over some tens of terms in float64.
assert_exact = partial(torch.testing.assert_close, rtol=1e-11, atol=1e-11)


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def layer(heads=4, key_value_heads=4, norm=None, **changes) -> Any:
    """A layer with weights and biases everywhere."""
    torch.manual_seed(0)
    return AttentionWeights(
        layer=0,
        W_Q=draw(heads, D_MODEL, D_HEAD),
        W_K=draw(key_value_heads, D_MODEL, D_HEAD),
        W_V=draw(key_value_heads, D_MODEL, D_HEAD),
        W_O=draw(heads, D_HEAD, D_MODEL),
        b_Q=draw(heads, D_HEAD),
        b_K=draw(key_value_heads, D_HEAD),
        b_V=draw(key_value_heads, D_HEAD),
        b_O=draw(D_MODEL),
        norm=norm,
        **changes,
    )


def layer_norm():
    return Norm("layer_norm", 1 + 0.3 * draw(D_MODEL), draw(D_MODEL), 1e-5)


def rms_norm():
    return Norm("rms_norm", 1 + 0.3 * draw(D_MODEL), None, 1e-6)


def test_circuits_are_the_products_of_each_query_head_with_the_keys_and_values_it_reads():
    weights = layer(heads=6, key_value_heads=2)
    qk, ov = weights.qk().dense(), weights.ov().dense()
    assert qk.shape == ov.shape == (6, D_MODEL, D_MODEL)
    for head in range(6):
        shared = head // 3
        assert_exact(qk[head], weights.W_K[shared] @ weights.W_Q[head].T)
        assert_exact(ov[head], (weights.W_V[shared] @ weights.W_O[head]).T)


def test_scores_and_outputs_of_a_head_follow_from_its_two_circuits():
    facts = AttentionFacts(score_scale=1.0, causal=True)
    weights: Any = replace(layer(facts=facts), b_Q=None, b_K=None, b_V=None, b_O=None)
    x = draw(TOKENS, D_MODEL)
    scores = torch.einsum("km,hmn,qn->hqk", x, weights.qk().dense(), x)
    hidden = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    pattern = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    output = torch.einsum("hqk,hmn,kn->qm", pattern, weights.ov().dense(), x)
    assert_exact(output, attend(weights, x).output)


@pytest.mark.parametrize("make_norm", [layer_norm, rms_norm])
@pytest.mark.parametrize("key_value_heads", [4, 2, 1])
@pytest.mark.parametrize("basis", ["folded", "folded_centred"])
def test_folding_leaves_attention_as_it_was(make_norm, key_value_heads, basis):
    weights = layer(key_value_heads=key_value_heads, norm=make_norm(), facts=AttentionFacts(causal=True))
    residual = 2 + draw(TOKENS, D_MODEL)
    before, after = attend(weights, residual), attend(weights.in_basis(basis), residual)
    assert_exact(after.pattern, before.pattern)
    written = before.output
    if basis == "folded_centred" and weights.norm.kind == "layer_norm":
        assert written.mean(-1).abs().max() > 0.1
        written = written - written.mean(-1, keepdim=True)
    assert_exact(after.output, written)


def test_folding_changes_the_circuits_as_the_gain_and_the_centring_say():
    weights = layer(norm=layer_norm())
    centring = torch.eye(D_MODEL, dtype=torch.float64) - 1 / D_MODEL
    read = centring @ weights.norm.gain.diag()
    qk = read @ weights.W_K @ weights.W_Q.mT @ read.T
    ov = (read @ weights.W_V @ weights.W_O).mT
    assert_exact(weights.qk("folded").dense(), qk)
    assert_exact(weights.ov("folded").dense(), ov)
    assert_exact(weights.qk("folded_centred").dense(), qk)
    assert_exact(weights.ov("folded_centred").dense(), centring @ ov)


def test_rms_norm_is_folded_without_centring_anything():
    weights = layer(norm=rms_norm())
    gain = weights.norm.gain.diag()
    for basis in ("folded", "folded_centred"):
        assert_exact(weights.qk(basis).dense(), gain @ weights.qk().dense() @ gain)
        assert_exact(weights.ov(basis).dense(), weights.ov().dense() @ gain)


def test_without_a_norm_in_front_the_folded_weights_are_the_raw_ones():
    weights = layer()
    for basis in ("folded", "folded_centred"):
        assert torch.equal(weights.ov(basis).dense(), weights.ov().dense())


def test_keys_and_values_of_cross_attention_are_not_folded_with_the_norm_of_the_other_stream():
    weights = layer(norm=layer_norm(), facts=AttentionFacts(cross=True))
    folded = weights.in_basis("folded")
    assert torch.equal(folded.W_K, weights.W_K)
    assert torch.equal(folded.W_V, weights.W_V)
    residual, source = draw(TOKENS, D_MODEL), draw(TOKENS + 2, D_MODEL)
    before, after = attend(weights, residual, source), attend(folded, residual, source)
    assert_exact(after.output, before.output)


def test_keys_and_values_of_another_width_do_not_take_the_norm():
    weights = layer(norm=layer_norm())
    other = replace(weights, W_K=draw(4, 5, D_HEAD), W_V=draw(4, 7, D_HEAD))
    assert other.qk().shape == (4, 5, D_MODEL)
    assert other.ov().shape == (4, D_MODEL, 7)
    with pytest.raises(CallError, match=r"got W_Q 12, W_K 5, W_V 7, the norm's gain 12; if keys .* cross = true"):
        other.in_basis("folded")
    folded = replace(other, facts=AttentionFacts(cross=True)).in_basis("folded")
    assert torch.equal(folded.W_K, other.W_K)
    assert torch.equal(folded.W_V, other.W_V)


def test_weights_read_folded_can_be_centred_and_not_unfolded():
    raw = layer(norm=layer_norm())
    folded = raw.in_basis("folded")
    assert_exact(folded.ov("folded_centred").dense(), raw.ov("folded_centred").dense())
    with pytest.raises(CallError, match="basis folded; they cannot be converted to raw"):
        folded.qk("raw")


def test_an_unknown_norm_is_not_guessed():
    weights = layer(facts=AttentionFacts(unknown=frozenset({"norm"})))
    with pytest.raises(CallError, match=r"the norm in front of layer 0 is not known.*config\.json.*--family"):
        weights.qk("folded")


def test_a_collapsed_circuit_cannot_be_folded():
    collapsed = AttentionWeights(3, W_QK=draw(1, D_MODEL, D_MODEL), norm=rms_norm())
    with pytest.raises(CallError, match="layer 3 holds collapsed circuits"):
        collapsed.qk("folded")


@pytest.mark.parametrize("key_value_heads", [4, 2])
@pytest.mark.parametrize("pairing", ["halves", "adjacent"])
def test_norms_at_many_offsets_are_those_of_the_circuits_at_each(key_value_heads, pairing):
    facts = AttentionFacts(rotary=Rotary.of_base(2, pairing=pairing))
    weights = layer(key_value_heads=key_value_heads, norm=layer_norm(), facts=facts)
    offsets = [0, 1, 7, -3]
    for basis in ("raw", "folded"):
        norms = weights.rotary_norms(offsets, basis)
        dense = [torch.linalg.matrix_norm(weights.qk(basis, offset).dense()) for offset in offsets]
        assert_exact(norms, torch.stack(dense))


def test_scores_of_rotary_positions_are_those_of_the_circuit_at_their_offset():
    facts = AttentionFacts(rotary=Rotary.of_base(D_HEAD), score_scale=1.0)
    weights: Any = replace(layer(heads=1, key_value_heads=1, facts=facts), b_Q=None, b_K=None)
    x = draw(TOKENS, D_MODEL)
    circuits = {offset: weights.qk(rotary_offset=offset).dense()[0] for offset in range(1 - TOKENS, TOKENS)}
    # Without an offset, all circuits of a layer are those of a query and a key at one position.
    assert_exact(weights.circuits()["QK"].dense()[0], circuits[0])
    scores = torch.stack([x[k] @ circuits[q - k] @ x[q] for q in range(TOKENS) for k in range(TOKENS)]).view(TOKENS, -1)
    assert_exact(scores.softmax(-1), attend(weights, x).pattern[0])


def test_an_offset_without_rotary_positions_is_refused():
    with pytest.raises(CallError, match="no rotary positions"):
        layer().qk(rotary_offset=2)
    with pytest.raises(CallError, match="known only at rotary offset 0"):
        AttentionWeights(0, W_QK=draw(1, D_MODEL, D_MODEL)).qk(rotary_offset=2)


def test_head_counts_that_do_not_divide_are_refused():
    with pytest.raises(CallError, match="W_Q has 4 heads and W_K has 3"):
        layer(heads=4, key_value_heads=3)


# Groups of heads under gradient flow. W_K and the W_Q of its group move at one rate: dW = -(gradient of the loss).


def gradients(weights, loss) -> dict[str, torch.Tensor]:
    """Return the gradients of a loss of both circuits of every query head with respect to the four weights."""
    parameters = {name: getattr(weights, name).clone().requires_grad_() for name in WEIGHTS}
    live: Any = replace(weights, **parameters)
    group = live.group_size
    qk = live.W_K.repeat_interleave(group, 0) @ live.W_Q.mT
    ov = (live.W_V.repeat_interleave(group, 0) @ live.W_O).mT
    grads = torch.autograd.grad(loss(qk, ov), [*parameters.values(), qk, ov])
    return dict(zip((*WEIGHTS, "QK", "OV"), grads, strict=True))


def some_loss(qk, ov):
    """Return an arbitrary loss whose gradient is neither small nor aligned."""
    torch.manual_seed(7)
    return (torch.tanh(qk @ draw(D_MODEL, 3)).sum() + (ov * draw(*ov.shape)).sum() + ov.pow(2).sum() / 5) / 10


def moved(weights, grads, step):
    return replace(weights, **{name: getattr(weights, name) - step * grads[name] for name in WEIGHTS})


def stacked(gradient, groups, side):
    """Join the gradients of each group's heads as the group's circuit joins them."""
    by_group = gradient.unflatten(0, (groups, -1))
    if side == "columns":
        return by_group.transpose(1, 2).flatten(2)
    return by_group.flatten(1, 2)


@pytest.mark.parametrize("key_value_heads", [4, 2, 1])
def test_gradient_flow_moves_the_circuit_of_a_group_by_its_exact_step(key_value_heads):
    weights = layer(key_value_heads=key_value_heads)
    grads = gradients(weights, some_loss)
    step = 1e-6
    after = moved(weights, grads, step)
    for name, side, form in (("QK", "columns", "qk_groups"), ("OV", "rows", "ov_groups")):
        circuit = getattr(weights, form)()
        velocity = (getattr(after, form)().dense() - circuit.dense()) / step
        predicted = -exact_step(circuit, stacked(grads[name], key_value_heads, side))
        # What is left over is of the second order, step * |gradient|^2.
        torch.testing.assert_close(velocity, predicted, rtol=1e-4, atol=1e-4)
        assert predicted.abs().max() > 0.1


def test_the_exact_step_of_single_heads_is_not_that_of_their_group():
    weights = layer(key_value_heads=2)
    grads = gradients(weights, some_loss)
    step = 1e-6
    velocity = (moved(weights, grads, step).qk().dense() - weights.qk().dense()) / step
    alone = -exact_step(weights.qk(), grads["QK"])
    assert (velocity - alone).abs().max() > 0.1


@pytest.mark.parametrize("key_value_heads", [4, 2, 1])
def test_gradient_flow_conserves_the_balance_of_a_group(key_value_heads):
    weights = layer(key_value_heads=key_value_heads)
    grads = gradients(weights, some_loss)

    def balances(of):
        W_Q, W_O = (w.unflatten(0, (key_value_heads, -1)) for w in (of.W_Q, of.W_O))
        keys = of.W_K.mT @ of.W_K - (W_Q.mT @ W_Q).sum(1)
        values = of.W_V.mT @ of.W_V - (W_O @ W_O.mT).sum(1)
        return torch.stack([keys, values])

    before = balances(weights)
    changes = [(balances(moved(weights, grads, step)) - before).abs().max() for step in (1e-2, 1e-3)]
    # Second order in the step, exactly: the balance is quadratic in the weights.
    torch.testing.assert_close(changes[0], 100 * changes[1], rtol=1e-6, atol=0.0)
    assert changes[0] > 1e-6


def test_imbalance_of_a_group_is_zero_where_its_keys_balance_the_sum_of_its_queries():
    weights = layer(heads=4, key_value_heads=2)
    queries = weights.W_Q.unflatten(0, (2, 2))
    total = (queries.mT @ queries).sum(1)
    # Any W_K with W_K'W_K equal to the sum: its Cholesky factor, turned into d_model dimensions.
    basis = torch.linalg.qr(draw(2, D_MODEL, D_HEAD)).Q
    balanced: Any = replace(weights, W_K=basis @ torch.linalg.cholesky(total).mT)
    circuit = balanced.qk_groups()
    assert imbalance(circuit).max() < 1e-13
    assert imbalance(balanced.qk()).min() > 0.05
    agreed = agreement(circuit)
    assert max(agreed.rows_difference.max(), agreed.columns_difference.max()) < 1e-12
    gradient = draw(*circuit.shape)
    assert_exact(Preconditioner(circuit).apply(gradient), exact_step(circuit, gradient))


def test_without_groups_the_circuits_of_groups_are_those_of_heads():
    weights = layer()
    assert torch.equal(weights.qk_groups().dense(), weights.qk().dense())
    assert torch.equal(weights.ov_groups().dense(), weights.ov().dense())


@pytest.mark.parametrize("missing", ["W_Q", "W_K", "W_V", "W_O"])
def test_a_circuit_takes_both_of_its_factors(missing):
    tensors = {name: torch.ones(2, 8, 4) for name in ("W_Q", "W_K", "W_V")} | {"W_O": torch.ones(2, 4, 8)}
    del tensors[missing]
    weights = AttentionWeights(3, **tensors)
    if missing in ("W_Q", "W_K"):
        with pytest.raises(CallError, match="layer 3 has no W_QK, which takes W_Q and W_K"):
            weights.qk()
        assert weights.ov().shape == (2, 8, 8)
    else:
        with pytest.raises(CallError, match="layer 3 has no W_OV, which takes W_V and W_O"):
            weights.ov()
        assert weights.qk().shape == (2, 8, 8)


def test_a_layer_is_made_of_named_tensors_alone():
    tensors = {"W_Q": draw(2, D_MODEL, D_HEAD), "b_Q": draw(2, D_HEAD)}
    weights = AttentionWeights.of(3, tensors)
    assert weights.layer == 3
    assert weights.W_Q is tensors["W_Q"]
    assert weights.b_Q is tensors["b_Q"]
    assert (weights.has_qk, weights.has_ov) == (False, False)
    with pytest.raises(CallError, match="layer 3: W_R is not the name of attention weights; expected W_Q"):
        AttentionWeights.of(3, tensors | {"W_R": draw(2, D_MODEL, D_HEAD)})


def test_a_layer_of_whole_circuits_has_no_groups():
    weights = AttentionWeights(0, W_QK=draw(3, D_MODEL, D_MODEL), W_OV=draw(3, D_MODEL, D_MODEL))
    assert weights.group_size == 1


def test_what_a_layer_adds_to_its_circuits_is_nothing_unless_it_is_stated():
    facts = AttentionFacts()
    assert not facts.sinks
    assert (facts.rotary, facts.score_scale, facts.soft_cap, facts.clip_qkv, facts.window) == (None,) * 5
