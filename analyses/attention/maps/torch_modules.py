"""Attention maps of torch.nn.MultiheadAttention, which fuses or averages them: they are computed a second time."""

from collections.abc import Callable, Iterator
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import nn

from ....circuits.weights.layer_keys import LayerKey
from .calls import CallHook, OnCall, around_forward, on_call
from .columns import NOT_SAID, ONE_OR_TWO, WHOLE, is_one_sequence
from .fused_layers import Progress, around_fused
from .modes import EVALUATION, training_mode
from .numbering import numbered
from .source import InputReceiver, LayerMap, MapSource, Receiver
from .torch_weights import attended, attention_weights, real_keys, seen_by_torch


class TorchMaps(MapSource):
    """Maps of every torch.nn.MultiheadAttention in a model, alone or in the layers of nn.Transformer.

    A map is computed from what the module was called with, without dropout. A probe's copy has no gradient, and the
    model's own numbers stay the same to the bit. For a measure that consumes the maps, the module's output is computed
    from the map, so that gradients reach it; it agrees with the module's own to rounding. Where a layer of
    nn.TransformerEncoder takes the fused path of inference, which bypasses the module, it stays on that path, and its
    map is computed from what the layer was called with.
    """

    # The modules are called with a mask of their own, which is true on padding.
    masks_in_call = False

    def __init__(self, model: nn.Module, modules: dict[str, nn.MultiheadAttention]) -> None:
        """Take the model and its attention modules by their paths."""
        self.name = type(model).__name__
        self._modules = {key: modules[path] for path, key in _keys(model, list(modules)).items()}
        self.keys = tuple(self._modules)
        self.positions_first = not all(module.batch_first for module in modules.values())
        keys = {module: key for key, module in self._modules.items()}
        within = [module for module in model.modules() if isinstance(module, nn.TransformerEncoderLayer)]
        self._layers = {keys[layer.self_attn]: layer for layer in within if layer.self_attn in keys}
        self._encoders = [module for module in model.modules() if isinstance(module, nn.TransformerEncoder)]

    @classmethod
    def of(cls, model: nn.Module) -> "TorchMaps | None":
        """Find the modules; return None if there are none."""
        modules = {path: module for path, module in model.named_modules() if isinstance(module, nn.MultiheadAttention)}
        return cls(model, modules) if modules else None

    def attach(
        self,
        receive: Receiver,
        *,
        inputs: InputReceiver | None = None,
        consume: bool = False,
        on_call: OnCall = on_call,
    ) -> Iterator[Callable[[], None]]:
        """Watch every module, and the layers and encoders whose fused path bypasses it."""
        progress = Progress()
        for key, module in self._modules.items():
            hook = _hook(key, module, receive, inputs, consume)
            yield on_call(module, progress.noting(module, hook))
        for key, layer in self._layers.items():
            around = around_fused(key, layer, receive, inputs, progress)
            yield around_forward(layer, around, owner=nn.TransformerEncoderLayer)
        for encoder in self._encoders:
            yield around_forward(encoder, progress.around_encoder, owner=nn.TransformerEncoder)


def _keys(model: nn.Module, paths: list[str]) -> dict[str, LayerKey]:
    """Return the layer of each path: by the kind of torch's own layers that the modules are in, or by the paths."""
    kinds: dict[str, str] = {}
    for path in paths:
        parent_path, _, name = path.rpartition(".")
        parent = model.get_submodule(parent_path) if name else model
        if isinstance(parent, nn.TransformerDecoderLayer):
            kinds[path] = "decoder cross" if name == "multihead_attn" else "decoder"
        elif isinstance(parent, nn.TransformerEncoderLayer):
            kinds[path] = "encoder"
    if len(kinds) < len(paths) or set(kinds.values()) == {"encoder"}:
        return numbered(paths)
    counts = dict.fromkeys(kinds.values(), 0)
    keys: dict[str, LayerKey] = {}
    for path, kind in kinds.items():
        keys[path] = (kind, counts[kind])
        counts[kind] += 1
    return keys


def _hook(
    key: LayerKey, module: nn.MultiheadAttention, receive: Receiver, inputs: InputReceiver | None, consume: bool
) -> CallHook:
    parameters = signature(type(module).forward)

    def hook(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        arguments = parameters.bind(module, *args, **kwargs).arguments
        query, keys = arguments["query"], arguments["key"]
        if inputs is not None:
            inputs(key, query if module.batch_first or query.ndim == 2 else query.transpose(0, 1))
        # Gradients go only through a map that the output is computed from.
        with torch.set_grad_enabled(consume and torch.is_grad_enabled()):
            weights = attention_weights(module, arguments)
        length = keys.shape[0 if keys.ndim == 2 or not module.batch_first else 1]
        attention = weights[..., :length]
        known = real_keys(arguments.get("key_padding_mask"))
        mode = training_mode(module.dropout, before=True) if module.training else EVALUATION
        is_cross = "cross" in key[0] or query.shape != keys.shape
        is_self = not is_cross and is_one_sequence(query, keys)
        columns = WHOLE if is_self else NOT_SAID if is_cross else ONE_OR_TWO
        seen = partial(seen_by_torch, arguments.get("attn_mask"), attention)
        receive(LayerMap(key, attention, is_self=is_self, columns=columns, seen=seen, real_keys=known, mode=mode))
        if not consume:
            return None
        return attended(module, arguments["value"], attention, weights[..., length:]), *output[1:]

    return hook
