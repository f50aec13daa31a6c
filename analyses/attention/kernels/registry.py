"""Calls of the attention functions that transformers keeps by name, as they happen in the forward of a module.

Its modules look their function up at every call. While any module is watched, what they find is a function that notes
the call if it happens in a watched module's forward, and calls the function that is registered.
"""

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .flash import flash_call
from .flex import flex_call
from .torch_kernel import Noted, kernel_calls

_NAME = "ALL_ATTENTION_FUNCTIONS"


class _Open(threading.local):
    """The lists that take the calls of this thread: one for each watched module whose forward runs."""

    def __init__(self) -> None:
        self.lists: list[list[Noted]] = []


_OPEN = _Open()
_LOCK = threading.RLock()


@contextmanager
def noted_calls() -> Iterator[list[Noted]]:
    """Collect the calls of registered functions in this thread."""
    calls: list[Noted] = []
    _OPEN.lists.append(calls)
    try:
        yield calls
    finally:
        _OPEN.lists.pop()


def registries_of(module: nn.Module) -> list[Any]:
    """Return the registries in which a module, or one inside it, looks up its attention function.

    Args:
        module: The module.
    """
    found = [_globals(type(part)).get(_NAME) for part in module.modules()]
    return list({id(registry): registry for registry in found if registry is not None}.values())


def _globals(kind: type[nn.Module]) -> dict[str, Any]:
    return getattr(inspect.unwrap(kind.forward), "__globals__", {})


class _Watched:
    """A registry whose functions note their calls."""

    def __init__(self, registry: Any) -> None:
        self.registry, self.watchers = registry, 0
        self._own: dict[str, Any] = {}
        self._put: dict[str, Any] = {}

    def put(self) -> None:
        local = self.registry._local_mapping
        self._own = dict(local)
        self._put = {kind: _noting(kind, self._function(kind)) for kind in list(self.registry)}
        local.update(self._put)

    def take_away(self) -> None:
        local = self.registry._local_mapping
        for kind, function in self._put.items():
            # Somebody may have put another function there meanwhile.
            if local.get(kind) is function:
                del local[kind]
                local.update({kind: self._own[kind]} if kind in self._own else {})

    def _function(self, kind: str) -> Callable[[], Any]:
        """Return what finds the function that is registered when it is called."""
        return lambda: self._own[kind] if kind in self._own else self.registry._global_mapping[kind]


_WATCHED: dict[int, _Watched] = {}


def watch_registry(registry: Any) -> Callable[[], None]:
    """Let a registry's functions note their calls, and return what ends this; calling it twice is harmless.

    Args:
        registry: An `AttentionInterface` of transformers.
    """
    with _LOCK:
        watched = _WATCHED.setdefault(id(registry), _Watched(registry))
        if not watched.watchers:
            watched.put()
        watched.watchers += 1
    ended = False

    def stop() -> None:
        nonlocal ended
        with _LOCK:
            if ended:
                return
            ended = True
            watched.watchers -= 1
            if not watched.watchers:
                watched.take_away()
                _WATCHED.pop(id(registry), None)

    return stop


def _noting(kind: str, find: Callable[[], Any]) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        own = find()
        if torch.compiler.is_compiling() or not _OPEN.lists:
            return own(*args, **kwargs)
        if _is_interpreted(kind):
            noted = _interpreted(kind, own, args, kwargs)
            output = own(*args, **kwargs)
        else:
            with kernel_calls() as calls:
                output = own(*args, **kwargs)
            noted = _as_called(calls, *args[1:3]) if len(args) > 2 and not _has_map(output) else None
        if noted is not None:
            for open_list in _OPEN.lists:
                open_list.append(noted)
        return output

    return function


def _has_map(output: Any) -> bool:
    """Return whether a function gives its map, which is read in place of its calls."""
    map_ = output[1] if isinstance(output, tuple) and len(output) > 1 else None
    return isinstance(map_, Tensor) and map_.ndim == 4


def _is_interpreted(kind: str) -> bool:
    """Return whether a kernel's call says what it computes; of other functions, the calls of torch's kernel say it."""
    return kind.startswith(("flash", "flex", "paged|")) or "/" in kind


def _interpreted(kind: str, own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Noted:
    if kind.startswith("paged|"):
        return "its keys are in the blocks of a paged cache, which are not those of one sequence"
    given = _by_name(own, args, kwargs)
    module, query, key = given["module"], given["query"], given["key"]
    if kind.startswith("flex"):
        return flex_call(query, key, given)
    is_causal = given.get("is_causal")
    return flash_call(kind, query, key, given, is_causal=bool(module.is_causal if is_causal is None else is_causal))


def _by_name(own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    arguments = inspect.signature(own).bind(*args, **kwargs).arguments
    names = ("module", "query", "key", "value", "attention_mask")
    extra = arguments.pop("kwargs", {})
    return dict(zip(names, args, strict=False)) | arguments | extra


def _as_called(calls: list[Noted], query: Tensor, key: Tensor) -> Noted | None:
    """Return the call of torch's kernel with the heads and keys of the layer.

    For a single query, the heads of a group may stand in the place of queries; keys that no query sees may be cut off.
    """
    if not calls:
        return None
    if len(calls) > 1:
        return f"it calls torch's kernel {len(calls)} times for one layer"
    call = calls[0]
    if isinstance(call, str):
        return call
    heads, queries = query.shape[1:3]
    groups, rows = call.query.shape[1:3]
    if (groups, rows) == (heads, queries):
        return call.widened(key.shape[2])
    if queries == 1 and groups * rows == heads:
        return call.with_heads_apart().widened(key.shape[2])
    return f"torch's kernel got queries of shape {list(call.query.shape)}, the layer has {list(query.shape)}"
