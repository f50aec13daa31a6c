"""Circuit learning rates for fused weights: the step of a circuit's entries is scaled after it was taken."""

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
from .entries import MULTIPLIER, CircuitEntries, circuit_entries, circuit_multipliers, in_words, trainable
from .proportional_steps import demand_proportional_steps


@dataclass(eq=False)
class _Scaled:
    """Entries whose steps are scaled, and their values before the step."""

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
    """Trains the QK circuit at qk times the optimizer's rate and the OV circuit at ov times, also in fused weights.

    After each step of the optimizer the entries p of a circuit become

        p = before + multiplier (p - before),

    which is the step that a separate rate would have made, for every optimizer that moves each entry separately and in
    proportion to its rate: among them SGD, momentum, Nesterov, Adam, AdamW, RMSprop and Adagrad, under any schedule.
    Scaling gradients would not do the same, since Adam divides the scale out again. Whether an optimizer is of this
    kind is tested on a small tensor when the rates are created. Weight decay is part of the step, as it is in a
    parameter group: a circuit at 30 times the rate decays 30 times as fast.

        with CircuitRates(optimizer, model, qk=30.0):
            train(model, optimizer)

    The result equals that of `circuit_parameter_groups` up to rounding: the optimizer rounds p once a step, by at most
    half a unit in its last place, and this error is multiplied too: 6e-8 |p| times the multiplier per step in float32.
    After 100 steps at 30 times the rate, entries of up to 0.5 differed by 2e-5 or less in float32, and by 1e-12 in
    float64. At rates so large that training itself magnifies rounding, the results differ as much as they do after two
    orders of the same batch.

    There is nothing to save: the optimizer's state is that of the base rate, and a run resumes with new rates on the
    loaded optimizer. Copies of an optimizer have no hooks, so create rates for the copy. Other hooks after the step
    see the scaled step if they were registered later. `CircuitProbe` counts biases as a row of the factors, so with
    biases at the base rate its `taken_rate` deviates a little from the multiplier. The only memory needed is one copy
    of the entries of each circuit whose multiplier is not 1.

    Attributes:
        multipliers: The multiplier of each circuit by its name.
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
        """Find the entries of both circuits, and scale their steps from now on.

        Args:
            optimizer: The optimizer that trains the model, or several that train it together.
            model: The model, whose attention is found as `open_model` finds it.
            qk: The multiplier of the rate of the QK circuit.
            ov: The multiplier of the rate of the OV circuit.
            biases: Whether b_Q and b_K learn at the rate of QK, and b_V and b_O at that of OV.
            options: How to read the model, as one object. A Mapping stands for `ReadingOptions(mapping=...)`.
            **reading: The same as keywords: mapping, family, heads or prefix.

        Raises:
            CallError: A multiplier is not a finite number above 0; a parameter is in no optimizer, already has its own
                rate, has half precision or is spread over processes; or the optimizer's step is not in proportion to
                the rate.
            QkovError: No attention is found.
        """
        multipliers = circuit_multipliers(qk, ov)
        entries = circuit_entries(model, reading_options(options, reading, ModelKeywords), biases)
        to_scale = [part for part in trainable(entries, multipliers) if multipliers[part.circuit] != 1]
        self.multipliers = multipliers
        self._entries = entries
        self._scaled = [(each, _of_optimizer(each, to_scale, multipliers)) for each in _listed(optimizer)]
        _demand_all(to_scale, [part for _, parts in self._scaled for part in parts])
        self._handles = []
        _ACTIVE.add(self)
        for each, parts in self._scaled:
            if parts:
                self._handles += [each.register_step_pre_hook(self._keep), each.register_step_post_hook(self._scale)]

    def scales(self, optimizer: Optimizer, parameter: nn.Parameter) -> bool:
        """Return whether the steps that an optimizer makes with a parameter are scaled.

        Args:
            optimizer: The optimizer.
            parameter: The parameter.
        """
        return any(part.entries.parameter is parameter for part in self._of(optimizer))

    def describe(self) -> str:
        """Return a text that states which tensors learn at how many times the base rate."""
        lines = []
        for circuit, multiplier in self.multipliers.items():
            trained = [part for part in self._entries if part.circuit == circuit and part.parameter.requires_grad]
            count = sum(part.count for part in trained)
            size = sum(part.parameter.numel() for part in trained)
            of_size = "" if count == size else f" of {size:,}"
            lines.append(
                f"{circuit}: {multiplier:g} times the base rate, {count:,}{of_size} entries in "
                f"{in_words(part.name for part in trained)}"
            )
        lines.append("rest: the base rate")
        frozen = {part.name: None for part in self._entries if not part.parameter.requires_grad}
        if frozen:
            lines.append(f"left out because they are frozen: {in_words(frozen)}")
        return "\n".join(lines)

    def remove(self) -> None:
        """Remove the hooks and free the copies. Calling it again is harmless."""
        # First, so that hooks that an interrupt leaves in place scale nothing.
        self._scaled = []
        for handle in self._handles:
            handle.remove()
        self._handles = []
        _ACTIVE.discard(self)

    def __enter__(self) -> "CircuitRates":
        """Return the rates, which are removed at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the hooks."""
        self.remove()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be copied or pickled, since a copy would scale nothing."""
        raise CallError("CircuitRates cannot be copied or saved: create new ones for the copied or loaded optimizer")

    def _of(self, optimizer: Optimizer) -> list[_Scaled]:
        return [part for other, parts in self._scaled if other is optimizer for part in parts]

    def _keep(self, optimizer: Optimizer, *_: Any) -> None:
        for part in self._of(optimizer):
            part.keep()

    def _scale(self, optimizer: Optimizer, *_: Any) -> None:
        for part in self._of(optimizer):
            part.scale()


#: The rates whose hooks are in place; the optimizers' hooks keep them alive.
_ACTIVE: WeakSet[CircuitRates] = WeakSet()


def _listed(optimizer: Optimizer | Iterable[Optimizer]) -> list[Optimizer]:
    """The optimizers, each once, because a step that is scaled twice would be too large."""
    optimizers = list(dict.fromkeys(optimizer if isinstance(optimizer, Iterable) else [optimizer]))
    for each in optimizers:
        if not isinstance(each, Optimizer):
            raise CallError(f"expected a torch.optim.Optimizer, or several in a list, got {type(each).__name__}")
    return optimizers


def _of_optimizer(
    optimizer: Optimizer, entries: Iterable[CircuitEntries], multipliers: dict[str, float]
) -> list[_Scaled]:
    """The entries that an optimizer moves, once it is known that they can be scaled."""
    if isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        raise CallError(f"{type(optimizer).__name__} wraps another optimizer: give that one, its .optimizer")
    by_parameter = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    scaled, tested = [], []
    for part in entries:
        group = by_parameter.get(id(part.parameter))
        if group is None:
            continue
        _demand_free(optimizer, group, part)
        if not any(group is other for other in tested):
            demand_proportional_steps(optimizer, group)
            tested.append(group)
        scaled.append(_Scaled(part, multipliers[part.circuit], []))
    return scaled


def _demand_free(optimizer: Optimizer, group: dict[str, Any], entries: CircuitEntries) -> None:
    name, parameter = entries.name, entries.parameter
    if parameter.dtype not in (torch.float32, torch.float64):
        raise CallError(
            f"{name} is of {parameter.dtype}, in which a step is mostly rounding error, which scaling would magnify: "
            f"keep the weights in float32 and compute under torch.autocast"
        )
    if hasattr(parameter, "full_tensor"):
        raise CallError(
            f"{name} is spread over processes (DTensor), and its slices cannot be scaled: split the projections"
        )
    if group.get(MULTIPLIER, 1.0) != 1.0:
        raise CallError(
            f"{name} already learns at {group[MULTIPLIER]:g} times the base rate through circuit_parameter_groups: "
            f"use one or the other"
        )
    if any(other.scales(optimizer, parameter) for other in _ACTIVE):
        raise CallError(f"the steps of {name} are already scaled by another CircuitRates: remove() that first")


def _demand_all(entries: list[CircuitEntries], scaled: list[_Scaled]) -> None:
    moved = {id(part.entries.parameter) for part in scaled}
    missing = [part.name for part in entries if id(part.parameter) not in moved]
    if missing:
        raise CallError(
            f"the optimizer does not hold {in_words(missing)}: give the optimizer that does, or all of them in a list "
            f"if several train the model"
        )
