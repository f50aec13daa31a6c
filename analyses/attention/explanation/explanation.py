"""Where a model's attention goes on a task, and whether it is faithful: measures of the same examples, in tables."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float64
from torch import Tensor

from ...tasks.example import Example, Task
from ...versions import versions
from ..measures.paper_readout import PaperReading
from ..models.alternatives import Answers, answers, are_compared, label_of
from ..models.model import AttentionModel
from ..models.tokenisers import written
from ..rationales.faithfulness import RANDOM, Faithfulness, faithfulness
from ..rationales.plausibility import plausibility
from ..relevance.dtap import dtap
from ..relevance.figures import relevance_summary
from ..relevance.heads import HeadRelevance
from ..relevance.relevance import Relevance, RelevantAttention, relevance_of
from ..relevance.relevant_tokens import Counting
from .rows import MethodRows, Progress, method_rows
from .settings import ExplanationSettings
from .tables import curve_table, example_table, method_table, token_table


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


def described(
    model: AttentionModel,
    task: Task,
    settings: ExplanationSettings,
    compared: bool,
    rows: MethodRows,
    faithful: Faithfulness,
    main: RelevantAttention | None,
) -> dict[str, Any]:
    """Return it as it comes back from JSON.

    Args:
        model: that was explained.
        task: in tokens.
        settings: of the explanation.
        compared: whether probabilities are those among an example's continuations.
        rows: of the methods.
        faithful: as measured.
        main: relevant-token attention of the main method; None where no example has a relevant token.
    """
    examples = task.in_tokens
    without = {"without a relevant token": len(examples)}
    kind = "classifier" if model.classifies else "causal language model" if model.causal else "masked language model"
    description = {
        "model": {
            "name": model.name,
            "kind": kind,
            "layers": model.layers,
            "heads": model.heads,
            "causal": model.causal,
            "context": model.context,
        },
        "task": {
            "name": task.name,
            "relevant": task.relevant,
            "classes": list(task.classes),
            "examples": len(examples),
            "cut_examples": sum(example.cut > 0 for example in examples),
            "attention_bins": list(task.attention_bins),
            "probability_bins": list(task.probability_bins),
        },
        "settings": asdict(settings) | {"convention": settings.convention, "main": settings.main},
        "probability": "classes" if model.classifies else "continuations" if compared else "vocabulary",
        "left_out": {
            "task": dict(task.left_out),
            "relevance": without if main is None else dict(main.left_out),
            "faithfulness": dict(faithful.left_out),
        },
        "integrated_gradients_delta": None if rows.deltas is None else float(np.abs(rows.deltas).max()),
        "versions": versions(),
    }
    return json.loads(json.dumps(description, allow_nan=False))
