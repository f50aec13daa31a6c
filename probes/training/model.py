"""A model in training as the circuit probe reads it: its circuits, and what a step did to their factors."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...analyses.trajectories.view import View
from ...circuits.algebra.circuit import Circuit
from ...circuits.algebra.factor_steps import measure_step
from ...circuits.errors import QkovError
from ...circuits.live.models import open_model
from ...circuits.live.parameters import LiveParameters
from ...circuits.reading.options import ReadingOptions
from ...circuits.weights.attention_weights import AttentionWeights
from ...circuits.weights.layer_keys import layer_label
from ...circuits.weights.source import LayersInMemory
from ...circuits.weights.trained_factors import trained_circuits, without_product

#: Stack and number of a layer, and the name of a circuit.
Place = tuple[str, int, str]
Factors = dict[Place, Circuit]


@dataclass(frozen=True)
class Untested:
    """Circuits of which a step says less, and why.

    Attributes:
        circuit: QK or OV.
        layers: in words.
        reason: in words.
    """

    circuit: str
    layers: list[str]
    reason: str


class LiveModel:
    """A model whose weights and gradients are read anew each time, since training and moving it replace them.

    Attributes:
        recognised: how its weights were, in words.
        skipped: what of it is no attention that has these circuits, and why.
        untested: circuits of which the test of the preconditioner has not all figures.
    """

    def __init__(self, model: Any, view: View, options: ReadingOptions) -> None:
        """Recognise the model.

        Raises:
            CallError: it is no model, or the view is not possible.
            QkovError: its weights are not recognised, or cannot be read.
        """
        self._model, self._view, self._options = model, view, options
        opened = open_model(model, options)
        self.recognised, self.skipped = opened.recognised, opened.skipped
        layers = tuple(opened.layers())
        view.demand_possible(LayersInMemory(layers), f"the model {type(model).__name__}")
        self._heads = {(weights.stack, weights.layer): weights.heads for weights in layers}
        reasons: dict[Place, str] = {
            (weights.stack, weights.layer, name): reason
            for weights in layers
            for name, reason in without_product(weights).items()
        }
        places = [(weights.stack, weights.layer, name) for weights in layers for name in _circuits_in(weights)]
        self._is_of_product = {place: place not in reasons for place in places}
        self._parameters: LiveParameters | None = None
        try:
            self._parameters = LiveParameters(model, options)
        except QkovError as error:
            reasons = dict.fromkeys(places, f"its gradients cannot be read, as {error}")
        else:
            reasons |= dict.fromkeys(self._frozen(), "not all of its weights are trained")
        self.untested = _gathered(reasons)

    def layers(self) -> LayersInMemory:
        """Return the layers in the basis of the view, sharing the model's memory where they can."""
        opened = open_model(self._model, self._options)
        return LayersInMemory(tuple(weights.in_basis(self._view.basis) for weights in opened.layers()))

    def factors(self) -> Factors:
        """Return the factors that training moves, sharing the model's memory where they can."""
        return self._read(lambda parameter: parameter)

    def gradients(self) -> Factors:
        """Return their gradients, G_A as left and G_B as right; NaN where a parameter has none."""
        return self._read(_gradient)

    def has_gradients(self) -> bool:
        """Say whether any parameter of the model has a gradient; so too where no parameter is known."""
        return self._parameters is None or any(parameter.grad is not None for parameter in self._model.parameters())

    def step_figures(self, before: Factors, gradients: Factors) -> dict[Place, dict[str, list[float]]]:
        """Return the figures of the step from the factors before to those now, for each head of each circuit."""
        after, measured = self.factors(), {}
        for place, factors in before.items():
            of_product = self._is_of_product[place]
            figures = measure_step(factors, gradients[place], after[place], of_product=of_product)
            # Those of a group stand in the rows of all its heads.
            times = self._heads[place[:2]] // factors.shape[0]
            measured[place] = {name: value.repeat_interleave(times).tolist() for name, value in figures.items()}
        return measured

    def _read(self, value: Callable[[nn.Parameter], Tensor]) -> Factors:
        if self._parameters is None:
            return {}
        return {
            (weights.stack, weights.layer, name): circuit
            for weights in self._parameters.read(value).layers()
            if (weights.stack, weights.layer) in self._heads
            for name, circuit in trained_circuits(weights).items()
        }

    def _frozen(self) -> list[Place]:
        is_trained = self._read(lambda parameter: _spread(float(parameter.requires_grad), parameter))
        return [place for place, factors in is_trained.items() if not all(map(torch.all, factors_in(factors)))]


def _circuits_in(weights: AttentionWeights) -> list[str]:
    return [name for name, there in (("QK", weights.has_qk), ("OV", weights.has_ov)) if there]


def copied(factors: Factors) -> Factors:
    """Return copies, which training does not change."""
    return {place: Circuit(*(factor.clone() for factor in factors_in(circuit))) for place, circuit in factors.items()}


def factors_in(circuit: Circuit) -> list[Tensor]:
    """Return the factors of a circuit that has both."""
    return [factor for factor in (circuit.left, circuit.right) if factor is not None]


def _gradient(parameter: nn.Parameter) -> Tensor:
    return _spread(torch.nan, parameter) if parameter.grad is None else parameter.grad


def _spread(number: float, parameter: nn.Parameter) -> Tensor:
    """A number in the shape of a parameter, without its memory."""
    return torch.full((1,) * parameter.ndim, number).expand_as(parameter)


def _gathered(reasons: dict[Place, str]) -> list[Untested]:
    """The circuits that have a reason in common, together."""
    layers: dict[tuple[str, str], list[str]] = {}
    for (stack, layer, name), reason in reasons.items():
        layers.setdefault((name, reason), []).append(layer_label(stack, layer))
    return [Untested(name, of_reason, reason) for (name, reason), of_reason in layers.items()]
