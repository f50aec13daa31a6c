"""Fused kernels of attention for tests: what torch's kernel got, a plain transcription, and a stand-in for flash."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class Recorded(TorchFunctionMode):
    """Keeps what torch's kernel got and returned."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[dict[str, Any], Tensor]] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is functional.scaled_dot_product_attention:
            names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
            self.calls.append((dict(zip(names, args, strict=False)) | (kwargs or {}), output))
        return output


def plain(tensor: Tensor) -> np.ndarray:
    return tensor.detach().double().numpy()


def plain_attention(
    query: Tensor,
    key: Tensor,
    scale: float,
    visible: np.ndarray,
    *,
    added: np.ndarray | float = 0.0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The weights, and the scores without what is added to them, in float64; heads of a group share a key."""
    q, k = plain(query), np.repeat(plain(key), query.shape[1] // key.shape[1], axis=1)
    scores = scale * np.einsum("bhqd,bhkd->bhqk", q, k)
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    raised = np.where(visible, np.exp(scores + added), 0.0)
    total = raised.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(plain(sinks))[None, :, None, None]
    return raised / np.where(total == 0, 1, total), scores


def flash_stand_in(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float = 1.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What flash attention computes, by forming the map; the last query stands at the last key."""
    queries, keys, groups = query.shape[2], key.shape[2], query.shape[1] // key.shape[1]
    scores = scaling * query @ key.repeat_interleave(groups, 1).transpose(2, 3)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    visible = torch.ones(1, 1, queries, keys, dtype=torch.bool)
    if module.is_causal if is_causal is None else is_causal:
        visible = visible & (distance >= 0)
    if sliding_window is not None and keys > sliding_window:
        visible = visible & (distance.abs() < sliding_window)
    if attention_mask is not None:
        visible = visible & (attention_mask[:, None, None] > 0)
    if kwargs.get("cu_seq_lens_q") is not None:
        numbers = torch.bucketize(torch.arange(keys), kwargs["cu_seq_lens_q"][1:-1], right=True)
        visible = visible & (numbers[:, None] == numbers)
    scores = scores.masked_fill(~visible, -torch.inf)
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
    weights = scores.softmax(-1).nan_to_num(0.0)[..., :keys]
    return (weights @ value.repeat_interleave(groups, 1)).transpose(1, 2).contiguous(), None
