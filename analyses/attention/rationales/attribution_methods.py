"""The registry of attribution methods that are not attention measures: captum's, gradients of attention, and chance."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..measures.registry import Registry
from ..models.model import AttentionModel
from .attribution_inputs import AttributionInputs, log_probability
from .faithfulness import RANDOM


@dataclass(frozen=True)
class AttributionOptions:
    """The options of a call of `attribute`, and which examples are in the batch.

    Attributes:
        steps: number of steps of integrated gradients.
        batch_tokens: largest number of tokens in one run of the model.
        seed: seed of the method "random".
        numbers: number of each of the batch's examples in the call.
    """

    steps: int
    batch_tokens: int
    seed: int
    numbers: list[int]


#: Values [batch, position], and each example's convergence delta if the method has one.
AttributedValues = tuple[Tensor, Tensor | None]


@dataclass(frozen=True)
class AttributionMethod:
    """A method that attributes a prediction to the tokens of its input.

    Attributes:
        name: name by which the method is requested.
        attribute: returns the values [batch, position] for a model, inputs and options, and the convergence delta of
            each example, or None.
        source: publication that defines the method, or a description of it.
        quick: whether the method is among the default methods of `explain`; false if it takes much longer than a few
            runs of the model.
    """

    name: str
    attribute: Callable[[AttentionModel, AttributionInputs, AttributionOptions], AttributedValues]
    source: str
    quick: bool = True


def _integrated_gradients(
    model: AttentionModel, inputs: AttributionInputs, options: AttributionOptions
) -> AttributedValues:
    from captum.attr import IntegratedGradients

    at_once = max(1, options.batch_tokens // inputs.tokens.numel())
    values, delta = IntegratedGradients(log_probability(model)).attribute(
        inputs.embedded,
        inputs.baseline,
        additional_forward_args=inputs.others,
        n_steps=options.steps,
        internal_batch_size=len(inputs.tokens) * at_once,
        return_convergence_delta=True,
    )
    return values.sum(dim=-1), delta


def _input_x_gradient(
    model: AttentionModel, inputs: AttributionInputs, _options: AttributionOptions
) -> AttributedValues:
    from captum.attr import InputXGradient

    embedded = inputs.embedded.clone().requires_grad_()
    values = InputXGradient(log_probability(model)).attribute(embedded, additional_forward_args=inputs.others)
    return values.sum(dim=-1), None


def _ablation(model: AttentionModel, inputs: AttributionInputs, options: AttributionOptions) -> AttributedValues:
    from captum.attr import FeatureAblation

    positions = torch.arange(inputs.tokens.shape[1], device=inputs.tokens.device)
    with torch.no_grad():
        values = FeatureAblation(log_probability(model)).attribute(
            inputs.embedded,
            inputs.baseline,
            additional_forward_args=inputs.others,
            feature_mask=positions[None, :, None].expand(1, -1, inputs.embedded.shape[-1]),
            perturbations_per_eval=max(1, options.batch_tokens // inputs.tokens.numel()),
        )
    # Every element of a token's embedding carries the change that all of them caused together.
    return values[..., 0], None


def _attention_x_gradient(
    model: AttentionModel, inputs: AttributionInputs, _options: AttributionOptions
) -> AttributedValues:
    """Return the sum over layers, heads and queries of A dlog p/dA.

    To first order it is the loss of log-probability if nothing attended to the token.
    """
    total = torch.zeros(inputs.tokens.shape, dtype=torch.float64, device=inputs.tokens.device)

    def hook(_layer: int, attention: Tensor) -> None:
        weights = attention.detach()

        def add(gradient: Tensor) -> None:
            total.add_((weights * gradient).sum(dim=(1, 2)))

        attention.register_hook(add)

    embedded = inputs.embedded.clone().requires_grad_()
    with torch.enable_grad():
        torch.autograd.grad(log_probability(model, hook)(embedded, *inputs.others).sum(), embedded)
    return total, None


def _random(_model: AttentionModel, inputs: AttributionInputs, options: AttributionOptions) -> AttributedValues:
    rows = torch.zeros(inputs.tokens.shape, dtype=torch.float64)
    for row, number in enumerate(options.numbers):
        length = len(inputs.examples[row].tokens)
        # Each example has a generator of its own, so its values do not depend on the other examples of the batch.
        generator = torch.Generator().manual_seed(options.seed * 1_000_003 + number)
        rows[row, :length] = torch.rand(length, dtype=torch.float64, generator=generator)
    return rows, None


#: Every attribution method that is not an attention measure, by name.
ATTRIBUTION_METHODS: Registry[AttributionMethod] = Registry(
    "attribution method",
    [
        AttributionMethod(
            "integrated gradients",
            _integrated_gradients,
            'Sundararajan, Taly & Yan, "Axiomatic Attribution for Deep Networks", 2017',
            quick=False,  # It takes many runs of the model.
        ),
        AttributionMethod(
            "attention x gradient",
            _attention_x_gradient,
            "attention times the gradient of the log-probability, summed over layers, heads and queries",
        ),
        AttributionMethod(
            "input x gradient",
            _input_x_gradient,
            "embedding times the gradient of the log-probability, summed over the embedding's elements",
        ),
        AttributionMethod(
            "ablation",
            _ablation,
            "loss of log-probability when the token's embedding is replaced by the baseline",
        ),
        AttributionMethod(RANDOM, _random, "uniform random weights, as a baseline"),
    ],
)
