"""Fusion of a layer's heads into one attention map, without its smallest entries and without padding."""

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ....circuits.errors import CallError

#: How the heads of a layer become one map, by name.
NamedFusion = Literal["mean", "max", "min"]
#: How the heads of a layer become one map: by name, or as a sum with one weight for each head.
HeadFusion = NamedFusion | tuple[float, ...]


def fuse_heads(
    attention: Float[Tensor, "batch head query key"], heads: HeadFusion = "mean"
) -> Float[Tensor, "batch query key"]:
    """Return one attention map over all heads, without gradient and in float32 or better.

    The rows of the result need not sum to 1.

    Args:
        attention: attention maps of one layer.
        heads: mean, max or min over the heads, entry by entry, or the weights of a weighted sum.

    Raises:
        CallError: The number of weights differs from the number of heads.
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


def named_fusion(heads: HeadFusion | tuple[tuple[float, ...], ...]) -> NamedFusion:
    """Return how heads are fused, by name.

    Raises:
        CallError: Weights of heads were given.
    """
    if not isinstance(heads, str):
        raise CallError(
            "weights of heads were given, but not every measure keeps heads separate; expected mean, max or min"
        )
    return heads


def hide_padding(
    fused: Float[Tensor, "batch query key"], mask: Bool[Tensor, "batch position"], first: int = 0
) -> Float[Tensor, "batch query key"]:
    """Set the rows and columns of padding to zero, in place, whatever their values, and return the map.

    Args:
        fused: attention maps, heads fused, or some rows of them.
        mask: token mask of the batch.
        first: position of the first row.
    """
    padding = ~mask.to(fused.device)
    rows = padding[:, first : first + fused.shape[1], None]
    return fused.masked_fill_(padding[:, None, :], 0.0).masked_fill_(rows, 0.0)


def discard_smallest(
    fused: Float[Tensor, "batch query key"], share: float, first: int = 0
) -> Float[Tensor, "batch query key"]:
    """Set the smallest entries of every row to zero, in place, and return the map.

    If a query attends to k keys with a weight above 0, the keys below its (floor(share k) + 1)-th smallest weight are
    dropped. That is at most the given share of them, fewer where entries tie, so that uniform attention stays uniform,
    and never all of them. The attention of a token to itself is never dropped. The share is taken of each row and not,
    as elsewhere, of the whole map: in a causal map late queries have small entries because they see many keys, and
    would lose nearly all of them.

    Args:
        fused: attention maps, heads fused, or some rows of them.
        share: share of each query's keys to drop, from 0 to less than 1.
        first: position of the first row.
    """
    if share == 0:
        return fused
    seen = fused > 0
    count = seen.sum(dim=-1, keepdim=True)
    # 0.29 * 100 is slightly less than 29 in floating point, and a share of almost 1 would be all keys.
    dropped = torch.minimum((share * count.double() + 1e-9).long(), (count - 1).clamp_min(0))
    threshold = fused.masked_fill(~seen, torch.inf).sort(dim=-1).values.gather(-1, dropped)
    below = fused < threshold
    below.diagonal(first, dim1=-2, dim2=-1).fill_(False)
    return fused.masked_fill_(below, 0.0)
