"""Attention maps of models with TransformerLens' hook points: HookedTransformer, HookedEncoder, TransformerBridge."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ....circuits.live.hooked_blocks import hooked_blocks
from ....circuits.weights.layer_keys import LayerKey
from .calls import CallHook, ForwardHook, OnCall, before_forward, naming, on_call
from .columns import CachedColumns
from .hooked_masks import OwnMasks, has_own_mask, inside_bridge, is_causal
from .modes import mode_after_dropout
from .seen import LayerMasks
from .source import InputReceiver, LayerMap, MapSource, Receiver

#: The names that attention modules of different versions give to what they read.
_INPUT_NAMES = ("hidden_states", "value_input")


@dataclass(frozen=True, eq=False)
class _HookedAttention:
    """The attention module of a layer, and the hook point that its map passes."""

    module: nn.Module
    point: nn.Module


class HookedMaps(MapSource):
    """Maps at the hook points `blocks.{layer}.attn.hook_pattern`, which are modules of torch.

    They are watched from outside and get no hook, so that `reset_hooks` removes only the hooks of the user. A map is
    read after all hooks of its hook point, and so as the user's own hooks have left it.
    """

    def __init__(self, attentions: dict[LayerKey, _HookedAttention], name: str) -> None:
        """Take the attention of each layer and the name of the model."""
        self.name, self.keys, self._attentions = name, tuple(attentions), attentions
        names = {key: getattr(attention.point, "name", None) for key, attention in attentions.items()}
        self.hook_points = {key: point for key, point in names.items() if point is not None}
        self._columns, self._masks, self._own_masks = CachedColumns(), LayerMasks(), OwnMasks()
        self._arguments: dict[nn.Module, dict[str, Any]] = {}

    @classmethod
    def of(cls, model: nn.Module) -> "HookedMaps | None":
        """Find the hook points of a model; return None if it has none."""
        found: dict[LayerKey, _HookedAttention] = {}
        for block in hooked_blocks(model):
            point = getattr(block.attention, "hook_pattern", None)
            if isinstance(point, nn.Module):
                found[block.key] = _HookedAttention(block.attention, point)
        return cls(found, type(model).__name__) if found else None

    def attach(
        self,
        receive: Receiver,
        *,
        inputs: InputReceiver | None = None,
        consume: bool = False,
        on_call: OnCall = on_call,
    ) -> Iterator[Callable[[], None]]:
        """Watch every hook point; the map that leaves it is what the layer attends with."""
        del consume  # Blocks return no maps, and gradients reach what passes a hook point.
        for key, attention in self._attentions.items():
            if inputs is not None:
                yield before_forward(attention.module, _input_hook(key, inputs))
            if "cross" not in key[0]:
                yield before_forward(attention.module, self._asks_for_columns(attention.module))
            yield on_call(attention.point, self._map_hook(key, attention.module, receive))

    def during(self) -> AbstractContextManager[None]:
        """Forget what an earlier call said about positions."""
        self._columns.forget()
        self._masks.forget()
        self._own_masks.forget()
        self._arguments = {}
        return nullcontext()

    def _asks_for_columns(self, module: nn.Module) -> ForwardHook:
        by_name = naming(inside_bridge(module))

        def hook(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._arguments[module] = by_name(args, kwargs)
            self._columns.ask(module, self._arguments[module])

        return hook

    def _map_hook(self, key: LayerKey, module: nn.Module, receive: Receiver) -> CallHook:
        def hook(_args: tuple[Any, ...], _kwargs: dict[str, Any], attention: Tensor) -> None:
            # A bridge drops weights before they pass the hook point, at the rate that the module inside it keeps.
            mode = mode_after_dropout(module.modules())
            arguments = self._arguments.get(module)
            if arguments is None or attention.ndim != 4:
                receive(LayerMap(key, attention, is_self="cross" not in key[0], mode=mode))
                return
            columns = self._columns.of(module, *attention.shape[-2:])

            def seen() -> Tensor | None:
                if has_own_mask(module):
                    return self._own_masks.seen(module, arguments, attention)
                inside = inside_bridge(module)
                return self._masks.seen(inside, arguments, attention, is_causal=is_causal(inside))

            receive(LayerMap(key, attention, columns=columns, seen=seen, mode=mode))

        return hook


def _input_hook(key: LayerKey, inputs: InputReceiver) -> ForwardHook:
    def hook(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs(key, args[0] if args else next(kwargs[name] for name in _INPUT_NAMES if name in kwargs))

    return hook
