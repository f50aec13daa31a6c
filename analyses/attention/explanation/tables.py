"""The tables of an explanation: examples, their tokens, methods, and curves against the cut."""

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from ...tasks.example import Example, Task
from ..intervals import mean_intervals
from ..models.alternatives import Answers
from ..models.tokenisers import Written
from ..rationales.faithfulness import METRICS, RANDOM, Faithfulness
from ..rationales.plausibility import Plausibility
from ..relevance.compared_runs import ALL_TOKENS
from ..relevance.relevance import RelevantAttention
from .rows import MethodRows
from .settings import ExplanationSettings

#: The metrics of a method other than those of faithfulness.
MASS, AVERAGE_PRECISION = "mass on relevant tokens", "average precision"


def beyond_random(metric: str) -> str:
    """Return the name of the metric that is a method's value minus that of random rankings of the same examples."""
    return f"{metric} beyond random"


def example_table(
    task: Task, answers: Answers, main: RelevantAttention | None, name: Written, *, classifies: bool = False
) -> pd.DataFrame:
    """Return one row for each example; see `Explanation.examples`.

    Args:
        task: the task, in tokens.
        answers: the model's answers.
        main: relevant-token attention of the main method; None if no example has a relevant token.
        name: writes tokens as text.
        classifies: whether the alternatives are classes, which have numbers where neither task nor model names them.
    """
    examples = task.in_tokens
    written = _class_in_words if classifies and not task.classes else _in_words
    table = pd.DataFrame(
        {
            "example": range(len(examples)),
            "id": [example.id for example in examples],
            "group": [example.group for example in examples],
            "text": [example.text for example in examples],
            "pair": pd.array([example.pair for example in examples], dtype="string"),
            "tokens": [len(example.tokens) for example in examples],
            "relevant_tokens": [0 if (r := example.relevance) is None else int((r > 0).sum()) for example in examples],
            "cut": [example.cut for example in examples],
            "label": pd.array([example.label for example in examples], dtype="Int64"),
            "predicted": answers.predicted,
            "right_answer": [
                "" if example.label is None else written(task, example, example.label, name) for example in examples
            ],
            "answer": [
                written(task, example, int(predicted), name)
                for example, predicted in zip(examples, answers.predicted, strict=True)
            ],
            "right": answers.right,
            "probability": answers.probability,
        }
    )
    table["correct"] = (table["label"] == table["predicted"]).astype("boolean")
    columns = ["attention", "chance"]
    if main is None:
        return table.assign(**dict.fromkeys(columns, math.nan))
    return table.join(main.table.set_index("example")[columns], on="example")


def token_table(examples: Sequence[Example], rows: MethodRows, name: Written) -> pd.DataFrame:
    """Return one row for each token of each example; see `Explanation.tokens`.

    Args:
        examples: the examples.
        rows: rows of all methods.
        name: writes tokens as text.
    """
    numbers = np.repeat(np.arange(len(examples)), [len(example.tokens) for example in examples])
    tokens = [token for example in examples for token in example.tokens]
    known = {token: name([token]) for token in set(tokens)}
    in_pair = [of_pair for example in examples for of_pair in example.in_pair or [False] * len(example.tokens)]
    types = [kind for example in examples for kind in example.token_types or [None] * len(example.tokens)]
    spans = [span for example in examples for span in example.spans or [(-1, -1)] * len(example.tokens)]
    relevance = [
        np.zeros(len(example.tokens)) if (weights := example.relevance) is None else weights.numpy()
        for example in examples
    ]
    positions = np.concatenate([np.arange(len(example.tokens)) for example in examples])
    return pd.DataFrame(
        {
            "example": numbers,
            "position": positions,
            "token": tokens,
            "written": [known[token] for token in tokens],
            "start": [start for start, _ in spans],
            "end": [end for _, end in spans],
            "in_pair": in_pair,
            "token_type": pd.array(types, dtype="Int64"),
            "special": [special for example in examples for special in example.is_special],
            "relevance": np.concatenate(relevance),
            "readout": positions == np.array(rows.readouts)[numbers],
            **{method: np.concatenate([row.numpy() for row in of_method]) for method, of_method in rows.rows.items()},
        }
    )


def method_table(
    faithful: Faithfulness, relevance: pd.DataFrame, plausible: Plausibility | None, settings: ExplanationSettings
) -> pd.DataFrame:
    """Return one row for each method and metric, with its interval over examples; see `Explanation.methods`.

    Args:
        faithful: results on faithfulness.
        relevance: MRTA, AC and ACMC of every method.
        plausible: results on plausibility; None if no example has a relevant token.
        settings: settings of the explanation.
    """
    summary = faithful.summary(settings.bootstrap)
    parts = [summary[summary["order"] == "given"]]
    parts += [_less_random(faithful, metric, settings) for metric in METRICS if RANDOM in settings.methods]
    if plausible is not None:
        by_metric = plausible.summary(settings.bootstrap)
        parts.append(by_metric[by_metric["metric"] == AVERAGE_PRECISION])
        mass = relevance[(relevance["metric"] == "MRTA") & (relevance["tokens"] == ALL_TOKENS)]
        parts.append(mass.assign(metric=MASS))
    table = pd.concat(parts, ignore_index=True)
    return table.reindex(columns=["method", "metric", "value", "low", "high", "chance", "examples", "interval"])


def _less_random(faithful: Faithfulness, metric: str, settings: ExplanationSettings) -> pd.DataFrame:
    """Return each method's metric minus that of random rankings, computed example by example.

    Examples are paired because the two share much of the spread between examples.
    """
    given = faithful.aopc().query("order == 'given'")
    by_method = given.pivot_table(index="example", columns="method", values=metric, sort=False)
    others = by_method.drop(columns=RANDOM)
    less = others.sub(by_method[RANDOM], axis=0)
    means = mean_intervals(less.to_numpy().T[:, None], settings.bootstrap)
    return means.assign(method=list(others.columns), metric=beyond_random(metric))


def curve_table(faithful: Faithfulness) -> pd.DataFrame:
    """Return the means over examples for each method, order and cut, with the band of the random method's draws."""
    curves = faithful.curves()
    columns = [f"{metric}_{edge}" for metric in METRICS for edge in ("lowest", "highest")]
    if RANDOM not in set(curves["method"]):
        return curves.assign(**dict.fromkeys(columns, math.nan))
    band = faithful.random_band()[["cut", *columns]].assign(method=RANDOM)
    return curves.merge(band, on=["method", "cut"], how="left")


def _in_words(task: Task, example: Example, alternative: int, name: Written) -> str:
    """Return the name of an alternative: that of a class, or the text of a continuation or token."""
    if task.classes:
        return task.classes[alternative]
    if example.continuations:
        return name(example.continuations[alternative])
    return name([alternative])


def _class_in_words(_task: Task, _example: Example, alternative: int, _name: Written) -> str:
    return f"class {alternative}"
