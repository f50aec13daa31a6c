"""A bound on scores: no input exceeds it, and inputs that are made for it attain it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from qkov.circuits import AttentionFacts, AttentionWeights, CallError, HeadNorm, Norm, Rotary, open_model, score_bound
from qkov.probes import AttentionProbe

HEADS, KEY_HEADS, D_MODEL, D_HEAD = 4, 2, 12, 6
ROTARY = Rotary.of_base(4, 100.0)
FACTS = AttentionFacts()


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def layer(kind: Any = "rms_norm", *, biases: bool = False, facts: AttentionFacts = FACTS) -> AttentionWeights:
    torch.manual_seed(0)
    bias = draw(D_MODEL) if kind == "layer_norm" else None
    return AttentionWeights(
        0,
        W_Q=draw(HEADS, D_MODEL, D_HEAD),
        W_K=draw(KEY_HEADS, D_MODEL, D_HEAD),
        b_Q=draw(HEADS, D_HEAD) if biases else None,
        b_K=draw(KEY_HEADS, D_HEAD) if biases else None,
        norm=Norm(kind, draw(D_MODEL), bias, 1e-6),
        facts=facts,
    )


def normalised(x: torch.Tensor, kind: str | None, gain: Any, bias: Any) -> torch.Tensor:
    x = x - x.mean(-1, keepdim=True) if kind == "layer_norm" else x
    x = x / x.square().mean(-1, keepdim=True).sqrt()
    x = x if gain is None else x * gain
    return x if bias is None else x + bias


def products(weights: AttentionWeights, x: torch.Tensor, y: torch.Tensor, offset: int = 0) -> torch.Tensor:
    """q . k of each head for pairs of inputs, written out: [head, pair]."""
    norm: Any = weights.norm
    q, k = (normalised(z, norm.kind, norm.gain, norm.bias) for z in (x, y))
    q = torch.einsum("pd,hde->hpe", q, weights.W_Q)
    k = torch.einsum("pd,hde->hpe", k, weights.W_K)
    if weights.b_Q is not None and weights.b_K is not None:
        q, k = q + weights.b_Q[:, None], k + weights.b_K[:, None]
    if weights.query_norm is not None and weights.key_norm is not None:
        q = normalised(q, weights.query_norm.kind, weights.query_norm.gain, weights.query_norm.bias)
        k = normalised(k, weights.key_norm.kind, weights.key_norm.gain, weights.key_norm.bias)
    k = k.repeat_interleave(HEADS // KEY_HEADS, 0)
    rotary = weights.facts.rotary
    if rotary is None:
        return (q * k).sum(-1)
    q = rotary.rotate(q, offset).clone()
    q[..., : rotary.dims] *= rotary.amplitude**2
    return (q * k).sum(-1)


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("rotary", [None, ROTARY, replace(ROTARY, amplitude=1.5)])
def test_no_input_exceeds_the_bound(kind, biases, rotary):
    weights = layer(kind, biases=biases, facts=AttentionFacts(rotary=rotary))
    x, y = draw(4000, D_MODEL), draw(4000, D_MODEL)
    for offset in (0, 1, 7, 100) if rotary else (0,):
        scores = products(weights, x, y, offset).abs().amax(dim=1) * D_HEAD**-0.5
        assert (scores <= score_bound(weights)).all()
        if rotary:
            assert (scores <= score_bound(weights, [offset])).all()
            assert (score_bound(weights, [offset]) <= score_bound(weights) * (1 + 1e-12)).all()


@pytest.mark.parametrize("rotary", [None, ROTARY])
def test_inputs_along_the_first_singular_vectors_attain_it(rotary):
    weights = layer(facts=AttentionFacts(rotary=rotary, score_scale=0.3))
    offset = 0 if rotary is None else 5
    bound = score_bound(weights, None if rotary is None else [offset])
    gain: Any = weights.norm and weights.norm.gain
    for head in range(HEADS):
        W_Q: Any = weights.W_Q
        W_K: Any = weights.W_K
        turned = W_Q[head] if rotary is None else rotary.rotate(W_Q[head], offset)
        left, _, right = torch.linalg.svd(gain[:, None] * W_K[head // 2] @ (gain[:, None] * turned).mT)
        # What RMSNorm makes of a vector of this direction is sqrt(d_model) times it.
        score = 0.3 * products(weights, right[:1], left[:, 0][None], offset)[head]
        torch.testing.assert_close(score.abs()[0], bound[head], rtol=1e-12, atol=0)


def test_biases_alone_attain_it():
    weights = replace(layer(biases=True), W_Q=torch.zeros(HEADS, D_MODEL, D_HEAD).double())
    weights = replace(weights, W_K=torch.zeros(KEY_HEADS, D_MODEL, D_HEAD).double())
    b_Q: Any = weights.b_Q
    b_K: Any = weights.b_K
    wanted = (b_Q * b_K.repeat_interleave(2, 0)).sum(-1).abs() * D_HEAD**-0.5
    torch.testing.assert_close(score_bound(weights), wanted, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm"])
def test_norms_of_queries_and_keys_bound_scores_whatever_the_weights(kind):
    weights = layer(facts=AttentionFacts(rotary=ROTARY))
    gains = [draw(D_HEAD), draw(D_HEAD)]
    biases = [draw(D_HEAD), draw(D_HEAD)] if kind == "layer_norm" else [None, None]
    norms = [HeadNorm(kind, gain, bias) for gain, bias in zip(gains, biases, strict=True)]
    weights = replace(weights, query_norm=norms[0], key_norm=norms[1])
    bound = score_bound(weights)
    scores = products(weights, draw(4000, D_MODEL), draw(4000, D_MODEL), 3).abs().amax(dim=1) * D_HEAD**-0.5
    assert (scores <= bound).all()
    W_Q: Any = weights.W_Q
    torch.testing.assert_close(score_bound(replace(weights, W_Q=100 * W_Q)), bound)
    if kind == "rms_norm":
        largest = gains[0].abs().max() * gains[1].abs().max() * D_HEAD**0.5
        torch.testing.assert_close(bound, largest.expand(HEADS), rtol=1e-12, atol=0)


def test_a_norm_over_all_heads_lets_one_head_take_everything():
    one, all_heads = HeadNorm("rms_norm", None, over="head"), HeadNorm("rms_norm", None, over="all")
    each = score_bound(replace(layer(), query_norm=one, key_norm=one))
    whole = score_bound(replace(layer(), query_norm=all_heads, key_norm=all_heads))
    torch.testing.assert_close(each, torch.full((HEADS,), D_HEAD**0.5).double())
    torch.testing.assert_close(whole, each * (HEADS * KEY_HEADS) ** 0.5)


def test_soft_caps_and_clipped_queries():
    bound = score_bound(layer())
    capped = score_bound(layer(facts=AttentionFacts(soft_cap=2.0)))
    torch.testing.assert_close(capped, 2 * (bound / 2).tanh(), rtol=1e-12, atol=0)
    clipped = score_bound(layer(facts=AttentionFacts(clip_qkv=0.1)))
    torch.testing.assert_close(clipped, torch.full((HEADS,), 0.01 * D_HEAD**0.5).double())


def test_without_a_norm_or_a_fact_there_is_no_bound():
    with pytest.raises(CallError, match="layer 0: no norm is in front of attention"):
        score_bound(replace(layer(), norm=None))
    with pytest.raises(CallError, match="layer 0: keys are read from another stream"):
        score_bound(layer(facts=AttentionFacts(cross=True)))
    with pytest.raises(CallError, match="layer 0: query_key_norm is not known"):
        score_bound(layer(facts=AttentionFacts(unknown=frozenset({"query_key_norm"}))))
    with pytest.raises(CallError, match="layer 0 has no W_Q"):
        score_bound(replace(layer(), W_Q=None))


@pytest.mark.parametrize("name", ["GPT2", "Llama", "Qwen3"])
def test_what_a_probe_measures_stays_below_it(name):
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 50}
    if name != "GPT2":
        sizes |= {"num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 32}
    config = getattr(transformers, f"{name}Config")(**sizes, bos_token_id=1, eos_token_id=1, pad_token_id=0)
    config._attn_implementation = "sdpa"
    model = getattr(transformers, "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
        with AttentionProbe(model, measures=["max_logit"]) as probe:
            model(torch.arange(40)[None] + 3)
    bounds = torch.cat([score_bound(weights) for weights in open_model(model).layers()])
    largest = torch.tensor(probe.table()["max_logit"].tolist(), dtype=torch.float64)
    assert (largest <= bounds).all()
    assert (largest > 0.02 * bounds).all()
