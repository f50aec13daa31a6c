"""What llama.cpp's converter writes for a model of transformers, transcribed from its `conversion/*.py`.

Names come from the package gguf's own table. Tensors that the table does not have are left out.
"""

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

Hparams = dict[str, Any]


def first(h: Hparams, *keys: str) -> Any:
    return next((h[key] for key in keys if h.get(key) is not None), None)


def rope_of(h: Hparams) -> Hparams:
    """`rope_parameters`, with the base in it as the converter mirrors it."""
    rope = dict(h.get("rope_parameters") or h.get("rope_scaling") or {})
    if "full_attention" not in rope and "sliding_attention" not in rope:
        theta = first(h, "rope_theta", "rotary_emb_base")
        if "rope_theta" not in rope and theta is not None:
            rope["rope_theta"] = theta
    return rope


def width(h: Hparams) -> int:
    return first(h, "head_dim") or h["hidden_size"] // h["num_attention_heads"]


def text_model(w: gguf.GGUFWriter, h: Hparams) -> None:
    """`TextModel.set_gguf_parameters`."""
    rope = rope_of(h).get("full_attention", rope_of(h))
    for add, value in (
        (w.add_block_count, first(h, "n_layers", "num_hidden_layers", "n_layer", "num_layers")),
        (w.add_context_length, first(h, "max_position_embeddings", "n_ctx", "n_positions")),
        (w.add_embedding_length, first(h, "hidden_size", "n_embd", "dim")),
        (w.add_feed_forward_length, first(h, "intermediate_size", "n_inner")),
        (w.add_head_count, first(h, "num_attention_heads", "n_head", "n_heads")),
        (w.add_head_count_kv, first(h, "num_key_value_heads", "n_kv_heads")),
        (w.add_rope_freq_base, rope.get("rope_theta")),
        (w.add_rope_freq_base_swa, rope_of(h).get("sliding_attention", {}).get("rope_theta")),
        (w.add_layer_norm_rms_eps, first(h, "rms_norm_eps", "norm_eps")),
        (w.add_layer_norm_eps, first(h, "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")),
        (w.add_expert_count, first(h, "num_local_experts", "num_experts")),
        (w.add_expert_used_count, first(h, "num_experts_per_tok")),
        (w.add_key_length, h.get("head_dim")),
        (w.add_value_length, h.get("head_dim")),
    ):
        if value is not None:
            add(value)
    if h.get("is_causal") is False:
        w.add_causal_attention(False)
    kind, factor = rope.get("rope_type"), rope.get("factor")
    if kind == "linear" and factor is not None:
        w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        w.add_rope_scaling_factor(factor)
    elif kind == "yarn" and factor is not None:
        w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        w.add_rope_scaling_factor(factor)
        w.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if (attention := rope.get("attention_factor", rope.get("attn_factor"))) is not None:
            w.add_rope_scaling_yarn_attn_factor(attention)
        if (fast := rope.get("beta_fast")) is not None:
            w.add_rope_scaling_yarn_beta_fast(fast)
        if (slow := rope.get("beta_slow")) is not None:
            w.add_rope_scaling_yarn_beta_slow(slow)


def llama(w: gguf.GGUFWriter, h: Hparams) -> None:
    text_model(w, h)
    w.add_vocab_size(h["vocab_size"])
    w.add_rope_dimension_count(width(h))


def granite(w: gguf.GGUFWriter, h: Hparams) -> None:
    h.pop("head_dim", None)
    llama(w, h)
    if h.get("attention_multiplier"):
        w.add_attention_scale(h["attention_multiplier"])


def olmo(w: gguf.GGUFWriter, h: Hparams) -> None:
    text_model(w, h)
    w.add_layer_norm_eps(1e-5)
    if h.get("clip_qkv") is not None:
        w.add_clamp_kqv(h["clip_qkv"])


def olmo2(w: gguf.GGUFWriter, h: Hparams) -> None:
    text_model(w, h)
    if "sliding_window" in h:
        w.add_sliding_window(h["sliding_window"])
        w.add_sliding_window_pattern([kind == "sliding_attention" for kind in h["layer_types"]])


def olmoe(w: gguf.GGUFWriter, h: Hparams) -> None:
    text_model(w, h)
    w.add_layer_norm_rms_eps(1e-5)


def gemma(w: gguf.GGUFWriter, h: Hparams) -> None:
    w.add_context_length(h["max_position_embeddings"])
    w.add_embedding_length(h["hidden_size"])
    w.add_block_count(h["num_hidden_layers"])
    w.add_feed_forward_length(h["intermediate_size"])
    w.add_head_count(h["num_attention_heads"])
    w.add_head_count_kv(h["num_key_value_heads"])
    w.add_layer_norm_rms_eps(h["rms_norm_eps"])
    w.add_key_length(h["head_dim"])
    w.add_value_length(h["head_dim"])


def gemma2(w: gguf.GGUFWriter, h: Hparams) -> None:
    gemma(w, h)
    w.add_attn_logit_softcapping(h["attn_logit_softcapping"])
    w.add_sliding_window(h["sliding_window"])


def gemma3(w: gguf.GGUFWriter, h: Hparams) -> None:
    text_model(w, h)
    w.add_rope_freq_base(rope_of(h).get("full_attention", rope_of(h)).get("rope_theta", 1_000_000.0))
    w.add_sliding_window(h["sliding_window"])


def gpt_oss(w: gguf.GGUFWriter, h: Hparams) -> None:
    text_model(w, h)
    w.add_sliding_window(h["sliding_window"])
    w.add_expert_feed_forward_length(h["intermediate_size"])


def command_r(w: gguf.GGUFWriter, h: Hparams) -> None:
    text_model(w, h)
    w.add_logit_scale(h["logit_scale"])
    w.add_rope_scaling_type(gguf.RopeScalingType.NONE)


def cohere2(w: gguf.GGUFWriter, h: Hparams) -> None:
    command_r(w, h)
    w.add_sliding_window(h["sliding_window"])
    w.add_rope_dimension_count(h["hidden_size"] // h["num_attention_heads"])


def exaone4(w: gguf.GGUFWriter, h: Hparams) -> None:
    text_model(w, h)
    if h.get("sliding_window") is not None:
        w.add_sliding_window(h["sliding_window"])
        w.add_sliding_window_pattern([kind == "sliding_attention" for kind in h["layer_types"]])


def glm4(w: gguf.GGUFWriter, h: Hparams) -> None:
    text_model(w, h)
    w.add_rope_dimension_count(int(width(h) * rope_of(h).get("partial_rotary_factor", 0.5)))


def stablelm(w: gguf.GGUFWriter, h: Hparams) -> None:
    factor = first(h, "partial_rotary_factor", "rope_pct") or rope_of(h)["partial_rotary_factor"]
    w.add_context_length(h["max_position_embeddings"])
    w.add_embedding_length(h["hidden_size"])
    w.add_block_count(h["num_hidden_layers"])
    w.add_feed_forward_length(h["intermediate_size"])
    w.add_rope_dimension_count(int(factor * (h["hidden_size"] // h["num_attention_heads"])))
    w.add_head_count(h["num_attention_heads"])
    w.add_head_count_kv(h["num_key_value_heads"])
    w.add_parallel_residual(h["use_parallel_residual"])
    w.add_layer_norm_eps(h["layer_norm_eps"])


def nemotron(w: gguf.GGUFWriter, h: Hparams) -> None:
    text_model(w, h)
    w.add_vocab_size(h["vocab_size"])
    w.add_layer_norm_eps(h["norm_eps"])
    w.add_rope_dimension_count(int(rope_of(h)["partial_rotary_factor"] * h["hidden_size"]) // h["num_attention_heads"])
    w.add_rope_scaling_type(gguf.RopeScalingType.NONE)


def phi2(w: gguf.GGUFWriter, h: Hparams) -> None:
    w.add_context_length(h["max_position_embeddings"])
    w.add_embedding_length(h["hidden_size"])
    w.add_feed_forward_length(4 * h["hidden_size"])
    w.add_block_count(h["num_hidden_layers"])
    w.add_head_count(h["num_attention_heads"])
    w.add_head_count_kv(h["num_attention_heads"])
    w.add_layer_norm_eps(h["layer_norm_eps"])
    w.add_rope_dimension_count(int(rope_of(h)["partial_rotary_factor"] * h["hidden_size"]) // h["num_attention_heads"])


def phi3(w: gguf.GGUFWriter, h: Hparams) -> None:
    fraction = rope_of(h).get("partial_rotary_factor", 1.0)
    w.add_context_length(h["max_position_embeddings"])
    w.add_rope_scaling_orig_ctx_len(h["original_max_position_embeddings"])
    w.add_embedding_length(h["hidden_size"])
    w.add_feed_forward_length(h["intermediate_size"])
    w.add_block_count(h["num_hidden_layers"])
    w.add_head_count(h["num_attention_heads"])
    w.add_head_count_kv(h["num_key_value_heads"])
    w.add_layer_norm_rms_eps(h["rms_norm_eps"])
    w.add_rope_dimension_count(int(fraction * h["hidden_size"]) // h["num_attention_heads"])
    w.add_rope_freq_base(rope_of(h)["rope_theta"])
    w.add_sliding_window(h.get("sliding_window") or 0)
    if rope_of(h).get("long_factor"):
        trained = h["original_max_position_embeddings"]
        scale = h["max_position_embeddings"] / trained
        w.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(scale) / np.log(trained))) if scale > 1 else 1.0)


def falcon(w: gguf.GGUFWriter, h: Hparams) -> None:
    w.add_context_length(2048)
    w.add_tensor_data_layout("jploski")
    w.add_embedding_length(h["hidden_size"])
    w.add_feed_forward_length(4 * h["hidden_size"])
    w.add_block_count(h["num_hidden_layers"])
    w.add_head_count(h["num_attention_heads"])
    w.add_head_count_kv(falcon_groups(h))
    w.add_layer_norm_eps(h["layer_norm_epsilon"])


def falcon_groups(h: Hparams) -> int:
    """The number in the config.json of the falcons: 1 for the first ones, whose config says multi_query."""
    return h["num_kv_heads"] if h["new_decoder_architecture"] or not h["multi_query"] else 1


def gptneox(w: gguf.GGUFWriter, h: Hparams) -> None:
    fraction = first(h, "rotary_pct") or rope_of(h)["partial_rotary_factor"]
    w.add_context_length(h["max_position_embeddings"])
    w.add_embedding_length(h["hidden_size"])
    w.add_block_count(h["num_hidden_layers"])
    w.add_feed_forward_length(h["intermediate_size"])
    w.add_rope_dimension_count(int(fraction * (h["hidden_size"] // h["num_attention_heads"])))
    w.add_head_count(h["num_attention_heads"])
    w.add_parallel_residual(h["use_parallel_residual"])
    w.add_layer_norm_eps(h["layer_norm_eps"])


def bloom(w: gguf.GGUFWriter, h: Hparams) -> None:
    w.add_context_length(h.get("seq_length", h["hidden_size"]))
    w.add_embedding_length(h["hidden_size"])
    w.add_feed_forward_length(4 * h["hidden_size"])
    w.add_block_count(h["n_layer"])
    w.add_head_count(h["n_head"])
    w.add_head_count_kv(h["n_head"])
    w.add_layer_norm_eps(h["layer_norm_epsilon"])


def mpt(w: gguf.GGUFWriter, h: Hparams) -> None:
    attention = h["attn_config"]
    w.add_context_length(h["max_seq_len"])
    w.add_embedding_length(h["d_model"])
    w.add_block_count(h["n_layers"])
    w.add_feed_forward_length(4 * h["d_model"])
    w.add_head_count(h["n_heads"])
    w.add_layer_norm_eps(1e-5)
    if attention["clip_qkv"] is not None:
        w.add_clamp_kqv(attention["clip_qkv"])
    w.add_max_alibi_bias(attention["alibi_bias_max"] if attention["alibi"] else 0.0)


def gpt2(w: gguf.GGUFWriter, h: Hparams) -> None:
    w.add_block_count(h["n_layer"])
    w.add_context_length(h["n_positions"])
    w.add_embedding_length(h["n_embd"])
    w.add_feed_forward_length(4 * h["n_embd"])
    w.add_head_count(h["n_head"])
    w.add_layer_norm_eps(h["layer_norm_epsilon"])


def starcoder(w: gguf.GGUFWriter, h: Hparams) -> None:
    gpt2(w, h)
    w.add_head_count_kv(1)


def bert(w: gguf.GGUFWriter, h: Hparams) -> None:
    text_model(w, h)
    w.add_causal_attention(False)


def t5(w: gguf.GGUFWriter, h: Hparams) -> None:
    t5encoder(w, h)
    w.add_decoder_block_count(h["num_decoder_layers"])
    w.add_decoder_start_token_id(0)


def t5encoder(w: gguf.GGUFWriter, h: Hparams) -> None:
    w.add_context_length(512)
    w.add_embedding_length(h["d_model"])
    w.add_feed_forward_length(h["d_ff"])
    w.add_block_count(h["num_layers"])
    w.add_head_count(h["num_heads"])
    w.add_key_length(h["d_kv"])
    w.add_value_length(h["d_kv"])
    w.add_layer_norm_eps(h["layer_norm_epsilon"])
    w.add_relative_attn_buckets_count(h["relative_attention_num_buckets"])
    w.add_layer_norm_rms_eps(h["layer_norm_epsilon"])


PARAMETERS: dict[str, Callable[[gguf.GGUFWriter, Hparams], None]] = {
    **dict.fromkeys(("llama", "arcee", "smollm3", "deci"), llama),
    **dict.fromkeys(("qwen2", "qwen2moe", "qwen3", "qwen3moe", "starcoder2"), text_model),
    **dict.fromkeys(("granite", "granitemoe"), granite),
    "olmo": olmo,
    "olmo2": olmo2,
    "olmoe": olmoe,
    "gemma": gemma,
    "gemma2": gemma2,
    "gemma3": gemma3,
    "gpt-oss": gpt_oss,
    "command-r": command_r,
    "cohere2": cohere2,
    "exaone4": exaone4,
    "glm4": glm4,
    "stablelm": stablelm,
    "nemotron": nemotron,
    "phi2": phi2,
    "phi3": phi3,
    "falcon": falcon,
    "gptneox": gptneox,
    "bloom": bloom,
    "mpt": mpt,
    "gpt2": gpt2,
    "starcoder": starcoder,
    "bert": bert,
    "t5": t5,
    "t5encoder": t5encoder,
}


def permute(rows: Tensor, heads: int) -> Tensor:
    """`LlamaModel.permute`."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def permuted(name: str, tensor: Tensor, h: Hparams) -> Tensor:
    queries = h["num_attention_heads"]
    if re.search(r"q_proj\.(weight|bias)$", name):
        return permute(tensor, queries)
    return permute(tensor, h["num_key_value_heads"]) if re.search(r"k_proj\.(weight|bias)$", name) else tensor


def plus_one(name: str, tensor: Tensor, h: Hparams) -> Tensor:
    return tensor + 1 if name.endswith("norm.weight") else tensor


def rearranged(name: str, tensor: Tensor, h: Hparams) -> Tensor:
    """Falcon's groups, each with its queries, its key and its value."""
    if "query_key_value" not in name:
        return tensor
    heads, groups = h["num_attention_heads"], falcon_groups(h)
    d_head = h["hidden_size"] // heads
    qkv = tensor.view(groups, heads // groups + 2, d_head, *tensor.shape[1:])
    q = qkv[:, :-2].reshape(heads * d_head, *tensor.shape[1:])
    k = qkv[:, [-2]].reshape(groups * d_head, *tensor.shape[1:])
    v = qkv[:, [-1]].reshape(groups * d_head, *tensor.shape[1:])
    return torch.cat((q, k, v)).reshape_as(tensor)


def reformatted(name: str, tensor: Tensor, h: Hparams) -> Tensor:
    """Bloom's and GPT-NeoX's heads, each with its query, its key and its value."""
    if "query_key_value" not in name:
        return tensor
    heads, d_model = first(h, "n_head", "num_attention_heads"), h["hidden_size"]
    if tensor.ndim == 2:
        qkv = tensor.reshape((heads, 3, d_model // heads, d_model))
        return torch.cat([qkv[:, part].reshape((-1, d_model)) for part in range(3)])
    qkv = tensor.reshape((heads, 3, d_model // heads))
    return torch.cat([qkv[:, part].reshape((d_model,)) for part in range(3)])


def transposed(name: str, tensor: Tensor, h: Hparams) -> Tensor:
    return tensor.T if name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")) else tensor


MODIFIED: dict[str, Callable[[str, Tensor, Hparams], Tensor]] = {
    **dict.fromkeys(("llama", "arcee", "smollm3", "deci", "granite", "granitemoe", "olmo"), permuted),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "nemotron"), plus_one),
    "falcon": rearranged,
    "bloom": reformatted,
    "gptneox": reformatted,
    "gpt2": transposed,
}


def extra_tensors(h: Hparams, architecture: str) -> dict[str, Tensor]:
    """`generate_extra_tensors`: what divides the frequencies of rotary positions."""
    rope = rope_of(h)
    if architecture == "phi3" and rope.get("long_factor"):
        return {f"rope_factors_{kind}.weight": torch.tensor(rope[f"{kind}_factor"]) for kind in ("long", "short")}
    if rope.get("rope_type") != "llama3":
        return {}
    factor, low, high = (rope[key] for key in ("factor", "low_freq_factor", "high_freq_factor"))
    length, dim = rope["original_max_position_embeddings"], width(h)
    divisors = []
    for frequency in 1.0 / rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim):
        wavelength = 2 * math.pi / float(frequency)
        if wavelength < length / high:
            divisors.append(1.0)
        elif wavelength > length / low:
            divisors.append(factor)
        else:
            smooth = (length / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return {"rope_freqs.weight": torch.tensor(divisors, dtype=torch.float32)}


def converted(model: Any, architecture: str) -> dict[str, Tensor]:
    """The tensors of a model by their names in GGUF."""
    h = model.config.to_dict()
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    layers = first(h, "n_layers", "num_hidden_layers", "n_layer", "num_layers")
    table = gguf.get_tensor_name_map(arch, layers)
    tensors = {}
    for name, tensor in _tensors(model.state_dict(), architecture):
        stored = table.get_name(name, try_suffixes=(".weight", ".bias"))
        if stored is not None:
            modified = MODIFIED.get(architecture)
            tensors[stored] = tensor if modified is None else modified(name, tensor, h)
    return tensors | extra_tensors(h, architecture)


def _tensors(state: dict[str, Tensor], architecture: str) -> Iterator[tuple[str, Tensor]]:
    norms: dict[str, list[Tensor]] = {}
    for name, tensor in state.items():
        if architecture == "bert":
            yield name.removeprefix("bert."), tensor
        elif architecture == "bloom":
            yield name.removeprefix("transformer."), tensor
        elif architecture == "gpt-oss" and name.endswith("sinks"):
            yield f"{name}.weight", tensor
        elif (of_head := re.fullmatch(r"(.+_layernorm)\.norms\.\d+\.weight", name)) is not None:
            norms.setdefault(f"{of_head[1]}.weight", []).append(tensor)
        elif name.endswith("mlp.experts.gate_up_proj") and architecture != "gpt-oss":
            gate, up = tensor.chunk(2, dim=-2)
            yield name.replace("gate_up_proj", "gate_proj.weight"), gate
            yield name.replace("gate_up_proj", "up_proj.weight"), up
        elif name.endswith("mlp.experts.down_proj") and architecture != "gpt-oss":
            yield f"{name}.weight", tensor
        else:
            yield name, tensor
    for name, of_heads in norms.items():
        yield name, torch.stack(of_heads)


def write(
    path: Path,
    architecture: str,
    parameters: Callable[[gguf.GGUFWriter], None],
    tensors: dict[str, Tensor],
    kind: Kind = Kind.F32,
    experts: bool = False,
) -> Path:
    """Write a file; matrices are stored as `kind`, and `experts` adds some of MXFP4."""
    writer = gguf.GGUFWriter(path, architecture)
    parameters(writer)
    for name, tensor in tensors.items():
        values = tensor.float().contiguous().numpy()
        if kind != Kind.F32 and values.ndim == 2:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    if experts:
        packed = np.random.default_rng(0).integers(0, 255, (2, 64, 2 * 17), dtype=np.uint8)
        # The exponent of each block's scale.
        packed[..., ::17] = 120
        writer.add_tensor("blk.0.ffn_gate_exps.weight", packed, raw_dtype=Kind.MXFP4)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def convert(model: Any, path: Path, architecture: str, kind: Kind = Kind.F32, **entries: Any) -> Path:
    """Write the file of a model; `entries` are further entries of the metadata, with __ for a dot."""

    def parameters(writer: gguf.GGUFWriter) -> None:
        PARAMETERS[architecture](writer, model.config.to_dict())
        for key, value in entries.items():
            add_entry(writer, key.replace("__", "."), value)

    experts = architecture == "gpt-oss"
    return write(path, architecture, parameters, converted(model, architecture), kind, experts)


def add_entry(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    key = key if key.startswith(("general.", "split.", "tokenizer.")) else f"{writer.arch}.{key}"
    for kind, add in (
        (bool, writer.add_bool),
        (int, writer.add_uint32),
        (float, writer.add_float32),
        (str, writer.add_string),
        (list, writer.add_array),
    ):
        if isinstance(value, kind):
            add(key, value)
            return
