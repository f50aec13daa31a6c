"""Where a model's attention goes on a task, and whether it is faithful: measures of the same examples, in tables."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float64
from torch import Tensor

from ..tasks.example import Example, Task
from .alternatives import label_of
from .answers import Answers, answers, are_compared
from .dtap import dtap
from .explanation_description import described
from .explanation_rows import MethodRows, Progress, method_rows
from .explanation_settings import ExplanationSettings
from .explanation_tables import curve_table, example_table, method_table, token_table
from .faithfulness import RANDOM, faithfulness
from .head_relevance import HeadRelevance
from .model import AttentionModel
from .paper_readout import PaperReading
from .plausibility import plausibility
from .relevance import Relevance, RelevantAttention, relevance_of
from .relevance_figures import relevance_summary
from .relevant_tokens import Counting
from .tokenisers import written


@dataclass(frozen=True, eq=False)
class Explanation:
    """Tables of what was measured, from which a report is drawn.

    Attributes:
        description: of the model, the task, the settings, what was left out and why, and versions.
        examples: a row for each: example (its number), id, group, text, tokens, relevant_tokens, cut, label, predicted,
            right_answer and answer (both in words), right (probability of the label), probability (of what is
            predicted), correct, attention and chance (of the main method, on relevant tokens).
        tokens: a row for each token: example, position, token (id), written, start and end (in the text), special,
            relevance, readout, and the weight that each method gives it.
        methods: method, figure, value, low, high, chance, examples.
        faithfulness: of every example, method, order, draw and cut: see `Faithfulness`.
        curves: method, order, cut, k, comprehensiveness and sufficiency; of random, what the lowest and the highest of
            its draws give.
        relevance: MRTA, AC and ACMC of every method of attention: see `relevance_summary`.
        dtap: cells of the main method: see `Dtap`.
        heads: attention of each head on relevant tokens: see `HeadRelevance`.
    """

    description: dict[str, Any]
    examples: pd.DataFrame
    tokens: pd.DataFrame
    methods: pd.DataFrame
    faithfulness: pd.DataFrame
    curves: pd.DataFrame
    relevance: pd.DataFrame
    dtap: pd.DataFrame
    heads: pd.DataFrame


def explain(
    model: AttentionModel,
    task: Task,
    settings: ExplanationSettings | None = None,
    *,
    tokeniser: Any | None = None,
    progress: Progress | None = None,
) -> Explanation:
    """Measure where a model's attention goes on a task, and how faithful it and other attributions are.

    The same encoded examples and the same predictions serve all measures. Probabilities are those among an example's
    continuations where every example has several, those of the classes of a classifier, or else those in the whole
    vocabulary. Where no example has a relevant token, what takes them is left out.

    Args:
        model: that predicts.
        task: in tokens of the model: see `fit_task`.
        settings: what is measured, and how.
        tokeniser: for the tokens' names; without one they are called by their ids.
        progress: called with how much of a part of the work is done, of how much, and which part.

    Raises:
        CallError: the task, the settings and the model do not go together.
        QkovError: a figure of the model is not finite.
    """
    settings = settings or ExplanationSettings()
    note = progress or _silent
    examples = task.in_tokens
    compared = are_compared(examples)
    found = answers(
        model,
        task,
        among_alternatives=compared,
        batch_tokens=settings.batch_tokens,
        progress=lambda done, total: note(done, total, "predictions"),
    )
    if settings.target == "predicted":
        targets = found.predicted.tolist()
    else:
        targets = [label_of(example, number) for number, example in enumerate(examples)]
    counting = Counting(convention=settings.convention)
    heads = HeadRelevance(model.causal, counting)
    rows = method_rows(model, examples, targets, settings, heads.update, progress=note)
    faithful = faithfulness(
        model,
        examples,
        {name: given for name, given in rows.rows.items() if name != RANDOM},
        settings.perturbation,
        target=settings.target,
        among_alternatives=compared,
        draws=settings.draws if RANDOM in settings.methods else 0,
        seed=settings.seed,
        batch_tokens=settings.batch_tokens,
        progress=lambda done, total: note(done, total, "perturbed inputs"),
    )
    relevant = _relevant(model, examples, rows, found, settings)
    agreement = plausibility(examples, rows.rows) if relevant else None
    main = relevant.get(settings.main)
    summaries = [
        relevance_summary(given, settings.thresholds, settings.bootstrap).assign(method=name)
        for name, given in relevant.items()
    ]
    relevance = pd.concat(summaries, ignore_index=True) if summaries else pd.DataFrame()
    has_cells = main is not None and main.table["probability"].notna().any()
    name = written(tokeniser)
    return Explanation(
        description=described(model, task, settings, compared, rows, faithful, main),
        examples=example_table(task, found, main, name),
        tokens=token_table(examples, rows, name),
        methods=method_table(faithful, relevance, agreement, settings),
        faithfulness=faithful.table,
        curves=curve_table(faithful),
        relevance=relevance,
        dtap=dtap(main, task.attention_bins, task.probability_bins, settings=settings.bootstrap).cells
        if main is not None and has_cells
        else pd.DataFrame(),
        heads=heads.compute(settings.bootstrap) if relevant else pd.DataFrame(),
    )


def _relevant(
    model: AttentionModel, examples: Sequence[Example], rows: MethodRows, found: Answers, settings: ExplanationSettings
) -> dict[str, RelevantAttention]:
    """The attention of each method on relevant tokens; of signed attributions, what speaks for the target.

    A method whose weights are nowhere above zero where there is a relevant token has none.
    """
    has_relevant = [example.relevance is not None for example in examples]
    counting, reading = Counting(convention=settings.convention), settings.paper_reading
    relevant = {}
    for name, given in rows.rows.items():
        positive = [row.clamp_min(0) for row in given]
        if not any(has and bool(row.any()) for has, row in zip(has_relevant, positive, strict=True)):
            continue
        if reading is not None and name == "rollout":
            relevant[name] = _of_padded_sequences(model, examples, positive, reading, found)
        else:
            relevant[name] = relevance_of(
                examples,
                positive,
                rows.readouts,
                causal=model.causal,
                probabilities=found.right,
                settings=counting,
            )
    return relevant


def _of_padded_sequences(
    model: AttentionModel,
    examples: Sequence[Example],
    rows: Sequence[Float64[Tensor, " _position"]],
    reading: PaperReading,
    found: Answers,
) -> RelevantAttention:
    """The paper's reading; chance is over all that attention could go to, padding that is not masked among it."""
    batch = reading.batch(examples, model.pad)
    padded = torch.zeros(batch.mask.shape, dtype=torch.float64)
    for place, row in enumerate(rows):
        own = row[: reading.padded_length]
        padded[place, : len(own)] = own
    relevance = Relevance(model.causal, Counting(convention="paper"))
    relevance.update(batch, padded, reading.readout(batch), probabilities=found.right)
    return relevance.compute()


def _silent(done: int, total: int, what: str) -> None:
    """Take progress and show none."""
