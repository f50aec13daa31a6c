"""Configs with the keys that published models have, of every age: the same attention as transformers makes of them."""

import json

import pytest
import transformers
from qkov.circuits import open_checkpoint

from .family_proof import Family, assert_same, build, run

_LLAMA_LIKE = ("model.layers.{layer}", "model.layers.{layer}.self_attn")

#: By the name of the model; sizes, windows and lengths are small.
CONFIGS = {
    "gpt2": {
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "model_type": "gpt2",
        "n_ctx": 32,
        "n_embd": 48,
        "n_head": 4,
        "n_layer": 2,
        "n_positions": 32,
        "resid_pdrop": 0.1,
        "summary_activation": None,
        "summary_first_dropout": 0.1,
        "vocab_size": 50,
    },
    "gpt-neo-125M": {
        "activation_function": "gelu_new",
        "architectures": ["GPTNeoForCausalLM"],
        "attention_dropout": 0,
        "attention_layers": ["global", "local"],
        "attention_types": [[["global", "local"], 1]],
        "embed_dropout": 0,
        "hidden_size": 48,
        "intermediate_size": None,
        "layer_norm_epsilon": 1e-05,
        "max_position_embeddings": 32,
        "model_type": "gpt_neo",
        "num_heads": 4,
        "num_layers": 2,
        "resid_dropout": 0,
        "vocab_size": 50,
        "window_size": 5,
    },
    "gpt-neo without attention_layers": {
        "architectures": ["GPTNeoForCausalLM"],
        "attention_types": [[["local", "local"], 1], [["global"], 2]],
        "hidden_size": 48,
        "max_position_embeddings": 32,
        "model_type": "gpt_neo",
        "num_heads": 4,
        "num_layers": 4,
        "vocab_size": 50,
        "window_size": 5,
    },
    "pythia-70m": {
        "architectures": ["GPTNeoXForCausalLM"],
        "bos_token_id": 0,
        "eos_token_id": 0,
        "hidden_act": "gelu",
        "hidden_size": 64,
        "initializer_range": 0.02,
        "intermediate_size": 96,
        "layer_norm_eps": 1e-05,
        "max_position_embeddings": 32,
        "model_type": "gpt_neox",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "rotary_emb_base": 10000,
        "rotary_pct": 0.25,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "use_cache": True,
        "use_parallel_residual": True,
        "vocab_size": 50,
    },
    "opt-125m": {
        "_remove_final_layer_norm": False,
        "activation_dropout": 0.0,
        "activation_function": "relu",
        "architectures": ["OPTForCausalLM"],
        "attention_dropout": 0.0,
        "do_layer_norm_before": True,
        "dropout": 0.1,
        "ffn_dim": 96,
        "hidden_size": 48,
        "init_std": 0.02,
        "layerdrop": 0.0,
        "max_position_embeddings": 32,
        "model_type": "opt",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "prefix": "</s>",
        "vocab_size": 50,
        "word_embed_proj_dim": 48,
    },
    "falcon-7b": {
        "alibi": False,
        "apply_residual_connection_post_layernorm": False,
        "architectures": ["FalconForCausalLM"],
        "attention_dropout": 0.0,
        "bias": False,
        "hidden_dropout": 0.0,
        "hidden_size": 48,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "model_type": "falcon",
        "multi_query": True,
        "new_decoder_architecture": False,
        "num_attention_heads": 6,
        "num_hidden_layers": 2,
        "parallel_attn": True,
        "vocab_size": 50,
    },
    "falcon-40b": {
        "alibi": False,
        "apply_residual_connection_post_layernorm": False,
        "architectures": ["FalconForCausalLM"],
        "bias": False,
        "hidden_size": 64,
        "layer_norm_epsilon": 1e-05,
        "model_type": "falcon",
        "multi_query": True,
        "new_decoder_architecture": True,
        "num_attention_heads": 8,
        "num_hidden_layers": 2,
        "num_kv_heads": 2,
        "parallel_attn": True,
        "vocab_size": 50,
    },
    "TinyLlama-1.1B": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": 48,
        "intermediate_size": 64,
        "max_position_embeddings": 32,
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "vocab_size": 50,
    },
    "Llama-2-7b before rope_theta was told": {
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": 48,
        "intermediate_size": 64,
        "max_position_embeddings": 32,
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "vocab_size": 50,
    },
    "Llama-3.2-1B": {
        "architectures": ["LlamaForCausalLM"],
        "head_dim": 16,
        "hidden_size": 48,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 32,
            "rope_type": "llama3",
        },
        "rope_theta": 500.0,
        "vocab_size": 50,
    },
    "Mistral-7B-v0.1": {
        "architectures": ["MistralForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": 48,
        "intermediate_size": 64,
        "max_position_embeddings": 32,
        "model_type": "mistral",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "sliding_window": 5,
        "vocab_size": 50,
    },
    "Mistral-7B-v0.2, no window": {
        "architectures": ["MistralForCausalLM"],
        "hidden_size": 48,
        "intermediate_size": 64,
        "max_position_embeddings": 32,
        "model_type": "mistral",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "vocab_size": 50,
    },
    "Qwen2.5-0.5B": {
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": 48,
        "intermediate_size": 64,
        "max_position_embeddings": 32,
        "max_window_layers": 1,
        "model_type": "qwen2",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 5,
        "tie_word_embeddings": True,
        "use_mrope": False,
        "use_sliding_window": False,
        "vocab_size": 50,
    },
    "Qwen2 with windows": {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 48,
        "intermediate_size": 64,
        "max_position_embeddings": 32,
        "max_window_layers": 1,
        "model_type": "qwen2",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 5,
        "use_sliding_window": True,
        "vocab_size": 50,
    },
    "gemma-2-2b": {
        "architectures": ["Gemma2ForCausalLM"],
        "attention_bias": False,
        "attn_logit_softcapping": 50.0,
        "cache_implementation": "hybrid",
        "final_logit_softcapping": 30.0,
        "head_dim": 16,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 48,
        "intermediate_size": 64,
        "max_position_embeddings": 32,
        "model_type": "gemma2",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "query_pre_attn_scalar": 24,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "sliding_window": 5,
        "vocab_size": 50,
    },
    "gemma-3-1b": {
        "architectures": ["Gemma3ForCausalLM"],
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "cache_implementation": "hybrid",
        "final_logit_softcapping": None,
        "head_dim": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 48,
        "intermediate_size": 64,
        "max_position_embeddings": 32,
        "model_type": "gemma3_text",
        "num_attention_heads": 4,
        "num_hidden_layers": 7,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 24,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "rope_theta": 1000000,
        "sliding_window": 5,
        "sliding_window_pattern": 6,
        "vocab_size": 50,
    },
    "phi-2": {
        "architectures": ["PhiForCausalLM"],
        "attention_dropout": 0.0,
        "hidden_act": "gelu_new",
        "hidden_size": 64,
        "intermediate_size": 64,
        "layer_norm_eps": 1e-05,
        "max_position_embeddings": 32,
        "model_type": "phi",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 4,
        "partial_rotary_factor": 0.5,
        "qk_layernorm": False,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": 50,
    },
    "Phi-3-mini-128k": {
        "architectures": ["Phi3ForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": 48,
        "intermediate_size": 64,
        "max_position_embeddings": 1024,
        "model_type": "phi3",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 4,
        "original_max_position_embeddings": 32,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "long_factor": [4.0, 5.0, 6.0, 7.0, 8.0, 9.0],
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
            "type": "longrope",
        },
        "rope_theta": 10000.0,
        "sliding_window": 8,
        "vocab_size": 50,
    },
    "stablelm-2-1_6b": {
        "architectures": ["StableLmForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 64,
        "layer_norm_eps": 1e-05,
        "max_position_embeddings": 32,
        "model_type": "stablelm",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 4,
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000,
        "tie_word_embeddings": False,
        "use_qkv_bias": True,
        "vocab_size": 50,
    },
    "c4ai-command-r7b": {
        "architectures": ["Cohere2ForCausalLM"],
        "attention_bias": False,
        "head_dim": 12,
        "hidden_size": 48,
        "intermediate_size": 64,
        "layer_norm_eps": 1e-05,
        "layer_switch": 4,
        "logit_scale": 0.25,
        "max_position_embeddings": 32,
        "model_type": "cohere2",
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "order_of_interleaved_layers": "local_attn_first",
        "position_embedding_type": "rope_gptj",
        "rope_theta": 50000,
        "rotary_pct": 1.0,
        "sliding_window": 5,
        "sliding_window_pattern": 4,
        "use_qk_norm": False,
        "vocab_size": 50,
    },
}
_PLACES = {
    "gpt2": ("transformer.h.{layer}", "transformer.h.{layer}.attn"),
    "gpt_neo": ("transformer.h.{layer}", "transformer.h.{layer}.attn.attention"),
    "gpt_neox": ("gpt_neox.layers.{layer}", "gpt_neox.layers.{layer}.attention"),
    "opt": ("model.decoder.layers.{layer}", "model.decoder.layers.{layer}.self_attn"),
    "falcon": ("transformer.h.{layer}", "transformer.h.{layer}.self_attention"),
}


def saved(config, folder):
    """A tiny model of what transformers makes of the config, saved with the config as it was published."""
    (folder / "config.json").write_text(json.dumps(config))
    loaded = transformers.AutoConfig.from_pretrained(folder)
    block, attention = _PLACES.get(config["model_type"], _LLAMA_LIKE)
    layers = range(loaded.num_hidden_layers)
    family = Family(config["model_type"], lambda: loaded, config["architectures"][0], block, attention, layers=layers)
    model = build(family)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return family, model


@pytest.mark.parametrize("name", CONFIGS)
def test_attention_is_the_model_s_own(name, tmp_path):
    family, model = saved(CONFIGS[name], tmp_path)
    opened = open_checkpoint(tmp_path)
    assert opened.skipped == {}
    extracted = list(opened.layers())
    assert [weights.layer for weights in extracted] == list(family.layers)
    seen = run(family, model)
    for weights in extracted:
        assert_same(weights, family, model, seen[weights.layer])


#: What model_type was before transformers had the model.
OLDER_NAMES = [("falcon-7b", "RefinedWebModel"), ("falcon-40b", "RefinedWeb")]


@pytest.mark.parametrize(("name", "older"), OLDER_NAMES)
def test_falcon_has_had_other_names(name, older, tmp_path):
    config = CONFIGS[name]
    saved(config, tmp_path)
    told = list(open_checkpoint(tmp_path).layers())
    renamed = {"num_attention_heads": "n_head", "num_hidden_layers": "n_layer", "num_kv_heads": "n_head_kv"}
    old = {renamed.get(key, key): value for key, value in config.items()} | {"model_type": older}
    (tmp_path / "config.json").write_text(json.dumps(old))
    assert open_checkpoint(tmp_path).skipped == {}
    for one, other in zip(told, open_checkpoint(tmp_path).layers(), strict=True):
        assert other.facts == one.facts
        assert other.W_Q.equal(one.W_Q)
        assert other.norm.gain.equal(one.norm.gain)


def test_gemma_3_has_two_bases_and_a_window_but_for_every_sixth_layer(tmp_path):
    saved(CONFIGS["gemma-3-1b"], tmp_path)
    facts = [weights.facts for weights in open_checkpoint(tmp_path).layers()]
    assert [each.window for each in facts] == [5, 5, 5, 5, 5, None, 5]
    local = tuple(10000 ** (-pair / 8) for pair in range(8))
    whole = tuple(1000000 ** (-pair / 8) / 8 for pair in range(8))
    assert facts[0].rotary.frequencies == pytest.approx(local, rel=1e-12)
    assert facts[5].rotary.frequencies == pytest.approx(whole, rel=1e-12)
