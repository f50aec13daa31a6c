"""Attention maps of torch.nn.MultiheadAttention, which fuses or averages them: they are computed a second time."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from ....circuits.weights.layer_keys import LayerKey
from .numbering import numbered
from .source import CallHook, InputReceiver, LayerMap, MapSource, OnCall, Receiver, on_call


class TorchMaps(MapSource):
    """Maps of every torch.nn.MultiheadAttention in a model, alone or in the layers of nn.Transformer.

    A map is computed from what the module was called with, without dropout. A probe's copy has no gradient, and the
    model's own numbers stay the same to the bit. For a measure that consumes the maps, the module's output is computed
    from the map, so that gradients reach it; it agrees with the module's own to rounding. The fused path of inference
    that nn.TransformerEncoderLayer may take bypasses the module; it is switched off while the model runs, and the plain
    path agrees with it to rounding.
    """

    # The modules are called with a mask of their own, which is true on padding.
    masks_in_call = False

    def __init__(self, model: nn.Module, modules: dict[str, nn.MultiheadAttention]) -> None:
        """Take the model and its attention modules by their paths."""
        self.name = type(model).__name__
        self._modules = {key: modules[path] for path, key in _keys(model, list(modules)).items()}
        self.keys = tuple(self._modules)
        self._has_fused_path = any(isinstance(module, nn.TransformerEncoderLayer) for module in model.modules())

    @classmethod
    def of(cls, model: nn.Module) -> "TorchMaps | None":
        """Find the modules; return None if there are none."""
        modules = {path: module for path, module in model.named_modules() if isinstance(module, nn.MultiheadAttention)}
        return cls(model, modules) if modules else None

    def during(self) -> AbstractContextManager[None]:
        """Switch the fused path off if there is one."""
        return _PlainPath() if self._has_fused_path else nullcontext()

    def attach(
        self,
        receive: Receiver,
        *,
        inputs: InputReceiver | None = None,
        consume: bool = False,
        on_call: OnCall = on_call,
    ) -> Iterator[Callable[[], None]]:
        """Register a hook on every module."""
        for key, module in self._modules.items():
            yield on_call(module, _hook(key, module, receive, inputs, consume))


class _PlainPath(AbstractContextManager[None]):
    """The context in which torch does not take its fused path of inference."""

    def __init__(self) -> None:
        self._before = torch.backends.mha.get_fastpath_enabled()

    def __enter__(self) -> None:
        torch.backends.mha.set_fastpath_enabled(False)

    def __exit__(self, *_error: object) -> None:
        torch.backends.mha.set_fastpath_enabled(self._before)


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
        real_keys = _real_keys(arguments.get("key_padding_mask"))
        receive(LayerMap(key, attention, is_self=query is keys, real_keys=real_keys))
        if not consume:
            return None
        return _attended(module, arguments["value"], attention, weights[..., length:]), *output[1:]

    return hook


def attention_weights(
    module: nn.MultiheadAttention, arguments: Mapping[str, Any]
) -> Float[Tensor, "batch head query key"]:
    """Return the weights that a module attends with, without dropout; the keys that it adds itself come last.

    Args:
        module: The module.
        arguments: What it was called with, by name.
    """
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    batched = query.ndim == 3
    if module.batch_first and batched:
        query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
    separate = not module._qkv_same_embed_dim
    _, weights = functional.multi_head_attention_forward(
        query,
        key,
        value,
        module.embed_dim,
        module.num_heads,
        module.in_proj_weight,
        module.in_proj_bias,
        module.bias_k,
        module.bias_v,
        module.add_zero_attn,
        0.0,
        module.out_proj.weight,
        module.out_proj.bias,
        training=False,
        key_padding_mask=arguments.get("key_padding_mask"),
        need_weights=True,
        attn_mask=arguments.get("attn_mask"),
        use_separate_proj_weight=separate,
        q_proj_weight=module.q_proj_weight if separate else None,
        k_proj_weight=module.k_proj_weight if separate else None,
        v_proj_weight=module.v_proj_weight if separate else None,
        average_attn_weights=False,
        is_causal=bool(arguments.get("is_causal", False)),
    )
    assert weights is not None
    return weights if batched else weights[None]


def _attended(
    module: nn.MultiheadAttention,
    value: Float[Tensor, "*first second width"],
    attention: Float[Tensor, "batch head query key"],
    added: Float[Tensor, "batch head query added_key"],
) -> Float[Tensor, "*first second d_model"]:
    """Return what a module writes, computed from its map and from the weights on the keys that it adds itself."""
    batched = value.ndim == 3
    if not batched:
        value = value[None]
    elif not module.batch_first:
        value = value.transpose(0, 1)
    width = module.embed_dim
    weight = module.in_proj_weight[2 * width :] if module._qkv_same_embed_dim else module.v_proj_weight
    bias = None if module.in_proj_bias is None else module.in_proj_bias[2 * width :]
    values = functional.linear(value, weight, bias)
    heads = values.unflatten(-1, (module.num_heads, -1)).transpose(1, 2)
    written = attention @ heads
    if module.bias_v is not None:
        # The key that the module adds first has this value; that of add_zero_attn comes after it and has the value 0.
        written = written + added[..., :1] * module.bias_v.view(module.num_heads, 1, -1)
    output = module.out_proj(written.transpose(1, 2).flatten(2))
    if not batched:
        return output[0]
    return output if module.batch_first else output.transpose(0, 1)


def _real_keys(padding: Tensor | None) -> Bool[Tensor, "batch key"] | None:
    """Return the opposite of key_padding_mask, which is true, or minus infinity, where a key is padding."""
    if padding is None:
        return None
    real = ~padding if padding.dtype == torch.bool else padding > -torch.inf
    return real if real.ndim == 2 else real[None]
