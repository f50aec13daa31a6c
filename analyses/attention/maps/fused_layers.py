"""Maps of the layers of nn.TransformerEncoder whose fused path of inference calls no attention module."""

import threading
from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from ....circuits.weights.layer_keys import LayerKey
from .calls import Around, CallHook
from .columns import WHOLE
from .source import InputReceiver, LayerMap, Receiver
from .torch_weights import attention_weights, real_keys, seen_by_torch

_ARGUMENTS = signature(nn.TransformerEncoderLayer.forward)


class Progress(threading.local):
    """What has happened so far in the call that is in progress in this thread.

    Attributes:
        called: The attention modules that were called themselves.
        length: The number of positions of the encoder's input; None outside of an encoder.
    """

    def __init__(self) -> None:
        """Begin with nothing."""
        self.called: set[nn.Module] = set()
        self.length: int | None = None

    def noting(self, module: nn.Module, hook: CallHook) -> CallHook:
        """Return the hook of an attention module, which notes that the module was called.

        Args:
            module: The module.
            hook: What else is done.
        """

        def noted(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            self.called.add(module)
            return hook(args, kwargs, output)

        return noted

    def around_encoder(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run an encoder, which packs its input without padding before its layers see it, and note the length."""
        source = args[0] if args else kwargs.get("src")
        before = self.length
        self.length = source.shape[1] if isinstance(source, Tensor) and source.ndim == 3 else None
        try:
            return forward(*args, **kwargs)
        finally:
            self.length = before


def around_fused(
    key: LayerKey,
    layer: nn.TransformerEncoderLayer,
    receive: Receiver,
    inputs: InputReceiver | None,
    progress: Progress,
) -> Around:
    """Return what runs around a layer: if its attention module was not called, the map is computed from its input.

    Args:
        key: The layer's key.
        layer: The layer.
        receive: Takes the map.
        inputs: Takes what the layer's attention reads.
        progress: Knows whether the module was called.
    """

    def around(forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        progress.called.discard(layer.self_attn)
        output = forward(*args, **kwargs)
        if layer.self_attn not in progress.called:
            given = _ARGUMENTS.bind(layer, *args, **kwargs).arguments
            with torch.no_grad():
                hidden, attention, known = _of_layer(layer, given, progress.length)
            if inputs is not None:
                inputs(key, hidden)
            seen = partial(seen_by_torch, given.get("src_mask"), attention)
            receive(LayerMap(key, attention, columns=WHOLE, seen=seen, real_keys=known))
        return output

    return around


def _of_layer(
    layer: nn.TransformerEncoderLayer, given: dict[str, Any], length: int | None
) -> tuple[
    Float[Tensor, "batch position d_model"], Float[Tensor, "batch head query key"], Bool[Tensor, "batch key"] | None
]:
    """Return what the layer's attention reads, its map, and which keys are tokens if that is known."""
    source, padding = given["src"], given.get("src_key_padding_mask")
    if source.is_nested:
        lengths = torch.tensor([len(example) for example in source.unbind()], device=source.device)
        longest = int(lengths.max()) if length is None else length
        source = source.to_padded_tensor(0.0, (len(lengths), longest, layer.self_attn.embed_dim))
        padding = torch.arange(longest, device=source.device) >= lengths[:, None]
    hidden = layer.norm1(source) if layer.norm_first else source
    arguments = {
        "query": hidden,
        "key": hidden,
        "value": hidden,
        "key_padding_mask": _added(padding, hidden),
        "attn_mask": _added(given.get("src_mask"), hidden),
    }
    return hidden, attention_weights(layer.self_attn, arguments), real_keys(padding)


def _added(mask: Tensor | None, hidden: Tensor) -> Tensor | None:
    """Return a mask as the numbers that are added to scores; torch wants both masks of a call in the same form."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=hidden.dtype).masked_fill(mask, -torch.inf)
