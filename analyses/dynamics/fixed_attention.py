"""Training of the output circuit while attention is held fixed, which shows how alpha alone determines the loss."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...circuits.errors import CallError
from .fifty_token_task import CLASSES, COMMON, VOCABULARY, FiftyTokenTask
from .sequences import Sequences

PAPER_ALPHAS = (0.2, 0.4, 0.6, 0.8, 1.0)
_DRAWN_AT_ONCE = 2048


@dataclass(frozen=True)
class FixedAttentionLosses:
    """Losses of training under fixed attention.

    Attributes:
        alphas: attention on the distinct tokens in each run.
        steps: numbers of steps after which the losses were measured, evenly spaced in the logarithm up to the end.
        collapsed: cross-entropy of the collapsed output on sequences that were not trained on.
        factorized: cross-entropy of the factorized output on the same sequences.
    """

    alphas: tuple[float, ...]
    steps: tuple[int, ...]
    collapsed: Float[Tensor, "measurement alpha"]
    factorized: Float[Tensor, "measurement alpha"]

    @property
    def final_collapsed(self) -> Float[Tensor, " alpha"]:
        """Loss of the collapsed output after the last step."""
        return self.collapsed[-1]

    @property
    def final_factorized(self) -> Float[Tensor, " alpha"]:
        """Loss of the factorized output after the last step."""
        return self.factorized[-1]


class OutputWeights(NamedTuple):
    """Weights of all runs, or their gradients. The inputs are the 50 tokens and a constant 1 for the bias.

    Attributes:
        collapsed: the collapsed output, whose last column is the bias.
        W_O: left factor of the factorized output.
        W_V: right factor of the factorized output, which has no bias; its last column is unused.
    """

    collapsed: Float[Tensor, "alpha class input"]
    W_O: Float[Tensor, "alpha class d_head"]
    W_V: Float[Tensor, "alpha d_head input"]


def train_fixed_attention(
    task: FiftyTokenTask,
    alphas: Sequence[float] = PAPER_ALPHAS,
    *,
    steps: int = 125_000,
    rate: float = 1e-2,
    batch: int = 128,
    d_head: int = VOCABULARY,
    seed: int = 0,
    measurements: int = 40,
    evaluation: int = 8192,
    dtype: torch.dtype = torch.float32,
) -> FixedAttentionLosses:
    """Train a collapsed and a factorized output by SGD at each alpha, and return their losses.

        x = alpha / n_distinct sum over distinct tokens x_j + (1 - alpha) / n_common sum over common tokens x_j
        z = W_OV x + bias (collapsed)      z = W_O W_V x (factorized)

    The sums run over occurrences. The query token counts as a common token if the task has it among the keys. There are
    four logits, one for each class. The loss is the mean cross-entropy over the batch. All weights start as
    torch.nn.Linear's do, uniform in +-1/sqrt(inputs). All alphas train from one start, on the same sequences, which are
    drawn afresh at every step.

    Args:
        task: the task that sequences are drawn from.
        alphas: attention on the distinct tokens in each run.
        steps: number of SGD steps.
        rate: learning rate of every weight.
        batch: number of sequences in a step.
        d_head: inner dimension of the factorized output.
        seed: seed of the start, the training sequences and the evaluation sequences.
        measurements: maximum number of times that the loss is measured.
        evaluation: number of evaluation sequences, on which nothing is trained.
        dtype: dtype of the weights.

    Raises:
        CallError: an alpha is outside [0, 1], or another number is not positive.

    Source: the fixed-attention experiment of "Faster Query-Key Learning Sharpens Attention".
    """
    _demand(
        alphas, steps=steps, rate=rate, batch=batch, d_head=d_head, evaluation=evaluation, measurements=measurements
    )
    start_seed, training_seed, evaluation_seed = np.random.SeedSequence(seed).spawn(3)
    weights = linear_start(len(alphas), d_head, np.random.default_rng(start_seed), dtype)
    reach = attention_on_inputs(torch.tensor(alphas, dtype=torch.float64)).to(dtype)
    held_out = task.sample_sequences(evaluation, np.random.default_rng(evaluation_seed))
    held_out_inputs = group_means(held_out, dtype)
    measured_at = np.unique(np.geomspace(1, steps, measurements + 1)[1:].round().astype(int)).tolist()
    losses = []
    batches = _batches(task, steps, batch, np.random.default_rng(training_seed), dtype)
    for step, (inputs, targets) in enumerate(batches, start=1):
        for weight, gradient in zip(weights, output_gradients(weights, reach, inputs, targets), strict=True):
            weight.sub_(gradient, alpha=rate)
        if step == measured_at[len(losses)]:
            losses.append(output_losses(weights, reach, held_out_inputs, held_out.label))
    collapsed, factorized = torch.stack(losses).split(len(alphas), dim=1)
    return FixedAttentionLosses(tuple(alphas), tuple(measured_at), collapsed, factorized)


def group_means(sequences: Sequences, dtype: torch.dtype) -> Float[Tensor, "sequence input"]:
    """Return the mean of the relevant tokens plus the mean of all others, and a constant 1 at the end.

    Tokens are one-hot, so the two means do not overlap. A group that does not occur in a sequence counts as zero.

    Args:
        sequences: the sequences to average.
        dtype: dtype of the result.
    """
    counts = sequences.counts.to(dtype)
    relevant = counts * sequences.relevant.to(dtype)
    others = counts - relevant
    means = relevant.div_(relevant.sum(dim=1, keepdim=True).clamp_(min=1))
    means += others.div_(others.sum(dim=1, keepdim=True).clamp_(min=1))
    return torch.cat([means, means.new_ones(len(means), 1)], dim=1)


def attention_on_inputs(alphas: Float[Tensor, " alpha"]) -> Float[Tensor, "output 1 input"]:
    """Return the factor of each input: alpha on distinct tokens, 1 - alpha on common ones, 1 or 0 on the constant.

    The collapsed outputs, which have a bias, come first; the factorized ones, which have none, follow.
    """
    reach = alphas[:, None].repeat(2, VOCABULARY + 1)
    reach[:, :COMMON] = 1 - reach[:, :COMMON]
    reach[: len(alphas), -1] = 1
    reach[len(alphas) :, -1] = 0
    return reach[:, None, :]


def linear_start(alphas: int, d_head: int, generator: np.random.Generator, dtype: torch.dtype) -> OutputWeights:
    """Return weights and bias uniform in +-1/sqrt(inputs), torch.nn.Linear's default, the same for every alpha.

    Args:
        alphas: number of runs.
        d_head: inner dimension of the factorized output.
        generator: generator of the draws.
        dtype: dtype of the weights.
    """

    def uniform(rows: int, columns: int, inputs: int) -> Tensor:
        bound = inputs**-0.5
        drawn = torch.from_numpy(generator.uniform(-bound, bound, size=(rows, columns)))
        return drawn.to(dtype).repeat(alphas, 1, 1)

    return OutputWeights(
        collapsed=uniform(CLASSES, VOCABULARY + 1, inputs=VOCABULARY),
        W_O=uniform(CLASSES, d_head, inputs=d_head),
        W_V=uniform(d_head, VOCABULARY + 1, inputs=VOCABULARY),
    )


def output_gradients(
    weights: OutputWeights,
    reach: Float[Tensor, "output 1 input"],
    inputs: Float[Tensor, "sequence input"],
    targets: Float[Tensor, "class input"],
) -> OutputWeights:
    """Return the gradients of every run's mean cross-entropy in closed form.

        dL/dM = mean (p - e_label) (reach x)'      dL/dW_O = dL/dM W_V'      dL/dW_V = W_O' dL/dM

    Args:
        weights: the weights at which to evaluate the gradients.
        reach: factors of the inputs, from `attention_on_inputs`.
        inputs: x, from `group_means`.
        targets: the mean of e_label x'. It does not depend on the weights, so it is computed for many steps at once.
    """
    outputs = _outputs(weights, reach)
    probabilities = torch.softmax(_logits(outputs, inputs), dim=1)
    gradient = (probabilities.flatten(0, 1) @ inputs).view_as(outputs)
    gradient = gradient.div_(len(inputs)).sub_(targets).mul_(reach)
    collapsed, product = gradient.chunk(2)
    return OutputWeights(collapsed=collapsed, W_O=product @ weights.W_V.mT, W_V=weights.W_O.mT @ product)


def output_losses(
    weights: OutputWeights,
    reach: Float[Tensor, "output 1 input"],
    inputs: Float[Tensor, "sequence input"],
    label: Int[Tensor, " sequence"],
) -> Float[Tensor, " output"]:
    """Return the mean cross-entropy of every run, first for the collapsed outputs and then for the factorized ones.

    Args:
        weights: the weights of all runs.
        reach: factors of the inputs, from `attention_on_inputs`.
        inputs: x, from `group_means`.
        label: class of each sequence.
    """
    log_probabilities = torch.log_softmax(_logits(_outputs(weights, reach), inputs), dim=1)
    return -log_probabilities[:, label, torch.arange(len(label))].mean(dim=1, dtype=torch.float64)


def _outputs(weights: OutputWeights, reach: Tensor) -> Tensor:
    """Return every run's matrix from group means to logits; attention is folded in, so that runs share inputs."""
    return torch.cat([weights.collapsed, weights.W_O @ weights.W_V]).mul_(reach)


def _logits(outputs: Tensor, inputs: Tensor) -> Tensor:
    """Return logits [output, class, sequence]; a softmax over four adjacent numbers would be much slower."""
    return (outputs.flatten(0, 1) @ inputs.T).view(*outputs.shape[:2], len(inputs))


def _batches(
    task: FiftyTokenTask, steps: int, batch: int, generator: np.random.Generator, dtype: torch.dtype
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the inputs and targets of every step, drawn for many steps at a time because single draws are slow."""
    for first in range(0, steps, max(1, _DRAWN_AT_ONCE // batch)):
        count = min(steps - first, max(1, _DRAWN_AT_ONCE // batch))
        sequences = task.sample_sequences(count * batch, generator)
        inputs = group_means(sequences, dtype).view(count, batch, -1)
        one_hot = torch.nn.functional.one_hot(sequences.label, CLASSES).to(dtype).view(count, batch, -1)
        yield from zip(inputs, one_hot.mT @ inputs / batch, strict=True)


def _demand(alphas: Sequence[float], **positive: int | float) -> None:
    if not alphas or not all(0 <= alpha <= 1 for alpha in alphas):
        raise CallError(f"alphas must be one or more shares of attention from 0 to 1; got {tuple(alphas)}")
    for name, value in positive.items():
        if value <= 0:
            raise CallError(f"{name} must be positive; got {value}")
