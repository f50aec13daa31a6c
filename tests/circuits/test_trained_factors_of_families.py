"""In every family of models the factors have the gradients of one product, including biases and shared heads."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from qkov.circuits.algebra.factor_steps import LARGEST_DISAGREEMENT, gradient_disagreement
from qkov.circuits.live.parameters import LiveParameters
from qkov.circuits.weights.trained_factors import trained_circuits, without_product
from torch import Tensor, nn

from .decoders import FAMILIES as DECODERS
from .encoder_decoders import FAMILIES as ENCODER_DECODERS
from .encoders import FAMILIES as ENCODERS
from .family_proof import LENGTH, build

#: Each model once, though several of its stacks are families.
FAMILIES = {(family.model, family.config): family for family in (*DECODERS, *ENCODERS, *ENCODER_DECODERS)}.values()
#: Some models compute scores in float32 whatever they are in.
ROUNDING = 1e-6


def outputs_in(found: Any) -> Iterator[Tensor]:
    if isinstance(found, Tensor):
        if found.is_floating_point() and found.requires_grad:
            yield found
    elif isinstance(found, dict | list | tuple):
        for part in found.values() if isinstance(found, dict) else found:
            yield from outputs_in(part)


def gradient_of(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_gradients_of_the_factors_are_those_of_their_product_or_the_reason_is_given(family):
    model = build(family)
    torch.manual_seed(1)
    inputs = family.inputs(model.config) if family.inputs else {"input_ids": torch.randint(3, 50, (1, LENGTH))}
    losses = [output.double().tanh().square().sum() for output in outputs_in(dict(model(**inputs)))]
    torch.stack(losses).sum().backward()
    parameters = LiveParameters(model)
    layers = zip(
        parameters.read(lambda parameter: parameter).layers(),
        parameters.read(gradient_of).layers(),
        strict=True,
    )
    for weights, gradients in layers:
        circuits, of_gradients = trained_circuits(weights), trained_circuits(gradients)
        reasons = without_product(weights)
        assert set(circuits) == {"QK", "OV"}
        for name, circuit in circuits.items():
            agreement = gradient_disagreement(circuit, of_gradients[name])
            if name not in reasons:
                assert (agreement < ROUNDING).all(), (name, weights.label)
            # What is clipped where it is too large may nowhere be so.
            elif "clipped" not in reasons[name]:
                assert (agreement > LARGEST_DISAGREEMENT).all(), (name, weights.label)
