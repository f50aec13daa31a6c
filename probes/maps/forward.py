"""Watching a model's forward, however it is called: as a module, or by run_with_cache, run_with_hooks or generate."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...analyses.attention.maps.source import CallHook, OnCall, on_call


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

    A hook of torch is bypassed where a library calls `model.forward` itself, as TransformerLens does. The model
    therefore has a forward of its own as long as it is watched. Watchers are called in the order in which they came.

    Args:
        model: The model.
        watcher: What to call.
    """
    own: Any = model.__dict__.get("forward")
    forward: Callable[..., Any] = own if _is_watched(own) else _watched(model)
    watchers: list[ForwardWatcher] = forward.__dict__["watchers"]

    def stop() -> None:
        if watcher in watchers:
            watchers.remove(watcher)
        if not watchers and model.__dict__.get("forward") is forward:
            _give_back(model, forward)

    try:
        model.__dict__["forward"] = forward
        watchers.append(watcher)
    except BaseException:
        stop()
        raise
    return stop


def on_call_within(model: nn.Module) -> OnCall:
    """Return the way to register a hook on a module so that it runs before the model's own forward ends.

    A forward hook does that for every module inside the model; the model itself is watched.
    """

    def register(module: nn.Module, hook: CallHook) -> Callable[[], None]:
        if module is not model:
            return on_call(module, hook)

        def end(arguments: dict[str, Any], output: Any) -> None:
            hook((), arguments, output)

        return watch_forward(model, ForwardWatcher(end=end))

    return register


def _watched(model: nn.Module) -> Callable[..., Any]:
    inner = model.forward
    signature = inspect.signature(inner)
    watchers: list[ForwardWatcher] = []

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        current = tuple(watchers)
        arguments = _by_name(signature, args, kwargs)
        try:
            for watcher in current:
                watcher.begin(arguments)
            output = inner(*args, **kwargs)
            for watcher in current:
                watcher.end(arguments, output)
        except BaseException:
            for watcher in current:
                watcher.abandon()
            raise
        return output

    forward.__dict__.update(watchers=watchers, replaced=model.__dict__.get("forward"), itself=forward)
    return forward


def _is_watched(forward: Any) -> bool:
    """Return whether this module made the forward; what a user wraps around one has copies of its attributes."""
    return forward is not None and getattr(forward, "itself", None) is forward


def _give_back(model: nn.Module, forward: Callable[..., Any]) -> None:
    replaced = forward.__dict__["replaced"]
    if replaced is None:
        del model.__dict__["forward"]
    else:
        model.__dict__["forward"] = replaced


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
