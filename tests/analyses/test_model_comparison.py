"""The change of each head between two models: dense algebra in float64, and models that do not compare."""

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from qkov.analyses.trajectories import ModelComparison, compare_models
from qkov.analyses.trajectories.comparison.comparable import demand_comparable
from qkov.analyses.trajectories.comparison.files import write_changes
from qkov.analyses.trajectories.comparison.models import CHANGE_QUANTITIES
from qkov.analyses.trajectories.comparison.wording import changes_in_words, identical_in_words, share
from qkov.circuits import AttentionFacts, AttentionWeights, CallError, HeadNorm, Norm, Rotary, open_checkpoint

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
}


def llama(seed: int = 0, **more) -> Any:
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(SHAPE | more)))


def tuned_from(model: Any, scale: float, layers=(1, 2)) -> Any:
    """A copy of a model with changed attention in some layers."""
    tuned = llama()
    tuned.load_state_dict(model.state_dict())
    torch.manual_seed(7)
    with torch.no_grad():
        for layer in layers:
            for parameter in tuned.model.layers[layer].self_attn.parameters():
                parameter.add_(scale * torch.randn_like(parameter))
    return tuned


def dense(weights: AttentionWeights, head: int) -> dict[str, np.ndarray]:
    few = head // weights.group_size
    W_Q, W_K = (getattr(weights, name)[at].double().numpy() for name, at in (("W_Q", head), ("W_K", few)))
    W_O, W_V = (getattr(weights, name)[at].double().numpy() for name, at in (("W_O", head), ("W_V", few)))
    return {"QK": W_K @ W_Q.T, "OV": W_O.T @ W_V.T}


@pytest.mark.parametrize("scale", [0.3, 1e-3])
def test_every_change_is_dense_algebra_of_the_two_models(tmp_path, scale):
    # R15
    base = llama()
    base.save_pretrained(tmp_path / "base")
    tuned_from(base, scale).save_pretrained(tmp_path / "tuned")
    comparison = compare_models(tmp_path / "base", tmp_path / "tuned")
    layers = [list(open_checkpoint(tmp_path / name).layers()) for name in ("base", "tuned")]
    assert len(comparison.table) == 3 * 4 * 2
    assert comparison.identical == [("", 0)]
    for row in comparison.table.to_dict("records"):
        before, after = (dense(of_model[row["layer"]], row["head"])[row["circuit"]] for of_model in layers)
        change = after - before
        assert row["norm_before"] == pytest.approx(np.linalg.norm(before), rel=1e-9)
        assert row["norm_after"] == pytest.approx(np.linalg.norm(after), rel=1e-9)
        assert row["change_norm"] == pytest.approx(np.linalg.norm(change), rel=1e-8)
        assert row["relative_change"] == pytest.approx(np.linalg.norm(change) / np.linalg.norm(before), rel=1e-8)
        cosine = (after * before).sum() / np.linalg.norm(after) / np.linalg.norm(before)
        assert row["cosine"] == pytest.approx(cosine, rel=1e-9)
        s = np.linalg.svd(change)[1][:16]
        if row["layer"] == 0:
            assert not s.any()
            assert row["relative_change"] == 0
            assert all(math.isnan(row[f"change_{name}"]) for name in ("stable_rank", "effective_rank", "top_share"))
            continue
        w = s[s > 0] / s.sum()
        assert row["change_stable_rank"] == pytest.approx((s**2).sum() / s[0] ** 2, rel=1e-7)
        assert row["change_effective_rank"] == pytest.approx(np.exp(-(w * np.log(w)).sum()), rel=1e-6)
        assert row["change_top_share"] == pytest.approx(s[0] ** 2 / (s**2).sum(), rel=1e-7)
        assert row["key_value_head"] == row["head"] // 2


def test_a_change_of_rank_one_has_rank_one(tmp_path):
    base, tuned = llama(num_key_value_heads=4), llama(num_key_value_heads=4)
    with torch.no_grad():
        # One row of W_Q of head 2 is one dimension of its inner width.
        tuned.model.layers[1].self_attn.q_proj.weight[17] += 5 * torch.randn(32)
    table = compare_models(base, tuned).table.query("circuit == 'QK'").set_index(["layer", "head"])
    assert (table["relative_change"] > 0).sum() == 1
    row: Any = table.loc[1, 2]
    assert row["change_stable_rank"] == pytest.approx(1, abs=1e-9)
    assert row["change_effective_rank"] == pytest.approx(1, abs=1e-5)
    assert row["change_top_share"] == pytest.approx(1, abs=1e-9)


def test_a_scaled_circuit_changed_by_its_scale():
    base, tuned = llama(), llama()
    with torch.no_grad():
        for layer in tuned.model.layers:
            layer.self_attn.q_proj.weight.mul_(2)
            layer.self_attn.o_proj.weight.mul_(2)
    for row in compare_models(base, tuned).table.to_dict("records"):
        assert row["relative_change"] == pytest.approx(1.0, rel=1e-12)
        assert row["norm_after"] == pytest.approx(2 * row["norm_before"], rel=1e-12)
        assert row["cosine"] == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize(("basis", "offset"), [("folded", 0), ("raw", 3)])
def test_the_basis_and_the_offset_are_those_that_were_asked_for(basis, offset):
    base = llama()
    tuned = tuned_from(base, 0.2)
    with torch.no_grad():
        tuned.model.layers[0].input_layernorm.weight.mul_(3)
    table = compare_models(base, tuned, basis=basis, rotary_offset=offset).table
    from qkov.circuits import open_model

    one, other = (next(iter(open_model(model).layers())) for model in (base, tuned))
    before, after = (each.qk(basis, offset).dense()[1].numpy() for each in (one, other))
    row = table.query("layer == 0 and head == 1 and circuit == 'QK'").iloc[0]
    assert row["norm_after"] == pytest.approx(np.linalg.norm(after), rel=1e-9)
    assert row["change_norm"] == pytest.approx(np.linalg.norm(after - before), rel=1e-9, abs=1e-12)
    assert (row["basis"], row["rotary_offset"]) == (basis, offset)
    # The gain of the norm is part of the folded circuit and no part of the raw weights.
    assert (row["relative_change"] > 0) == (basis == "folded")


def test_the_same_model_did_not_change():
    comparison = compare_models(llama(), llama())
    assert comparison.sentences() == [
        "W_QK did not change in any of 12 heads.",
        "W_OV did not change in any of 12 heads.",
        "All 3 layers are identical to the bit, biases included.",
    ]


def test_sentences_follow_from_the_table():
    rows = [
        {
            "stack": "",
            "layer": layer,
            "head": head,
            "circuit": "QK",
            "relative_change": 0.41 if (layer, head) == (7, 3) else 0.02,
        }
        for layer in range(12)
        for head in range(12)
    ]
    table = pd.DataFrame(rows)
    expected = "The largest change of W_QK is in layer 7, head 3: 41 % of its norm; the median over 144 heads is 2.0 %."
    assert changes_in_words(table) == [expected]
    table.loc[0, "relative_change"] = math.nan
    assert changes_in_words(table) == [
        expected.replace("144", "143"),
        "The change of W_QK is unknown for 1 head, whose weights are zero in the base model, or NaN or infinite in "
        "either.",
    ]
    table["stack"] = "decoder"
    assert "in decoder layer 7, head 3" in changes_in_words(table)[0]
    table["relative_change"] = 0.0
    assert changes_in_words(table) == ["W_QK did not change in any of 144 heads."]
    comparison = ModelComparison(
        "a", "b", "raw", 0, table, [("decoder", 0), ("decoder", 1)], [("decoder", n) for n in range(12)]
    )
    assert comparison.sentences()[-1] == "Decoder layers 0 and 1 are identical to the bit, biases included."


@pytest.mark.parametrize(
    ("identical", "layers", "sentence"),
    [
        ([], [("", 0)], "No layer is identical to the bit."),
        ([("", 0)], [("", 0)], "The only layer is identical to the bit, biases included."),
        ([("", 0), ("", 1)], [("", 0), ("", 1)], "All 2 layers are identical to the bit, biases included."),
        ([("", 1)], [("", 0), ("", 1)], "Layer 1 is identical to the bit, biases included."),
    ],
)
def test_identical_layers_are_counted(identical, layers, sentence):
    assert identical_in_words(identical, layers) == [sentence]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.41, "41 %"),
        (0.02, "2.0 %"),
        (0.0, "0 %"),
        (1.5, "150 %"),
        (0.00123, "0.12 %"),
        (0.0995, "10 %"),
        (1.0, "100 %"),
        (1e-5, "0.0010 %"),
        (1e-9, "1.0e-07 %"),
    ],
)
def test_shares_have_two_digits(value, text):
    assert share(value) == text


def test_a_head_that_is_not_finite_is_unknown_and_the_rest_is_measured():
    base, tuned = llama(), llama(1)
    with torch.no_grad():
        tuned.model.layers[0].self_attn.q_proj.weight[0, 0] = math.nan
    comparison = compare_models(base, tuned)
    table = comparison.table.query("circuit == 'QK'")
    assert table["relative_change"].isna().sum() == 1
    assert any("unknown for 1 head," in sentence for sentence in comparison.sentences())


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"num_hidden_layers": 2}, "has layers 0 to 2 and .* has layers 0 and 1"),
        (
            {"num_attention_heads": 8, "head_dim": 4, "num_key_value_heads": 4},
            "the number of heads is 4 in .* and 8 in",
        ),
        ({"num_key_value_heads": 4}, "the number of key-value heads is 2 in .* and 4 in"),
        ({"hidden_size": 64, "head_dim": 8}, "the shape of W_QK is 32 x 32 in .* and 64 x 64 in"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
            "the frequency of rotary pair 1 is 0.1 in",
        ),
    ],
)
def test_models_that_do_not_compare_are_refused_with_what_differs(tmp_path, more, named):
    llama().save_pretrained(tmp_path / "base")
    llama(**more).save_pretrained(tmp_path / "tuned")
    with pytest.raises(CallError, match=named):
        compare_models(tmp_path / "base", tmp_path / "tuned")


def layer(**more) -> AttentionWeights:
    return AttentionWeights(0, W_Q=torch.ones(2, 8, 4), W_K=torch.ones(2, 8, 4), **more)


@pytest.mark.parametrize(
    ("one", "other", "named"),
    [
        ({}, {"stored_basis": "folded"}, "the stored basis is raw in A and folded in B"),
        ({}, {"norm": Norm("rms_norm")}, "the norm is none in A and rms_norm in B"),
        ({}, {"key_norm": HeadNorm("rms_norm")}, "the key norm is none in A and rms_norm in B"),
        ({}, {"W_V": torch.ones(2, 8, 4), "W_O": torch.ones(2, 4, 8)}, "the shape of W_OV is none in A and 8 x 8 in B"),
        ({}, {"facts": AttentionFacts(cross=True)}, "the kind of attention is self in A and cross in B"),
        (
            {"facts": AttentionFacts(positions="absolute")},
            {"facts": AttentionFacts(rotary=Rotary.of_base(4), positions="rotary")},
            "the kind of positions is absolute in A and rotary in B",
        ),
        (
            {"facts": AttentionFacts(rotary=Rotary.of_base(4))},
            {"facts": AttentionFacts(rotary=Rotary.of_base(2))},
            "the number of rotary dimensions is 4 in A and 2 in B",
        ),
        (
            {"facts": AttentionFacts(rotary=Rotary.of_base(4))},
            {"facts": AttentionFacts(rotary=Rotary.of_base(4, pairing="adjacent"))},
            "the pairing of rotary dimensions is halves in A and adjacent in B",
        ),
    ],
)
def test_facts_that_differ_are_named(one, other, named):
    with pytest.raises(CallError, match=f"layer 0 does not compare: {named}; qkov compare takes two models"):
        demand_comparable(layer(**one), layer(**other), "A", "B")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {"facts": AttentionFacts(unknown=frozenset({"norm"}))}),
        ({"norm": Norm("rms_norm")}, {"facts": AttentionFacts(unknown=frozenset({"norm"}))}),
        ({"facts": AttentionFacts(positions="rotary", rotary=Rotary.of_base(4))}, {"facts": AttentionFacts()}),
        (
            {"facts": AttentionFacts(rotary=Rotary.of_base(4))},
            {"facts": AttentionFacts(rotary=Rotary.of_base(4, 1e4 + 1e-3))},
        ),
        ({"facts": AttentionFacts(rotary=Rotary())}, {"facts": AttentionFacts(rotary=Rotary.of_base(4))}),
        ({"facts": AttentionFacts(rotary=Rotary.of_base(4))}, {"facts": AttentionFacts(rotary=Rotary())}),
    ],
)
def test_what_is_unknown_or_equal_up_to_rounding_does_not_contradict(one, other):
    demand_comparable(layer(**one), layer(**other), "A", "B")


def test_the_table_is_written_as_parquet_and_as_csv(tmp_path):
    base = llama()
    comparison = compare_models(base, tuned_from(base, 0.1))
    for name in ("changes.parquet", "changes.csv"):
        write_changes(comparison, tmp_path / name)
    written = (
        pd.read_parquet(tmp_path / "changes.parquet"),
        pd.read_csv(tmp_path / "changes.csv", keep_default_na=False),
    )
    for table in written:
        assert list(table.columns) == ["base", "tuned", *comparison.table.columns]
        assert set(CHANGE_QUANTITIES) < set(table.columns)
        assert list(table["norm_after"].astype(float)) == list(comparison.table["norm_after"])
    with pytest.raises(CallError, match=r"should end in .parquet or .csv"):
        write_changes(comparison, tmp_path / "changes.xlsx")
