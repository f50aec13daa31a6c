"""Watching the calls of a module without a trace in it: a copy of a watched module is a plain module of its own.

Hooks of torch, and a `forward` that is set on an object, belong to the state of the module. They are copied and pickled
with it, so that a copy would call back, or even run, the original. A watched module therefore stays as it is, and its
class asks at every call whether this object is watched. Hooks of torch would also switch off the fused path of
inference in torch's own layers, so that watching changed what they compute.
"""

import copy
import functools
import inspect
import operator
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

#: Called in place of a method: takes the method, bound to its object, and the arguments; returns what the caller gets.
Around = Callable[..., Any]
#: Ends what was begun; calling it twice is harmless.
Stop = Callable[[], None]
#: Takes the arguments and the output of a module's call; what it returns, unless that is None, replaces the output.
CallHook = Callable[[tuple[Any, ...], dict[str, Any], Any], Any]
#: Takes the arguments of a module's forward, and returns those that it is called with; None if they stay.
ForwardHook = Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]] | None]
#: Registers a hook on a module's calls, and returns what removes it.
OnCall = Callable[[nn.Module, CallHook], Stop]


def naming(module: nn.Module) -> Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Any]]:
    """Return what gives the arguments of a module's forward their names, or else their numbers.

    Args:
        module: The module.
    """
    names = [name for name in inspect.signature(module.forward).parameters if name not in ("args", "kwargs")]

    def by_name(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        numbered = {str(number): value for number, value in enumerate(args[len(names) :], len(names))}
        return dict(zip(names, args, strict=False)) | numbered | kwargs

    return by_name


def around_forward(module: nn.Module, around: Around, *, owner: type[nn.Module] | None = None) -> Stop:
    """Run a function in place of a module's forward, also where a library calls `module.forward` itself.

    The function that comes last runs first.

    Args:
        module: The module.
        around: The function.
        owner: The base class whose forward is meant, where the module's own class may override it.
    """
    own: Any = module.__dict__.get("forward")
    if own is None:
        return _watch_class(owner or type(module), "forward", module, around)
    return _watch_own(module, own, around)


def before_forward(module: nn.Module, hook: ForwardHook) -> Stop:
    """Call a function with the arguments of a module's forward, after the module's own hooks have changed them.

    Args:
        module: The module.
        hook: The function.
    """

    def around(forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = hook(args, kwargs) or (args, kwargs)
        return forward(*args, **kwargs)

    return around_forward(module, around)


def on_call(module: nn.Module, hook: CallHook) -> Stop:
    """Call a function with what a module's forward was called with, and with what the module hands on.

    It runs after every hook that the module has, whenever that was registered, so that it sees what the user's own
    hooks have changed.

    Args:
        module: The module.
        hook: The function.
    """
    calls = _Calls()

    def forward_in(forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if calls.arguments:
            calls.arguments[-1] = (args, kwargs)
        return forward(*args, **kwargs)

    def call_in(call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        calls.arguments.append((args, kwargs))
        try:
            output = call(*args, **kwargs)
        finally:
            received = calls.arguments.pop()
        replaced = hook(*received, output)
        return output if replaced is None else replaced

    stop_forward = around_forward(module, forward_in)
    try:
        stop_call = _watch_class(type(module), "__call__", module, call_in)
    except BaseException:
        stop_forward()
        raise

    def stop() -> None:
        stop_call()
        stop_forward()

    return stop


class _Calls(threading.local):
    """The arguments of the calls of a module that are in progress in this thread, the innermost last."""

    def __init__(self) -> None:
        self.arguments: list[tuple[tuple[Any, ...], dict[str, Any]]] = []


class _Method:
    """A method that stands in a class in place of the class's own as long as any object is watched.

    Attributes:
        watched: The watched objects by their identity, each with the functions that run around its method.
        method: What stands in the class.
    """

    def __init__(self, owner: type[nn.Module], name: str) -> None:
        self.watched: dict[int, tuple[nn.Module, tuple[Around, ...]]] = {}
        self._owner, self._name = owner, name
        self._own: Any = owner.__dict__.get(name)
        self.method = _asking(self.watched, owner, name, self._own)

    def put(self) -> None:
        """Put the method into the class."""
        setattr(self._owner, self._name, self.method)

    def take_away(self) -> None:
        """Give the class its own method back, unless somebody has replaced it meanwhile."""
        if self._owner.__dict__.get(self._name) is not self.method:
            return
        if self._own is None:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._own)


def _asking(
    watched: dict[int, tuple[nn.Module, tuple[Around, ...]]], owner: type[nn.Module], name: str, own: Any
) -> Callable[..., Any]:
    run_watched = _not_compiled()

    @functools.wraps(getattr(owner, name))
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # torch.compile would look a bound method up again by its name, so it is bound where nothing is compiled.
        if id(self) in watched:
            arounds = watched.get(id(self), (self, ()))[1]
            return run_watched(arounds, lambda: bound(self), args, kwargs)
        return bound(self)(*args, **kwargs)

    def bound(self: nn.Module) -> Callable[..., Any]:
        return getattr(super(owner, self), name) if own is None else own.__get__(self, type(self))

    return method


def _run(
    arounds: tuple[Around, ...],
    bound: Callable[[], Callable[..., Any]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run a method, and around it the functions that watch it."""
    call = bound()
    for around in arounds:
        call = functools.partial(around, call)
    return call(*args, **kwargs)


@functools.cache
def _not_compiled() -> Callable[..., Any]:
    """Return `_run` so that torch.compile leaves it, and what it calls, as it is: a compiled part would not be seen."""
    return torch.compiler.disable(_run)


_METHODS: dict[tuple[type[nn.Module], str], _Method] = {}
_LOCK = threading.RLock()


def _watch_class(owner: type[nn.Module], name: str, module: nn.Module, around: Around) -> Stop:
    key = (owner, name)

    def stop() -> None:
        with _LOCK:
            method = _METHODS.get(key)
            if method is None:
                return
            _, arounds = method.watched.get(id(module), (module, ()))
            left = tuple(other for other in arounds if other is not around)
            if left:
                method.watched[id(module)] = (module, left)
            else:
                method.watched.pop(id(module), None)
            if not method.watched:
                method.take_away()
                _METHODS.pop(key, None)

    try:
        with _LOCK:
            method = _METHODS.get(key) or _METHODS.setdefault(key, _Method(owner, name))
            if owner.__dict__.get(name) is not method.method and not method.watched:
                method.put()
            _, arounds = method.watched.get(id(module), (module, ()))
            method.watched[id(module)] = (module, (*arounds, around))
    except BaseException:
        stop()
        raise
    return stop


class _OwnForward:
    """A forward that was set on an object, watched; a copy of it is a copy of that forward alone."""

    def __init__(self, own: Callable[..., Any]) -> None:
        self.own = own
        self.arounds: tuple[Around, ...] = ()
        functools.update_wrapper(self, own, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _not_compiled()(self.arounds, lambda: self.own, args, kwargs)

    def __copy__(self) -> Callable[..., Any]:
        return self.own

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return copy.deepcopy(self.own, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        # What is pickled is the forward itself, so that the file needs nothing of this module.
        return operator.getitem, ([self.own], 0)


def _watch_own(module: nn.Module, own: Callable[..., Any], around: Around) -> Stop:
    forward = own if isinstance(own, _OwnForward) else _OwnForward(own)

    def stop() -> None:
        with _LOCK:
            forward.arounds = tuple(other for other in forward.arounds if other is not around)
            if not forward.arounds and module.__dict__.get("forward") is forward:
                module.__dict__["forward"] = forward.own

    try:
        with _LOCK:
            module.__dict__["forward"] = forward
            forward.arounds = (*forward.arounds, around)
    except BaseException:
        stop()
        raise
    return stop
