"""What architecture a checkpoint is: by its config, by its names, as asked; and what is told without a config."""

from dataclasses import fields

import pytest
import torch

from .decoders import FAMILIES
from .family_proof import build, read, read_by_names

#: A fused W_QKV of nanoGPT's names: where all heads have keys of their own, names and shapes do not tell its order.
_TAKEN_FOR_OTHERS = {"gpt_bigcode"}
BY_NAMES = [family for family in FAMILIES if family.name not in _TAKEN_FOR_OTHERS]


@pytest.mark.parametrize("family", BY_NAMES, ids=lambda family: family.name)
def test_names_alone_tell_the_same_weights_and_nothing_that_is_false(family, tmp_path):
    model = build(family)
    told = read(model, tmp_path, family.stack)
    guessed = read_by_names(model, tmp_path, family.stack, heads=told[0].heads)
    assert [weights.layer for weights in guessed] == [weights.layer for weights in told]
    for one, other in zip(told, guessed, strict=True):
        for name in ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O"):
            assert _same(getattr(one, name), getattr(other, name)), name
        assert_true_or_unknown(one, other)


def assert_true_or_unknown(told, guessed):
    unknown = guessed.facts.unknown
    for each in fields(told.facts):
        truth, claim = getattr(told.facts, each.name), getattr(guessed.facts, each.name)
        if each.name == "rotary" and truth is not None and claim is not None:
            assert (claim.pairing, claim.frequencies) in {(truth.pairing, truth.frequencies), (truth.pairing, None)}
        elif each.name != "unknown":
            assert claim == truth or each.name in unknown, each.name
    for name in ("norm", "query_norm", "key_norm"):
        truth, claim = getattr(told, name), getattr(guessed, name)
        if claim is None:
            assert truth is None or "norm" in unknown, name
        else:
            assert _same(claim.gain, truth.gain)
            assert _same(claim.bias, truth.bias)
            assert claim.eps in (None, truth.eps)
            assert claim.kind == truth.kind or (claim.kind is None and "query_key_norm" in unknown)


def _same(one, other):
    return (one is None and other is None) or torch.equal(one, other)
