"""Gradient descent on the single-layer model with a learning rate for each circuit, many ratios r at once."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ...circuits.algebra.circuit import Circuit
from ...circuits.algebra.preconditioner import Preconditioner, exact_step
from ...circuits.errors import CallError, QkovError
from ...circuits.weights.attention_weights import AttentionWeights
from .landing import Landing
from .model import SingleLayerAttention, relevant_attention
from .sequences import Sequences
from .step_sizes import CircuitMotion, ConstantRate, RelativeStep


@dataclass(frozen=True)
class State:
    """All runs just before a step, and the step that each would take.

    Attributes:
        step: number of steps taken so far.
        time: the sum of the rates so far: the time of the gradient flow.
        loss: cross-entropy at this step's weights.
        attention: alpha, on the relevant tokens.
        rate: of the coming step.
        active: runs that have not ended; only they move.
        reached: for every run, the losses of `losses` that this very state is at.
        weights: the parameters by name, [run, head, ...].
        qk_gradient, ov_gradient: dL/dC by the dense products.
    """

    step: int
    time: Float[Tensor, " run"]
    loss: Float[Tensor, " run"]
    attention: Float[Tensor, " run"]
    rate: Float[Tensor, " run"]
    active: Bool[Tensor, " run"]
    reached: list[list[float]]
    weights: dict[str, Tensor]
    qk_gradient: Float[Tensor, "run head d_model d_model"]
    ov_gradient: Float[Tensor, "run head classes d_model"]

    def attention_weights(self, run: int) -> AttentionWeights:
        """Return the weights of one run as a layer's attention weights."""
        return AttentionWeights.of(0, {name: weight[run] for name, weight in self.weights.items()})


def train(
    model: SingleLayerAttention,
    data: Sequences | Callable[[], Sequences],
    ratios: Sequence[float],
    *,
    step_size: ConstantRate | RelativeStep,
    losses: Sequence[float] = (),
    max_steps: int = 100_000,
    rescaled: bool = False,
) -> Iterator[State]:
    """Train all runs side by side by gradient descent, yielding the state before every step and at the end.

    W <- W - eta_circuit dL/dW with eta_OV = rate and eta_QK = r rate. A run ends when its loss has come down to the
    last of `losses`; its steps are shortened so that it passes exactly through each of them (to second order in the
    step) when the step size is relative. All end after `max_steps`.

    Args:
        model: with one run for each ratio.
        data: the whole population (full batch), or a function that draws the next batch.
        ratios: r = eta_QK / eta_OV of each run.
        step_size: the rate of each step.
        losses: to stop at; the last one ends the run.
        max_steps: after which training ends.
        rescaled: multiply the rate of each circuit by 2 sum s^3 / sum s^2 of its current singular values s, which is
            2 sigma mu on the fixed directions. A collapsed circuit then follows the factorized equations.

    Raises:
        CallError: the number of ratios is not the number of runs, a ratio is not positive, or several heads are to
            train at the rescaled rate.
        QkovError: the loss became NaN or infinite; the step is named.

    Source: Theorem 1 of "Faster Query-Key Learning Sharpens Attention"; the rescaled rate is the review's concrete
        test.
    """
    if len(ratios) != model.runs:
        raise CallError(f"the model holds {model.runs} runs, and {len(ratios)} ratios were given: give one a run")
    if not all(ratio > 0 for ratio in ratios):
        raise CallError(f"every ratio r = eta_QK / eta_OV must be positive, got {list(ratios)}")
    if rescaled and model.heads > 1:
        raise CallError(f"the rescaled rate is one rate a circuit; the model has {model.heads} heads, use one")
    ratio = torch.tensor(ratios, dtype=torch.float64)
    time = torch.zeros(len(ratio), dtype=torch.float64)
    landing = Landing(losses, len(ratio))
    attention_parameters = [model.get_parameter(name) for name in model.attention_names]
    output_parameters = [model.get_parameter(name) for name in model.output_names]
    # A factorized circuit, or one that imitates it, grows in proportion to itself; a collapsed one leaves its start.
    starts = [
        None if rescaled or len(parameters) > 1 else parameters[0].detach()
        for parameters in (attention_parameters, output_parameters)
    ]

    for step in range(max_steps + 1):
        sequences = data if isinstance(data, Sequences) else data()
        loss, attention, gradients, (qk_gradient, ov_gradient) = _gradients(
            model, sequences, [*attention_parameters, *output_parameters]
        )
        if not bool(torch.isfinite(loss).all()):
            raise QkovError(
                f"training diverged at step {step}: the losses of the runs at r = {list(ratios)} are {loss.tolist()}; "
                f"use a smaller step"
            )
        reached = landing.reach(loss)
        active = landing.active

        factor_qk, factor_ov = ratio, torch.ones_like(ratio)
        if rescaled:
            factor_qk = ratio * Preconditioner(model.qk()).self_rate[:, 0]
            factor_ov = Preconditioner(model.ov()).self_rate[:, 0]
        split = len(attention_parameters)
        motions = [
            _motion(factor_qk, model.qk(), qk_gradient, gradients[:split], starts[0]),
            _motion(factor_ov, model.ov(), ov_gradient, gradients[split:], starts[1]),
        ]
        rate = step_size(loss, motions)
        if isinstance(step_size, RelativeStep):
            rate = landing.shorten(rate, loss, motions[0].power + motions[1].power)
        last = step == max_steps or not bool(active.any())
        yield State(
            step=step,
            time=time.clone(),
            loss=loss,
            attention=attention,
            rate=rate,
            active=active & (step < max_steps),
            reached=reached,
            weights={name: parameter.detach() for name, parameter in model.named_parameters()},
            qk_gradient=qk_gradient,
            ov_gradient=ov_gradient,
        )
        if last:
            return
        moved = torch.where(active, rate, 0.0)
        factors = [moved * factor_qk] * split + [moved * factor_ov] * len(output_parameters)
        for parameter, gradient, factor in zip(
            [*attention_parameters, *output_parameters], gradients, factors, strict=True
        ):
            # A new tensor, not an update in place: the state that was yielded keeps its weights.
            parameter.data = parameter.detach() - _along_runs(factor, parameter) * gradient
        time = time + moved


def _gradients(
    model: SingleLayerAttention, sequences: Sequences, parameters: list[torch.nn.Parameter]
) -> tuple[Tensor, Tensor, list[Tensor], tuple[Tensor, Tensor]]:
    """Loss, alpha, the gradients of the parameters, and the gradients of the dense W_QK and W_OV from the same pass."""
    qk, ov = model.products()
    attention = model.attention(sequences, qk)
    logits = model.logits(attention, sequences, ov)
    loss = -logits.log_softmax(dim=-1)[:, torch.arange(len(sequences)), sequences.label].mean(dim=-1)
    # The runs share no weight, so the gradient of the sum is each run's own gradient.
    *gradients, qk_gradient, ov_gradient = torch.autograd.grad(loss.sum(), [*parameters, qk, ov])
    with torch.no_grad():
        alpha = relevant_attention(attention, sequences)
    return loss.detach().double(), alpha.double(), gradients, (qk_gradient, ov_gradient)


def _motion(
    factor: Tensor, circuit: Circuit, gradient: Tensor, factor_gradients: list[Tensor], start: Tensor | None
) -> CircuitMotion:
    """What a circuit would do in a step of rate 1, by the exact operator where it is a product of factors."""
    moving = gradient if circuit.right is None else exact_step(circuit, gradient)
    size = circuit.dense() if start is None else circuit.dense() - start
    speed = factor * (_squared_norm(moving) / _squared_norm(size)).sqrt()
    return CircuitMotion(
        power=factor * torch.stack([_squared_norm(each) for each in factor_gradients]).sum(dim=0),
        relative_speed=torch.where(torch.isfinite(speed), speed, 0.0),
        from_zero=start is not None,
    )


def _squared_norm(tensor: Tensor) -> Tensor:
    return tensor.double().square().flatten(1).sum(dim=1)


def _along_runs(values: Tensor, parameter: Tensor) -> Tensor:
    return values.to(parameter.dtype).reshape(-1, *[1] * (parameter.dim() - 1))
