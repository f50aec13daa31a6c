"""A model in training as the circuit probe reads it: its circuits, and what a step did to their factors."""

from collections.abc import Callable
from collections.abc import Mapping as Dictionary
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...analyses.trajectories.view import View
from ...circuits.algebra.circuit import Circuit
from ...circuits.algebra.factor_steps import measure_step
from ...circuits.errors import QkovError
from ...circuits.live.adapters import AdaptedWeight, Entry, adapted_names, without_peft
from ...circuits.live.models import open_live
from ...circuits.live.parameters import LiveParameters
from ...circuits.reading.options import ReadingOptions
from ...circuits.weights.attention_weights import AttentionWeights
from ...circuits.weights.source import AttentionSource, LayersInMemory
from ...circuits.weights.trained_factors import trained_circuits, without_product
from .gathering import Gathering, is_spread, stand_in
from .optimizer_steps import Mover

#: The stack and the number of a layer, and the name of a circuit.
CircuitKey = tuple[str, int, str]
#: The columns that say who moved the left and the right factor: W_K and W_Q of QK, W_O and W_V of OV.
MOVERS = ("left_optimizer", "left_learning_rate", "right_optimizer", "right_learning_rate")
#: Circuits of up to this many entries are measured together, since there a call costs more than what it computes.
_TOGETHER = 2**18
Factors = dict[CircuitKey, Circuit]


@dataclass(frozen=True)
class Untested:
    """Circuits for which some quantities of a step are missing, and why.

    Attributes:
        circuit: QK or OV.
        layers: The layers in words.
        reason: The reason in words.
    """

    circuit: str
    layers: list[str]
    reason: str


class LiveModel:
    """A model whose weights and gradients are read anew each time, because training and moving a model replace them.

    Attributes:
        name: The name of its class.
        recognised: How its weights were recognised, in words.
        skipped: The parts that are not attention with these circuits, and why.
    """

    def __init__(
        self, model: Any, view: View, options: ReadingOptions, gathering: Gathering | None = None, start: int = 0
    ) -> None:
        """Recognise the model.

        Args:
            model: Any model that `open_model` opens.
            view: The basis and the rotary offset.
            options: How to read the model.
            gathering: Gathers its parameters, if they are spread over processes.
            start: The number of steps that it has been trained already.

        Raises:
            CallError: The model is not a model, or the view is not possible.
            QkovError: The model's weights are not recognised, or cannot be read.
        """
        self._model, self._view, self._options = model, view, options
        self.name = _class_name(without_peft(model))
        self._gathering = gathering
        self._wanted: list[Tensor] | None = None
        self._gathered: dict[int, tuple[Tensor, Tensor]] = {}
        self._parameters: LiveParameters | None = None
        self._adapted_names: frozenset[str] = frozenset()
        self._is_adapted = False
        self.gather(start)
        opened = self._open()
        self.recognised, self.skipped = opened.recognised, opened.skipped
        layers = tuple(opened.layers())
        view.demand_possible(LayersInMemory(layers), f"the model {type(model).__name__}")
        self._heads = {(weights.stack, weights.layer): weights.heads for weights in layers}
        reasons: dict[CircuitKey, str] = {
            (weights.stack, weights.layer, name): reason
            for weights in layers
            for name, reason in without_product(weights).items()
        }
        keys = [(weights.stack, weights.layer, name) for weights in layers for name in _circuits_in(weights)]
        self._is_of_product = {key: key not in reasons for key in keys}
        try:
            self._parameters = LiveParameters(model, options, self._whole)
        except QkovError as error:
            reasons = dict.fromkeys(keys, f"its gradients cannot be read: {error}")
        else:
            reasons |= dict.fromkeys(self._frozen(), "not all of its weights are trained")
            reasons |= self._adapted()
        self._reasons = reasons

    @property
    def untested(self) -> list[Untested]:
        """The circuits for which the test of the preconditioner lacks some quantities, or lacked them once."""
        return _untested(self._reasons)

    @property
    def is_spread(self) -> bool:
        """Whether its parameters are spread over processes, which gather them together."""
        return self._gathering is not None

    @property
    def _is_beside(self) -> bool:
        return self._gathering is not None and not self._gathering.is_first

    def gather(self, step: int, gradients: Dictionary[int, Tensor] | bool = False) -> None:
        """Bring parameters together that are spread over processes, for what is read until `release`.

        All processes have to do this at the same steps. For any other model this does nothing.

        Args:
            step: The step.
            gradients: Whether the gradients are gathered too; or copies of them, by the id of the parameter.

        Raises:
            QkovError: The processes differ in the step or in the model.
        """
        if self._gathering is None:
            return
        # A first reading, of zeros, finds out which tensors are read.
        self._wanted = wanted = []
        try:
            for adapters in (True, False) if adapted_names(self._model) else (True,):
                for _ in self._open(adapters).layers():
                    pass
            if gradients is not False:
                self._read(_gradients_in(None if gradients is True else gradients), _missing)
        finally:
            self._wanted = None
        self._gathered = self._gathering.gather(step, wanted)

    def release(self) -> None:
        """Forget what was gathered."""
        self._gathered = {}

    def layers(self) -> LayersInMemory:
        """Return the layers in the basis of the view, sharing the model's memory where possible."""
        return self._in_basis(self._open())

    def factors(self) -> Factors:
        """Return the factors that training moves, sharing the model's memory where possible."""
        return {} if self._is_beside else self._read(lambda parameter: parameter, lambda weight: weight)

    def base_layers(self) -> LayersInMemory | None:
        """Return the layers without the adapters of attention, in the basis of the view; None if there are none.

        Raises:
            QkovError: The weights without the adapters cannot be read.
        """
        names = adapted_names(self._model)
        if names != self._adapted_names:
            factors = self._entries()
            self._adapted_names = names
            # Adapters may have been added to a model that was measured before; what they left out stays told.
            self._reasons |= self._adapted()
            self._is_adapted = bool(names) and (self._parameters is None or not names.isdisjoint(factors))
        return self._in_basis(self._open(adapters=False)) if self._is_adapted else None

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters that hold the factors or adapt them, with their names; each once."""
        return list({id(part): (name, part) for parts in self._entries().values() for name, part in parts}.values())

    def _entries(self) -> dict[str, list[tuple[str, nn.Parameter]]]:
        """Return the parameters of which each weight of the factors is made, by the name of the weight."""
        if self._parameters is None:
            return {}
        # Each weight is read as its number, so that the factors hold the numbers of those that they are made of.
        numbers: dict[Any, int] = {}
        made_of: list[tuple[str, list[tuple[str, nn.Parameter]]]] = []
        for name, entry in self._parameters.tensors().items():
            if isinstance(entry, AdaptedWeight):
                numbers[entry.label] = len(made_of)
                made_of.append((name, list(entry.parts)))
            elif isinstance(entry, nn.Parameter):
                numbers.setdefault(id(entry), len(made_of))
                made_of.append((name, [(name, entry)]))
        factors = self._read(
            lambda parameter: _spread(float(numbers[id(parameter)]), parameter),
            lambda weight: _spread(float(numbers[weight.label]), weight),
        )
        found = {
            int(number)
            for circuit in factors.values()
            for factor in _factors_in(circuit)
            for number in _distinct(factor)
        }
        return dict(made_of[number] for number in sorted(found))

    def precision(self) -> float:
        """Return the coarsest relative rounding of the parameters that hold the factors."""
        return max((torch.finfo(part.dtype).eps for _, part in self.named_parameters()), default=0.0)

    def gradients(self, copies: Dictionary[int, Tensor] | None = None) -> Factors:
        """Return the gradients of the factors, G_A as left and G_B as right; NaN where a parameter has none.

        Args:
            copies: Gradients by the id of the parameter; by default those that the parameters have.
        """
        return {} if self._is_beside else self._read(_gradients_in(copies), _missing)

    def step_quantities(self, before: Factors, gradients: Factors) -> dict[CircuitKey, dict[str, list[float]]]:
        """Return the quantities of the step from earlier factors to the current ones.

        Args:
            before: The factors before the step.
            gradients: Their gradients.

        Returns:
            The quantities by circuit and name, one value for each head.
        """
        after, measured = self.factors(), {}
        # A layer may have been removed meanwhile.
        there = {key: factors for key, factors in before.items() if key in after and key in gradients}
        for keys in _measured_together(there, self._is_of_product):
            circuits = (_joined([of_time[key] for key in keys]) for of_time in (before, gradients, after))
            quantities = measure_step(*circuits, of_product=self._is_of_product[keys[0]])
            counts = [before[key].shape[0] for key in keys]
            values = {name: value.split(counts) for name, value in quantities.items()}
            for place, (key, count) in enumerate(zip(keys, counts, strict=True)):
                # The values of a group stand in the rows of all its heads.
                times = self._heads[key[:2]] // count
                measured[key] = {name: of[place].repeat_interleave(times).tolist() for name, of in values.items()}
        return measured

    def _open(self, adapters: bool = True) -> AttentionSource:
        return open_live(self._model, self._options, adapters, self._whole)

    def _whole(self, tensor: Tensor) -> Tensor:
        """Return what was gathered of a tensor that is spread over processes; any other tensor as it is."""
        if self._gathering is None or not is_spread(tensor):
            return tensor
        if self._wanted is not None:
            self._wanted.append(tensor)
        if self._wanted is not None or self._is_beside:
            return stand_in(tensor)
        if id(tensor) not in self._gathered:
            raise QkovError("a weight that is spread over processes was not gathered before it was read")
        return self._gathered[id(tensor)][1]

    def movers(self, by_parameter: Dictionary[int, Mover]) -> dict[CircuitKey, dict[str, Any]]:
        """Return which optimizers moved the factors of each circuit, and at what rate.

        Args:
            by_parameter: Who moved the parameters, by their id.

        Returns:
            The columns `MOVERS` of each circuit: the names of the optimizers, None if none moved the factor; and the
            learning rate, None if it is not one for the whole factor.
        """
        if self._parameters is None or not by_parameter:
            return {}
        known = list(dict.fromkeys(by_parameter.values()))
        places = {key: float(known.index(mover) + 1) for key, mover in by_parameter.items()}

        def place_of_adapted(weight: AdaptedWeight) -> Entry:
            return _spread(max((places.get(id(part), 0.0) for _, part in weight.parts), default=0.0), weight)

        read = self._parameters.read(lambda each: _spread(places.get(id(each), 0.0), each), place_of_adapted)
        found = {}
        for weights in read.layers():
            for name, sides in (("QK", (weights.W_K, weights.W_Q)), ("OV", (weights.W_O, weights.W_V))):
                columns: dict[str, Any] = {}
                for side, factor in zip(("left", "right"), sides, strict=True):
                    inside = [] if factor is None else [int(place) for place in _distinct(factor) if place]
                    moving = [known[place - 1] for place in inside]
                    rates = {mover.rate for mover in moving}
                    names = ", ".join(dict.fromkeys(mover.optimizer for mover in moving))
                    columns[f"{side}_optimizer"] = names or None
                    columns[f"{side}_learning_rate"] = rates.pop() if len(rates) == 1 else None
                found[weights.stack, weights.layer, name] = columns
        return found

    def _in_basis(self, opened: AttentionSource) -> LayersInMemory:
        return LayersInMemory(tuple(weights.in_basis(self._view.basis) for weights in opened.layers()))

    def _read(self, value: Callable[[nn.Parameter], Tensor], adapted: Callable[[AdaptedWeight], Entry]) -> Factors:
        if self._parameters is None:
            return {}
        return {
            (weights.stack, weights.layer, name): circuit
            for weights in self._parameters.read(value, adapted).layers()
            if (weights.stack, weights.layer) in self._heads
            for name, circuit in trained_circuits(weights).items()
        }

    def _frozen(self) -> list[CircuitKey]:
        is_trained = self._read(
            lambda parameter: _spread(float(parameter.requires_grad), parameter),
            lambda weight: _spread(float(weight.is_trained), weight),
        )
        return [key for key, factors in is_trained.items() if not all(map(torch.all, _factors_in(factors)))]

    def _adapted(self) -> dict[CircuitKey, str]:
        """Return why circuits whose weights adapters change have no gradients of their factors."""
        kinds = sorted(
            {entry.layer.kind for entry in self._parameters.tensors().values() if isinstance(entry, AdaptedWeight)}
            if self._parameters is not None
            else ()
        )
        is_adapted = {
            kind: self._read(
                lambda parameter: _spread(0.0, parameter),
                lambda weight, kind=kind: _spread(float(weight.layer.kind == kind), weight),
            )
            for kind in kinds
        }
        return {
            key: f"its weights are made with adapters ({kind}), which have gradients in place of the weights"
            for kind, factors in is_adapted.items()
            for key, circuit in factors.items()
            if any(bool(factor.any()) for factor in _factors_in(circuit))
        }


def _class_name(model: Any) -> str:
    """Return the name of a model's class, without that which fully_shard puts in front of it."""
    kinds = type(model).__mro__
    return next(kind.__name__ for kind in kinds if not kind.__module__.startswith("torch.distributed.fsdp"))


def copied(factors: Factors) -> Factors:
    """Return copies of the factors, which training does not change."""
    return {key: Circuit(*(factor.clone() for factor in _factors_in(circuit))) for key, circuit in factors.items()}


def same(one: Factors, other: Factors) -> bool:
    """Return whether all factors have equal values."""
    pairs = zip(one.values(), other.values(), strict=False)
    return one.keys() == other.keys() and all(
        torch.equal(*both) for pair in pairs for both in zip(*map(_factors_in, pair), strict=True)
    )


def _joined(circuits: list[Circuit]) -> Circuit:
    """Return circuits of one shape as one batch."""
    if len(circuits) == 1:
        return circuits[0]
    return Circuit(*(torch.cat(factors) for factors in zip(*map(_factors_in, circuits), strict=True)))


def _measured_together(factors: Factors, is_of_product: Dictionary[CircuitKey, bool]) -> list[list[CircuitKey]]:
    """Return the circuits in parts that are measured at once: those of one shape, as far as they are small."""
    parts: dict[Any, list[list[CircuitKey]]] = {}
    for key, circuit in factors.items():
        alike = [(factor.shape[-2:], factor.dtype, factor.device) for factor in _factors_in(circuit)]
        of_kind = parts.setdefault((is_of_product[key], *alike), [[]])
        size = sum(factor.numel() for factor in _factors_in(circuit))
        if of_kind[-1] and (len(of_kind[-1]) + 1) * size > _TOGETHER:
            of_kind.append([])
        of_kind[-1].append(key)
    return [part for of_kind in parts.values() for part in of_kind]


def _circuits_in(weights: AttentionWeights) -> list[str]:
    return [name for name, is_there in (("QK", weights.has_qk), ("OV", weights.has_ov)) if is_there]


def _factors_in(circuit: Circuit) -> list[Tensor]:
    return [factor for factor in (circuit.left, circuit.right) if factor is not None]


def _gradients_in(copies: Dictionary[int, Tensor] | None) -> Callable[[nn.Parameter], Tensor]:
    """Return what gives the gradient of a parameter: among copies, or the one that it has."""

    def gradient(parameter: nn.Parameter) -> Tensor:
        found = parameter.grad if copies is None else copies.get(id(parameter))
        return _missing(parameter) if found is None else found

    return gradient


def _missing(weight: nn.Parameter | AdaptedWeight) -> Tensor:
    return _spread(torch.nan, weight)


def _distinct(numbers: Tensor) -> list[float]:
    """Return the different entries, looking once at those that share their memory."""
    for axis, stride in enumerate(numbers.stride()):
        if stride == 0:
            numbers = numbers.narrow(axis, 0, 1)
    return numbers.unique().tolist()


def _spread(number: float, weight: nn.Parameter | AdaptedWeight) -> Tensor:
    """A number in the shape of a weight, without its memory."""
    return torch.full((1,) * len(weight.shape), number).expand(weight.shape)


def _untested(reasons: dict[CircuitKey, str]) -> list[Untested]:
    """The circuits that share a reason, together."""
    layers: dict[tuple[str, str], list[str]] = {}
    for (stack, layer, name), reason in reasons.items():
        layers.setdefault((name, reason), []).append(f"{stack} {layer}".lstrip())
    return [Untested(name, members, reason) for (name, reason), members in layers.items()]
