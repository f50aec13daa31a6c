"""Which keys each query of a layer of HookedTransformer or HookedEncoder can see."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from .seen import seen_in


class HookedMasks:
    """Reads the masks of the layers of one call; layers that mask alike get the same tensor.

    A layer whose direction is causal adds a mask of its own, with its window, to the padding mask that it is called
    with. The mask is what the layer's own method hides of scores of 0.
    """

    def __init__(self) -> None:
        """Begin with nothing."""
        self._read: dict[Any, tuple[Any, Tensor | None]] = {}

    def forget(self) -> None:
        """Forget the call that was in progress."""
        self._read = {}

    def seen(
        self, module: nn.Module, arguments: Mapping[str, Any], attention: Float[Tensor, "batch head query key"]
    ) -> Bool[Tensor, "#batch #query key"] | None:
        """Return which keys the queries of a map can see; None if the mask is of a form that is not known.

        Args:
            module: The attention module.
            arguments: What it was called with, by name.
            attention: Its map.
        """
        hidden: Any = module
        queries, keys = attention.shape[-2:]
        direction = getattr(hidden, "_attention_dir_override", None) or hidden.cfg.attention_dir
        padding, added = arguments.get("attention_mask"), arguments.get("additive_attention_mask")
        known = (direction, hidden.attn_type, id(padding), id(added), queries, keys)
        if known not in self._read:
            visible: Tensor | None = torch.ones(1, 1, keys, dtype=torch.bool, device=attention.device)
            if direction == "causal":
                scores = torch.zeros(1, 1, queries, keys, device=attention.device)
                visible = seen_in(hidden.apply_causal_mask(scores, keys - queries, padding))
            if added is not None and visible is not None:
                also = seen_in(added)
                visible = None if also is None else visible & also
            self._read[known] = ((padding, added), visible)
        return self._read[known][1]
