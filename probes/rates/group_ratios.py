"""Whether parameter groups learn at the multiples of the base rate that they promise, whatever set their rates."""

import warnings
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

#: The key of a parameter group that holds its multiple of the base rate.
MULTIPLIER = "multiplier"

#: The key of a parameter group that holds the base rate with which it was made; groups that share it are compared.
BASE_RATE = "base_rate"

#: Rates are computed step by step by some schedules, and rounded by some users.
_RELATIVE = 1e-3

#: A rate that is so small a part of the first one moves nothing; near the end of a schedule it is rounding alone.
_NEGLIGIBLE = 1e-6


@dataclass(frozen=True)
class Departure:
    """A group whose rate is not what its multiplier promises.

    Attributes:
        name: The name of the group.
        promised: Its multiplier.
        rate: Its rate.
        beside: The name of the group with which it is compared.
        base: The base rate, as the other group has it.
    """

    name: str
    promised: float
    rate: float
    beside: str
    base: float

    def __str__(self) -> str:
        """Say what was promised and what was found."""
        found = f"{self.rate / self.base:.4g} times it" if self.base else "a rate while that is 0"
        return (
            f"the group {self.name} should learn at {self.promised:g} times the base rate and learns at {found} "
            f"({self.rate:.3g}, where the group {self.beside} makes the base rate {self.base:.3g})"
        )


def departures(groups: Iterable[dict[str, Any]]) -> list[Departure]:
    """Return which groups do not learn at their multiple of the base rate, beside the others of the same base rate.

    In each set of groups that were made with the same base rate, the one whose multiplier is nearest to 1 states what
    the base rate is now. A group alone has nothing to be compared with.

    Args:
        groups: Parameter groups; those that `circuit_parameter_groups` did not make are left out.
    """
    sets: dict[float, list[dict[str, Any]]] = {}
    for group in groups:
        if MULTIPLIER in group and BASE_RATE in group:
            sets.setdefault(float(group[BASE_RATE]), []).append(group)
    return [found for first, members in sets.items() for found in _departures(first, members)]


def _departures(first: float, groups: Sequence[dict[str, Any]]) -> list[Departure]:
    standard = min(reversed(groups), key=lambda group: abs(group[MULTIPLIER] - 1))
    base = float(standard["lr"]) / standard[MULTIPLIER]
    found = []
    for group in groups:
        rate, promised = float(group["lr"]), group[MULTIPLIER]
        expected = promised * base
        allowed = _RELATIVE * max(abs(rate), abs(expected)) + _NEGLIGIBLE * promised * first
        if abs(rate - expected) > allowed:
            found.append(Departure(_name(group), promised, rate, _name(standard), base))
    return found


def _name(group: dict[str, Any]) -> str:
    return group.get("name", "without a name")


class _Watch:
    """Compares the groups of every optimizer before each step, and warns once of each that leaves its ratio.

    Groups that one call of `circuit_parameter_groups` made are compared across optimizers as well, where these have
    taken the same number of steps.
    """

    def __init__(self) -> None:
        self._told: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._makers = WeakIdKeyDictionary()
        self._steps: weakref.WeakKeyDictionary[Optimizer, tuple[int, list[dict[str, Any]]]]
        self._steps = weakref.WeakKeyDictionary()
        self._calls = 0

    def begin(self, groups: Iterable[dict[str, Any]]) -> None:
        """Watch all optimizers from now on, for good, since optimizers can be copied and loaded at any time.

        Args:
            groups: The groups that one call made.
        """
        if not self._calls:
            register_optimizer_step_pre_hook(self._look)
        self._calls += 1
        for group in groups:
            self._makers[group["params"][0]] = self._calls

    def _look(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        promising = [group for group in optimizer.param_groups if BASE_RATE in group and group["params"]]
        if not promising or optimizer in self._told or _is_captured(promising):
            return
        steps, _ = self._steps.get(optimizer, (0, []))
        # What the groups say now, since schedules may change it before another optimizer steps.
        now = [
            {**group, "lr": float(group["lr"]), "params": self._makers.get(group["params"][0])} for group in promising
        ]
        self._steps[optimizer] = steps + 1, now
        found = departures([*self._elsewhere(optimizer), *now])
        if found:
            self._told.add(optimizer)
            more = len(found) - 1
            others = f"; so it is with {more} other group{'s' * (more > 1)}" if more else ""
            warnings.warn(
                f"{type(optimizer).__name__}: {found[0]}{others}. What set the rates, such as a schedule, did not keep "
                f"their ratio: give it a rate for each group, as in max_lr=groups.rates(1e-3); or use CircuitRates, "
                f"which keeps multipliers under any schedule; or, if it is meant, set group['{MULTIPLIER}'] to "
                f"what holds",
                stacklevel=4,
            )

    def _elsewhere(self, optimizer: Optimizer) -> list[dict[str, Any]]:
        """The other groups of the calls that made this optimizer's groups, in optimizers that are as far as it is."""
        steps, own = self._steps[optimizer]
        makers = {group["params"] for group in own} - {None}
        names = {(group["params"], _name(group)) for group in own}
        return [
            group
            for other, (of_other, groups) in self._steps.items()
            if other is not optimizer and of_other == steps and other not in self._told
            for group in groups
            if group["params"] in makers and (group["params"], _name(group)) not in names
        ]


def _is_captured(groups: Iterable[dict[str, Any]]) -> bool:
    """Return whether the rates cannot be read now, as tensors while a CUDA graph is captured."""
    on_device = any(isinstance(group["lr"], Tensor) and group["lr"].is_cuda for group in groups)
    return on_device and torch.cuda.is_current_stream_capturing()


watch = _Watch()
