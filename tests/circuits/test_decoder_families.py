"""Decoders of transformers: attention from the extracted weights alone is the model's own, and not if one flips."""

from dataclasses import replace

import pytest
from qkov.circuits import open_checkpoint

from .decoders import BY_NAME, FAMILIES
from .family_proof import assert_same, build, prove, read, run


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_attention_from_the_weights_alone_is_the_model_s_own(family, tmp_path):
    prove(family, tmp_path)


@pytest.mark.parametrize(
    ("name", "role", "flipped"),
    [
        ("gpt2", "O", "d_model (head d_head)"),
        ("gpt2", "QKV", "d_model (head qkv d_head)"),
        ("gpt_bigcode", "QKV", "(qkv head d_head) d_model"),
        ("gpt_neox", "QKV", "(qkv head d_head) d_model"),
        ("falcon new, two norms", "QKV", "(qkv head d_head) d_model"),
        ("phi3", "QKV", "(head qkv d_head) d_model"),
        ("llama", "Q", "(d_head head) d_model"),
        ("llama", "K", "(d_head head) d_model"),
        ("llama", "V", "(d_head head) d_model"),
        ("llama", "O", "(head d_head) d_model"),
    ],
)
def test_a_flipped_layout_is_not_the_model_s(name, role, flipped, tmp_path):
    family = BY_NAME[name]
    model = build(family)
    model.save_pretrained(tmp_path)
    (mapping,) = open_checkpoint(tmp_path).stacks
    changed = replace(mapping, layouts=mapping.layouts | {role: flipped})
    assert_differs(open_checkpoint(tmp_path, changed).layers(), family, model)


def _facts(**changes):
    return lambda weights: replace(weights, facts=replace(weights.facts, **changes))


def _turned(**changes):
    return lambda weights: _facts(rotary=replace(weights.facts.rotary, **changes))(weights)


def _gain_as_stored(weights):
    return replace(weights, norm=replace(weights.norm, gain=weights.norm.gain - 1))


def _other_kind(weights):
    return replace(weights, norm=replace(weights.norm, kind="layer_norm"))


def _norm_over_heads(weights):
    gain = weights.query_norm.gain.reshape(weights.heads, -1)
    return replace(weights, query_norm=replace(weights.query_norm, over="head", gain=gain))


def _other_group(weights):
    return replace(weights, W_K=weights.W_K.flip(0))


@pytest.mark.parametrize(
    ("name", "flip"),
    [
        ("llama", _turned(pairing="adjacent")),
        ("llama", _other_group),
        ("llama", _other_kind),
        ("gptj", _turned(pairing="halves")),
        ("gpt_neox", _turned(pairing="adjacent")),
        ("gpt2 scores divided by layer", _facts(score_scale=None)),
        ("gpt_neo", _facts(score_scale=None)),
        ("gpt_neo", _facts(window=None)),
        ("bloom 4 heads", _facts(positions="none")),
        ("mpt clipped", _facts(clip_qkv=None)),
        ("gemma", _gain_as_stored),
        ("gemma2", _facts(soft_cap=None)),
        ("gemma2", _facts(window=6)),
        ("gemma2", _facts(score_scale=None)),
        ("olmo2", _norm_over_heads),
        ("qwen3", lambda weights: replace(weights, query_norm=None)),
        ("smollm3", _facts(rotary=None)),
        ("gpt_oss", _facts(sinks=False)),
        ("phi3 longrope", _turned(amplitude=1.0)),
    ],
)
def test_a_flipped_fact_is_not_the_model_s(name, flip, tmp_path):
    family = BY_NAME[name]
    model = build(family)
    assert_differs([flip(weights) for weights in read(model, tmp_path, family.stack)], family, model)


def assert_differs(layers, family, model):
    seen = run(family, model)
    with pytest.raises(AssertionError):  # noqa: PT012 - not every layer has what was flipped
        for weights in layers:
            assert_same(weights, family, model, seen[weights.layer])


@pytest.mark.parametrize(("name", "kind"), [("jamba", "Mamba"), ("bamba", "Mamba")])
def test_layers_without_attention_are_named_and_skipped(name, kind, tmp_path):
    build(BY_NAME[name]).save_pretrained(tmp_path)
    opened = open_checkpoint(tmp_path)
    assert opened.layer_keys == [("", 1)]
    assert list(opened.skipped) == [f"layer 0 ({kind})"]


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "olmo2", "olmoe", "stablelm query-key norm", "phi query-key norm"])
def test_models_that_normalise_queries_and_keys_are_flagged(name, tmp_path):
    family = BY_NAME[name]
    for weights in read(build(family), tmp_path, family.stack):
        assert weights.query_norm is not None
        assert weights.key_norm is not None
