"""Circuit learning rates for fused weights: the step of a circuit's entries is scaled after it was taken."""

import warnings
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any, NoReturn, Unpack
from weakref import WeakSet

import torch
from torch import nn
from torch.optim import Optimizer

from ...circuits.architectures.mapping import Mapping
from ...circuits.errors import CallError
from ...circuits.reading.options import ModelKeywords, ReadingOptions, reading_options
from ...circuits.weights.layer_keys import LayerKey
from ..step_calls import call_of_step, is_running
from .descriptions import lines_of_circuit
from .entries import CircuitEntries, CircuitName, circuit_entries, in_words
from .group_ratios import MULTIPLIER
from .guard import GuardedBy, ScoreGuard
from .guarded_rates import GuardedRates
from .multipliers import HeadMultipliers, Multipliers, demand_multipliers
from .proportional_steps import proportional_steps
from .scaled_entries import ScaledEntries


class CircuitRates:
    """Trains the QK circuit at qk times the optimizer's rate and the OV circuit at ov times, also in fused weights.

    After each step of the optimizer the entries p of a circuit become

        p = before + multiplier (p - before),

    which is the step that a separate rate would have made, for every optimizer that moves each entry separately and in
    proportion to its rate: among them SGD, momentum, Nesterov, Adam, AdamW, RMSprop and Adagrad, under any schedule.
    Where all entries of a parameter have one multiplier, as in models with W_Q and W_K apart, it is enough that the
    optimizer moves each parameter in proportion to its rate, as Muon does. Scaling gradients would not do the same,
    since Adam divides the scale out again. Whether an optimizer is of either kind is tested on small tensors when the
    rates are created. Weight decay is part of the step, as it is in a parameter group: a circuit at 30 times the rate
    decays 30 times as fast.

        with CircuitRates(optimizer, model, qk=30.0):
            train(model, optimizer)

    Multipliers may differ by layer and by head:

        CircuitRates(optimizer, model, qk={0: 10.0, (3, 5): 30.0})  # layer 0, and head 5 of layer 3
        CircuitRates(optimizer, model, qk=torch.full((layers, heads), 30.0))

    The multiplier of a head is that of its part of W_Q and W_K, or of W_V and W_O. Heads that share keys and values
    (grouped heads) share W_K and W_V, so their multipliers have to be equal; b_O belongs to all heads of a layer.

    Layers may be frozen and unfrozen at any time, and parameters added to the optimizers: at each step those are scaled
    that are trained then. What cannot be scaled when it comes later is told once, and learns at the base rate.

    The result equals that of `circuit_parameter_groups` up to rounding: the optimizer rounds p once a step, by at most
    half a unit in its last place, and this error is multiplied too: 6e-8 |p| times the multiplier per step in float32.
    After 100 steps at 30 times the rate, entries of up to 0.5 differed by 2e-5 or less in float32, and by 1e-12 in
    float64. At rates so large that training itself magnifies rounding, the results differ as much as they do after two
    orders of the same batch.

    `guard=100.0` keeps the largest score of each head under 100 as the model trains, as `AttentionHealth` sees it: the
    rate of its W_Q and W_K, and of b_Q and b_K, is lowered from a tenth of the limit on, to 0 at the limit, on top of
    the multipliers. `guard_by="clip"` scales them after the step instead, each by sqrt(limit / score) (QK-clip), which
    goes with every optimizer. Where nothing is held, training is the same to the bit. `rates.guard.table()` says what
    was done at each step. A lower rate holds a score only as far as it grows by W_Q and W_K, and by no more than ten
    times in a step: what the layer reads may drive it beyond the limit. A clip follows the score of the pass before its
    step, so that the next pass may see more than the limit.

    There is nothing to save: the optimizer's state is that of the base rate, and a run resumes with new rates on the
    loaded optimizer. Copies of an optimizer have no hooks, so create rates for the copy. Other hooks after the step
    see the scaled step if they were registered later. `CircuitProbe` counts biases as a row of the factors, so with
    biases at the base rate its `taken_rate` deviates a little from the multiplier. The only memory needed is one copy
    of the entries of each circuit whose multiplier is not 1.

    Attributes:
        multipliers: The multipliers of each circuit by its name, as they were given.
    """

    def __init__(
        self,
        optimizer: Optimizer | Sequence[Optimizer],
        model: nn.Module,
        qk: Multipliers = 30.0,
        ov: Multipliers = 1.0,
        *,
        biases: bool = False,
        guard: float | None = None,
        guard_by: GuardedBy = "rate",
        options: ReadingOptions | Mapping | None = None,
        **reading: Unpack[ModelKeywords],
    ) -> None:
        """Find the entries of both circuits, and scale their steps from now on.

        Args:
            optimizer: The optimizer that trains the model, or several that train it together.
            model: The model, whose attention is found as `open_model` finds it.
            qk: The multiplier of the rate of the QK circuit: a number; a tensor [layer] or [layer, head]; or a mapping
                to numbers from layers (numbers; with several stacks (stack, number), or names such as "encoder layer
                3") and from heads, (layer, head) or (stack, layer, head). A layer may have a list of one number for
                each head, too. Layers and heads that it does not name have 1.
            ov: The same for the OV circuit.
            biases: Whether b_Q and b_K learn at the rate of QK, and b_V and b_O at that of OV.
            guard: The largest score under which each head is kept; None for no guard.
            guard_by: How it is kept there: by a lower "rate", or by a "clip" of W_Q and W_K after the step.
            options: How to read the model, as one object. A Mapping stands for `ReadingOptions(mapping=...)`.
            **reading: The same as keywords: mapping, family, heads or prefix.

        Raises:
            CallError: A multiplier is not a finite number above 0, or names a layer or a head that is not there; heads
                that share weights have different multipliers; a parameter is trained and in no optimizer, already has
                its own rate, has half precision or is spread over processes; the optimizer's step is not in proportion
                to the rate; or the scores of the model are not seen, or cannot be held.
            QkovError: No attention is found.
        """
        demand_multipliers(qk, ov)
        chosen = reading_options(options, reading, ModelKeywords)
        self._entries = circuit_entries(model, chosen, biases)
        self.multipliers: dict[CircuitName, Multipliers] = {"QK": qk, "OV": ov}
        self._of_heads = HeadMultipliers(self._entries, qk, ov)
        self._of_heads.demand_one_each(self._entries)
        self._scaled = [ScaledEntries(part, self._of_heads) for part in self._entries]
        self._guard: ScoreGuard | None = None
        self._guarded: GuardedRates | None = None
        if guard is not None:
            with_biases = [part for part in circuit_entries(model, chosen, True) if part.circuit == "QK"]
            self._guard = ScoreGuard(model, with_biases, guard, guard_by, chosen)
            if guard_by == "rate":
                self._guarded = GuardedRates(self._scaled, self._of_heads, with_biases)
                self._scaled += self._guarded.biases
        self._optimizers = _listed(optimizer)
        self._accepted: dict[int, Optimizer] = {}
        self._refused: dict[int, str] = {}
        self._kinds: list[tuple[dict[str, Any], str]] = []
        self._calls: dict[Optimizer, tuple[FrameType, list[ScaledEntries]]] = {}
        self._told: set[str] = set()
        self._handles = []
        wanted = self._wanted()
        for part in wanted:
            self._accept(part)
        _demand_all([part.entries for part in wanted if id(part) not in self._accepted])
        _ACTIVE.add(self)
        if self._guard is not None:
            self._guard.start()
        self._hook()

    @property
    def guard(self) -> ScoreGuard:
        """What holds the scores.

        Raises:
            CallError: They are not held.
        """
        if self._guard is None:
            raise CallError("these rates have no guard: create them with CircuitRates(..., guard=100.0)")
        return self._guard

    def scales(self, optimizer: Optimizer, parameter: nn.Parameter) -> bool:
        """Return whether the steps that an optimizer makes with a parameter are scaled.

        Args:
            optimizer: The optimizer.
            parameter: The parameter.
        """
        return any(
            part.entries.parameter is parameter and self._accepted.get(id(part)) is optimizer for part in self._wanted()
        )

    def describe(self) -> str:
        """Return a text that states which tensors learn at how many times the base rate."""
        at_base = {id(part.entries) for part in self._scaled if id(part) in self._refused}
        trained = [part for part in self._entries if part.parameter.requires_grad and id(part) not in at_base]
        lines = [
            line
            for circuit in self.multipliers
            for line in lines_of_circuit(circuit, [part for part in trained if part.circuit == circuit], self._of_heads)
        ]
        lines.append("rest: the base rate")
        lines += [] if self._guard is None else [self._guard.in_words()]
        lines += self._refused.values()
        frozen = {part.name: None for part in self._entries if not part.parameter.requires_grad}
        if frozen:
            lines.append(f"left out because they are frozen: {in_words(frozen)}")
        return "\n".join(lines)

    def remove(self) -> None:
        """Remove the hooks and free the copies. Calling it again is harmless."""
        # First, so that hooks that an interrupt leaves in place scale nothing.
        self._scaled, self._calls = [], {}
        if self._guard is not None:
            self._guard.close()
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

    def _set_multiplier(self, circuit: CircuitName, layer: LayerKey, head: int, multiplier: float) -> None:
        """Change the multiplier of one head from the next step on; weights that heads share have the lowest of theirs.

        Args:
            circuit: QK or OV.
            layer: The stack and the number of the layer.
            head: The query head.
            multiplier: The new multiplier.
        """
        self._of_heads.set(circuit, layer, head, multiplier)
        for part in self._scaled:
            if part.entries.circuit == circuit and any(block.layer == layer for block in part.entries.blocks):
                part.refresh(self._of_heads)
                # What can be scaled as a whole may not be where heads differ.
                self._accepted.pop(id(part), None)
        self._hook()

    def _hook(self) -> None:
        """Put hooks on the optimizers as soon as anything is scaled or guarded."""
        if self._handles or (self._guard is None and not any(part.is_scaled for part in self._scaled)):
            return
        for each in self._optimizers:
            # A compiled step calls them as they are.
            keep: Any = torch.compiler.disable(self._keep)
            scale: Any = torch.compiler.disable(self._scale)
            self._handles += [each.register_step_pre_hook(keep), each.register_step_post_hook(scale)]

    def _wanted(self) -> list[ScaledEntries]:
        """The entries that are trained now and have a rate of their own, or may get one from the guard."""
        return [
            part
            for part in self._scaled
            if (part.is_scaled or self._is_guarded(part)) and part.entries.parameter.requires_grad
        ]

    def _is_guarded(self, part: ScaledEntries) -> bool:
        return self._guarded is not None and part.entries.circuit == "QK"

    def _look(self, *, is_after_step: bool = False) -> None:
        """Let the guard decide by the scores that were seen since the last time."""
        if self._guard is not None and self._guard.look(is_after_step=is_after_step) and self._guarded is not None:
            self._guarded.lower(self._guard.rates)

    def _keep(self, optimizer: Optimizer, *_: Any) -> None:
        caller, call = call_of_step(), self._calls.get(optimizer)
        if call is not None and is_running(call[0], caller):
            # `step` calls that of its base class, and may have moved something before.
            for part in call[1]:
                part.scale()
            return
        self._look()
        self._tell_untrained()
        self._examine_newcomers()
        parts = [part for part in self._wanted() if self._accepted.get(id(part)) is optimizer]
        self._calls[optimizer] = caller, parts
        for part in parts:
            part.keep()

    def _scale(self, optimizer: Optimizer, *_: Any) -> None:
        caller, parts = self._calls.get(optimizer, (None, []))
        self._look(is_after_step=True)
        for part in parts:
            part.scale()
        if caller is call_of_step():
            del self._calls[optimizer]
            if self._guard is not None:
                self._guard.clip(parameter for group in optimizer.param_groups for parameter in group["params"])

    def _examine_newcomers(self) -> None:
        """Accept entries that are trained only now, and say of which that is not possible."""
        refused, without = [], []
        for part in self._wanted():
            if id(part) in self._accepted or id(part) in self._refused:
                continue
            name = part.entries.name
            try:
                self._accept(part)
            except CallError as error:
                self._refused[id(part)] = f"at the base rate: {name}, since {error}"
                refused.append(f"{name} cannot be scaled from now on, and learns at the base rate: {error}")
            else:
                without += [] if id(part) in self._accepted else [name]
        if refused:
            others = f" (and {len(refused) - 1} more, see describe())" if len(refused) > 1 else ""
            self._tell(f"{refused[0]}{others}")
        if without:
            self._tell(
                f"{in_words(without)} is trained now, and held by none of the optimizers that CircuitRates was given, "
                f"so its steps are not scaled: add it to one of them, or create new rates with all optimizers"
            )

    def _accept(self, part: ScaledEntries) -> None:
        """Note which optimizer moves the entries, if any does, once it is known that they can be scaled.

        Raises:
            CallError: They cannot.
        """
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                if any(parameter is part.entries.parameter for parameter in group["params"]):
                    self._demand_free(optimizer, group, part.entries)
                    if self._kind(optimizer, group) == "tensors":
                        _demand_whole(optimizer, part)
                        if self._is_guarded(part):
                            _demand_one_head(optimizer, part)
                    self._accepted[id(part)] = optimizer
                    return

    def _demand_free(self, optimizer: Optimizer, group: dict[str, Any], entries: CircuitEntries) -> None:
        name, parameter = entries.name, entries.parameter
        if parameter.dtype not in (torch.float32, torch.float64):
            raise CallError(
                f"{name} is of {parameter.dtype}, in which a step is mostly rounding error, which scaling would "
                f"magnify: keep the weights in float32 and compute under torch.autocast"
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
        if any(other is not self and other.scales(optimizer, parameter) for other in _ACTIVE):
            raise CallError(f"the steps of {name} are already scaled by another CircuitRates: remove() that first")

    def _kind(self, optimizer: Optimizer, group: dict[str, Any]) -> str:
        """What moves in proportion to the rate: each entry, or each tensor; it is found out once for each group."""
        for known, kind in self._kinds:
            if known is group:
                return kind
        kind = proportional_steps(optimizer, group, [parameter.ndim for parameter in group["params"]])
        self._kinds.append((group, kind))
        return kind

    def _tell_untrained(self) -> None:
        """Say at the first step that nothing of a circuit is trained; it may be unfrozen later."""
        for circuit in self.multipliers:
            of_circuit = [part.entries for part in self._scaled if part.is_scaled and part.entries.circuit == circuit]
            if of_circuit and not any(part.parameter.requires_grad for part in of_circuit):
                self._tell(
                    f"no parameter of the {circuit} circuit is trained, so CircuitRates scales nothing of it until one "
                    f"is unfrozen: {in_words(part.name for part in of_circuit)}"
                )

    def _tell(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            warnings.warn(message, stacklevel=5)


#: The rates whose hooks are in place; the optimizers' hooks keep them alive.
_ACTIVE: WeakSet[CircuitRates] = WeakSet()


def _listed(optimizer: Optimizer | Iterable[Optimizer]) -> list[Optimizer]:
    """The optimizers, each once, because a step that is scaled twice would be too large."""
    optimizers = list(dict.fromkeys(optimizer if isinstance(optimizer, Iterable) else [optimizer]))
    for each in optimizers:
        if not isinstance(each, Optimizer):
            raise CallError(f"expected a torch.optim.Optimizer, or several in a list, got {type(each).__name__}")
        if isinstance(getattr(each, "optimizer", None), Optimizer):
            raise CallError(f"{type(each).__name__} wraps another optimizer: give that one, its .optimizer")
    return optimizers


def _demand_whole(optimizer: Optimizer, part: ScaledEntries) -> None:
    """Refuse parts of a parameter whose optimizer moves only whole parameters in proportion to the rate."""
    if part.entries.is_whole and not isinstance(part.multipliers, torch.Tensor):
        return
    name, kind = part.entries.name, type(optimizer).__name__
    holds = (
        f"{name} holds heads with different multipliers"
        if part.entries.is_whole
        else f"{name} holds W_{part.entries.circuit} fused with other weights"
    )
    raise CallError(
        f"{kind} does not move each entry separately, but each parameter as a whole, and {holds}: keep them as "
        f"parameters of their own, or use an optimizer such as AdamW"
    )


def _demand_one_head(optimizer: Optimizer, part: ScaledEntries) -> None:
    """Refuse a guard of single heads in parameters that move as a whole."""
    if len({block.heads for block in part.entries.blocks}) > 1:
        raise CallError(
            f"{type(optimizer).__name__} does not move each entry separately, but each parameter as a whole, and "
            f"{part.entries.name} holds several heads, whose rates a guard lowers one by one: use guard_by='clip'"
        )


def _demand_all(missing: list[CircuitEntries]) -> None:
    if missing:
        raise CallError(
            f"the optimizer does not hold {in_words(part.name for part in missing)}: give the optimizer that does, or "
            f"all of them in a list if several train the model"
        )
