"""Scaled rotary frequencies from old and new configs, compared with the tables of transformers' own models."""

import json
import math

import pytest
import torch
import transformers
from qkov.circuits import QkovError, open_checkpoint
from qkov.circuits.weights.rope_scaling import scaled_rotary

from .decoders import BY_NAME
from .family_proof import build, small

#: What transformers computes in float32.
SINGLE = 1e-6
BASE = 500.0

SCALINGS = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "longrope": {
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
        "long_factor": [2.0] * 8,
    },
}


def llama(kind, folder):
    """A tiny LLaMA with this scaling, saved."""
    config = small(
        "LlamaConfig",
        hidden_size=64,
        max_position_embeddings=256,
        rope_theta=BASE,
        rope_scaling={"rope_type": kind} | SCALINGS[kind],
        # transformers 4 looks for it here when it computes the amplitude of longrope.
        **({"original_max_position_embeddings": 64} if kind == "longrope" else {}),
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return model


def assert_as_in(model, folder):
    table = model.model.rotary_emb
    for weights in open_checkpoint(folder).layers():
        rotary = weights.facts.rotary
        assert rotary.frequencies == pytest.approx(table.inv_freq.tolist(), rel=SINGLE)
        assert rotary.amplitude == pytest.approx(table.attention_scaling, rel=SINGLE)


@pytest.mark.parametrize("kind", SCALINGS)
def test_a_current_config(kind, tmp_path):
    assert_as_in(llama(kind, tmp_path), tmp_path)


@pytest.mark.parametrize("key", ["rope_type", "type"])
@pytest.mark.parametrize("kind", SCALINGS)
def test_config_with_rope_theta_beside_rope_scaling(kind, key, tmp_path):
    model = llama(kind, tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config.pop("rope_parameters", None)
    scaling = None if kind == "default" else {key: kind} | SCALINGS[kind]
    file.write_text(json.dumps(config | {"rope_theta": BASE, "rope_scaling": scaling}))
    assert_as_in(model, tmp_path)


def test_every_kind_that_transformers_has_is_known():
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for kind in ROPE_INIT_FUNCTIONS:
        scaling = {"rope_type": kind} | SCALINGS.get(kind, {})
        assert scaled_rotary(16, 16, BASE, "halves", scaling, 256).dims == 16


def test_llama3_keeps_short_wavelengths_and_stretches_long_ones():
    scaling = {"rope_type": "llama3"} | SCALINGS["llama3"]
    plain = scaled_rotary(64, 64, BASE, "halves", None)
    scaled = scaled_rotary(64, 64, BASE, "halves", scaling)
    for one, other in zip(plain.frequencies, scaled.frequencies, strict=True):
        wavelength = 2 * math.pi / one
        if wavelength < 64 / 4:
            assert other == one
        elif wavelength > 64 / 1:
            assert other == one / 8
        else:
            assert one / 8 < other < one


def test_partial_rotation_is_scaled_over_the_dimensions_that_rotate():
    config = small(
        "PhiConfig",
        hidden_size=64,
        rope_scaling={"rope_type": "linear", "factor": 2.0},
        rope_theta=BASE,
        partial_rotary_factor=0.5,
    )
    table = transformers.PhiForCausalLM(config).model.rotary_emb.inv_freq
    rotary = scaled_rotary(16, 8, BASE, "halves", {"rope_type": "linear", "factor": 2.0})
    assert rotary.frequencies == pytest.approx(table.tolist(), rel=SINGLE)


@pytest.mark.parametrize(("layer", "kind"), [(0, "sliding_attention"), (1, "full_attention")])
def test_gemma_3_has_a_table_for_windows_and_another(layer, kind, tmp_path):
    model = build(BY_NAME["gemma3"])
    model.save_pretrained(tmp_path)
    if hasattr(model.model, "rotary_emb_local"):  # in transformers 4 the windows have a module of their own
        table = (model.model.rotary_emb_local if kind == "sliding_attention" else model.model.rotary_emb).inv_freq
    else:
        table = getattr(model.model.rotary_emb, f"{kind}_inv_freq")
    rotary = list(open_checkpoint(tmp_path).layers())[layer].facts.rotary
    assert rotary.frequencies == pytest.approx(table.tolist(), rel=SINGLE)


@pytest.mark.parametrize("older", ["su", "yarn"])
def test_longrope_by_the_names_that_phi_3_gave_it(older):
    scaling = SCALINGS["longrope"]
    named = scaled_rotary(16, 16, BASE, "halves", {"rope_type": "longrope"} | scaling, 256)
    assert scaled_rotary(16, 16, BASE, "halves", {"type": older} | scaling, 256) == named


def test_length_of_training_beside_the_scaling_counts():
    scaling = {name: value for name, value in SCALINGS["longrope"].items() if name not in ("factor",)}
    inside = scaled_rotary(16, 16, BASE, "halves", {"rope_type": "longrope"} | scaling, 256)
    del scaling["original_max_position_embeddings"]
    beside = scaled_rotary(16, 16, BASE, "halves", {"rope_type": "longrope"} | scaling, 256, 64)
    assert beside == inside
    assert inside.amplitude == pytest.approx(math.sqrt(1 + math.log(256 / 64) / math.log(64)), rel=1e-12)


@pytest.mark.parametrize(
    ("scaling", "told"),
    [
        ({"rope_type": "spiral"}, "the rotary scaling 'spiral' of the config is not known; known are default"),
        ({"rope_type": "linear"}, "the rotary scaling 'linear' of the config cannot be used"),
        ({"rope_type": "llama3", "factor": 8.0}, "the rotary scaling 'llama3' of the config cannot be used"),
        ({"rope_type": "yarn"}, "the rotary scaling 'yarn' of the config cannot be used"),
        ({"rope_type": "linear", "factor": "two"}, "the rotary scaling 'linear' of the config cannot be used"),
        ({"rope_type": "linear", "factor": 0}, "the rotary scaling 'linear' of the config cannot be used"),
        ({"rope_type": "yarn", "factor": 0}, "the rotary scaling 'yarn' of the config cannot be used"),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
            "the rotary scaling 'llama3' of the config cannot be used",
        ),
    ],
)
def test_scaling_that_cannot_be_used_is_named(scaling, told):
    with pytest.raises(QkovError, match=told):
        scaled_rotary(16, 16, BASE, "halves", scaling, 256)


@pytest.mark.parametrize("base", [0.0, -5.0, math.nan, math.inf])
def test_a_base_that_gives_no_frequencies_is_refused(base):
    with pytest.raises(QkovError, match=r"cannot be used: .*the base is"):
        scaled_rotary(16, 16, base, "halves", None)


def test_as_few_as_two_dimensions_rotate_and_not_fewer():
    assert scaled_rotary(16, 2, BASE, "halves", None).frequencies == (1.0,)
    with pytest.raises(QkovError, match="1 of 16 dimensions rotate"):
        scaled_rotary(16, 1, BASE, "halves", None)


def test_longrope_without_a_longer_context_leaves_the_scores_as_they_are():
    scaling = {"rope_type": "longrope", "short_factor": [1.0, 2.0], "original_max_position_embeddings": 64}
    assert scaled_rotary(4, 4, 100.0, "halves", scaling).amplitude == 1.0
    longer = scaled_rotary(4, 4, 100.0, "halves", scaling, 256)
    assert longer.amplitude == pytest.approx(math.sqrt(1 + math.log(4) / math.log(64)), rel=1e-15)
    assert longer.frequencies == pytest.approx((1.0, 0.05), rel=1e-15)
