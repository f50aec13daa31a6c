"""The weights that a torch.nn.MultiheadAttention attends with, from what it was called with."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from .seen import seen_in


def attention_weights(
    module: nn.MultiheadAttention, arguments: Mapping[str, Any]
) -> Float[Tensor, "batch head query key"]:
    """Return the weights that a module attends with, without dropout; the keys that it adds itself come last.

    Args:
        module: The module.
        arguments: What it was called with, by name.
    """
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    batched = query.ndim == 3
    if module.batch_first and batched:
        query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
    separate = not module._qkv_same_embed_dim
    _, weights = functional.multi_head_attention_forward(
        query,
        key,
        value,
        module.embed_dim,
        module.num_heads,
        module.in_proj_weight,
        module.in_proj_bias,
        module.bias_k,
        module.bias_v,
        module.add_zero_attn,
        0.0,
        module.out_proj.weight,
        module.out_proj.bias,
        key_padding_mask=arguments.get("key_padding_mask"),
        need_weights=True,
        attn_mask=arguments.get("attn_mask"),
        use_separate_proj_weight=separate,
        q_proj_weight=module.q_proj_weight if separate else None,
        k_proj_weight=module.k_proj_weight if separate else None,
        v_proj_weight=module.v_proj_weight if separate else None,
        average_attn_weights=False,
        is_causal=bool(arguments.get("is_causal", False)),
    )
    assert weights is not None
    return weights if batched else weights[None]


def attended(
    module: nn.MultiheadAttention,
    value: Float[Tensor, "*first second width"],
    attention: Float[Tensor, "batch head query key"],
    added: Float[Tensor, "batch head query added_key"],
) -> Float[Tensor, "*first second d_model"]:
    """Return what a module writes, computed from its map and from the weights on the keys that it adds itself.

    Args:
        module: The module.
        value: The values that it was called with.
        attention: Its map.
        added: The weights on the keys that it adds itself.
    """
    batched = value.ndim == 3
    if not batched:
        value = value[None]
    elif not module.batch_first:
        value = value.transpose(0, 1)
    width = module.embed_dim
    weight = module.in_proj_weight[2 * width :] if module._qkv_same_embed_dim else module.v_proj_weight
    bias = None if module.in_proj_bias is None else module.in_proj_bias[2 * width :]
    values = functional.linear(value, weight, bias)
    heads = values.unflatten(-1, (module.num_heads, -1)).transpose(1, 2)
    written = attention @ heads
    if module.bias_v is not None:
        # The key that the module adds first has this value; that of add_zero_attn comes after it and has the value 0.
        written = written + added[..., :1] * module.bias_v.view(module.num_heads, 1, -1)
    output = module.out_proj(written.transpose(1, 2).flatten(2))
    if not batched:
        return output[0]
    return output if module.batch_first else output.transpose(0, 1)


def real_keys(padding: Tensor | None) -> Bool[Tensor, "batch key"] | None:
    """Return the opposite of key_padding_mask, which is true, or minus infinity, where a key is padding."""
    if padding is None:
        return None
    real = ~padding if padding.dtype == torch.bool else padding > -torch.inf
    return real if real.ndim == 2 else real[None]


def seen_by_torch(mask: Tensor | None, attention: Float[Tensor, "batch head query key"]) -> Tensor | None:
    """Return where attn_mask lets a query see a key, [1 or batch, 1 or query, key]; None if heads differ.

    Args:
        mask: [query, key], or [batch * head, query, key]: true, or minus infinity, where a key is hidden.
        attention: The map.
    """
    if mask is None:
        return torch.ones(1, 1, attention.shape[-1], dtype=torch.bool, device=attention.device)
    visible = ~mask if mask.dtype == torch.bool else mask
    return seen_in(visible[None] if mask.ndim == 2 else visible.unflatten(0, (len(attention), -1)))
