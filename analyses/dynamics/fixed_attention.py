"""The output circuit learning under attention that is held fixed: how alpha alone sets the loss."""

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
    """What training under fixed attention came to.

    Attributes:
        alphas: attention on the distinct tokens, one for each run.
        steps: numbers of steps after which the losses were measured, evenly spaced in the logarithm up to the end.
        collapsed: cross-entropy of the collapsed output on sequences that were not trained on.
        factorized: the same of the factorized output, on the same sequences.
    """

    alphas: tuple[float, ...]
    steps: tuple[int, ...]
    collapsed: Float[Tensor, "measurement alpha"]
    factorized: Float[Tensor, "measurement alpha"]

    @property
    def final_collapsed(self) -> Float[Tensor, " alpha"]:
        """Loss of the collapsed output at the end."""
        return self.collapsed[-1]

    @property
    def final_factorized(self) -> Float[Tensor, " alpha"]:
        """Loss of the factorized output at the end."""
        return self.factorized[-1]


class OutputWeights(NamedTuple):
    """Weights of all runs, or their gradients; `input` is the 50 tokens and a constant 1, whose column is the bias.

    The factorized output W_O W_V has no bias: its last column takes part in nothing.
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

    Sums run over occurrences. The query token counts as a common token where the task has it among the keys. There are
    four logits, one for each class; the cross-entropy is a mean over the batch, so that the rate is as given. All
    weights start as torch.nn.Linear's do, uniform in +-1/sqrt(inputs), and all alphas train from one start on the same
    fresh sequences of every step.

    Args:
        task: where sequences come from.
        alphas: attention on the distinct tokens.
        steps: number of SGD steps.
        rate: learning rate of every weight.
        batch: sequences in a step.
        d_head: inner width of the factorized output.
        seed: of the start, the training sequences and the evaluation sequences.
        measurements: at most how many times the loss is measured.
        evaluation: number of sequences, none of them trained on, that the loss is measured on.
        dtype: of the weights.

    Raises:
        CallError: an alpha is outside 0 to 1, or another number is not positive.

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
    """Return the mean of the relevant tokens plus that of all others (one-hot, so apart), and a constant 1 at the end.

    A group that does not occur in a sequence counts as zero.
    """
    counts = sequences.counts.to(dtype)
    relevant = counts * sequences.relevant.to(dtype)
    others = counts - relevant
    means = relevant.div_(relevant.sum(dim=1, keepdim=True).clamp_(min=1))
    means += others.div_(others.sum(dim=1, keepdim=True).clamp_(min=1))
    return torch.cat([means, means.new_ones(len(means), 1)], dim=1)


def attention_on_inputs(alphas: Float[Tensor, " alpha"]) -> Float[Tensor, "output 1 input"]:
    """Return the factor of each input: alpha on distinct tokens, 1 - alpha on common ones, 1 or 0 on the constant.

    The outputs are the collapsed ones, which have a bias, and then the factorized ones, which do not.
    """
    reach = alphas[:, None].repeat(2, VOCABULARY + 1)
    reach[:, :COMMON] = 1 - reach[:, :COMMON]
    reach[: len(alphas), -1] = 1
    reach[len(alphas) :, -1] = 0
    return reach[:, None, :]


def linear_start(alphas: int, d_head: int, generator: np.random.Generator, dtype: torch.dtype) -> OutputWeights:
    """Return weights and bias uniform in +-1/sqrt(inputs), torch.nn.Linear's default, the same for every alpha."""

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
    """Return the gradients of every run's mean cross-entropy, by hand.

        dL/dM = mean (p - e_label) (reach x)'      dL/dW_O = dL/dM W_V'      dL/dW_V = W_O' dL/dM

    Args:
        weights: where to take them.
        reach: from `attention_on_inputs`.
        inputs: x, from `group_means`.
        targets: mean e_label x'; it depends on no weight, so that it is formed apart, for many steps at once.
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
    """Return the mean cross-entropy of every run: the collapsed outputs, then the factorized ones."""
    log_probabilities = torch.log_softmax(_logits(_outputs(weights, reach), inputs), dim=1)
    return -log_probabilities[:, label, torch.arange(len(label))].mean(dim=1, dtype=torch.float64)


def _outputs(weights: OutputWeights, reach: Tensor) -> Tensor:
    """Every run's map from group means to logits, the attention folded into it: the runs then share their input."""
    return torch.cat([weights.collapsed, weights.W_O @ weights.W_V]).mul_(reach)


def _logits(outputs: Tensor, inputs: Tensor) -> Tensor:
    """Logits [output, class, sequence]: a softmax over four adjacent numbers would take as long as all the rest."""
    return (outputs.flatten(0, 1) @ inputs.T).view(*outputs.shape[:2], len(inputs))


def _batches(
    task: FiftyTokenTask, steps: int, batch: int, generator: np.random.Generator, dtype: torch.dtype
) -> Iterator[tuple[Tensor, Tensor]]:
    """The inputs and the targets of every step, drawn for many steps at a time since single draws are slow."""
    for first in range(0, steps, max(1, _DRAWN_AT_ONCE // batch)):
        count = min(steps - first, max(1, _DRAWN_AT_ONCE // batch))
        sequences = task.sample_sequences(count * batch, generator)
        inputs = group_means(sequences, dtype).view(count, batch, -1)
        one_hot = torch.nn.functional.one_hot(sequences.label, CLASSES).to(dtype).view(count, batch, -1)
        yield from zip(inputs, one_hot.mT @ inputs / batch, strict=True)


def _demand(alphas: Sequence[float], **positive: int | float) -> None:
    if not alphas or not all(0 <= alpha <= 1 for alpha in alphas):
        raise CallError(f"alphas are shares of attention, from 0 to 1, at least one; got {tuple(alphas)}")
    for name, value in positive.items():
        if value <= 0:
            raise CallError(f"{name} must be positive; got {value}")
