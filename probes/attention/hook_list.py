"""A probe as a list of TransformerLens' hooks, which the user hands to the model together with hooks of their own."""

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from ...analyses.attention.maps.source import LayerReading, MapSource, Receiver
from ...circuits.weights.layer_keys import LayerKey
from ..maps.forward import ForwardWatcher, on_call_within, watch_forward

#: The name of a hook point, and the function that TransformerLens calls there as `function(value, hook=hook_point)`.
Hook = tuple[str, Callable[..., None]]


@dataclass(eq=False)
class _Call:
    """A call of the model that is in progress.

    Attributes:
        is_watched: Whether it was handed on as begun.
        marked: The layers whose hook has run, and whose map has not been read yet.
        has_read: Whether any map was read.
    """

    is_watched: bool
    marked: set[LayerKey] = field(default_factory=set)
    has_read: bool = False


class _Calls(threading.local):
    """The calls of the model that are in progress in this thread, the innermost last."""

    def __init__(self) -> None:
        self.open: list[_Call] = []


class HookList:
    """Hooks that switch the reading of a map on, one for each layer.

    A hook does not read the map itself: hooks that come after it in the list would change the map unseen. It marks the
    layer, and the map is read when it leaves the hook point. The model is watched from outside for as long as this
    object or one of its hooks exists, and a call in which none of the hooks ran is not counted.
    """

    def __init__(
        self,
        model: nn.Module,
        source: MapSource,
        watcher: ForwardWatcher,
        receive: Receiver,
        drop: Callable[[], None],
        stands_by: Callable[[], bool],
    ) -> None:
        """Begin to watch the model.

        Args:
            model: The model.
            source: The source of its maps, with hook points.
            watcher: What is called when a forward begins and ends.
            receive: Takes the maps.
            drop: Called at the end of a call that does not count.
            stands_by: Returns whether something else reads the maps of this call.
        """
        self._source, self._watcher, self._receive = source, watcher, receive
        self._drop, self._stands_by = drop, stands_by
        self._calls = _Calls()
        ends: list[Callable[[], None]] = []
        weakref.finalize(self, _end_all, ends).atexit = False
        # What watches the model must not hold this object, which ends the watching when it is no longer used.
        for end in source.attach(_weakly(self._take), on_call=on_call_within(model)):
            ends.append(end)
        of_forward = ForwardWatcher(_weakly(self._begin), _weakly(self._end), _weakly(self._abandon))
        ends.append(watch_forward(model, of_forward))

    def hooks(self) -> list[Hook]:
        """Return the name of the hook point of each layer, with the hook."""
        return [(name, partial(self._mark, key)) for key, name in self._source.hook_points.items()]

    def _mark(self, key: LayerKey, value: Tensor, hook: Any) -> None:
        del value, hook
        if self._calls.open:
            self._calls.open[-1].marked.add(key)

    def _begin(self, arguments: dict[str, Any]) -> None:
        call = _Call(is_watched=not self._stands_by())
        self._calls.open.append(call)
        if call.is_watched:
            self._watcher.begin(arguments)

    def _take(self, layer_map: LayerReading) -> None:
        call = self._calls.open[-1] if self._calls.open else None
        if call is not None and call.is_watched and layer_map.key in call.marked:
            call.marked.discard(layer_map.key)
            call.has_read = True
            self._receive(layer_map)

    def _end(self, arguments: dict[str, Any], output: Any) -> None:
        call = self._calls.open.pop()
        if call.is_watched and call.has_read:
            self._watcher.end(arguments, output)
        elif call.is_watched:
            self._drop()

    def _abandon(self) -> None:
        if not self._calls.open:
            return
        call = self._calls.open.pop()
        if call.is_watched and (call.has_read or call.marked):
            self._watcher.abandon()
        elif call.is_watched:
            self._drop()


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Return a function that calls a method for as long as its object exists."""
    held = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        bound = held()
        if bound is not None:
            bound(*args)

    return call


def _end_all(ends: list[Callable[[], None]]) -> None:
    while ends:
        ends.pop()()
