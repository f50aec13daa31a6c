"""The rows of all methods for the same examples and predictions, with as few runs of the model as possible."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float64, Int
from torch import Tensor

from ....circuits.errors import QkovError
from ...tasks.example import Example
from ..measures.attention_rows import attention_rows
from ..measures.paper_readout import PaperReadout
from ..measures.registry import streamed_measures
from ..models.model import AttentionModel, Batch, length_buckets
from ..rationales.attribution import Attributions, attribute
from .settings import ExplanationSettings

#: Gradients need the results of every layer in memory, so this many times fewer tokens go through the model at once.
_HELD_FOR_GRADIENTS = 4

#: Called with the amount of work that is done, the amount of all, and the name of the work.
Progress = Callable[[int, int, str], None]
#: Called with a batch, the row of every head, and the readout positions.
HeadSink = Callable[[Batch, Float64[Tensor, "batch layer head position"], Int[Tensor, " batch"]], None]


@dataclass(frozen=True, eq=False)
class MethodRows:
    """The weights that every method gives to every example's tokens.

    Attributes:
        rows: by method, one row for each example.
        readouts: readout position of each example.
        deltas: convergence deltas of integrated gradients, if they are among the methods; see `Attributions`.
    """

    rows: dict[str, list[Float64[Tensor, " _position"]]]
    readouts: list[int]
    deltas: list[float] | None


def method_rows(
    model: AttentionModel,
    examples: Sequence[Example],
    targets: Sequence[int],
    settings: ExplanationSettings,
    heads: HeadSink,
    *,
    progress: Progress,
) -> MethodRows:
    """Return the rows of every method.

    The measures that need only attention maps share one run of the model; the other methods run it themselves. In the
    paper's convention the rollout is read from padded sequences.

    Args:
        model: the model that predicts.
        examples: examples of any length.
        targets: for each example the number of the alternative that is explained.
        settings: which methods, and their settings.
        heads: receives every head's attention at the readout positions, batch by batch.
        progress: called as each part of the work advances.

    Raises:
        CallError: An example does not fit the model.
        QkovError: A value is not finite, or a layer's weights cannot be read.
    """
    paper = settings.paper_readout
    padded = ["rollout"] if paper is not None and "rollout" in settings.methods else []
    known = streamed_measures()
    streamed = [name for name in settings.methods if name in known and name not in padded]
    rows, readouts = _streamed_rows(model, examples, streamed, settings, heads, progress)
    if paper is not None and padded:
        rows["rollout"] = _padded_rows(model, examples, paper, settings.batch_tokens, progress)
    # Every method explains the same alternative; passing it as the label saves each of them a run.
    labelled = [replace(example, label=target) for example, target in zip(examples, targets, strict=True)]
    deltas = None
    for name in settings.methods:
        if name not in rows:
            attributions = _attributions(model, labelled, name, settings, progress)
            rows[name] = attributions.rows
            deltas = attributions.deltas or deltas
    return MethodRows({name: rows[name] for name in settings.methods}, readouts, deltas)


def _streamed_rows(
    model: AttentionModel,
    examples: Sequence[Example],
    measures: list[str],
    settings: ExplanationSettings,
    heads: HeadSink,
    progress: Progress,
) -> tuple[dict[str, list[Float64[Tensor, " _position"]]], list[int]]:
    """Return the rows of the measures that need only attention maps, and the readout positions."""
    rows: dict[str, list[Tensor]] = {name: [torch.empty(0)] * len(examples) for name in measures}
    readouts = [0] * len(examples)
    done = 0
    for bucket in length_buckets([len(example.tokens) for example in examples], settings.batch_tokens):
        batch = Batch.of([examples[index] for index in bucket], model.pad)
        results = attention_rows(model, batch, measures, settings.rollout)
        heads(batch, results.heads, results.readout)
        for row, index in enumerate(bucket):
            readouts[index] = int(results.readout[row])
            for name, of_batch in results.measures.items():
                rows[name][index] = of_batch[row, : len(examples[index].tokens)]
        done += len(bucket)
        progress(done, len(examples), "attention maps")
    return rows, readouts


def _attributions(
    model: AttentionModel, examples: Sequence[Example], method: str, settings: ExplanationSettings, progress: Progress
) -> Attributions:
    """Return the attributions of a method that runs the model itself; errors name the method."""
    try:
        return attribute(
            model,
            examples,
            method,
            target="label",
            steps=settings.steps,
            seed=settings.seed,
            rollout=settings.rollout,
            batch_tokens=max(1, settings.batch_tokens // _HELD_FOR_GRADIENTS),
            progress=lambda done, total: progress(done, total, method),
        )
    except QkovError as error:
        raise type(error)(f"{method}: {error}") from error


def _padded_rows(
    model: AttentionModel, examples: Sequence[Example], paper: PaperReadout, batch_tokens: int, progress: Progress
) -> list[Float64[Tensor, " _position"]]:
    """Return the weights of each sequence's own tokens; the weight on padding is dropped, as in the paper's code."""
    at_once = max(1, batch_tokens // paper.padded_length)
    rows = []
    for start in range(0, len(examples), at_once):
        some = examples[start : start + at_once]
        for example, row in zip(some, paper.rows(model, paper.batch(some, model.pad)), strict=True):
            own = row[: len(example.tokens)]
            rows.append(torch.nn.functional.pad(own, (0, len(example.tokens) - len(own))))
        progress(len(rows), len(examples), "attention of padded sequences")
    return rows
