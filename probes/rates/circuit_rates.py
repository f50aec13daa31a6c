"""Circuit learning rates for fused weights: the step of the entries of a circuit is scaled after it was taken."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Unpack
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...circuits.architectures.mapping import Mapping
from ...circuits.errors import CallError
from ...circuits.reading.options import ModelKeywords, ReadingOptions, reading_options
from .entries import MULTIPLIER, CircuitEntries, circuit_entries, circuit_multipliers, in_words, training
from .proportional_steps import demand_proportional_steps


@dataclass(eq=False)
class _Scaled:
    """Entries whose steps are scaled, and what they were before the step."""

    entries: CircuitEntries
    multiplier: float
    before: list[Tensor]

    @torch.no_grad()
    def keep(self) -> None:
        views = self.entries.views()
        if not self.before or (self.before[0].device, self.before[0].dtype) != (views[0].device, views[0].dtype):
            self.before = [torch.empty_like(view, memory_format=torch.contiguous_format) for view in views]
        for kept, view in zip(self.before, views, strict=True):
            kept.copy_(view)

    @torch.no_grad()
    def scale(self) -> None:
        for kept, view in zip(self.before, self.entries.views(), strict=True):
            view.copy_(kept.lerp_(view, self.multiplier))


class CircuitRates:
    """The QK circuit at qk times the optimizer's rate and the OV circuit at ov times, whether weights are fused or not.

    After each step of the optimizer the entries p of a circuit become

        p = before + multiplier (p - before)

    which is the step that a rate of their own would have made, for every optimizer that moves each entry by itself and
    in proportion to its rate: SGD, momentum, Nesterov, Adam, AdamW, RMSprop and Adagrad among them, under any schedule.
    Scaling gradients would not do: Adam divides it out again. Whether an optimizer is of that kind is tried on a small
    tensor when the rates are made. Weight decay is part of the step, as it is in a parameter group: a circuit at 30
    times the rate decays 30 times as fast.

        with CircuitRates(optimizer, model, qk=30.0):
            train(model, optimizer)

    Equality with `circuit_parameter_groups` is up to rounding: the optimizer rounds p once a step, by half a unit in
    its last place at most, and that is multiplied too: 6e-8 |p| times the multiplier a step in float32. After 100 steps
    at 30 times the rate entries of up to 0.5 differed by 2e-5 or less in float32, and by 1e-12 in float64. At rates so
    large that training itself magnifies rounding, they differ as much as after two orders of the same batch.

    There is nothing to save: the state of the optimizer is that of the base rate, and a run goes on with new rates on
    the loaded optimizer. Copies of an optimizer have no hooks, so make rates for the copy. Other hooks behind the step
    see the scaled step if they were registered later. `CircuitProbe` counts biases as a row of the factors, so with
    biases at the base rate its `taken_rate` is a little off the multiplier. Entries of circuits whose multiplier is
    not 1 are copied once, which is all the memory that it takes.
    """

    def __init__(
        self,
        optimizer: Optimizer | Sequence[Optimizer],
        model: nn.Module,
        qk: float = 30.0,
        ov: float = 1.0,
        *,
        biases: bool = False,
        options: ReadingOptions | Mapping | None = None,
        **reading: Unpack[ModelKeywords],
    ) -> None:
        """Find the entries of both circuits and scale their steps from now on.

        Args:
            optimizer: that trains the model, or several that train it together.
            model: whose attention is found as `open_model` finds it.
            qk: what multiplies the rate of the QK circuit.
            ov: what multiplies the rate of the OV circuit.
            biases: whether b_Q and b_K learn as QK does, b_V and b_O as OV does.
            options: How to read the model, as one object. A Mapping stands for `ReadingOptions(mapping=...)`.
            **reading: The same as keywords: mapping, family, heads or prefix.

        Raises:
            CallError: a multiplier cannot be one; a parameter is in no optimizer, has a rate of its own already, is of
                half precision or spread over processes; the optimizer's step is not in proportion to the rate.
            QkovError: no attention is found.
        """
        multipliers = circuit_multipliers(qk, ov)
        found = circuit_entries(model, reading_options(options, reading, ModelKeywords), biases)
        scaled = [one for one in training(found, multipliers) if multipliers[one.circuit] != 1]
        self.multipliers = multipliers
        self._found = found
        self._scaled = [(one, _of_optimizer(one, scaled, multipliers)) for one in _listed(optimizer)]
        _demand_all(scaled, [one for _, of_one in self._scaled for one in of_one])
        self._handles = []
        _ACTIVE.add(self)
        for one, of_one in self._scaled:
            if of_one:
                self._handles += [one.register_step_pre_hook(self._keep), one.register_step_post_hook(self._scale)]

    def scales(self, optimizer: Optimizer, parameter: nn.Parameter) -> bool:
        """Say whether steps that the optimizer makes with the parameter are scaled."""
        return any(one.entries.parameter is parameter for one in self._of(optimizer))

    def describe(self) -> str:
        """Say in words which tensors learn at how many times the base rate."""
        lines = []
        for circuit, multiplier in self.multipliers.items():
            moving = [one for one in self._found if one.circuit == circuit and one.parameter.requires_grad]
            entries = sum(one.count for one in moving)
            held = sum(one.parameter.numel() for one in moving)
            of_held = "" if entries == held else f" of {held:,}"
            lines.append(
                f"{circuit}: {multiplier:g} times the base rate, {entries:,}{of_held} entries in "
                f"{in_words(one.name for one in moving)}"
            )
        lines.append("rest: the base rate")
        frozen = {one.name: None for one in self._found if not one.parameter.requires_grad}
        if frozen:
            lines.append(f"left out, for they do not train: {in_words(frozen)}")
        return "\n".join(lines)

    def remove(self) -> None:
        """Let the optimizer step as before, and free the copies; does nothing the second time."""
        # First, so that hooks that an interrupt leaves scale nothing.
        self._scaled = []
        for handle in self._handles:
            handle.remove()
        self._handles = []
        _ACTIVE.discard(self)

    def __enter__(self) -> "CircuitRates":
        """Return the rates, which are removed at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the hooks, whatever happened."""
        self.remove()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be copied or pickled: a copy would scale nothing."""
        raise CallError("CircuitRates cannot be copied or saved: make new ones for the copied or loaded optimizer")

    def _of(self, optimizer: Optimizer) -> list[_Scaled]:
        return [one for other, of_other in self._scaled if other is optimizer for one in of_other]

    def _keep(self, optimizer: Optimizer, *_: Any) -> None:
        for one in self._of(optimizer):
            one.keep()

    def _scale(self, optimizer: Optimizer, *_: Any) -> None:
        for one in self._of(optimizer):
            one.scale()


#: The rates whose hooks are in place; the optimizers' hooks keep them alive.
_ACTIVE: WeakSet[CircuitRates] = WeakSet()


def _listed(optimizer: Optimizer | Iterable[Optimizer]) -> list[Optimizer]:
    """The optimizers, each once: a step that is scaled twice would be too large."""
    given = optimizer if isinstance(optimizer, Iterable) else [optimizer]
    optimizers = list(dict.fromkeys(given))
    for one in optimizers:
        if not isinstance(one, Optimizer):
            raise CallError(f"expected a torch.optim.Optimizer, or several in a list, got {type(one).__name__}")
    return optimizers


def _of_optimizer(
    optimizer: Optimizer, entries: Iterable[CircuitEntries], multipliers: dict[str, float]
) -> list[_Scaled]:
    """The entries that the optimizer moves, if it may be scaled."""
    if isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        raise CallError(f"{type(optimizer).__name__} wraps another optimizer: give that one, its .optimizer")
    by_parameter = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    scaled, tried = [], []
    for one in entries:
        group = by_parameter.get(id(one.parameter))
        if group is None:
            continue
        _demand_free(optimizer, group, one)
        if not any(group is other for other in tried):
            demand_proportional_steps(optimizer, group)
            tried.append(group)
        scaled.append(_Scaled(one, multipliers[one.circuit], []))
    return scaled


def _demand_free(optimizer: Optimizer, group: dict[str, Any], entries: CircuitEntries) -> None:
    name, parameter = entries.name, entries.parameter
    if parameter.dtype not in (torch.float32, torch.float64):
        raise CallError(
            f"{name} is of {parameter.dtype}, in which a step is mostly rounding, and scaling it scales that: keep the "
            f"weights in float32 and compute under torch.autocast"
        )
    if hasattr(parameter, "full_tensor"):
        raise CallError(
            f"{name} is spread over processes (DTensor), whose slices are not scaled: split the projections"
        )
    if group.get(MULTIPLIER, 1.0) != 1.0:
        raise CallError(
            f"{name} learns at {group[MULTIPLIER]:g} times the base rate already, by circuit_parameter_groups: "
            f"use one or the other"
        )
    if any(other.scales(optimizer, parameter) for other in _ACTIVE):
        raise CallError(f"the steps of {name} are scaled already by another CircuitRates: remove() that first")


def _demand_all(entries: list[CircuitEntries], scaled: list[_Scaled]) -> None:
    held = {id(one.entries.parameter) for one in scaled}
    missing = [one.name for one in entries if id(one.parameter) not in held]
    if missing:
        raise CallError(
            f"the optimizer does not hold {in_words(missing)}: give the optimizer that does, or all of them in a list "
            f"where several train the model"
        )
