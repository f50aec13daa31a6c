"""Which keys each query of a layer can see, from the mask that the layer was called with."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from ..kernels.scores import HIDDEN, KernelCall

#: The names of masks in the calls of attention modules.
_MASKS = ("attention_mask", "mask", "attn_mask")
_ABSENT = object()


def seen_in(mask: Tensor | None) -> Bool[Tensor, "#batch #query key"] | None:
    """Return where a mask lets a query see a key; None if it is of a form that is not known, or differs between heads.

    Args:
        mask: [batch, head, query, key], [batch, query, key] or [batch, key]: numbers that are added to scores, or true
            or 1 where a key is seen.
    """
    if mask is None or mask.ndim not in (2, 3, 4):
        return None
    visible = mask > HIDDEN if mask.is_floating_point() and mask.ndim > 2 else mask != 0
    if mask.ndim == 4:
        if mask.shape[1] != 1 and not bool((visible == visible[:, :1]).all()):
            return None
        return visible[:, 0]
    return visible if mask.ndim == 3 else visible[:, None]


class LayerMasks:
    """Reads the masks of the layers of one call; layers that share a mask get the same tensor."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._read: dict[Any, tuple[Any, Tensor | None]] = {}
        self._of_kernels: dict[Any, tuple[Any, Tensor | None]] = {}

    def forget(self) -> None:
        """Forget the call that was in progress."""
        self._read, self._of_kernels = {}, {}

    def seen_by_kernel(self, call: KernelCall) -> Bool[Tensor, "#batch #query key"] | None:
        """Return which keys the queries of a kernel can see, from the mask that it was given; None if it had none.

        Args:
            call: The call of the kernel.
        """
        mask = call.mask
        if mask is None or mask.shape[-1] != call.shape[-1]:
            return None
        # transformers 4 cuts the mask anew for every layer; as it is kept here, no other tensor takes its place.
        known = (mask.data_ptr(), mask.dtype, mask.shape, mask.stride())
        if known not in self._of_kernels:
            self._of_kernels[known] = (mask, seen_in(mask))
        return self._of_kernels[known][1]

    def seen(
        self,
        module: nn.Module,
        arguments: Mapping[str, Any],
        attention: Float[Tensor, "batch head query key"],
        *,
        is_causal: bool | None = None,
    ) -> Bool[Tensor, "#batch #query key"] | None:
        """Return which keys the queries of a map can see; None if that is not known.

        Args:
            module: The attention module.
            arguments: What it was called with, by name.
            attention: Its map.
            is_causal: Whether queries see no later keys, where the module itself does not say; None if that is not
                known.
        """
        is_causal = getattr(module, "is_causal", is_causal)
        mask = next((arguments[name] for name in _MASKS if name in arguments), _ABSENT)
        bias = getattr(module, "bias", None)
        # Some modules keep a causal or local mask of their own, and cut it by the number of keys.
        own = bias if isinstance(bias, Tensor) and bias.dtype == torch.bool and bias.ndim == 4 else None
        queries, keys = attention.shape[-2:]
        # Without a mask for each query, all of them see the same keys in a module that is not causal.
        by_query = isinstance(mask, Tensor) and mask.ndim > 2 and mask.shape[-2] == queries
        stated = is_causal is None and _is_for_all_queries(mask) and not _keeps_a_mask(module)
        alike = queries == 1 or is_causal is False or stated
        if own is None and (mask is _ABSENT or not (by_query or alike)):
            return None
        mask = mask if isinstance(mask, Tensor) else None
        known = (id(mask), id(own), queries, keys)
        if known not in self._read:
            # A mask of truth values that contradicts the map is true where a key is hidden, as in MPT.
            senses = [mask] if mask is None or mask.dtype != torch.bool else [mask, ~mask]
            read = [_seen(sense, own, queries, keys, attention.device) for sense in senses]
            fitting = (visible for visible in read if visible is not None and _agrees(visible, attention))
            self._read[known] = ((mask, own), next(fitting, None))
        return self._read[known][1]


def _agrees(visible: Tensor, attention: Tensor) -> bool:
    """Return whether no weight of a map's first head is where its mask hides the key; some masks have another sense."""
    hidden = ~visible[0] & visible[0].any(dim=-1, keepdim=True)
    return not bool((hidden & (attention[0, 0] > 0)).any())


def _is_for_all_queries(mask: Any) -> bool:
    """Return whether a mask is one that is added to the scores of all queries."""
    return isinstance(mask, Tensor) and mask.ndim == 4 and mask.shape[-2] == 1


def _keeps_a_mask(module: nn.Module) -> bool:
    """Return whether a module has a buffer of truth values for pairs of positions."""
    kinds = (torch.bool, torch.uint8)
    return any(
        buffer.dtype in kinds and buffer.ndim > 1 and buffer.shape[-1] == buffer.shape[-2] > 1
        for buffer in module.buffers()
    )


def _seen(mask: Tensor | None, own: Tensor | None, queries: int, keys: int, device: torch.device) -> Tensor | None:
    visible = torch.ones(1, 1, keys, dtype=torch.bool, device=device) if mask is None else seen_in(mask)
    if visible is None:
        return None
    visible = visible[..., :keys]
    if visible.shape[2] != keys or visible.shape[1] not in (1, queries):
        return None
    if own is not None:
        visible = visible & own[:, 0, keys - queries : keys, :keys]
    return visible
