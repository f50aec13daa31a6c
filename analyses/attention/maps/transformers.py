"""Attention maps of models of transformers, from the modules that the models themselves name as giving them."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ....circuits.errors import CallError
from ....circuits.weights.layer_keys import LayerKey, layer_name
from ..kernels.registry import registries_of, watch_registry
from ..kernels.torch_kernel import Noted
from ..kernels.watching import KernelCalls, can_be_watched, one_call
from .calls import CallHook, ForwardHook, OnCall, around_forward, before_forward, naming, on_call
from .columns import CachedColumns
from .evaluation import is_fused
from .modes import mode_after_dropout, mode_before_dropout
from .numbering import layer_numbers
from .seen import LayerMasks
from .source import InputReceiver, LayerMap, LayerScores, MapSource, Receiver

#: What to do where there are no maps.
REMEDY = (
    "fused attention (sdpa, flash, flex) gives none: load the model with attn_implementation='eager', or call "
    "model.set_attn_implementation('eager')"
)
#: Rows of softmax weights in float16 sum to 1 within this tolerance; scores do not by chance.
ROUNDING = 1e-2
_HEAD_COUNTS = ("num_attention_heads", "encoder_attention_heads", "decoder_attention_heads")


@dataclass(frozen=True, eq=False)
class _MapModule:
    """A module that returns attention maps.

    Attributes:
        path: Where it is in the model.
        module: The module.
        owner: The model that it is part of, whose config describes it.
        index: The position of the map in the module's output.
        cross: Whether keys and values come from another sequence.
        ask: Whether the module returns its map only when it is called with output_attentions.
    """

    path: str
    module: nn.Module
    owner: nn.Module
    index: int
    cross: bool
    ask: bool

    @property
    def implementation(self) -> str | None:
        """The attention implementation that is set; None if there is no choice."""
        # A part of a composed model may still use the config that it was built with.
        config = getattr(self.module, "config", None) or getattr(self.owner, "config", None)
        return getattr(config, "_attn_implementation", None)


class TransformersMaps(MapSource):
    """Maps that attention modules return beside their output.

    Most classes of transformers state which of their modules give attention, and in which position of the output. In
    the other classes the maps come from the innermost modules that can be called with output_attentions; only those
    calls are changed, so that what the model returns stays as it was.
    """

    def __init__(self, model: nn.Module, modules: list[_MapModule]) -> None:
        """Sort the modules that give maps into stacks and layers.

        Args:
            model: The model.
            modules: The modules in the order of the layers.

        Raises:
            CallError: The model consists of several models, such as a text and an image tower.
        """
        self.name = type(model).__name__
        self._modules = modules
        self._stacks = _stacks(modules, self.name)
        self.keys = tuple((stack, layer) for stack, members in self._stacks.items() for layer in _layers(members))
        self._calls: dict[str, int] = {}
        self._columns, self._masks, self._kernels = CachedColumns(), LayerMasks(), KernelCalls()
        self._encoder = _encoder(model, self._stacks.get("encoder", []))

    @classmethod
    def of(cls, model: nn.Module) -> "TransformersMaps | None":
        """Find the modules that give maps; return None if the model has no module of transformers that does."""
        modules = list(_recorded(model)) or list(_asked(model))
        return cls(model, modules) if modules else None

    def demand_readable(self) -> None:
        """Refuse a model with fused attention whose code does not show how it calls its kernel."""
        for module in self._modules:
            kind = module.implementation
            if is_fused(kind) and not can_be_watched(module.module):
                raise CallError(
                    f"the attention of {self.name} is {kind}, and how {type(module.module).__name__} calls it is not "
                    f"known; {REMEDY}"
                )

    @property
    def gives_scores(self) -> bool:
        """Whether the attention of any module is fused."""
        return any(is_fused(module.implementation) for module in self._modules)

    def called_apart(self) -> nn.Module | None:
        """Return the encoder beside a decoder, which `generate` calls once, before the first call of the model."""
        return self._encoder

    def during(self) -> AbstractContextManager[None]:
        """Count the calls of shared modules from the first layer."""
        self._calls = {}
        self._columns.forget()
        self._masks.forget()
        return nullcontext()

    def attach(
        self,
        receive: Receiver,
        *,
        inputs: InputReceiver | None = None,
        consume: bool = False,
        on_call: OnCall = on_call,
    ) -> Iterator[Callable[[], None]]:
        """Register a hook on every module that gives maps."""
        for stack, modules in self._stacks.items():
            layers = _layers(modules)
            numbers = layers if len(layers) == len(modules) else [None] * len(modules)
            for number, module in zip(numbers, modules, strict=True):
                if module.ask:
                    yield before_forward(module.module, _asks_for_maps(module, consume=consume))
                if not module.cross:
                    yield before_forward(module.module, self._asks_for_columns(module.module))
                if not consume and module.implementation not in (None, "eager"):
                    for registry in registries_of(module.module):
                        yield watch_registry(registry)
                    yield around_forward(module.module, self._kernels.around(module.module))
                yield on_call(module.module, self._hook(stack, number, module, receive, inputs, consume))

    def _asks_for_columns(self, module: nn.Module) -> ForwardHook:
        by_name = naming(module)

        def hook(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._columns.ask(module, by_name(args, kwargs))

        return hook

    def _hook(
        self,
        stack: str,
        number: int | None,
        module: _MapModule,
        receive: Receiver,
        inputs: InputReceiver | None,
        consume: bool,
    ) -> CallHook:
        by_name = naming(module.module)

        def hook(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            # Where layers share a module, only the order of its calls tells them apart.
            layer = self._calls.get(stack, 0) if number is None else number
            self._calls[stack] = self._calls.get(stack, 0) + 1
            key = (stack, layer)
            if inputs is not None:
                # DistilBERT of transformers 4 is called with query, key and value.
                name = "hidden_states" if "hidden_states" in kwargs else "query"
                inputs(key, args[0] if args else kwargs[name])
            was_asked = consume or not is_fused(module.implementation)
            index = _position_of_map(output, module) if was_asked or not module.ask else None
            attention = None if index is None else output[index]
            calls = self._kernels.take(module.module)
            if index is None or not isinstance(attention, Tensor) or calls:
                receive(self._scores(key, module, calls))
                return None
            if module.ask:
                _demand_weights(attention, key, module, self.name)
            receive(self._layer_map(key, module, attention, by_name(args, kwargs)))
            if not consume:
                return None
            # The blocks around the module would keep the map until the next layer, or until the end.
            return (*output[:index], None, *output[index + 1 :])

        return hook

    def _layer_map(self, key: LayerKey, module: _MapModule, attention: Tensor, arguments: dict[str, Any]) -> LayerMap:
        mode = mode_after_dropout([module.module])
        if module.cross or attention.ndim != 4:
            return LayerMap(key, attention, is_self=not module.cross, mode=mode)
        columns = self._columns.of(module.module, *attention.shape[-2:])

        def seen() -> Tensor | None:
            is_causal = getattr(getattr(module.owner, "config", None), "causal", None)
            return self._masks.seen(module.module, arguments, attention, is_causal=is_causal)

        return LayerMap(key, attention, columns=columns, seen=seen, mode=mode)

    def _scores(self, key: LayerKey, module: _MapModule, calls: list[Noted]) -> LayerScores:
        fused = not module.ask or module.implementation not in (None, "eager")
        remedy = REMEDY if fused else f"{type(module.module).__name__} is not supported"
        call = one_call(calls, f"{layer_name(*key)} of {self.name}", remedy)
        mode = mode_before_dropout(call.dropout, is_training=module.module.training)
        if module.cross:
            return LayerScores(key, call, is_self=False, mode=mode)
        columns = self._columns.of(module.module, *call.shape[-2:])
        return LayerScores(key, call, columns=columns, seen=lambda: self._masks.seen_by_kernel(call), mode=mode)


def _recorded(model: nn.Module) -> Iterator[_MapModule]:
    """Yield the modules whose attention transformers itself records, each with the model that it is part of."""
    owners: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if hasattr(module, "_can_record_outputs") and hasattr(module, "config"):
            owners[path] = module
        owner = next((owners[at] for at in reversed(list(_parents(path))) if at in owners), None)
        recorded = (getattr(owner, "_can_record_outputs", None) or {}).items()
        for key, recorders in recorded:
            if not key.endswith("attentions"):
                continue
            for recorder in recorders if isinstance(recorders, list) else [recorders]:
                if _matches(recorder, path, module):
                    blocks = _attending_blocks(path, module)
                    index = 1 if blocks else getattr(recorder, "index", 1)
                    for place, part in blocks or [(path, module)]:
                        yield _MapModule(place, part, owner or model, index, "cross" in key, ask=False)


def _attending_blocks(path: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the attention of each block of a stage, of which the stage itself gives only the last map.

    A stage holds its blocks in a list, and attention says of itself whether it is causal.
    """
    lists = [name for name, part in module.named_modules() if isinstance(part, nn.ModuleList)]
    return [
        (f"{path}.{name}", part)
        for name, part in module.named_modules()
        if hasattr(part, "is_causal") and any(name.startswith(f"{outer}.") for outer in lists)
    ]


def _parents(path: str) -> Iterator[str]:
    """Yield the paths from the model itself down to the module."""
    yield ""
    parts = path.split(".") if path else []
    for length in range(len(parts)):
        yield ".".join(parts[: length + 1])


def _matches(recorder: Any, path: str, module: nn.Module) -> bool:
    """Return whether a recorder, which is a class, a name or a description of both, means this module."""
    target = recorder if isinstance(recorder, type) else getattr(recorder, "target_class", None)
    ending = recorder if isinstance(recorder, str) else getattr(recorder, "class_name", None)
    if not (target is not None and isinstance(module, target)) and not (ending is not None and path.endswith(ending)):
        return False
    name = getattr(recorder, "layer_name", None)
    return name is None or f".{name.strip('.')}." in f".{path}."


def _asked(model: nn.Module) -> Iterator[_MapModule]:
    """Yield the innermost modules of a model of transformers whose forward takes output_attentions."""
    owners = {path: module for path, module in model.named_modules() if hasattr(module, "set_attn_implementation")}
    can = {path for path, module in model.named_modules() if "output_attentions" in _parameters(module)}
    for path, module in model.named_modules():
        owner = next((owners[at] for at in reversed(list(_parents(path))) if at in owners), None)
        inside = any(other != path and other.startswith(f"{path}." if path else "") for other in can)
        if path in can and owner is not None and not inside:
            cross = any(part in path.lower() for part in ("cross", "encoder_attn", "encdec"))
            yield _MapModule(path, module, owner, 1, cross, ask=True)


def _parameters(module: nn.Module) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(module.forward).parameters)


def _asks_for_maps(module: _MapModule, *, consume: bool) -> ForwardHook:
    signature = inspect.signature(module.module.forward)

    def hook(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        # With a fused kernel, a module that is asked for its map computes in another way.
        if is_fused(module.implementation) and not consume:
            return None
        bound = signature.bind(*args, **kwargs)
        bound.arguments["output_attentions"] = True
        return bound.args, bound.kwargs

    return hook


def _position_of_map(output: Any, module: _MapModule) -> int | None:
    """Return the position of the map in a module's output, or None if it has none."""
    if not isinstance(output, tuple) or len(output) <= module.index:
        return None
    if module.ask and isinstance(output[module.index], Tensor):
        # T5 of transformers 4 returns its position bias before the map that was asked for.
        shaped = [index for index, part in enumerate(output) if index and isinstance(part, Tensor) and part.ndim == 4]
        return shaped[-1] if shaped else module.index
    return module.index


def _demand_weights(attention: Tensor, key: LayerKey, module: _MapModule, name: str) -> None:
    """Raise CallError if the tensor in the position of a map is not a map."""
    shape, layer = list(attention.shape), layer_name(*key)
    config = getattr(module.owner, "config", None)
    # An encoder and a decoder may have different numbers of heads.
    stated = [getattr(config, name) for name in _HEAD_COUNTS if hasattr(config, name)]
    # Models of several stages state a number for each.
    heads = {count for each in stated for count in (each if isinstance(each, list | tuple) else [each])}
    fits = attention.ndim == 4 and (not heads or attention.shape[1] in heads)
    fits = fits and attention.shape[2] <= attention.shape[3]
    if not fits or bool((attention < 0).any()):
        raise CallError(
            f"{type(module.module).__name__} of {layer} of {name} gives {shape}, not attention weights [batch, head, "
            f"query, key], in the position of its attention map; this architecture is not supported"
        )
    # Dropout scales the remaining weights up, so that rows may sum to more than 1.
    if not module.module.training and bool((attention.sum(dim=-1) > 1 + ROUNDING).any()):
        raise CallError(f"the maps of {layer} of {name} have rows that sum to more than 1; expected softmax rows")


def _stacks(modules: list[_MapModule], name: str) -> dict[str, list[_MapModule]]:
    """Return the modules by stack: one of self-attention, or an encoder and a decoder, and cross-attention."""
    sides: dict[str, str] = {}
    for module in modules:
        prefix = _before_number(module.path)
        parts = prefix.split(".")
        sides[prefix] = next((part for part in parts if part in ("encoder", "decoder")), "")
    if len(sides) == 1:
        sides = dict.fromkeys(sides, "")
    elif sorted(sides.values()) != ["decoder", "encoder"]:
        raise CallError(
            f"{name} holds several stacks of attention ({', '.join(sides)}) that are not one encoder and one decoder; "
            f"give one of its parts"
        )
    stacks: dict[str, list[_MapModule]] = {}
    for module in modules:
        side = sides[_before_number(module.path)]
        stack = f"{side} cross".strip() if module.cross else side
        stacks.setdefault(stack, []).append(module)
    return stacks


def _encoder(model: nn.Module, modules: list[_MapModule]) -> nn.Module | None:
    """Return the encoder of a model if its attention modules are those of the stack "encoder"."""
    encoder: Any = model.get_encoder() if modules and hasattr(model, "get_encoder") else None  # pyright: ignore[reportCallIssue]
    if not isinstance(encoder, nn.Module) or encoder is model:
        return None
    inside = set(encoder.modules())
    return encoder if all(module.module in inside for module in modules) else None


def _before_number(path: str) -> str:
    parts = path.split(".")
    return ".".join(parts[: next((index for index, part in enumerate(parts) if part.isdigit()), len(parts))])


def _layers(modules: list[_MapModule]) -> list[int]:
    """Return the numbers of a stack's layers; one module may serve several layers."""
    config: Any = getattr(modules[0].owner, "config", None)
    stated = getattr(config, "num_hidden_layers", None)
    # ALBERT keeps its groups of shared layers in a list of their own.
    shares = isinstance(getattr(config, "num_hidden_groups", None), int)
    return list(range(stated)) if shares and stated is not None else layer_numbers([module.path for module in modules])
