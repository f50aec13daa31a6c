"""Watching a model's forward, however it is called: as a module, or by run_with_cache, run_with_hooks or generate."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...analyses.attention.maps.calls import CallHook, OnCall, around_forward, on_call


@dataclass(frozen=True, eq=False)
class ForwardWatcher:
    """The functions that are called when a forward begins and when it ends.

    Attributes:
        begin: Takes the arguments by name before the forward runs.
        end: Takes the arguments and what the forward returned.
        abandon: Called when a forward ends by an exception or an interrupt, be it in the model or in another watcher.
    """

    begin: Callable[[dict[str, Any]], None] = lambda _arguments: None
    end: Callable[[dict[str, Any], Any], None] = lambda _arguments, _output: None
    abandon: Callable[[], None] = lambda: None


def watch_forward(model: nn.Module, watcher: ForwardWatcher) -> Callable[[], None]:
    """Call a watcher at every forward of a model, and return a function that ends this; calling it twice is harmless.

    A hook of torch is bypassed where a library calls `model.forward` itself, as TransformerLens does, and it would be
    copied with the model. The forward itself is therefore watched; see `analyses.attention.maps.calls`.

    Args:
        model: The model.
        watcher: What to call.
    """
    signature = inspect.signature(model.forward)

    def around(forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        arguments = _by_name(signature, args, kwargs)
        try:
            watcher.begin(arguments)
            output = forward(*args, **kwargs)
            watcher.end(arguments, output)
        except BaseException:
            watcher.abandon()
            raise
        return output

    return around_forward(model, around)


def on_call_within(model: nn.Module) -> OnCall:
    """Return the way to register a hook on a module so that it runs before the model's own forward ends.

    The call of a module inside the model has ended by then; of the model itself, the forward is watched.
    """

    def register(module: nn.Module, hook: CallHook) -> Callable[[], None]:
        if module is not model:
            return on_call(module, hook)

        def around(forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            hook(args, kwargs, output)
            return output

        return around_forward(model, around)

    return register


def _by_name(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments by name; none if they do not fit, which the model itself will report."""
    try:
        bound = signature.bind(*args, **kwargs).arguments
    except TypeError:
        return {}
    arguments: dict[str, Any] = {}
    for name, value in bound.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            arguments |= value
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            arguments |= {f"{name}{number}": part for number, part in enumerate(value)}
        else:
            arguments[name] = value
    return arguments
