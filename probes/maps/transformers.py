"""Maps of models of transformers: the modules that give them, by what the models say of themselves."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from ...analyses.attention.models.attention_hooks import REMEDY, ROUNDING
from ...circuits.errors import CallError
from .source import GivenMap, MapSource, Receiver, layer_name, layer_numbers


class TransformersMaps(MapSource):
    """Maps that attention modules give beside their output.

    transformers says of most classes which modules give attention, and in which place of their output. In the others it
    is the innermost modules that can be asked for output_attentions; they are asked for it in their own call, so that
    what the model returns is as it was.
    """

    def __init__(self, model: nn.Module, modules: list["_MapModule"]) -> None:
        """Take the modules that give maps, in the order of the layers.

        Raises:
            CallError: attention is fused, or there are several models in the model.
        """
        self.name = type(model).__name__
        for module in modules:
            # A part of a composed model may go on with the config that it was made with.
            config = getattr(module.module, "config", None) or getattr(module.owner, "config", None)
            kind = getattr(config, "_attn_implementation", None)
            if kind not in (None, "eager"):
                raise CallError(f"the attention of {self.name} is {kind}, and there are no maps to measure; {REMEDY}")
        self._stacks = _stacks(modules, self.name)
        self.keys = tuple((stack, layer) for stack, found in self._stacks.items() for layer in _layers(found))
        self._seen: dict[str, int] = {}

    @classmethod
    def of(cls, model: nn.Module) -> "TransformersMaps | None":
        """Find the modules that give maps; None if there are none of transformers."""
        modules = list(_recorded(model)) or list(_asked(model))
        return cls(model, modules) if modules else None

    def during(self) -> AbstractContextManager[None]:
        """Count the layers from the first."""
        self._seen = {}
        return nullcontext()

    def attach(self, receive: Receiver) -> Iterator[Callable[[], None]]:
        """Register a hook at every module that gives maps."""
        for stack, modules in self._stacks.items():
            layers = _layers(modules)
            numbers = layers if len(layers) == len(modules) else [None] * len(modules)
            for number, module in zip(numbers, modules, strict=True):
                if module.ask:
                    yield module.module.register_forward_pre_hook(_ask(module.module), with_kwargs=True).remove
                yield module.module.register_forward_hook(self._taken(stack, number, module, receive)).remove

    def _taken(
        self, stack: str, number: int | None, given: "_MapModule", receive: Receiver
    ) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def taken(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
            # Where layers share a module, only the order of its calls tells them apart.
            layer = self._seen.get(stack, 0) if number is None else number
            self._seen[stack] = self._seen.get(stack, 0) + 1
            attention = output[given.index] if isinstance(output, tuple) and len(output) > 1 else None
            if not isinstance(attention, Tensor):
                raise CallError(f"{layer_name((stack, layer))} of {self.name} gave no attention map; {REMEDY}")
            if given.ask:
                _demand_weights(attention, layer, given, self.name)
            receive(GivenMap((stack, layer), attention, is_self=not given.cross))

        return taken


class _MapModule:
    """A module that gives maps, where, and of which model it is part."""

    def __init__(self, path: str, module: nn.Module, owner: nn.Module, index: int, cross: bool, ask: bool) -> None:
        self.path, self.module, self.owner = path, module, owner
        self.index, self.cross, self.ask = index, cross, ask


def _recorded(model: nn.Module) -> Iterator[_MapModule]:
    """The modules of which transformers records attention, by the model that each is part of."""
    owners: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if hasattr(module, "_can_record_outputs") and hasattr(module, "config"):
            owners[path] = module
        owner = next((owners[at] for at in reversed(list(_parents(path))) if at in owners), None)
        recorded = (getattr(owner, "_can_record_outputs", None) or {}).items()
        for key, places in recorded:
            if not key.endswith("attentions"):
                continue
            for place in places if isinstance(places, list) else [places]:
                if _matches(place, path, module):
                    yield _MapModule(path, module, owner or model, getattr(place, "index", 1), "cross" in key, False)


def _parents(path: str) -> Iterator[str]:
    """The paths from the model itself down to the module."""
    yield ""
    parts = path.split(".") if path else []
    for length in range(len(parts)):
        yield ".".join(parts[: length + 1])


def _matches(place: Any, path: str, module: nn.Module) -> bool:
    kind = place if isinstance(place, type) else getattr(place, "target_class", None)
    ending = place if isinstance(place, str) else getattr(place, "class_name", None)
    if not (kind is not None and isinstance(module, kind)) and not (ending is not None and path.endswith(ending)):
        return False
    name = getattr(place, "layer_name", None)
    return name is None or f".{name.strip('.')}." in f".{path}."


def _asked(model: nn.Module) -> Iterator[_MapModule]:
    """The innermost modules of a model of transformers whose forward can be asked for output_attentions."""
    owners = {path: module for path, module in model.named_modules() if hasattr(module, "set_attn_implementation")}
    can = {path for path, module in model.named_modules() if "output_attentions" in _parameters(module)}
    for path, module in model.named_modules():
        owner = next((owners[at] for at in reversed(list(_parents(path))) if at in owners), None)
        inside = any(other != path and other.startswith(f"{path}." if path else "") for other in can)
        if path in can and owner is not None and not inside:
            cross = any(part in path.lower() for part in ("cross", "encoder_attn", "encdec"))
            yield _MapModule(path, module, owner, 1, cross, True)


def _parameters(module: nn.Module) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(module.forward).parameters)


def _ask(module: nn.Module) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]:
    signature = inspect.signature(module.forward)

    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        bound = signature.bind(*args, **kwargs)
        bound.arguments["output_attentions"] = True
        return bound.args, bound.kwargs

    return hook


def _demand_weights(attention: Tensor, layer: int, given: _MapModule, name: str) -> None:
    """CallError for what stands in the place of a map and is none."""
    shape = list(attention.shape)
    heads = getattr(getattr(given.owner, "config", None), "num_attention_heads", None)
    fits = attention.ndim == 4 and heads in (None, attention.shape[1]) and attention.shape[2] <= attention.shape[3]
    if not fits or bool((attention < 0).any()):
        raise CallError(
            f"{type(given.module).__name__} of layer {layer} of {name} gives {shape}, not attention weights [batch, "
            f"head, query, key], where its map was looked for; this architecture is not supported"
        )
    # Rows of dropped-out maps sum to more.
    if not given.module.training and bool((attention.sum(dim=-1) > 1 + ROUNDING).any()):
        raise CallError(f"the maps of layer {layer} of {name} have rows that sum to more than 1; expected softmax rows")


def _stacks(modules: list[_MapModule], name: str) -> dict[str, list[_MapModule]]:
    """The modules by stack: one of self-attention, or an encoder and a decoder, and cross-attention beside them."""
    sides: dict[str, str] = {}
    for module in modules:
        prefix = _before_number(module.path)
        parts = prefix.split(".")
        sides[prefix] = next((part for part in parts if part in ("encoder", "decoder")), "")
    if len(sides) == 1:
        sides = dict.fromkeys(sides, "")
    elif sorted(sides.values()) != ["decoder", "encoder"]:
        raise CallError(
            f"{name} holds several stacks of attention ({', '.join(sides)}) and no one encoder and decoder: put the "
            f"probe on one of its parts"
        )
    found: dict[str, list[_MapModule]] = {}
    for module in modules:
        side = sides[_before_number(module.path)]
        stack = f"{side} cross".strip() if module.cross else side
        found.setdefault(stack, []).append(module)
    return found


def _before_number(path: str) -> str:
    parts = path.split(".")
    return ".".join(parts[: next((place for place, part in enumerate(parts) if part.isdigit()), len(parts))])


def _layers(modules: list[_MapModule]) -> list[int]:
    """The numbers of a stack's layers; one module may stand for several."""
    config: Any = getattr(modules[0].owner, "config", None)
    stated = getattr(config, "num_hidden_layers", None)
    # ALBERT keeps its groups of shared layers in a list of their own.
    shares = isinstance(getattr(config, "num_hidden_groups", None), int)
    return list(range(stated)) if shares and stated is not None else layer_numbers([module.path for module in modules])
