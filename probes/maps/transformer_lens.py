"""Maps of models with TransformerLens' hook points: HookedTransformer, HookedEncoder, TransformerBridge."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from .source import GivenMap, LayerKey, MapSource, Receiver

#: Where blocks and their attention are: stack, names of the list, names of the attention in a block.
_PLACES = (
    ("", ("blocks",), ("attn",)),
    ("encoder", ("encoder_blocks", "encoder"), ("attn", "self_attn")),
    ("decoder", ("decoder_blocks", "decoder"), ("attn", "self_attn")),
    ("decoder cross", ("decoder_blocks", "decoder"), ("cross_attn",)),
)


class HookedMaps(MapSource):
    """Maps at the hook points `blocks.{layer}.attn.hook_pattern`, as modules of torch.

    What is registered there is no hook of TransformerLens, so that reset_hooks leaves it where it is.
    """

    def __init__(self, points: dict[LayerKey, nn.Module], name: str) -> None:
        """Take the hook points of the layers."""
        self.name, self.keys, self._points = name, tuple(points), points

    @classmethod
    def of(cls, model: nn.Module) -> "HookedMaps | None":
        """Find the hook points of a model; None if it has none."""
        points: dict[LayerKey, nn.Module] = {}
        for stack, lists, attentions in _PLACES:
            blocks: Any = next((getattr(model, name) for name in lists if hasattr(model, name)), None)
            if not isinstance(blocks, nn.ModuleList | nn.Sequential):
                continue
            for layer, block in enumerate(blocks):
                attention = next((getattr(block, name) for name in attentions if hasattr(block, name)), None)
                point = getattr(attention, "hook_pattern", None)
                if isinstance(point, nn.Module):
                    points[stack, layer] = point
        return cls(points, type(model).__name__) if points else None

    def attach(self, receive: Receiver) -> Iterator[Callable[[], None]]:
        """Register a hook of torch at every hook point."""
        for key, point in self._points.items():
            yield point.register_forward_hook(_hook(key, receive)).remove


def _hook(key: LayerKey, receive: Receiver) -> Callable[[nn.Module, Any, Tensor], None]:
    def hook(_point: nn.Module, _args: Any, attention: Tensor) -> None:
        receive(GivenMap(key, attention, is_self="cross" not in key[0]))

    return hook
