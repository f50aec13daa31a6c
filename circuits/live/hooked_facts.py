"""Facts about attention that the config of a TransformerLens model states beside the weights."""

from typing import Any

from torch import Tensor

from ..checkpoints.tensor_file import in_memory
from ..weights.attention_weights import AttentionFacts, Positions
from ..weights.norms import HeadNorm, Norm
from ..weights.rope_scaling import scaled_rotary
from ..weights.rotary import Rotary

_POSITIONS: dict[str, Positions] = {
    "standard": "absolute",
    "shortformer": "absolute",
    "alibi": "alibi",
    "relative_positional_bias": "relative",
    "rotary": "rotary",
}
#: Architectures whose norms come after attention.
_NORM_BEHIND = ("Olmo2ForCausalLM", "Olmo3ForCausalLM")


def facts_of(cfg: Any, attention: Any, stack: str, layer: int, d_head: int) -> AttentionFacts:
    """Return the facts of one layer.

    Args:
        cfg: Config of the model. Facts that it does not state are unknown.
        attention: Attention module of the layer.
        stack: Name of the stack; empty if the model has only one.
        layer: Number of the layer.
        d_head: Inner width of its heads.
    """
    config_keys = {"positions": "positional_embedding_type", "causal": "attention_dir", "norm": "normalization_type"}
    unknown = {fact for fact, key in config_keys.items() if not hasattr(cfg, key)}
    if "positions" in unknown:
        unknown.add("rotary")
    kind = getattr(cfg, "positional_embedding_type", None)
    direction = getattr(cfg, "attention_dir", None)
    local = getattr(attention, "attn_type", None) == "local"
    soft_cap, clip = (getattr(cfg, key, None) for key in ("attn_scores_soft_cap", "clip_qkv"))
    cross = stack == "decoder cross"
    causal = {"decoder": True, "decoder cross": False}.get(stack, None if direction is None else direction == "causal")
    return AttentionFacts(
        rotary=_rotary(cfg, local, d_head) if kind == "rotary" else None,
        score_scale=_score_scale(cfg, layer, d_head),
        soft_cap=float(soft_cap) if soft_cap is not None and soft_cap > 0 else None,
        clip_qkv=None if clip is None else float(clip),
        window=cfg.window_size if local else None,
        causal=causal,
        positions=None if kind is None or cross else _POSITIONS.get(kind),
        cross=cross,
        unknown=frozenset(unknown),
    )


def norm_of(cfg: Any, block: Any, stack: str) -> Norm | None:
    """Return the norm in front of a block's attention; None if it comes after attention, is missing, or is unknown.

    Args:
        cfg: Config of the model.
        block: The block.
        stack: Name of the stack; empty if the model has only one.
    """
    kind = getattr(cfg, "normalization_type", None)
    # Only BERT's block has a hook after its last norm.
    is_after_attention = getattr(cfg, "original_architecture", None) in _NORM_BEHIND or hasattr(
        block, "hook_normalized_resid_post"
    )
    if kind is None or is_after_attention:
        return None
    module = getattr(block, "ln2" if stack == "decoder cross" else "ln1", None)
    # Only T5 has stacks with names, and its norms are RMSNorms whatever the config says.
    layer_norm = kind.upper().startswith("LN") and not stack
    return Norm(
        "layer_norm" if layer_norm else "rms_norm",
        _norm_parameter(module, "w"),
        _norm_parameter(module, "b"),
        float(cfg.eps),
    )


def head_norms_of(cfg: Any, attention: Any, d_head: int) -> tuple[HeadNorm | None, HeadNorm | None]:
    """Return the norm of the queries and the norm of the keys, each None if there is none.

    Args:
        cfg: Config of the model.
        attention: Attention module of the layer.
        d_head: Inner width of its heads.
    """
    return _head_norm(cfg, attention, "q_norm", d_head), _head_norm(cfg, attention, "k_norm", d_head)


def _head_norm(cfg: Any, attention: Any, name: str, d_head: int) -> HeadNorm | None:
    module = getattr(attention, name, None)
    if module is None:
        return None
    gain = _norm_parameter(module, "w")
    over_all = not getattr(cfg, "use_qk_norm", False)
    return HeadNorm(
        kind="rms_norm",
        gain=gain.reshape(-1, d_head) if gain is not None and over_all else gain,
        eps=float(cfg.eps),
        over="all" if over_all else "head",
    )


def _score_scale(cfg: Any, layer: int, d_head: int) -> float:
    """Return 1/attn_scale. TransformerLens divides the scores by attn_scale; -1 stands for sqrt(d_head)."""
    stated = getattr(cfg, "attn_scale", -1.0)
    divisor = float(stated) if stated > 0 else d_head**0.5
    if not getattr(cfg, "use_attn_scale", True):
        # A native bridge scales the scores nevertheless.
        divisor = d_head**0.5 if _is_native(cfg) else 1.0
    return 1.0 / (divisor * (layer + 1 if getattr(cfg, "scale_attn_by_inverse_layer_idx", False) else 1))


def _rotary(cfg: Any, local: bool, d_head: int) -> Rotary:
    """Return the rotation of a layer; its frequencies are unknown if the scaling depends on more than the config."""
    base = getattr(cfg, "rotary_base_local", None) if local else None
    adjacent = getattr(cfg, "rotary_adjacent_pairs", False) or _is_native(cfg)
    pairing = "adjacent" if adjacent else "halves"
    scaling = _scaling(cfg, local)
    if scaling is not None and scaling.get("rope_type", scaling.get("type")) in ("dynamic", "ntk"):
        return Rotary(pairing=pairing)
    dims = getattr(cfg, "rotary_dim", None) or d_head
    return scaled_rotary(d_head, dims, float(base or cfg.rotary_base), pairing, scaling, getattr(cfg, "n_ctx", None))


def _scaling(cfg: Any, local: bool) -> dict[str, Any] | None:
    """Return the scaling of rotary positions as a transformers config would state it."""
    if getattr(cfg, "use_NTK_by_parts_rope", False):
        return {
            "rope_type": "llama3",
            "factor": cfg.NTK_by_parts_factor,
            "low_freq_factor": cfg.NTK_by_parts_low_freq_factor,
            "high_freq_factor": cfg.NTK_by_parts_high_freq_factor,
            "original_max_position_embeddings": cfg.NTK_original_ctx_len,
        }
    if getattr(cfg, "use_yarn_rope", False) and not (cfg.yarn_global_attn_only and local):
        return {
            "rope_type": "yarn",
            "factor": cfg.yarn_factor,
            "attention_factor": cfg.yarn_attention_factor,
            "beta_fast": cfg.yarn_beta_fast,
            "beta_slow": cfg.yarn_beta_slow,
            "original_max_position_embeddings": cfg.yarn_original_max_position_embeddings,
            "truncate": cfg.yarn_truncate,
        }
    factor = getattr(cfg, "rotary_scaling_factor", 1.0)
    if factor != 1.0 and not local:
        return {"rope_type": "linear", "factor": factor}
    return getattr(cfg, "rope_scaling", None)


def _is_native(cfg: Any) -> bool:
    """Return whether the model is TransformerLens' own, without a model of another library inside."""
    return getattr(cfg, "architecture", None) == "TransformerLensNative"


def _norm_parameter(module: Any, name: str) -> Tensor | None:
    """Return a parameter of a norm; None if the norm does not have it."""
    tensor = getattr(module, name, None)
    return in_memory(tensor, f"{name} of a norm") if isinstance(tensor, Tensor) else None
