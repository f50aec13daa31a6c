"""Which keys the queries of a layer with hook points can see, where the layer adds a causal mask of its own."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from .seen import seen_in


def inside_bridge(module: nn.Module) -> nn.Module:
    """Return the module that a bridge of TransformerLens calls; any other module is returned itself.

    Args:
        module: The attention module of a block.
    """
    return getattr(module, "original_component", module)


def is_causal(module: nn.Module) -> bool | None:
    """Return whether the queries of a module see no later keys; None if neither it nor a part of it says so.

    Args:
        module: The module inside a bridge.
    """
    stated = {vars(part).get("is_causal") for part in module.modules()} - {None}
    return next(iter(stated)) if len(stated) == 1 else None


def has_own_mask(module: nn.Module) -> bool:
    """Return whether a layer adds a causal mask of its own: HookedTransformer's, or that of a bridge's own model.

    Args:
        module: The attention module of a block.
    """
    return hasattr(module, "apply_causal_mask") or _is_native(inside_bridge(module))


class OwnMasks:
    """Reads the masks of the layers of one call; layers that mask alike get the same tensor.

    The mask of HookedTransformer, with its window, is what the layer's own method hides of scores of 0. A native model
    of TransformerBridge keeps its mask in a buffer, which is true where a key is hidden.
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
        inside: Any = inside_bridge(module)
        queries, keys = attention.shape[-2:]
        padding, added = arguments.get("attention_mask"), arguments.get("additive_attention_mask")
        native = _is_native(inside)
        direction = None if native else getattr(inside, "_attention_dir_override", None) or inside.cfg.attention_dir
        kind = inside.causal if native else (direction, inside.attn_type)
        known = (kind, id(padding), id(added), queries, keys)
        if known not in self._read:
            own = torch.ones(1, 1, keys, dtype=torch.bool, device=attention.device)
            if native and inside.causal:
                own = ~inside.causal_mask[None, :queries, :keys]
            elif direction == "causal":
                scores = torch.zeros(1, 1, queries, keys, device=attention.device)
                own = inside.apply_causal_mask(scores, keys - queries, padding)[:, 0] == 0
            given = padding if native else added
            self._read[known] = ((padding, added), own if given is None else _both(own, seen_in(given)))
        return self._read[known][1]


def _is_native(inside: nn.Module) -> bool:
    return isinstance(getattr(inside, "causal_mask", None), Tensor) and isinstance(vars(inside).get("causal"), bool)


def _both(own: Tensor, given: Tensor | None) -> Tensor | None:
    return None if given is None else own & given.to(own.device)
