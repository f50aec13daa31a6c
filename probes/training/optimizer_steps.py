"""Watches the optimizers that move some parameters: their gradients before a step, and when a step is complete."""

import math
import warnings
import weakref
from collections.abc import Callable, Iterable
from collections.abc import Mapping as Dictionary
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from ...circuits.errors import CallError
from ..step_calls import is_running
from .gathering import is_spread, local
from .step_hooks import unwatch_steps, watch_steps


class Mover(NamedTuple):
    """An optimizer that moves a parameter.

    Attributes:
        optimizer: The name of its class.
        rate: The learning rate of the parameter's group, as the step begins.
    """

    optimizer: str
    rate: float


class OptimizerSteps:
    """The steps that optimizers take with some parameters, seen by hooks of torch for all optimizers.

    A step of training is one step of each optimizer that moves any of the parameters. It begins before the first of
    them and ends after the last of those that were given, or, where an optimizer steps again before all others have,
    before that; the next steps are then those of the optimizers that stepped. If none was given, `forget_step` ends it.

    An optimizer whose `step` calls that of its base class is seen once, as the hooks of the outer call. Gradients are
    copied before an optimizer's own code can change them; where it computes them by a closure, after the first call of
    the closure. They are divided by the scale of a GradScaler that the optimizer removes itself.

    Attributes:
        gradients: Copies of the gradients of the step, by the id of the parameter; empty if they were not wanted.
        movers: Who moves the parameters that had gradients, by the id of the parameter; empty if it was not wanted.
        seen: Whether any optimizer has moved the parameters yet.
        stepped: Whether any optimizer has done so since `forget_step` was called last.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]], begin: Callable[[], bool], end: Callable[[], None]) -> None:
        """Name the parameters, which are not kept alive; nothing is watched yet.

        Args:
            named: The parameters with their names.
            begin: Called before a step; it returns whether the gradients are wanted.
            end: Called after a step.
        """
        self.name(named)
        self.gradients: dict[int, Tensor] = {}
        self.movers: dict[int, Mover] = {}
        self.seen = self.stepped = False
        self._begin, self._end = begin, end
        self._given: list[Optimizer] = []
        self._expected: set[Optimizer] = set()
        self._done: set[Optimizer] = set()
        self._outer: dict[Optimizer, tuple[FrameType, dict[int, Tensor]]] = {}
        self._wants = self._is_begun = False
        self._after_step: list[tuple[Tensor, tuple[weakref.ref[Tensor], int] | None]] = []

    def name(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Name the parameters anew, where the model has got others.

        Args:
            named: The parameters with their names.
        """
        # Of a parameter that was deleted, the id may be that of another one later.
        self._names = WeakIdKeyDictionary({parameter: name for name, parameter in named})

    def watch(self) -> None:
        """Watch from now on, until it is closed or for as long as this object exists."""
        watch_steps(self)

    def close(self) -> None:
        """Stop watching. Calling it again is harmless."""
        unwatch_steps(self)
        self._outer = {}

    def give(self, optimizers: Iterable[Optimizer]) -> list[str]:
        """State which optimizers train the parameters.

        Args:
            optimizers: The optimizers, without wrappers.

        Returns:
            The names of those trained parameters that no optimizer holds.

        Raises:
            CallError: An optimizer holds none of the parameters.
        """
        given = list(optimizers)
        held: set[int] = set()
        for optimizer in given:
            own = self._parameters_of(optimizer)
            if not own:
                raise CallError(
                    f"{type(optimizer).__name__} holds no attention parameter of the model: give the optimizer that "
                    f"trains {next(iter(self._names.values()), 'them')}"
                )
            held |= own.keys()
        self._given, self._expected = given, set(given)
        return [
            name for parameter, name in self._names.items() if parameter.requires_grad and id(parameter) not in held
        ]

    def holds(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer of torch holds any of the parameters; its hooks then tell of its steps.

        Args:
            optimizer: The optimizer, without wrappers; what still wraps another one steps by itself.
        """
        return not hasattr(optimizer, "optimizer") and bool(self._parameters_of(optimizer))

    def forget_step(self) -> None:
        """Forget the step that was taken last, and its gradients; the next optimizer that steps begins a new one."""
        self.gradients, self.movers, self.stepped = {}, {}, False
        self._done, self._is_begun = set(), False

    def is_trained(self) -> bool:
        """Return whether any of the parameters is trained."""
        return any(parameter.requires_grad for parameter in self._names)

    def has_gradients(self, copied: bool = False) -> bool:
        """Return whether any gradient of the parameters is not zero; NaN does not count.

        Args:
            copied: Whether to ask the gradients that were copied before the step, in place of the current ones.
        """
        current = (parameter.grad for parameter in self._names)
        gradients = self.gradients.values() if copied else current
        # Of a gradient that is spread over processes, this one's part, since all of it takes all of them.
        parts = (local(gradient) for gradient in gradients if gradient is not None)
        return any(bool((part.nan_to_num(0.0) != 0).any()) for part in parts)

    def has_new_gradients(self) -> bool:
        """Return whether there are gradients that were computed after the optimizers' last step."""
        return any(
            parameter.grad is not None and _is_new(parameter.grad, state) and bool(local(parameter.grad).any())
            for parameter, state in self._after_step
        )

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any, caller: FrameType) -> Any:
        """Begin a step, if the optimizer moves any of the parameters.

        Args:
            optimizer: The optimizer whose `step` is called.
            args: The positional arguments of the call.
            kwargs: Its keyword arguments.
            caller: The frame that calls the hooks.

        Returns:
            The arguments with which the call goes on, if they are changed.
        """
        if optimizer in self._outer and is_running(self._outer[optimizer][0], caller):
            return None
        own = self._parameters_of(optimizer)
        if not own:
            return None
        self._outer[optimizer] = caller, own
        if optimizer in self._done:
            self._complete()
        if self._given and optimizer not in self._expected:
            self._warn_of(optimizer, own)
        if not self._is_begun:
            # What the step before has left is used by then.
            self._is_begun, self._wants, self.gradients, self.movers = True, self._begin(), {}, {}
        if not self._wants:
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._copy_gradients(optimizer, own)
            return None
        followed = self._following(closure, optimizer, own)
        return (
            (args, {**kwargs, "closure": followed})
            if "closure" in kwargs
            else ((*args[:1], followed, *args[2:]), kwargs)
        )

    def after_step(self, optimizer: Optimizer, caller: FrameType) -> None:
        """End a step, if this optimizer was the last that it needs.

        Args:
            optimizer: The optimizer whose `step` was called.
            caller: The frame that calls the hooks.
        """
        outer, own = self._outer.get(optimizer, (None, {}))
        if outer is not caller:
            return
        del self._outer[optimizer]
        if bool(getattr(optimizer, "found_inf", False)):
            # A fused optimizer under a GradScaler was called, and left everything as it was.
            self._is_begun = bool(self._done)
            return
        self.seen = self.stepped = True
        self._after_step = [(parameter, _state(parameter)) for parameter in own.values()][:1]
        self._done.add(optimizer)
        if self._given and self._expected <= self._done:
            self._complete()

    def _complete(self) -> None:
        ended, self._done, self._is_begun = self._done, set(), False
        if self._given:
            self._expected = ended
            self._end()

    def _warn_of(self, optimizer: Optimizer, own: Dictionary[int, Tensor]) -> None:
        """Warn once of an optimizer that moves the parameters and was not given; it is followed all the same."""
        self._given.append(optimizer)
        self._expected.add(optimizer)
        moved = self._names[next(iter(own.values()))]
        warnings.warn(
            f"{type(optimizer).__name__}, which was not given to the probe, moves {moved}; its steps are followed too: "
            f"give the probe every optimizer, as optimizer=[...], or a new probe for a new one",
            stacklevel=5,
        )

    def _following(
        self, closure: Callable[[], Any], optimizer: Optimizer, own: Dictionary[int, Tensor]
    ) -> Callable[[], Any]:
        """Return a closure that copies the gradients that its first call leaves."""
        is_first = True

        def followed() -> Any:
            nonlocal is_first
            loss = closure()
            if is_first:
                is_first = False
                self._copy_gradients(optimizer, own)
            return loss

        return followed

    def _copy_gradients(self, optimizer: Optimizer, own: Dictionary[int, Tensor]) -> None:
        scale = getattr(optimizer, "grad_scale", None)
        for key, parameter in own.items():
            if parameter.grad is not None:
                copied = parameter.grad.detach().clone()
                # A gradient that is spread over processes is not divided by a tensor that is not.
                divisor = 1.0 if scale is None else float(scale) if is_spread(copied) else scale.to(copied.device)
                self.gradients[key] = copied if scale is None else copied / divisor
        for group in optimizer.param_groups:
            mover = Mover(type(optimizer).__name__, float(group.get("lr", math.nan)))
            moved = (id(parameter) for parameter in group["params"] if id(parameter) in self.gradients)
            self.movers |= dict.fromkeys(moved, mover)

    def _parameters_of(self, optimizer: Optimizer) -> dict[int, Tensor]:
        every = (parameter for group in optimizer.param_groups for parameter in group["params"])
        return {id(parameter): parameter for parameter in every if parameter in self._names}


def unwrapped(optimizer: Any) -> Optimizer:
    """Return the optimizer inside wrappers such as that of accelerate.

    Args:
        optimizer: An optimizer; a wrapper is one too, and keeps the other as its attribute `optimizer`.

    Raises:
        CallError: It is not an optimizer.
    """
    if not isinstance(optimizer, Optimizer):
        raise CallError(f"expected a torch.optim.Optimizer, or several in a list, got {type(optimizer).__name__}")
    inside = getattr(optimizer, "optimizer", None)
    return unwrapped(inside) if isinstance(inside, Optimizer) else optimizer


def listed(optimizer: Any) -> list[Optimizer]:
    """Return one or several optimizers as a list, each once and without wrappers.

    Args:
        optimizer: The optimizer, or several.

    Raises:
        CallError: There is none, or one is not an optimizer.
    """
    given = [optimizer] if isinstance(optimizer, Optimizer) or not isinstance(optimizer, Iterable) else list(optimizer)
    if not given:
        raise CallError("optimizer should be an optimizer, or several in a list, got an empty list")
    return list(dict.fromkeys(map(unwrapped, given)))


def _state(parameter: Tensor) -> "tuple[weakref.ref[Tensor], int] | None":
    """Return the gradient, which is not kept alive, and what changes when it is added to."""
    return None if parameter.grad is None else (weakref.ref(parameter.grad), parameter.grad._version)


def _is_new(gradient: Tensor, state: "tuple[weakref.ref[Tensor], int] | None") -> bool:
    """Return whether a gradient was computed or added to since a state; another one may take its place in memory."""
    return state is None or state[0]() is not gradient or state[1] != gradient._version
