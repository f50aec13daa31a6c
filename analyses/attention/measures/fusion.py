"""One map out of the heads of a layer: fused, its small entries dropped, padding kept out."""

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ....circuits.errors import CallError

#: How the heads of a layer become one map: a name, or a weight for every head.
HeadFusion = Literal["mean", "max", "min"] | tuple[float, ...]


def fuse_heads(
    attention: Float[Tensor, "batch head query key"], heads: HeadFusion = "mean"
) -> Float[Tensor, "batch query key"]:
    """Return one map over all heads, without gradient, in float32 at least; its rows need not sum to 1.

    Args:
        attention: the maps of a layer.
        heads: mean, max or min over the heads, entry by entry, or the weights of a weighted sum.

    Raises:
        CallError: there are not as many weights as heads.
    """
    attention = attention.detach()
    dtype = torch.promote_types(attention.dtype, torch.float32)
    if heads == "mean":
        return attention.mean(dim=1, dtype=dtype)
    if heads in ("max", "min"):
        return (attention.amax(dim=1) if heads == "max" else attention.amin(dim=1)).to(dtype)
    if len(heads) != attention.shape[1]:
        raise CallError(f"{len(heads)} weights were given for the {attention.shape[1]} heads of a layer")
    fused = torch.zeros_like(attention[:, 0], dtype=dtype)
    for head, weight in enumerate(heads):
        fused.add_(attention[:, head], alpha=weight)
    return fused


def hide_padding(
    fused: Float[Tensor, "batch query key"], mask: Bool[Tensor, "batch position"]
) -> Float[Tensor, "batch query key"]:
    """Set the rows and the columns of padding to zero, in place, whatever was there."""
    padding = ~mask.to(fused.device)
    return fused.masked_fill_(padding[:, None, :], 0.0).masked_fill_(padding[:, :, None], 0.0)


def discard_smallest(fused: Float[Tensor, "batch query key"], share: float) -> Float[Tensor, "batch query key"]:
    """Set the smallest entries of every row to zero, in place.

    Of the k keys that a query attends to at all, those below its (floor(share k) + 1)-th smallest attention are
    dropped: at most the share, fewer where entries tie, so that uniform attention stays uniform, and never all of them.
    What a token gives to itself is never dropped. The share is of each row and not, as elsewhere, of the whole map: in
    a causal map late queries have small entries because they see many keys, and would lose nearly all of them.
    """
    if share == 0:
        return fused
    seen = fused > 0
    count = seen.sum(dim=-1, keepdim=True)
    # 0.29 * 100 is a little less than 29 in floating point.
    dropped = (share * count.double() + 1e-9).long().clamp(max=fused.shape[-1] - 1)
    threshold = fused.masked_fill(~seen, torch.inf).sort(dim=-1).values.gather(-1, dropped)
    below = fused < threshold
    below.diagonal(dim1=-2, dim2=-1).fill_(False)
    return fused.masked_fill_(below, 0.0)
