"""The rows of all methods for the same examples and the same predictions, the model run no more often than it takes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float64, Int
from torch import Tensor

from ....circuits.errors import QkovError
from ...tasks.example import Example
from ..measures.paper_readout import PaperReading
from ..measures.registry import STREAMED, attention_rows
from ..models.model import AttentionModel, Batch, length_buckets
from ..rationales.attribution import Attributions, attribute
from .settings import ExplanationSettings

#: Gradients take what every layer computed to be held: so many times fewer tokens go through the model at once.
_HELD_FOR_GRADIENTS = 4

#: Takes how much is done, of how much, and what it is.
Progress = Callable[[int, int, str], None]
#: Takes a batch, the row of every head and where they are read.
HeadSink = Callable[[Batch, Float64[Tensor, "batch layer head position"], Int[Tensor, " batch"]], None]


@dataclass(frozen=True, eq=False)
class MethodRows:
    """Weights of every example's tokens.

    Attributes:
        rows: by method, a row for each example.
        readouts: for each example the position at which attention is read.
        deltas: of integrated gradients, where they are among the methods: see `Attributions`.
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

    Measures that need maps alone come from one run, layer by layer; the others take runs of their own. Under the
    paper's convention the rollout is read of padded sequences.

    Args:
        model: that predicts.
        examples: of any length.
        targets: for each example the alternative that is explained.
        settings: which methods, and how.
        heads: is given what every head attends to where the prediction is read.
        progress: of each part of the work.

    Raises:
        CallError: an example does not fit the model.
        QkovError: a figure is not finite, or a layer's weights cannot be read.
    """
    reading = settings.paper_reading
    padded = ["rollout"] if reading is not None and "rollout" in settings.methods else []
    streamed = [name for name in settings.methods if name in STREAMED and name not in padded]
    found, readouts = _streamed_rows(model, examples, streamed, settings, heads, progress)
    if reading is not None and padded:
        found["rollout"] = _padded_rows(model, examples, reading, settings.batch_tokens, progress)
    # Every method explains the same alternative, which none has to find again.
    asked = [replace(example, label=target) for example, target in zip(examples, targets, strict=True)]
    deltas = None
    for name in settings.methods:
        if name not in found:
            attributions = _attributions(model, asked, name, settings, progress)
            found[name] = attributions.rows
            deltas = attributions.deltas or deltas
    return MethodRows({name: found[name] for name in settings.methods}, readouts, deltas)


def _streamed_rows(
    model: AttentionModel,
    examples: Sequence[Example],
    measures: list[str],
    settings: ExplanationSettings,
    heads: HeadSink,
    progress: Progress,
) -> tuple[dict[str, list[Float64[Tensor, " _position"]]], list[int]]:
    """Rows of the measures that need maps alone, and where they are read."""
    found: dict[str, list[Tensor]] = {name: [torch.empty(0)] * len(examples) for name in measures}
    readouts = [0] * len(examples)
    done = 0
    for bucket in length_buckets([len(example.tokens) for example in examples], settings.batch_tokens):
        batch = Batch.of([examples[index] for index in bucket], model.pad)
        given = attention_rows(model, batch, measures, settings.rollout)
        heads(batch, given.heads, given.readout)
        for place, index in enumerate(bucket):
            readouts[index] = int(given.readout[place])
            for name, rows in given.measures.items():
                found[name][index] = rows[place, : len(examples[index].tokens)]
        done += len(bucket)
        progress(done, len(examples), "attention maps")
    return found, readouts


def _attributions(
    model: AttentionModel, asked: Sequence[Example], method: str, settings: ExplanationSettings, progress: Progress
) -> Attributions:
    try:
        return attribute(
            model,
            asked,
            method,
            target="label",
            steps=settings.steps,
            seed=settings.seed,
            batch_tokens=max(1, settings.batch_tokens // _HELD_FOR_GRADIENTS),
            progress=lambda done, total: progress(done, total, method),
        )
    except QkovError as error:
        raise type(error)(f"{method}: {error}") from error


def _padded_rows(
    model: AttentionModel, examples: Sequence[Example], reading: PaperReading, batch_tokens: int, progress: Progress
) -> list[Float64[Tensor, " _position"]]:
    """The weights that the padded sequences' own tokens get; what is on padding is lost, as in the paper's figures."""
    at_once = max(1, batch_tokens // reading.padded_length)
    found = []
    for start in range(0, len(examples), at_once):
        some = examples[start : start + at_once]
        for example, row in zip(some, reading.rows(model, reading.batch(some, model.pad)), strict=True):
            own = row[: len(example.tokens)]
            found.append(torch.nn.functional.pad(own, (0, len(example.tokens) - len(own))))
        progress(len(found), len(examples), "attention of padded sequences")
    return found
