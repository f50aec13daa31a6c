"""Attention without circuits of its own is named and refused, by config and by names; it passes for no other."""

import shutil

import pytest
import torch
import transformers
from qkov.circuits import QkovError, open_checkpoint

from .family_proof import small

_MLA = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 2,
}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
    "layer_types": ["linear_attention", "full_attention"],
}


def codegen():
    return transformers.CodeGenConfig(n_embd=48, n_head=4, n_layer=2, n_positions=32, vocab_size=50, rotary_dim=4)


def reformer():
    return transformers.ReformerConfig(
        attn_layers=["lsh", "lsh"],
        hidden_size=32,
        num_attention_heads=2,
        attention_head_size=16,
        feed_forward_size=32,
        axial_pos_embds=False,
        max_position_embeddings=64,
        vocab_size=50,
        num_buckets=4,
        is_decoder=True,
    )


def xlnet():
    return transformers.XLNetConfig(d_model=32, n_layer=2, n_head=4, d_inner=32, vocab_size=50)


MODELS = {
    "DeepseekV3ForCausalLM": (lambda: small("DeepseekV3Config", **_MLA), "multi-head latent attention"),
    "DeepseekV2ForCausalLM": (lambda: small("DeepseekV2Config", **_MLA), "multi-head latent attention"),
    "MiniCPM3ForCausalLM": (
        lambda: small(
            "MiniCPM3Config", q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8
        ),
        "multi-head latent attention",
    ),
    "MambaForCausalLM": (
        lambda: transformers.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=50, state_size=4),
        "Mamba",
    ),
    "Mamba2ForCausalLM": (
        lambda: transformers.Mamba2Config(
            hidden_size=32, num_hidden_layers=2, vocab_size=50, state_size=4, num_heads=4, head_dim=16, n_groups=1
        ),
        "Mamba",
    ),
    "RwkvForCausalLM": (
        lambda: transformers.RwkvConfig(hidden_size=32, num_hidden_layers=2, vocab_size=50, context_length=16),
        "RWKV",
    ),
    "Qwen3NextForCausalLM": (
        lambda: small("Qwen3NextConfig", head_dim=12, num_key_value_heads=2, **_DELTA),
        "a hybrid with linear attention",
    ),
    "MiniMaxForCausalLM": (
        lambda: small("MiniMaxConfig", num_key_value_heads=2, num_local_experts=2, head_dim=12),
        "a hybrid with linear attention",
    ),
    "DebertaModel": (lambda: small("DebertaConfig"), "DeBERTa's disentangled attention"),
    "DebertaV2Model": (lambda: small("DebertaV2Config"), "DeBERTa's disentangled attention"),
    "XLNetLMHeadModel": (xlnet, "XLNet"),
    "ReformerModelWithLMHead": (reformer, "Reformer"),
    "FNetModel": (lambda: small("FNetConfig"), "FNet"),
    "LongformerModel": (lambda: small("LongformerConfig", attention_window=4), "Longformer"),
    "LEDModel": (
        lambda: transformers.LEDConfig(
            vocab_size=50,
            d_model=32,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=32,
            decoder_ffn_dim=32,
            max_encoder_position_embeddings=32,
            max_decoder_position_embeddings=32,
            attention_window=4,
        ),
        "Longformer",
    ),
    "DiffLlamaForCausalLM": (lambda: small("DiffLlamaConfig", num_key_value_heads=2), "differential attention"),
    "Gemma3nForCausalLM": (
        lambda: small(
            "Gemma3nTextConfig",
            num_key_value_heads=2,
            head_dim=12,
            num_kv_shared_layers=1,
            vocab_size_per_layer_input=50,
            hidden_size_per_layer_input=8,
            laurel_rank=4,
            layer_types=["sliding_attention", "sliding_attention"],
            activation_sparsity_pattern=[0.0, 0.0],
            pad_token_id=0,
        ),
        "keys and values shared between layers",
    ),
    "Gemma4ForCausalLM": (
        lambda: small(
            "Gemma4TextConfig",
            num_key_value_heads=2,
            head_dim=12,
            num_kv_shared_layers=1,
            vocab_size_per_layer_input=50,
            hidden_size_per_layer_input=8,
            layer_types=["full_attention", "full_attention"],
            pad_token_id=0,
        ),
        "keys and values shared between layers",
    ),
    "Llama4ForCausalLM": (
        lambda: small(
            "Llama4TextConfig",
            num_key_value_heads=2,
            head_dim=12,
            intermediate_size_mlp=64,
            num_local_experts=2,
            pad_token_id=0,
        ),
        "Llama 4",
    ),
    "CodeGenForCausalLM": (codegen, "CodeGen"),
    "FalconH1ForCausalLM": (
        lambda: small(
            "FalconH1Config",
            num_key_value_heads=2,
            mamba_d_ssm=32,
            mamba_n_heads=4,
            mamba_d_head=8,
            mamba_d_state=8,
            mamba_chunk_size=8,
        ),
        "Falcon-H1",
    ),
}
#: Their attention by itself has LLaMA's names, and is read as that where no config says more.
_READ_BY_NAMES = {"FalconH1ForCausalLM"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    saved = {}

    def folder(name):
        if name not in saved:
            saved[name] = tmp_path_factory.mktemp(name)
            torch.manual_seed(0)
            getattr(transformers, name)(MODELS[name][0]()).save_pretrained(saved[name])
        return saved[name]

    return folder


def without_config(folder, other):
    return shutil.copy(folder / "model.safetensors", other)


@pytest.mark.parametrize("name", MODELS)
def test_config_tells(name, folders):
    with pytest.raises(QkovError, match=r"is .* \(model_type '.*'\), which is not measured: .") as caught:
        open_checkpoint(folders(name))
    assert MODELS[name][1] in str(caught.value)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in _READ_BY_NAMES])
def test_names_alone_tell(name, folders, tmp_path):
    with pytest.raises(
        QkovError, match=r"as its names show, which is not measured: .|holds nothing to measure: ."
    ) as caught:
        open_checkpoint(without_config(folders(name), tmp_path))
    assert MODELS[name][1] in str(caught.value)


def test_mamba_beside_attention_is_skipped_by_names_alone(folders, tmp_path):
    opened = open_checkpoint(without_config(folders("FalconH1ForCausalLM"), tmp_path), heads=4)
    assert opened.skipped == {"layers 0, 1 (Mamba)": "a state-space layer has no queries and keys"}
    assert {"norm", "rotary", "positions"} <= next(opened.layers()).facts.unknown


def test_cross_attention_of_gpt2_is_skipped(tmp_path):
    config = transformers.GPT2Config(
        n_embd=48, n_head=4, n_layer=2, n_positions=32, vocab_size=50, add_cross_attention=True
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    opened = open_checkpoint(tmp_path)
    assert opened.layer_keys == [("", 0), ("", 1)]
    assert list(opened.skipped) == ["layers 0, 1 (cross-attention of GPT-2)"]
