"""HookedTransformer, which TransformerLens 3.9 is the last to have, against files and against its own attention.

It needs an environment of its own and is not collected with the other tests:
`pytest tests/transformer_lens_3/hooked_transformer.py`.
"""

from typing import Any

import pytest
import torch
import transformer_lens
import transformers
from qkov.circuits import CallError, open_checkpoint, open_model

from ..circuits.family_proof import small
from ..circuits.forward_pass import attend
from ..circuits.test_transformer_lens import EXAMPLES, MODES, Example, assert_same, assert_same_circuits, build, save

pytestmark = pytest.mark.filterwarnings("ignore")
TL: Any = transformer_lens
LENGTH = 12

MORE = [
    Example(
        "GPTJForCausalLM", lambda: transformers.GPTJConfig(n_embd=48, n_head=4, n_layer=2, n_positions=32, rotary_dim=4)
    ),
    Example("MistralForCausalLM", lambda: small("MistralConfig", num_key_value_heads=2, sliding_window=5)),
    Example("OPTForCausalLM", lambda: small("OPTConfig", ffn_dim=64, word_embed_proj_dim=48)),
]


@pytest.fixture(params=[*EXAMPLES, *MORE], ids=lambda example: example.model)
def example(request):
    return request.param


_ROOT_MEAN_SQUARE = {
    "d_model": 48,
    "n_heads": 4,
    "n_key_value_heads": 2,
    "n_layers": 2,
    "d_mlp": 64,
    "d_vocab": 50,
    "n_ctx": 32,
    "eps": 1e-6,
    "act_fn": "silu",
    "gated_mlp": True,
    "final_rms": True,
    "positional_embedding_type": "rotary",
    "device": "cpu",
}
_GEMMA_2 = {
    "attn_scale": 16.0,
    "attn_scores_soft_cap": 50.0,
    "use_normalization_before_and_after": True,
    "use_local_attn": True,
    "window_size": 4096,
    "attn_types": ["local", "global"],
}
#: What TransformerLens tells by the model's name on the hub, and not from a local folder.
BY_NAME = {
    "GemmaForCausalLM": _ROOT_MEAN_SQUARE | {"d_head": 16},
    "Gemma2ForCausalLM": _ROOT_MEAN_SQUARE | _GEMMA_2 | {"d_head": 16},
    "Olmo2ForCausalLM": _ROOT_MEAN_SQUARE | {"d_head": 12, "eps": 1e-5, "n_key_value_heads": None},
}


def config_of(model, folder, fold_ln) -> Any:
    architecture = type(model).__name__
    if architecture in BY_NAME:
        kind = "RMSPre" if fold_ln else "RMS"
        told = BY_NAME[architecture] | {"normalization_type": kind, "original_architecture": architecture}
        return TL.HookedTransformerConfig(**told)
    numbers = {"hf_cfg": model.config.to_dict(), "fold_ln": fold_ln, "device": "cpu"}
    return TL.loading_from_pretrained.get_pretrained_model_config(str(folder), **numbers)


def hooked(model, folder, fold_ln=False, **processing) -> Any:
    """Convert a local model as `from_pretrained` does that of a name on the hub; raw unless told otherwise."""
    save(model, folder)
    cfg = config_of(model, folder, fold_ln)
    tensors = TL.loading_from_pretrained.get_pretrained_state_dict(str(folder), cfg, model)
    converted = TL.HookedTransformer(cfg)
    settings = {"center_writing_weights": False, "center_unembed": False, "fold_value_biases": False}
    converted.load_and_process_state_dict(tensors, fold_ln=fold_ln, **(settings | processing))
    return converted


def drawn(model):
    """Numbers of the order of 1/sqrt(d_model) in every parameter."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


def assert_attends(model, layers):
    """The pattern and the output of every layer, from its weights alone, are the model's own."""
    torch.manual_seed(1)
    _, cache = model.run_with_cache(torch.randint(0, 50, (1, LENGTH)))
    for number, layer in enumerate(layers):
        attended = attend(layer, cache[f"blocks.{number}.hook_resid_pre"][0])
        pattern, z = (cache[f"blocks.{number}.attn.{hook}"][0].double() for hook in ("hook_pattern", "hook_z"))
        attention = model.blocks[number].attn
        output = torch.einsum("qhd,hdm->qm", z, attention.W_O.double()) + attention.b_O.double()
        torch.testing.assert_close(attended.pattern, pattern, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(attended.output, output, rtol=1e-5, atol=1e-5)


def test_raw_circuits_from_files_and_from_the_model(example, tmp_path):
    model = hooked(build(example), tmp_path)
    layers = list(open_model(model).layers())
    assert {layer.stored_basis for layer in layers} == {"raw"}
    assert_same_circuits(layers, model, "raw")
    assert_same_circuits(open_checkpoint(tmp_path).layers(), model, "raw")
    with torch.no_grad():
        assert_attends(model, layers)


@pytest.mark.parametrize("basis", MODES)
def test_folded_circuits_from_files_and_from_the_model(example, basis, tmp_path):
    model = hooked(build(example), tmp_path, **MODES[basis])
    layers = list(open_model(model).layers())
    stored = "folded" if example.is_rms else basis
    assert {layer.stored_basis for layer in layers} == {stored}
    assert_same_circuits(layers, model, basis)
    assert_same_circuits(open_checkpoint(tmp_path).layers(), model, basis)
    with pytest.raises(CallError, match=f"in the basis {stored}; they cannot be converted to raw"):
        layers[0].qk("raw")
    with torch.no_grad():
        assert_attends(model, layers)


@pytest.mark.parametrize("basis", MODES)
def test_a_raw_model_is_folded_as_its_own_processing_would(example, basis, tmp_path):
    raw = list(open_model(hooked(build(example), tmp_path / "raw")).layers())
    assert_same_circuits(raw, hooked(build(example), tmp_path / "folded", **MODES[basis]), basis)


def test_grouped_heads_are_read_once_and_facts_are_those_of_the_files(example, tmp_path):
    model = hooked(build(example), tmp_path)
    for live, saved in zip(open_model(model).layers(), open_checkpoint(tmp_path).layers(), strict=True):
        assert live.W_K.shape == saved.W_K.shape
        assert_same(live.W_K, saved.W_K)
        assert live.facts.window == saved.facts.window
        assert live.facts.causal == saved.facts.causal
        assert live.facts.positions == saved.facts.positions
        assert (live.facts.rotary is None) == (saved.facts.rotary is None)
        if live.facts.rotary is not None:
            assert (live.facts.rotary.dims, live.facts.rotary.pairing) == (
                saved.facts.rotary.dims,
                saved.facts.rotary.pairing,
            )
            frequencies = [torch.tensor(layer.facts.rotary.frequencies) for layer in (live, saved)]
            assert_same(*frequencies)


@pytest.mark.parametrize("basis", ["raw", *MODES])
def test_a_state_dict_is_read_by_its_names(example, basis, tmp_path):
    model = hooked(build(example), tmp_path / "model", **MODES.get(basis, {}))
    torch.save(model.state_dict(), tmp_path / "state.pt")
    layers = list(open_checkpoint(tmp_path / "state.pt").layers())
    assert_same_circuits(layers, model, layers[0].stored_basis)
    assert layers[0].W_K.shape[0] == (model.cfg.n_key_value_heads or model.cfg.n_heads)


PLAIN = {
    "d_model": 48,
    "d_head": 12,
    "n_heads": 4,
    "n_layers": 2,
    "n_ctx": 16,
    "d_vocab": 50,
    "attn_only": True,
    "device": "cpu",
    "seed": 0,
}
LOCAL = {"use_local_attn": True, "window_size": 3, "attn_types": ["global", "local"]}
ROTARY = {"positional_embedding_type": "rotary"}
LLAMA3 = {
    "use_NTK_by_parts_rope": True,
    "NTK_original_ctx_len": 64,
    "NTK_by_parts_low_freq_factor": 1.0,
    "NTK_by_parts_high_freq_factor": 4.0,
    "NTK_by_parts_factor": 8.0,
}
YARN = {
    "use_yarn_rope": True,
    "yarn_factor": 4.0,
    "yarn_attention_factor": 1.3,
    "yarn_original_max_position_embeddings": 32,
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"normalization_type": None, "use_attn_scale": False},
        {"normalization_type": "LNPre", "attention_dir": "bidirectional"},
        {"normalization_type": "RMS", "n_key_value_heads": 2, "attn_scores_soft_cap": 3.0, "use_qk_norm": True},
        {"normalization_type": "RMSPre", "attn_scale": 2.0, "clip_qkv": 0.7},
        {"scale_attn_by_inverse_layer_idx": True, **LOCAL},
        {"positional_embedding_type": "alibi"},
        {**ROTARY, "rotary_dim": 4, "rotary_base": 100},
        {**ROTARY, "rotary_adjacent_pairs": True, "n_key_value_heads": 1},
        {**ROTARY, **LOCAL, "rotary_base": 1000, "rotary_base_local": 50, "rotary_scaling_factor": 8.0},
        {**ROTARY, **LLAMA3},
        {**ROTARY, **YARN},
        {**ROTARY, **YARN, **LOCAL, "yarn_global_attn_only": True},
    ],
    ids=lambda changes: " ".join(map(str, changes)) or "plain",
)
def test_a_model_of_its_own_attends_as_its_weights_and_config_say(changes):
    model = drawn(TL.HookedTransformer(TL.HookedTransformerConfig(**(PLAIN | changes))))
    with torch.no_grad():
        layers = list(open_model(model).layers())
        assert [layer.stored_basis for layer in layers] == ["raw", "raw"]
        assert_attends(model, layers)
        assert_same_circuits(layers, model, "raw")


def test_norms_behind_attention_are_not_folded(tmp_path):
    olmo = Example("Olmo2ForCausalLM", lambda: small("Olmo2Config"))
    model = hooked(build(olmo), tmp_path)
    layers = list(open_model(model).layers())
    assert all(layer.norm is None and layer.query_norm.over == "all" for layer in layers)
    assert_same_circuits(open_checkpoint(tmp_path).layers(), model, "folded_centred")
    with torch.no_grad():
        assert_attends(model, layers)


def test_the_encoder_has_its_norms_behind_attention():
    cfg = TL.HookedTransformerConfig(
        **(PLAIN | {"attn_only": False, "act_fn": "gelu", "attention_dir": "bidirectional"})
    )
    model = drawn(TL.HookedEncoder(cfg))
    layers = list(open_model(model).layers())
    assert all(layer.norm is None and layer.facts.causal is False for layer in layers)
    for number, layer in enumerate(layers):
        assert_same(layer.qk("folded").dense().mT, model.QK.AB[number].double())
        assert_same(layer.ov("folded").dense().mT, model.OV.AB[number].double())


def test_stacks_of_the_encoder_and_decoder():
    relative = {"positional_embedding_type": "relative_positional_bias", "use_attn_scale": False}
    buckets = {"relative_attention_max_distance": 16, "relative_attention_num_buckets": 8}
    shape = {"attn_only": False, "act_fn": "relu", "attention_dir": "bidirectional"}
    cfg = TL.HookedTransformerConfig(**(PLAIN | shape | relative | buckets), decoder_start_token_id=0)
    model = drawn(TL.HookedEncoderDecoder(cfg))
    layers = {(layer.stack, layer.layer): layer for layer in open_model(model).layers()}
    assert set(layers) == {(stack, number) for stack in ("encoder", "decoder", "decoder cross") for number in (0, 1)}
    for (stack, number), layer in layers.items():
        block = (model.encoder if stack == "encoder" else model.decoder)[number]
        attention = block.cross_attn if stack == "decoder cross" else block.attn
        assert_same(layer.qk().dense().mT, attention.QK.AB.double())
        assert (layer.facts.cross, layer.facts.causal) == (stack == "decoder cross", stack == "decoder")
        assert layer.facts.score_scale == 1.0
        assert layer.norm.kind == "rms_norm"
        assert torch.equal(layer.norm.gain, (block.ln2 if stack == "decoder cross" else block.ln1).w)
