"""Maps of torch.nn.MultiheadAttention, which computes them in a fused way or averages them: computed once more."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from .forward import on_output
from .source import GivenMap, LayerKey, MapSource, Receiver, numbered


class TorchMaps(MapSource):
    """Maps of every torch.nn.MultiheadAttention in a model, alone or in the layers of nn.Transformer.

    A map is computed from what the module was called with, without gradient and without dropout, so that the model's
    own numbers stay the same to the bit. The fused path of inference that nn.TransformerEncoderLayer may take passes by
    the module; it is switched off while the model runs, and the plain path agrees with it to rounding.
    """

    # The modules are told themselves, with a mask that is true on padding.
    called_with_masks = False

    def __init__(self, model: nn.Module, modules: dict[str, nn.MultiheadAttention]) -> None:
        """Take the modules by their paths."""
        self.name = type(model).__name__
        self._model = model
        self._modules = {key: modules[path] for path, key in _keys(model, list(modules)).items()}
        self.keys = tuple(self._modules)
        self._has_fused_path = any(isinstance(module, nn.TransformerEncoderLayer) for module in model.modules())

    @classmethod
    def of(cls, model: nn.Module) -> "TorchMaps | None":
        """Find the modules; None if there is none."""
        modules = {path: module for path, module in model.named_modules() if isinstance(module, nn.MultiheadAttention)}
        return cls(model, modules) if modules else None

    def during(self) -> AbstractContextManager[None]:
        """Switch the fused path off where there is one."""
        return _PlainPath() if self._has_fused_path else nullcontext()

    def attach(self, receive: Receiver) -> Iterator[Callable[[], None]]:
        """Register a hook at every module."""
        for key, module in self._modules.items():
            yield on_output(module, self._model, _taken(key, module, receive))


class _PlainPath(AbstractContextManager[None]):
    def __init__(self) -> None:
        self._before = torch.backends.mha.get_fastpath_enabled()

    def __enter__(self) -> None:
        torch.backends.mha.set_fastpath_enabled(False)

    def __exit__(self, *_error: object) -> None:
        torch.backends.mha.set_fastpath_enabled(self._before)


def _keys(model: nn.Module, paths: list[str]) -> dict[str, LayerKey]:
    """The layers by what torch's own layers say of their attention, else by the paths."""
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
    found: dict[str, LayerKey] = {}
    for path, kind in kinds.items():
        found[path] = (kind, counts[kind])
        counts[kind] += 1
    return found


def _taken(
    key: LayerKey, module: nn.MultiheadAttention, receive: Receiver
) -> Callable[[tuple[Any, ...], dict[str, Any], Any], None]:
    parameters = signature(type(module).forward)

    def taken(args: tuple[Any, ...], kwargs: dict[str, Any], _output: Any) -> None:
        given = parameters.bind(module, *args, **kwargs).arguments
        receive(
            GivenMap(
                key,
                attention_map(module, given),
                is_self=given["query"] is given["key"],
                real_keys=_real_keys(given.get("key_padding_mask")),
            )
        )

    return taken


@torch.no_grad()
def attention_map(module: nn.MultiheadAttention, given: Mapping[str, Any]) -> Float[Tensor, "batch head query key"]:
    """Return the map that a module attends with, without dropout and without the keys that it adds itself.

    Args:
        module: whose map it is.
        given: what it was called with, by name.
    """
    query, key, value = (given[name] for name in ("query", "key", "value"))
    batched = query.ndim == 3
    if module.batch_first and batched:
        query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
    separate = not module._qkv_same_embed_dim
    mask = given.get("attn_mask")
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
        key_padding_mask=given.get("key_padding_mask"),
        need_weights=True,
        attn_mask=mask,
        use_separate_proj_weight=separate,
        q_proj_weight=module.q_proj_weight if separate else None,
        k_proj_weight=module.k_proj_weight if separate else None,
        v_proj_weight=module.v_proj_weight if separate else None,
        average_attn_weights=False,
        is_causal=bool(given.get("is_causal", False)),
    )
    assert weights is not None
    return (weights if batched else weights[None])[..., : key.shape[0]]


def _real_keys(padding: Tensor | None) -> Bool[Tensor, "batch key"] | None:
    """The opposite of key_padding_mask, which is true, or minus infinity, where a key is padding."""
    if padding is None:
        return None
    real = ~padding if padding.dtype == torch.bool else padding > -torch.inf
    return real if real.ndim == 2 else real[None]
