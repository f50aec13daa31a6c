"""Watching a model's forward, whoever calls it: the model as a module, run_with_cache, run_with_hooks or generate."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True, eq=False)
class ForwardWatcher:
    """What is told when a forward begins and how it ends.

    Attributes:
        begin: takes the arguments by name before the forward runs.
        end: takes them and what was returned.
        abandon: hears that a forward ended by an exception or an interrupt, its own or another watcher's.
    """

    begin: Callable[[dict[str, Any]], None] = lambda _arguments: None
    end: Callable[[dict[str, Any], Any], None] = lambda _arguments, _output: None
    abandon: Callable[[], None] = lambda: None


def watch_forward(model: nn.Module, watcher: ForwardWatcher) -> Callable[[], None]:
    """Tell the watcher of every forward of the model, and return what ends it, which does nothing the second time.

    A hook of torch is passed by where a library calls `model.forward` itself, as TransformerLens does, so the model has
    a forward of its own for as long as somebody watches; watchers are told in the order in which they came.
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


def on_output(
    module: nn.Module, model: nn.Module, taken: Callable[[tuple[Any, ...], dict[str, Any], Any], None]
) -> Callable[[], None]:
    """Hand on what a module of the model is called with and gives, before the model's own forward ends.

    Returns:
        What ends it.
    """
    if module is model:
        return watch_forward(module, ForwardWatcher(end=lambda arguments, output: taken((), arguments, output)))

    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        taken(args, kwargs, output)

    return module.register_forward_hook(hook, with_kwargs=True).remove


def _watched(model: nn.Module) -> Callable[..., Any]:
    inner = model.forward
    signature = inspect.signature(inner)
    watchers: list[ForwardWatcher] = []

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        told = tuple(watchers)
        arguments = _by_name(signature, args, kwargs)
        try:
            for watcher in told:
                watcher.begin(arguments)
            output = inner(*args, **kwargs)
            for watcher in told:
                watcher.end(arguments, output)
        except BaseException:
            for watcher in told:
                watcher.abandon()
            raise
        return output

    forward.__dict__.update(watchers=watchers, replaced=model.__dict__.get("forward"), itself=forward)
    return forward


def _is_watched(forward: Any) -> bool:
    """Whether this is a forward made here, and not what somebody wrapped around one, which copies its attributes."""
    return forward is not None and getattr(forward, "itself", None) is forward


def _give_back(model: nn.Module, forward: Callable[..., Any]) -> None:
    replaced = forward.__dict__["replaced"]
    if replaced is None:
        del model.__dict__["forward"]
    else:
        model.__dict__["forward"] = replaced


def _by_name(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name; without names where they do not fit, which the model itself will say."""
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
