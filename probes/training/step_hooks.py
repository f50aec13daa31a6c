"""One pair of torch's hooks on the steps of all optimizers, which hands them on to everyone who watches."""

import weakref
from types import FrameType
from typing import Any, Protocol, runtime_checkable

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..step_calls import call_of_step


@runtime_checkable
class Watcher(Protocol):
    """What watches the steps of optimizers."""

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any, caller: FrameType) -> Any:
        """Look at a call of `step` that begins; what is returned, unless it is None, are its arguments from now on."""

    def after_step(self, optimizer: Optimizer, caller: FrameType) -> None:
        """Look at a call of `step` that ended; both methods get the same frame for a call."""


class _StepHooks:
    """Those who watch, in the order in which they began.

    Python may collect a watcher while torch iterates over its hooks, which must not change then. So torch's hooks are
    removed only when `unwatch` is called, and those who no longer exist are passed over.
    """

    def __init__(self) -> None:
        self._watchers: list[weakref.ref[Watcher]] = []
        self._handles: list[Any] = []
        self._calls = 0

    def watch(self, watcher: Watcher) -> None:
        self._watchers = [*self._alive(), weakref.ref(watcher)]
        if not self._handles:
            self._handles = [
                register_optimizer_step_pre_hook(self._before),
                register_optimizer_step_post_hook(self._after),
            ]

    def unwatch(self, watcher: Watcher) -> None:
        self._watchers = [held for held in self._alive() if held() is not watcher]
        if not self._watchers and not self._calls:
            for handle in self._handles:
                handle.remove()
            self._handles = []

    def _alive(self) -> list["weakref.ref[Watcher]"]:
        return [held for held in self._watchers if held() is not None]

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        caller, arguments = call_of_step(), None
        self._calls += 1
        try:
            for held in self._watchers:
                watcher = held()
                changed = None if watcher is None else watcher.before_step(optimizer, args, kwargs, caller)
                if changed is not None:
                    args, kwargs = arguments = changed
        finally:
            self._calls -= 1
        return arguments

    def _after(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        caller = call_of_step()
        self._calls += 1
        try:
            for held in self._watchers:
                watcher = held()
                if watcher is not None:
                    watcher.after_step(optimizer, caller)
        finally:
            self._calls -= 1


_hooks = _StepHooks()


def watch_steps(watcher: Watcher) -> None:
    """Hand the steps of all optimizers on to a watcher, for as long as it exists.

    Args:
        watcher: The watcher, which is not kept alive.
    """
    _hooks.watch(watcher)


def unwatch_steps(watcher: Watcher) -> None:
    """Hand no more steps on to a watcher. Calling it again is harmless.

    Args:
        watcher: The watcher.
    """
    _hooks.unwatch(watcher)
