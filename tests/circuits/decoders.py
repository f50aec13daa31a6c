"""Tiny decoders of transformers, and where their attention is."""

import math
from typing import Any

import torch
import transformers
from torch import Tensor

from .family_proof import LENGTH, Family, small
from .forward_pass import alibi_slopes

_BLOCKS: dict[str, Any] = {"block": "model.layers.{layer}", "attention": "model.layers.{layer}.self_attn"}
_H: dict[str, Any] = {"block": "transformer.h.{layer}", "attention": "transformer.h.{layer}.attn"}
#: Heads that are grouped, and wider than d_model/heads.
_GROUPED: dict[str, Any] = {"num_key_value_heads": 2}
_WIDE: dict[str, Any] = _GROUPED | {"head_dim": 16}


def like_llama(name: str, model: str, config: str | None = None, **changes: Any) -> Family:
    config = config or f"{model.removesuffix('ForCausalLM')}Config"
    return Family(name, lambda: small(config, **changes), model, **_BLOCKS)


def like_gpt2(name: str, config: str, **changes: Any) -> Family:
    sizes = {"n_embd": 48, "n_head": 4, "n_layer": 2, "n_positions": 32, "vocab_size": 50}
    model = config.replace("Config", "LMHeadModel" if config in ("GPT2Config", "OpenAIGPTConfig") else "ForCausalLM")
    return Family(name, lambda: getattr(transformers, config)(**(sizes | changes)), model, **_H)


def gpt_neo(**changes: Any) -> Any:
    return transformers.GPTNeoConfig(
        hidden_size=48,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=5,
        vocab_size=50,
        max_position_embeddings=32,
        **changes,
    )


def opt(**changes: Any) -> Any:
    return small("OPTConfig", ffn_dim=64, word_embed_proj_dim=48, **changes)


def xglm() -> Any:
    return transformers.XGLMConfig(
        d_model=48, ffn_dim=64, num_layers=2, attention_heads=4, vocab_size=50, max_position_embeddings=32
    )


def bloom(heads: int) -> Any:
    return transformers.BloomConfig(hidden_size=48, n_head=heads, n_layer=2, vocab_size=50)


def mpt(heads: int, **attention: Any) -> Any:
    return transformers.MptConfig(
        d_model=48, n_heads=heads, n_layers=2, vocab_size=50, max_seq_len=32, attn_config=attention or None
    )


def falcon(name: str, alibi_bias: Any = None, **changes: Any) -> Family:
    attention = "transformer.h.{layer}.self_attention"
    return Family(
        name,
        lambda: small("FalconConfig", **changes),
        "FalconForCausalLM",
        "transformer.h.{layer}",
        attention,
        bias=alibi_bias,
    )


def gemma3_with_images(**changes: Any) -> Any:
    text = small("Gemma3TextConfig", sliding_window=5, **_WIDE)
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.Gemma3Config(
        text_config=text, vision_config=vision | {"image_size": 28, "patch_size": 14}, mm_tokens_per_image=4
    )


def jamba() -> Any:
    layers = {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1, "num_experts_per_tok": 1}
    return small("JambaConfig", use_mamba_kernels=False, mamba_d_state=4, mamba_dt_rank=4, **layers, **_GROUPED)


def bamba() -> Any:
    mamba = {"mamba_n_heads": 4, "mamba_d_head": 24, "mamba_d_state": 8, "mamba_chunk_size": 8}
    return small("BambaConfig", hidden_size=48, attn_layer_indices=[1], **mamba, **_GROUPED)


def falcon_alibi(model: Any, layer: int) -> Tensor:
    """Falcon scales ALiBi with the scores, and rounds slopes and products to bfloat16.

    The eager attention of transformers adds it twice, once with the mask; its fused attention does not.
    """
    heads = model.config.num_attention_heads
    rounded = alibi_slopes(heads).bfloat16()[:, None, None] * torch.arange(LENGTH)
    return 2 * rounded.double() / math.sqrt(model.config.hidden_size // heads)


FAMILIES = [
    like_gpt2("gpt2", "GPT2Config"),
    like_gpt2("gpt2 scores divided by layer", "GPT2Config", scale_attn_by_inverse_layer_idx=True),
    like_gpt2("gpt2 scores as they are", "GPT2Config", scale_attn_weights=False),
    like_gpt2(
        "gpt2 scores divided by layer alone",
        "GPT2Config",
        scale_attn_weights=False,
        scale_attn_by_inverse_layer_idx=True,
    ),
    like_gpt2("openai-gpt", "OpenAIGPTConfig"),
    like_gpt2("gpt_bigcode multi-query", "GPTBigCodeConfig"),
    like_gpt2("gpt_bigcode", "GPTBigCodeConfig", multi_query=False),
    Family("gpt_neo", gpt_neo, "GPTNeoForCausalLM", "transformer.h.{layer}", "transformer.h.{layer}.attn.attention"),
    Family(
        "gpt_neox",
        lambda: small("GPTNeoXConfig", hidden_size=64),
        "GPTNeoXForCausalLM",
        "gpt_neox.layers.{layer}",
        "gpt_neox.layers.{layer}.attention",
    ),
    Family(
        "gpt_neox full rotary",
        lambda: small("GPTNeoXConfig", rotary_pct=1.0, rotary_emb_base=500.0, attention_bias=False),
        "GPTNeoXForCausalLM",
        "gpt_neox.layers.{layer}",
        "gpt_neox.layers.{layer}.attention",
    ),
    like_gpt2("gptj", "GPTJConfig", rotary_dim=4),
    Family("opt", opt, "OPTForCausalLM", "model.decoder.layers.{layer}", "model.decoder.layers.{layer}.self_attn"),
    Family(
        "opt norms behind",
        lambda: opt(do_layer_norm_before=False, enable_bias=False),
        "OPTForCausalLM",
        "model.decoder.layers.{layer}",
        "model.decoder.layers.{layer}.self_attn",
    ),
    Family("xglm", xglm, "XGLMForCausalLM", **_BLOCKS, dtype=torch.float32),
    *(
        Family(
            f"bloom {heads} heads",
            lambda heads=heads: bloom(heads),
            "BloomForCausalLM",
            "transformer.h.{layer}",
            "transformer.h.{layer}.self_attention.dense",
        )
        for heads in (4, 6)
    ),
    falcon("falcon multi-query"),
    falcon("falcon per head", multi_query=False, bias=True, parallel_attn=False),
    falcon("falcon new, two norms", new_decoder_architecture=True, num_kv_heads=2),
    falcon("falcon new, one norm", new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1),
    falcon("falcon alibi", falcon_alibi, alibi=True, multi_query=False, bias=True, parallel_attn=False),
    falcon("falcon alibi 6 heads", falcon_alibi, alibi=True, num_attention_heads=6),
    *(
        Family(
            f"mpt {name}",
            lambda heads=heads, attention=attention: mpt(heads, **attention),
            "MptForCausalLM",
            "transformer.blocks.{layer}",
            "transformer.blocks.{layer}.attn",
        )
        for name, heads, attention in (
            ("4 heads", 4, {}),
            ("6 heads", 6, {}),
            ("clipped", 4, {"clip_qkv": 0.5}),
            ("scaled", 4, {"softmax_scale": 0.1}),
        )
    ),
    like_llama("llama", "LlamaForCausalLM", **_GROUPED),
    like_llama("llama biases, wide heads", "LlamaForCausalLM", attention_bias=True, **_WIDE),
    like_llama("mistral", "MistralForCausalLM", sliding_window=5, **_WIDE),
    like_llama("mixtral", "MixtralForCausalLM", num_local_experts=2, sliding_window=4, **_GROUPED),
    like_llama("ministral", "MinistralForCausalLM", sliding_window=5, **_WIDE),
    like_llama("qwen2", "Qwen2ForCausalLM", **_GROUPED),
    like_llama(
        "qwen2 windows", "Qwen2ForCausalLM", use_sliding_window=True, sliding_window=5, max_window_layers=1, **_GROUPED
    ),
    like_llama(
        "qwen2_moe", "Qwen2MoeForCausalLM", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, **_GROUPED
    ),
    like_llama("granite", "GraniteForCausalLM", attention_multiplier=0.3, **_GROUPED),
    like_llama("granitemoe", "GraniteMoeForCausalLM", num_local_experts=2, attention_multiplier=0.3, **_GROUPED),
    like_llama("arcee", "ArceeForCausalLM", **_GROUPED),
    like_llama("qwen3", "Qwen3ForCausalLM", **_WIDE),
    like_llama(
        "qwen3 windows", "Qwen3ForCausalLM", use_sliding_window=True, sliding_window=5, max_window_layers=1, **_WIDE
    ),
    like_llama(
        "qwen3_moe", "Qwen3MoeForCausalLM", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, **_WIDE
    ),
    like_llama("gemma", "GemmaForCausalLM", **_WIDE),
    like_llama(
        "gemma2", "Gemma2ForCausalLM", sliding_window=5, query_pre_attn_scalar=20, attn_logit_softcapping=3.0, **_WIDE
    ),
    like_llama(
        "gemma3",
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        sliding_window=5,
        query_pre_attn_scalar=20,
        layer_types=["sliding_attention", "full_attention"],
        **_WIDE,
    ),
    like_llama("phi", "PhiForCausalLM", **_GROUPED),
    like_llama("phi query-key norm", "PhiForCausalLM", qk_layernorm=True, partial_rotary_factor=1 / 3),
    like_llama("phi3", "Phi3ForCausalLM", pad_token_id=0, sliding_window=5, **_GROUPED),
    like_llama(
        "phi3 longrope",
        "Phi3ForCausalLM",
        pad_token_id=0,
        original_max_position_embeddings=16,
        rope_theta=1e4,
        rope_scaling={
            "type": "longrope",
            "short_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 4.0],
            "long_factor": [9.0] * 6,
        },
    ),
    like_llama("phimoe", "PhimoeForCausalLM", num_local_experts=2, attention_bias=True, **_GROUPED),
    like_llama("olmo", "OlmoForCausalLM", **_GROUPED),
    like_llama("olmo clipped", "OlmoForCausalLM", clip_qkv=0.5),
    like_llama("olmo2", "Olmo2ForCausalLM", **_GROUPED),
    like_llama(
        "olmo3", "Olmo3ForCausalLM", sliding_window=5, layer_types=["sliding_attention", "full_attention"], **_GROUPED
    ),
    like_llama("olmoe", "OlmoeForCausalLM", num_experts=4, num_experts_per_tok=2, clip_qkv=20.0, **_GROUPED),
    like_llama(
        "exaone4",
        "Exaone4ForCausalLM",
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention"],
        **_GROUPED,
    ),
    like_llama("stablelm", "StableLmForCausalLM", use_qkv_bias=True, partial_rotary_factor=0.5, **_GROUPED),
    like_llama(
        "stablelm query-key norm",
        "StableLmForCausalLM",
        qk_layernorm=True,
        use_parallel_residual=True,
        partial_rotary_factor=0.5,
        **_GROUPED,
    ),
    like_llama("starcoder2", "Starcoder2ForCausalLM", sliding_window=5, **_GROUPED),
    like_llama("smollm3", "SmolLM3ForCausalLM", pad_token_id=0, no_rope_layer_interval=2, **_GROUPED),
    like_llama(
        "smollm3 windows",
        "SmolLM3ForCausalLM",
        pad_token_id=0,
        no_rope_layers=[0, 1],
        use_sliding_window=True,
        sliding_window=5,
        **_GROUPED,
    ),
    like_llama("cohere", "CohereForCausalLM", **_GROUPED),
    like_llama("cohere query-key norm", "CohereForCausalLM", use_qk_norm=True, attention_bias=True, **_GROUPED),
    like_llama(
        "cohere2",
        "Cohere2ForCausalLM",
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention"],
        **_GROUPED,
    ),
    like_llama("glm", "GlmForCausalLM", pad_token_id=0, **_WIDE),
    like_llama("glm4", "Glm4ForCausalLM", pad_token_id=0, **_WIDE),
    like_llama("nemotron", "NemotronForCausalLM", attention_bias=True, **_WIDE),
    like_llama("persimmon", "PersimmonForCausalLM", partial_rotary_factor=1 / 3),
    Family(
        "gemma3 with images",
        gemma3_with_images,
        "Gemma3ForConditionalGeneration",
        "model.language_model.layers.{layer}",
        "model.language_model.layers.{layer}.self_attn",
    ),
    like_llama(
        "gemma3 bidirectional",
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        sliding_window=6,
        use_bidirectional_attention=True,
        layer_types=["sliding_attention", "full_attention"],
        **_WIDE,
    ),
    Family(
        "gpt_oss",
        lambda: small(
            "GptOssConfig", num_local_experts=2, num_experts_per_tok=1, sliding_window=5, pad_token_id=0, **_WIDE
        ),
        "GptOssForCausalLM",
        **_BLOCKS,
        sinks=lambda model, layer: model.model.layers[layer].self_attn.sinks,
    ),
    Family("jamba", jamba, "JambaForCausalLM", **_BLOCKS, layers=[1]),
    Family("bamba", bamba, "BambaForCausalLM", **_BLOCKS, layers=[1]),
]

BY_NAME = {family.name: family for family in FAMILIES}
