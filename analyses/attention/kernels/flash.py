"""What the flash kernels under transformers compute, from the call of transformers' attention function."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from .scores import KernelCall, MaskRows, causal, equal, of_tensor, window
from .torch_kernel import in_kernel_type

#: The arguments of packed sequences; the kernel takes them as such if it gets all of them.
_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def flash_call(
    kind: str,
    query: Float[Tensor, "batch head query d_head"],
    key: Float[Tensor, "batch key_head key d_head"],
    given: Mapping[str, Any],
    *,
    is_causal: bool,
) -> KernelCall | str:
    """Return what a flash kernel computes, or the reason why it is not known.

    A padding mask is over the keys, and the queries are its last positions. Without one, the last query stands at the
    last key. Packed sequences do not see each other.

    Args:
        kind: The name of the kernel.
        query: The queries.
        key: The keys.
        given: The other arguments by name.
        is_causal: Whether a query sees no later key.
    """
    if given.get("block_table") is not None:
        return "its keys are in the blocks of a paged cache, which are not those of one sequence"
    sinks = given.get("s_aux")
    if sinks is not None and kind.startswith("flash_attention_2"):
        return "flash_attention_2 has no sinks, and whether it was given them is not known"
    padding = given.get("attention_mask")
    if padding is not None and padding.ndim != 2:
        return f"its mask has the shape {list(padding.shape)}; expected [batch, key], which is true on tokens"
    masks = _places(query, key, given) if padding is None else _places_of_tokens(query, key, padding)
    if isinstance(masks, str):
        return masks
    queries, keys, masks = masks
    if is_causal:
        masks.append(causal(queries, keys))
    size = given.get("sliding_window")
    if size is not None and key.shape[2] > size:
        masks.append(window(queries, keys, size))
    scale = given.get("scaling")
    width = key.shape[2]
    return KernelCall(
        in_kernel_type(query),
        in_kernel_type(key[:, :, : keys.shape[-1]]),
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        masks=tuple(masks),
        softcap=given.get("softcap"),
        sinks=sinks,
        width=width,
        dropout=given.get("dropout") or 0.0,
    )


def _places_of_tokens(query: Tensor, key: Tensor, padding: Tensor) -> tuple[Tensor, Tensor, list[MaskRows]] | str:
    """Return the numbers of the tokens among the queries and keys, and what hides padding."""
    length, queries = padding.shape[1], query.shape[2]
    if length > key.shape[2] or queries > length:
        return f"its mask has {length} positions for {queries} queries and {key.shape[2]} keys"
    tokens = padding > 0
    numbers = tokens.long().cumsum(dim=1) - 1
    # A single query is a token whatever the mask says.
    asks = tokens[:, length - queries :] if queries > 1 else torch.ones_like(tokens[:, :1])
    masks = [of_tensor(tokens[:, None, None]), _of_queries(asks)]
    return numbers[:, length - queries :], numbers, masks


def _of_queries(asks: Bool[Tensor, "batch query"]) -> MaskRows:
    def rows(first: int, last: int) -> Tensor:
        return asks[:, None, first:last, None]

    return rows


def _places(query: Tensor, key: Tensor, given: Mapping[str, Any]) -> tuple[Tensor, Tensor, list[MaskRows]] | str:
    """Return the places of queries and keys without padding, and what keeps packed sequences apart."""
    queries, keys = query.shape[2], key.shape[2]
    places = torch.arange(keys, device=query.device)
    starts = _packed(len(query), queries, keys, given)
    if isinstance(starts, str):
        return starts
    own = torch.arange(keys - queries, keys, device=query.device)
    if starts is None:
        return own, places, []
    numbers = torch.bucketize(places, starts.to(places), right=True)
    return own, places, [equal(numbers, numbers)]


def _packed(batch: int, queries: int, keys: int, given: Mapping[str, Any]) -> Tensor | str | None:
    """Return where packed sequences begin; None if there are none, and the reason if that is not known."""
    ids = given.get("position_ids")
    if all(given.get(name) is not None for name in _PACKED):
        starts, of_keys = given["cu_seq_lens_q"], given["cu_seq_lens_k"]
        if batch != 1 or queries != keys or not torch.equal(starts, of_keys):
            return "its packed sequences have other bounds for queries than for keys, or go across examples"
        return starts[1:-1]
    if batch != 1 or not isinstance(ids, Tensor) or ids.shape[-1] == 1:
        return None
    if ids.ndim != 2:
        return "its position_ids have several dimensions, and where packed sequences begin is not known"
    if torch.equal(ids[0], torch.arange(ids.shape[1], device=ids.device) + ids.min()):
        return None
    if queries != keys or ids.shape[1] != queries:
        return "its position_ids begin again where keys are cached, and the bounds of the sequences are not known"
    starts = (ids[0] == ids.min()).nonzero()[:, 0]
    return starts[1:] if len(starts) and starts[0] == 0 else "its position_ids do not begin with the first position"
