"""Where a model's attention goes on a task, and whether it is faithful: all methods on the same examples, as tables."""

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
from ..measures.paper_readout import PaperReadout
from ..models.alternatives import Answers, answers, are_compared, label_of
from ..models.model import AttentionModel
from ..models.task_fitting import with_class_names
from ..models.tokenisers import blank_labels, written
from ..rationales.faithfulness import RANDOM, Faithfulness, faithfulness
from ..rationales.plausibility import plausibility
from ..relevance.dtap import dtap
from ..relevance.heads import HeadRelevance
from ..relevance.relevance import Relevance, RelevantAttention, relevance_of
from ..relevance.relevant_tokens import Counting
from ..relevance.summary import relevance_summary
from .rows import MethodRows, Progress, method_rows
from .settings import ExplanationSettings
from .tables import curve_table, example_table, method_table, token_table


@dataclass(frozen=True, eq=False)
class Explanation:
    """The results of `explain` as tables, from which a report is made.

    Attributes:
        description: the model, the task, the settings, what was left out and why, and the versions of libraries.
        examples: one row for each example, with the columns example (its number), id, group, text, pair (the second
            text, if there is one), tokens and relevant_tokens (their numbers), cut, label, predicted, right_answer and
            answer (both in words), right (probability of the label), probability (of the predicted alternative),
            correct, and attention and chance (the main method's attention on relevant tokens, and its chance level).
        tokens: one row for each token, with the columns example, position, token (id), written, start and end (in its
            text), in_pair (whether that is the second text), token_type (missing if the model was given none), special,
            relevance, readout, and the weight that each method gives to the token.
        methods: one row for each method and metric, with the columns method, metric, value, low, high, chance, examples
            and interval.
        faithfulness: one row for each example, method, order, draw and cut; see `Faithfulness`.
        curves: one row for each method, order and cut, with the columns method, order, cut, k, comprehensiveness,
            sufficiency and, for the random method, the lowest and the highest of its draws' averages.
        relevance: MRTA, AC and ACMC of every method; see `relevance_summary`.
        dtap: cells of the main method's DTAP; see `Dtap`.
        heads: attention of each head on relevant tokens; see `HeadRelevance`.
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

    All methods use the same encoded examples and the same predictions. Probabilities are those among an example's
    continuations if every example has several, those of the classes for a classifier, and otherwise those in the whole
    vocabulary. If no example has a relevant token, the tables about relevant tokens are empty.

    Args:
        model: the model that predicts.
        task: a task in tokens of the model; see `fit_task`.
        settings: which methods are measured, and how; by default `ExplanationSettings()`.
        tokeniser: tokenizer that gives the tokens' names; without one they are named by their ids.
        progress: called with the amount of work that is done, the amount of all, and the name of the work.

    Returns:
        The results as tables.

    Raises:
        CallError: The task, the settings and the model do not fit together.
        QkovError: A value that the model gives is not finite.
    """
    settings = settings or ExplanationSettings()
    note = progress or _silent
    task = with_class_names(task, model)
    examples = task.in_tokens
    compared = are_compared(examples)
    predicted = answers(
        model,
        task,
        among_alternatives=compared,
        batch_tokens=settings.batch_tokens,
        progress=lambda done, total: note(done, total, "predictions"),
    )
    if settings.target == "predicted":
        targets = predicted.predicted.tolist()
    else:
        targets = [label_of(example, number) for number, example in enumerate(examples)]
    counting = Counting(convention=settings.convention)
    heads = HeadRelevance(model.causal, counting)
    rows = method_rows(model, examples, targets, settings, heads.update, progress=note)
    faithful = faithfulness(
        model,
        examples,
        {name: of_method for name, of_method in rows.rows.items() if name != RANDOM},
        settings.perturbation,
        target=settings.target,
        among_alternatives=compared,
        draws=settings.draws if RANDOM in settings.methods else 0,
        seed=settings.seed,
        batch_tokens=settings.batch_tokens,
        progress=lambda done, total: note(done, total, "perturbed inputs"),
    )
    relevant = _relevant(model, examples, rows, predicted, settings)
    plausible = plausibility(examples, rows.rows) if relevant else None
    main = relevant.get(settings.main)
    summaries = [
        relevance_summary(of_method, settings.thresholds, settings.bootstrap).assign(method=name)
        for name, of_method in relevant.items()
    ]
    relevance = pd.concat(summaries, ignore_index=True) if summaries else pd.DataFrame()
    has_cells = main is not None and main.table["probability"].notna().any()
    name = written(tokeniser)
    return Explanation(
        description=described(model, task, settings, compared, rows, faithful, main, tokeniser),
        examples=example_table(task, predicted, main, name, classifies=model.classifies),
        tokens=token_table(examples, rows, name),
        methods=method_table(faithful, relevance, plausible, settings),
        faithfulness=faithful.table,
        curves=curve_table(faithful),
        relevance=relevance,
        dtap=dtap(main, task.attention_bins, task.probability_bins, settings=settings.bootstrap).cells
        if main is not None and has_cells
        else pd.DataFrame(),
        heads=heads.compute(settings.bootstrap) if relevant else pd.DataFrame(),
    )


def _relevant(
    model: AttentionModel,
    examples: Sequence[Example],
    rows: MethodRows,
    predicted: Answers,
    settings: ExplanationSettings,
) -> dict[str, RelevantAttention]:
    """Return the attention of each method on relevant tokens; for signed attributions, their positive part.

    A method is left out if none of its weights is above zero in any example with a relevant token.
    """
    has_relevant = [example.relevance is not None for example in examples]
    counting, paper = Counting(convention=settings.convention), settings.paper_readout
    relevant = {}
    for name, of_method in rows.rows.items():
        positive = [row.clamp_min(0) for row in of_method]
        if not any(has and bool(row.any()) for has, row in zip(has_relevant, positive, strict=True)):
            continue
        if paper is not None and name == "rollout":
            relevant[name] = _of_padded_sequences(model, examples, positive, paper, predicted)
        else:
            relevant[name] = relevance_of(
                examples,
                positive,
                rows.readouts,
                causal=model.causal,
                probabilities=predicted.right,
                settings=counting,
            )
    return relevant


def _of_padded_sequences(
    model: AttentionModel,
    examples: Sequence[Example],
    rows: Sequence[Float64[Tensor, " _position"]],
    paper: PaperReadout,
    predicted: Answers,
) -> RelevantAttention:
    """Return relevant-token attention in the paper's convention.

    The chance level is over all positions to which attention could go, including padding that is not masked.
    """
    batch = paper.batch(examples, model.pad)
    padded = torch.zeros(batch.mask.shape, dtype=torch.float64)
    for number, row in enumerate(rows):
        own = row[: paper.padded_length]
        padded[number, : len(own)] = own
    relevance = Relevance(model.causal, Counting(convention="paper"))
    relevance.update(batch, padded, paper.readout(batch), probabilities=predicted.right)
    return relevance.compute()


def _silent(done: int, total: int, what: str) -> None:
    """Ignore progress."""


def described(
    model: AttentionModel,
    task: Task,
    settings: ExplanationSettings,
    compared: bool,
    rows: MethodRows,
    faithful: Faithfulness,
    main: RelevantAttention | None,
    tokeniser: Any | None = None,
) -> dict[str, Any]:
    """Return the description of an explanation, in the form in which it is read back from JSON.

    Args:
        model: the model that was explained.
        task: the task, in tokens.
        settings: settings of the explanation.
        compared: whether probabilities are those among an example's continuations.
        rows: rows of all methods.
        faithful: results on faithfulness.
        main: relevant-token attention of the main method; None if no example has a relevant token.
        tokeniser: the model's tokenizer, which tells which labels are white space; None if there is none.
    """
    examples = task.in_tokens
    has_next_tokens = not model.classifies and tokeniser is not None
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
            "mode": model.mode,
            "chosen_checkpoint": model.chosen_checkpoint,
        },
        "task": {
            "name": task.name,
            "relevant": task.relevant,
            "classes": list(task.classes),
            "examples": len(examples),
            "pairs": sum(example.pair is not None for example in examples),
            "spaced_labels": sum(example.blanks > 0 for example in examples),
            "blank_labels": blank_labels(examples, tokeniser) if has_next_tokens else 0,
            "cut_examples": sum(example.cut > 0 for example in examples),
            "attention_bins": list(task.attention_bins),
            "probability_bins": list(task.probability_bins),
        },
        "settings": _described_settings(settings),
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


def _described_settings(settings: ExplanationSettings) -> dict[str, Any]:
    described: dict[str, Any] = asdict(settings) | {"convention": settings.convention, "main": settings.main}
    if settings.rollout.layers is not None:
        described["rollout"]["layers"] = list(settings.rollout.layers)
    return described
