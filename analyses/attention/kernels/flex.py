"""What torch's flex_attention computes under transformers, from the call of transformers' attention function."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from .scores import KernelCall, MaskRows, of_tensor


def flex_call(
    query: Float[Tensor, "batch head query d_head"],
    key: Float[Tensor, "batch key_head key d_head"],
    given: Mapping[str, Any],
) -> KernelCall | str:
    """Return what flex_attention computes, or the reason why it is not known.

    Args:
        query: The queries.
        key: The keys.
        given: The other arguments by name.
    """
    mask, scale = given.get("attention_mask"), given.get("scaling")
    if given.get("head_mask") is not None:
        return "it was called with head_mask, which is not read"
    masks: list[MaskRows] = []
    if isinstance(mask, BlockMask):
        masks.append(_of_blocks(mask, key.shape[2]))
    elif isinstance(mask, Tensor) and mask.ndim == 4:
        masks.append(of_tensor(mask[:, :1, :, : key.shape[2]]))
    elif mask is not None:
        return f"its mask is a {type(mask).__name__}; expected a BlockMask or a tensor [batch, head, query, key]"
    if given.get("position_bias") is not None:
        masks.append(of_tensor(given["position_bias"].detach()))
    return KernelCall(
        query,
        key,
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        masks=tuple(masks),
        softcap=given.get("softcap"),
        sinks=given.get("s_aux"),
    )


def _of_blocks(mask: BlockMask, keys: int) -> MaskRows:
    """Return a mask whose rows are computed by the function that a BlockMask was made of."""
    device = mask.kv_num_blocks.device
    examples, heads = (torch.arange(size, device=device) for size in mask.shape[:2])
    places = torch.arange(keys, device=device)
    of_all: Any = mask.mask_mod
    # The function takes one example, head, query and key.
    for argument in (3, 2, 1, 0):
        of_all = torch.vmap(of_all, in_dims=tuple(0 if number == argument else None for number in range(4)))

    def rows(first: int, last: int) -> Tensor:
        return of_all(examples, heads, torch.arange(first, last, device=device), places)

    return rows
