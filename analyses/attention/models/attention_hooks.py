"""The attention modules of a torch model, found by what they give out, and hooks that hand on their maps one by one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ....circuits.errors import CallError, QkovError
from .model import InputSink, MapSink

#: Where there are no maps, what to do.
REMEDY = (
    "fused attention (sdpa, flash, flex) gives none: load the model with attn_implementation='eager', or call "
    "model.set_attn_implementation('eager')"
)
#: Weights of float16 sum to 1 within this, and no scores do by chance.
ROUNDING = 1e-2


@dataclass(frozen=True)
class AttentionModules:
    """Modules whose output is a tuple with an attention map [batch, head, query, key] in second place.

    Attributes:
        modules: the innermost that give the maps, each once.
        layers: how many maps one run gives; a module that layers share gives several.
        heads: of each map.
        causal: whether no map had any weight on what comes later.
        flagged: whether maps come only with output_attentions, with which transformers would keep them all.
    """

    modules: tuple[nn.Module, ...]
    layers: int
    heads: int
    causal: bool
    flagged: bool

    @property
    def options(self) -> dict[str, bool]:
        """What the model is to be called with for maps to come."""
        return {"output_attentions": True} if self.flagged else {}

    @contextmanager
    def hooked(self, maps: MapSink | None, inputs: InputSink | None) -> Iterator[None]:
        """Hand the maps, and what the attention modules read, to the sinks while the model runs inside this context.

        Raises:
            CallError: a module gave no map.
            QkovError: there were more or fewer maps than layers.
        """
        layer = 0

        def hand_on(_module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
            nonlocal layer
            if inputs is not None:
                inputs(layer, args[0] if args else kwargs["hidden_states"])
            if maps is None:
                layer += 1
                return None
            if not _has_map(output):
                raise CallError(f"layer {layer} gave no attention map; {REMEDY}")
            maps(layer, output[1])
            layer += 1
            # The blocks around would keep the map until the next one, or to the end.
            return output[0], None, *output[2:]

        handles = [module.register_forward_hook(hand_on, with_kwargs=True) for module in self.modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        if layer != self.layers:
            raise QkovError(f"expected {self.layers} attention maps in one run, got {layer}")


def find_attention(model: nn.Module, run: Callable[[dict[str, bool]], Any], name: str) -> AttentionModules:
    """Run the model once and see which modules give attention maps.

    Args:
        model: that is run.
        run: runs it on one sequence of several tokens without padding, with the options given.
        name: of the model, for messages.

    Raises:
        CallError: there are no attention maps, or what is in their place is none.
    """
    for options in ({}, {"output_attentions": True}):
        seen: list[tuple[nn.Module, Tensor]] = []

        def catch(module: nn.Module, _args: Any, output: Any, seen: list[tuple[nn.Module, Tensor]] = seen) -> None:
            # A block often hands on the map of the module inside it, whose hook came first.
            if _has_map(output) and not any(output[1] is known for _, known in seen):
                seen.append((module, output[1]))

        handles = [module.register_forward_hook(catch) for module in model.modules()]
        try:
            with torch.no_grad():
                run(options)
        finally:
            for handle in handles:
                handle.remove()
        if seen:
            return _described(seen, bool(options), name)
    raise CallError(f"{name} gives no attention maps [batch, head, query, key]; {REMEDY}")


def _described(seen: list[tuple[nn.Module, Tensor]], flagged: bool, name: str) -> AttentionModules:
    for module, given in seen:
        if bool((given < 0).any()) or bool((given.sum(dim=-1) > 1 + ROUNDING).any()):
            raise CallError(
                f"{type(module).__name__} of {name} gives scores in the place of an attention map (some are negative, "
                f"or a row sums to more than 1); {REMEDY}"
            )
    heads = {given.shape[1] for _, given in seen}
    if len(heads) > 1:
        raise CallError(f"the layers of {name} have {', '.join(map(str, sorted(heads)))} heads; expected one number")
    return AttentionModules(
        modules=tuple(dict.fromkeys(module for module, _ in seen)),
        layers=len(seen),
        heads=heads.pop(),
        causal=all(bool((given.triu(1) == 0).all()) for _, given in seen),
        flagged=flagged,
    )


def _has_map(output: Any) -> bool:
    """Whether a module's output is a tuple with [batch, head, query, key] in second place."""
    if not isinstance(output, tuple) or len(output) < 2 or not isinstance(output[1], Tensor):
        return False
    return output[1].ndim == 4 and output[1].shape[-1] == output[1].shape[-2]
