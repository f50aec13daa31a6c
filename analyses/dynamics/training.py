"""Gradient descent on the single-layer model with a learning rate for each circuit, for many ratios r at once."""

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
    """All runs just before a step, and the step that each is about to take.

    Attributes:
        step: number of steps taken so far.
        time: the sum of the rates so far, which is the time of the gradient flow.
        loss: cross-entropy in nats at this step's weights.
        attention: attention alpha on the relevant tokens.
        rate: rate of the coming step.
        active: whether each run is still training; the others no longer move.
        reached: for every run, those of `train`'s losses that it has reached in this state.
        weights: the parameters by name, each [run, head, ...].
        qk_gradient: dL/dW_QK, the gradient of the dense product.
        ov_gradient: dL/dW_OV, the gradient of the dense product.
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
        """Return the weights of one run as the attention weights of a layer."""
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

        W <- W - eta_circuit dL/dW      with eta_OV = rate and eta_QK = r rate

    A run ends when it has reached the smallest of `losses`. With a relative step size, steps are shortened so that the
    run passes exactly (to second order in the step) through each loss. All runs end after `max_steps`.

    Args:
        model: the model to train, with one run for each ratio.
        data: the whole population, for full-batch steps, or a function that draws the next batch.
        ratios: ratio r = eta_QK / eta_OV of each run.
        step_size: rule for the rate of each step.
        losses: the losses to pass through; the smallest one ends the run.
        max_steps: number of steps after which training ends.
        rescaled: whether to multiply the rate of each circuit by 2 sum s^3 / sum s^2, where s are the circuit's current
            singular values. On the fixed directions this factor is 2 sigma mu, so that a collapsed circuit follows the
            factorized equations.

    Yields:
        The state of all runs. A yielded state keeps its weights when training continues.

    Raises:
        CallError: the number of ratios differs from the number of runs, a ratio is not positive, or the rescaled rate
            is requested for several heads.
        QkovError: a loss became NaN or infinite; the message names the step.

    Source: Theorem 1 of "Faster Query-Key Learning Sharpens Attention". The rescaled rate is the concrete test that the
        paper's review proposes; see docs/theory, factorized dynamics.
    """
    if len(ratios) != model.runs:
        raise CallError(f"the model has {model.runs} runs, but {len(ratios)} ratios were given; give one for each run")
    if not all(ratio > 0 for ratio in ratios):
        raise CallError(f"every ratio r = eta_QK / eta_OV must be positive, got {list(ratios)}")
    if rescaled and model.heads > 1:
        raise CallError(f"the rescaled rate needs a model with one head; this one has {model.heads} heads")
    ratio = torch.tensor(ratios, dtype=torch.float64)
    time = torch.zeros(len(ratio), dtype=torch.float64)
    landing = Landing(losses, len(ratio))
    attention_parameters = [model.get_parameter(name) for name in model.attention_names]
    output_parameters = [model.get_parameter(name) for name in model.output_names]
    # A factorized circuit, or one at the rescaled rate, grows in proportion to itself; a collapsed one may start at 0.
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
                "use a smaller step"
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
            # A new tensor instead of an update in place, so that the yielded state keeps its weights.
            parameter.data = parameter.detach() - _along_runs(factor, parameter) * gradient
        time = time + moved


def _gradients(
    model: SingleLayerAttention, sequences: Sequences, parameters: list[torch.nn.Parameter]
) -> tuple[Tensor, Tensor, list[Tensor], tuple[Tensor, Tensor]]:
    """Return the loss, alpha, the parameters' gradients, and the gradients of the dense W_QK and W_OV."""
    qk, ov = model.products()
    attention = model.attention(sequences, qk)
    logits = model.logits(attention, sequences, ov)
    loss = -logits.log_softmax(dim=-1)[:, torch.arange(len(sequences)), sequences.label].mean(dim=-1)
    # The runs share no weights, so the gradient of the sum is each run's own gradient.
    *gradients, qk_gradient, ov_gradient = torch.autograd.grad(loss.sum(), [*parameters, qk, ov])
    with torch.no_grad():
        alpha = relevant_attention(attention, sequences)
    return loss.detach().double(), alpha.double(), gradients, (qk_gradient, ov_gradient)


def _motion(
    factor: Tensor, circuit: Circuit, gradient: Tensor, factor_gradients: list[Tensor], start: Tensor | None
) -> CircuitMotion:
    """Return a circuit's motion in a step of rate 1, by the exact operator where the circuit is factorized."""
    moving = gradient if circuit.right is None else exact_step(circuit, gradient)
    size = circuit.dense() if start is None else circuit.dense() - start
    speed = factor * (_squared_norm(moving) / _squared_norm(size)).sqrt()
    return CircuitMotion(
        power=factor * torch.stack([_squared_norm(factor_gradient) for factor_gradient in factor_gradients]).sum(dim=0),
        relative_speed=torch.where(torch.isfinite(speed), speed, 0.0),
        from_zero=start is not None,
    )


def _squared_norm(tensor: Tensor) -> Tensor:
    return tensor.double().square().flatten(1).sum(dim=1)


def _along_runs(values: Tensor, parameter: Tensor) -> Tensor:
    return values.to(parameter.dtype).reshape(-1, *[1] * (parameter.dim() - 1))
