"""Encoders and encoder-decoders of transformers: attention from the extracted weights alone is the model's own."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from qkov.circuits import QkovError, open_checkpoint
from qkov.circuits.weights.attention_weights import BIASES, NAMES

from .encoder_decoders import FAMILIES as ENCODER_DECODERS
from .encoders import CROSS_BERT, stream
from .encoders import FAMILIES as ENCODERS
from .family_proof import assert_same, build, prove, read, read_by_names, run, small

FAMILIES = [*ENCODERS, *ENCODER_DECODERS]
BY_NAME = {family.name: family for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_attention_from_the_weights_alone_is_the_model_s_own(family, tmp_path):
    prove(family, tmp_path)


def test_a_bert_that_reads_another_stream_crosses_to_it(tmp_path):
    model = build(CROSS_BERT)
    extracted = read(model, tmp_path, "cross")
    assert [weights.layer for weights in extracted] == [0, 1]
    seen = run(CROSS_BERT, model)
    for weights in extracted:
        assert_same(weights, CROSS_BERT, model, replace(seen[weights.layer], source=stream()[0]))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_names_and_shapes_alone_tell_the_same_weights(family, tmp_path):
    model = build(family)
    told = read(model, tmp_path, family.stack)
    # A tower of CLIP by itself does not tell which of the two it is.
    stack = "" if family.name.endswith("alone") else family.stack
    found = read_by_names(model, tmp_path, stack, told[0].heads)
    assert [weights.layer for weights in found] == list(family.layers)
    for one, other in zip(told, found, strict=True):
        for name in (*NAMES, *BIASES):
            torch.testing.assert_close(getattr(other, name), getattr(one, name), rtol=0, atol=0)


def test_names_that_two_families_share_leave_the_norm_open_until_one_is_asked_for(tmp_path):
    build(BY_NAME["MBart encoder"]).save_pretrained(tmp_path)
    (tmp_path / "config.json").unlink()
    found = {
        family: next(open_checkpoint(tmp_path, family=family, heads=4).layers()) for family in (None, "bart", "mbart")
    }
    assert "norm" in found[None].facts.unknown
    assert "norm" not in found["bart"].facts.unknown
    assert found["bart"].norm is None
    assert found["mbart"].norm is not None
    torch.testing.assert_close(found["bart"].qk("folded").dense(), found[None].qk().dense())


def test_heads_that_nothing_tells_are_asked_for(tmp_path):
    with pytest.raises(QkovError, match=r"is BERT.*nothing states its number of heads: give --heads"):
        read_by_names(build(BY_NAME["Bert"]), tmp_path, "")


@pytest.mark.parametrize(
    ("name", "role", "flipped"),
    [
        ("Bert", "Q", "(d_head head) d_model"),
        ("Bert", "Q", "d_model (head d_head)"),
        ("Bert", "K", "(d_head head) d_model"),
        ("Bert", "V", "d_model (head d_head)"),
        ("Bert", "O", "(head d_head) d_model"),
        ("Bert", "O", "d_model (d_head head)"),
        ("ModernBert", "QKV", "(head qkv d_head) d_model"),
        ("ModernBert", "QKV", "(qkv d_head head) d_model"),
        ("T5 decoder cross", "V", "(d_head head) d_model"),
    ],
)
def test_another_layout_is_another_attention(name, role, flipped, tmp_path):
    family = BY_NAME[name]
    model: Any = build(family)
    model.save_pretrained(tmp_path)
    (mapping,) = (each for each in open_checkpoint(tmp_path).stacks if each.stack == family.stack)
    seen = run(family, model)
    for layouts, agrees in ((mapping.layouts, True), (mapping.layouts | {role: flipped}, False)):
        weights = next(open_checkpoint(tmp_path, replace(mapping, layouts=layouts)).layers())
        if agrees:
            assert_same(weights, family, model, seen[0])
        else:
            with pytest.raises(AssertionError, match="not close"):
                assert_same(weights, family, model, seen[0])


@pytest.mark.parametrize(
    ("layers", "groups", "inner", "used_by"),
    [(4, 1, 1, 4), (4, 2, 1, 2), (2, 1, 2, 2), (4, 2, 3, 2), (3, 2, 1, 1)],
)
def test_layers_that_share_their_weights_are_measured_once(layers, groups, inner, used_by, tmp_path):
    shared = {"num_hidden_layers": layers, "num_hidden_groups": groups, "inner_group_num": inner}
    model: Any = transformers.AlbertModel(small("AlbertConfig", embedding_size=16, **shared))
    found = read(model, tmp_path, "")
    assert [weights.layer for weights in found] == list(range(groups * inner))
    for weights in found:
        group, of_group = divmod(weights.layer, inner)
        query = model.encoder.albert_layer_groups[group].albert_layers[of_group].attention.query.weight
        torch.testing.assert_close(weights.W_Q, query.detach().unflatten(0, (4, 12)).mT, rtol=0, atol=0)
        assert weights.facts.used_by == used_by
        # Three layers in two groups: one group serves two of them, and the config does not say so of each.
        assert ("used_by" in weights.facts.unknown) == bool(layers % groups)


@pytest.mark.parametrize("name", ["ViT", "Dinov2"])
def test_a_running_vision_model_calls_its_tensors_otherwise(name, tmp_path):
    model = build(BY_NAME[name])
    (saved := tmp_path / "saved").mkdir()
    told = read(model, saved, "")
    torch.save(model.state_dict(), tmp_path / "model.pt")
    (tmp_path / "config.json").write_text((saved / "config.json").read_text())
    found = list(open_checkpoint(tmp_path / "model.pt").layers())
    assert [weights.layer for weights in found] == [0, 1]
    for one, other in zip(told, found, strict=True):
        torch.testing.assert_close(other.qk("folded").dense(), one.qk("folded").dense(), rtol=0, atol=0)
        torch.testing.assert_close(other.ov("folded").dense(), one.ov("folded").dense(), rtol=0, atol=0)
