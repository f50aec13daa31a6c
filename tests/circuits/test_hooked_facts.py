"""Facts from the config of a TransformerLens model, compared with the closed forms of what its attention does."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from qkov.circuits.live.hooked_facts import facts_of, head_norms_of, norm_of

D_HEAD, BASE = 8, 100.0
FREQUENCIES = [BASE ** (-2 * pair / D_HEAD) for pair in range(D_HEAD // 2)]


def config(**changes: Any) -> SimpleNamespace:
    stated = {
        "positional_embedding_type": "rotary",
        "attention_dir": "causal",
        "normalization_type": "RMS",
        "attn_scale": -1.0,
        "rotary_base": BASE,
        "rotary_dim": None,
        "eps": 1e-6,
        "window_size": 5,
    }
    return SimpleNamespace(**(stated | changes))


def facts(layer: int = 0, local: bool = False, **changes: Any) -> Any:
    attention = SimpleNamespace(attn_type="local" if local else "global")
    return facts_of(config(**changes), attention, "", layer, D_HEAD)


def test_a_scale_by_the_inverse_layer_divides_by_the_number_of_the_layer():
    assert facts(layer=0, scale_attn_by_inverse_layer_idx=True).score_scale == pytest.approx(D_HEAD**-0.5)
    assert facts(layer=3, scale_attn_by_inverse_layer_idx=True).score_scale == pytest.approx(D_HEAD**-0.5 / 4)
    assert facts(layer=3).score_scale == pytest.approx(D_HEAD**-0.5)


def test_a_config_that_states_no_scale_has_the_usual_one():
    stated = config()
    del stated.attn_scale
    assert facts_of(stated, SimpleNamespace(attn_type="global"), "", 0, D_HEAD).score_scale == pytest.approx(
        D_HEAD**-0.5
    )


def test_a_scale_that_is_not_used_is_one():
    assert facts(use_attn_scale=False, attn_scale=3.0).score_scale == 1
    assert facts(attn_scale=0.5).score_scale == 2
    native = facts(use_attn_scale=False, attn_scale=3.0, architecture="TransformerLensNative")
    assert native.score_scale == pytest.approx(D_HEAD**-0.5)


@pytest.mark.parametrize(("stated", "cap"), [(0.5, 0.5), (30.0, 30.0), (-1.0, None), (0.0, None), (None, None)])
def test_only_a_positive_soft_cap_caps(stated, cap):
    assert facts(attn_scores_soft_cap=stated).soft_cap == cap


def test_local_layers_have_a_window_a_base_and_no_scaling_of_their_own():
    changes = {"rotary_base_local": 16.0, "rotary_scaling_factor": 4.0}
    local, other = facts(local=True, **changes), facts(local=False, **changes)
    assert (local.window, other.window) == (5, None)
    assert local.rotary.frequencies == pytest.approx([16.0 ** (-2 * pair / D_HEAD) for pair in range(D_HEAD // 2)])
    assert other.rotary.frequencies == pytest.approx([frequency / 4 for frequency in FREQUENCIES])


def test_frequencies_by_parts_are_those_of_the_llama_3_form():
    """Long waves are divided by the factor, short ones stay, and those between are blended in the number of turns."""
    length, low, high, factor = 64, 1.0, 4.0, 8.0
    rotary = facts(
        use_NTK_by_parts_rope=True,
        NTK_by_parts_factor=factor,
        NTK_by_parts_low_freq_factor=low,
        NTK_by_parts_high_freq_factor=high,
        NTK_original_ctx_len=length,
    ).rotary
    wanted = []
    for frequency in FREQUENCIES:
        turns = length * frequency / (2 * math.pi)
        part = (turns - low) / (high - low)
        kept = 1 if turns > high else 0 if turns < low else part
        wanted.append(kept * frequency + (1 - kept) * frequency / factor)
    assert {0 < value / frequency < 1 for value, frequency in zip(wanted, FREQUENCIES, strict=True)} == {True, False}
    assert rotary.frequencies == pytest.approx(wanted)


@pytest.mark.parametrize("global_only", [True, False])
@pytest.mark.parametrize("local", [True, False])
def test_yarn_may_be_for_global_layers_only(global_only, local):
    changes: dict[str, Any] = {
        "use_yarn_rope": True,
        "yarn_global_attn_only": global_only,
        "yarn_factor": 4.0,
        "yarn_attention_factor": 1.25,
        "yarn_beta_fast": 32.0,
        "yarn_beta_slow": 1.0,
        "yarn_original_max_position_embeddings": 64,
        "yarn_truncate": True,
        "n_ctx": 256,
    }
    rotary = facts(local=local, **changes).rotary
    if global_only and local:
        assert (rotary.amplitude, list(rotary.frequencies)) == (1, pytest.approx(FREQUENCIES))
    else:
        assert rotary.amplitude == 1.25
        # The slowest wave makes less than one turn in 64 tokens, so it is divided by the whole factor.
        assert rotary.frequencies[-1] == pytest.approx(FREQUENCIES[-1] / 4)


@pytest.mark.parametrize("kind", ["dynamic", "ntk"])
def test_frequencies_that_depend_on_the_input_are_unknown(kind):
    assert facts(rope_scaling={"rope_type": kind, "factor": 2.0}).rotary.frequencies is None


@pytest.mark.parametrize(
    ("direction", "stack", "causal"),
    [
        ("causal", "", True),
        ("bidirectional", "", False),
        ("bidirectional", "decoder", True),
        ("causal", "decoder cross", False),
        (None, "", None),
    ],
)
def test_what_a_query_sees_depends_on_the_stack_and_the_direction(direction, stack, causal):
    seen = facts_of(config(attention_dir=direction), SimpleNamespace(), stack, 0, D_HEAD)
    assert (seen.causal, seen.cross) == (causal, stack == "decoder cross")
    assert seen.positions == (None if stack == "decoder cross" else "rotary")


def test_what_the_config_does_not_state_is_unknown():
    stated = config()
    del stated.positional_embedding_type, stated.attention_dir
    seen = facts_of(stated, SimpleNamespace(), "", 0, D_HEAD)
    assert seen.unknown == {"positions", "rotary", "causal"}
    assert (seen.rotary, seen.positions, seen.causal) == (None, None, None)
    assert facts().unknown == frozenset()


@pytest.mark.parametrize(
    ("changes", "stack", "kind"),
    [
        ({"normalization_type": "LN"}, "", "layer_norm"),
        ({"normalization_type": "LNPre"}, "", "layer_norm"),
        ({"normalization_type": "RMS"}, "", "rms_norm"),
        ({"normalization_type": "LN"}, "encoder", "rms_norm"),
        ({"normalization_type": None}, "", None),
        ({"original_architecture": "Olmo2ForCausalLM"}, "", None),
    ],
)
def test_the_norm_in_front_of_attention(changes, stack, kind):
    norm = norm_of(config(**changes), SimpleNamespace(), stack)
    assert (None if norm is None else (norm.kind, norm.eps)) == (None if kind is None else (kind, 1e-6))


@pytest.mark.parametrize(("each", "over"), [(True, "head"), (False, "all")])
def test_norms_of_queries_and_keys_are_over_each_head_or_over_all(each, over):
    query, key = head_norms_of(config(use_qk_norm=each), SimpleNamespace(q_norm=SimpleNamespace()), D_HEAD)
    assert key is None
    assert query is not None
    assert (query.kind, query.over, query.eps) == ("rms_norm", over, 1e-6)


def test_a_norm_over_all_heads_has_a_gain_for_each_of_them():
    gain = torch.arange(2.0 * D_HEAD)
    attention = SimpleNamespace(q_norm=SimpleNamespace(w=gain))
    query, _ = head_norms_of(config(), attention, D_HEAD)
    assert query is not None
    assert query.over == "all"
    assert query.gain is not None
    assert query.gain.tolist() == [list(range(D_HEAD)), list(range(D_HEAD, 2 * D_HEAD))]


def test_a_config_that_does_not_state_adjacent_pairs_has_halves():
    stated = facts().rotary
    assert stated.pairing == "halves"
    assert stated.frequencies == pytest.approx(FREQUENCIES)
    assert facts(rotary_adjacent_pairs=True).rotary.pairing == "adjacent"
