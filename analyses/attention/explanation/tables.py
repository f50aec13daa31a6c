"""The tables of an explanation: examples, their tokens, methods, and curves against the cut."""

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from ...tasks.example import Example, Task
from ..intervals import mean_intervals
from ..models.alternatives import Answers
from ..models.tokenisers import Written
from ..rationales.faithfulness import MEASURED, RANDOM, Faithfulness
from ..rationales.plausibility import Plausibility
from ..relevance.compared_runs import ALL_TOKENS
from ..relevance.relevance import RelevantAttention
from .rows import MethodRows
from .settings import ExplanationSettings

#: The figures of a method beside those of faithfulness.
MASS, AGREEMENT = "mass on relevant tokens", "average precision"


def beyond_random(measure: str) -> str:
    """Return the name of a figure that is a method's less that of random rankings of the same examples."""
    return f"{measure} beyond random"


def example_table(task: Task, answers: Answers, main: RelevantAttention | None, name: Written) -> pd.DataFrame:
    """Return a row for each example; see `Explanation`."""
    examples = task.in_tokens
    table = pd.DataFrame(
        {
            "example": range(len(examples)),
            "id": [example.id for example in examples],
            "group": [example.group for example in examples],
            "text": [example.text for example in examples],
            "tokens": [len(example.tokens) for example in examples],
            "relevant_tokens": [0 if (r := example.relevance) is None else int((r > 0).sum()) for example in examples],
            "cut": [example.cut for example in examples],
            "label": pd.array([example.label for example in examples], dtype="Int64"),
            "predicted": answers.predicted,
            "right_answer": [
                "" if example.label is None else _in_words(task, example, example.label, name) for example in examples
            ],
            "answer": [
                _in_words(task, example, int(predicted), name)
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
    """Return a row for each token of each example; see `Explanation`."""
    numbers = np.repeat(np.arange(len(examples)), [len(example.tokens) for example in examples])
    tokens = [token for example in examples for token in example.tokens]
    known = {token: name([token]) for token in set(tokens)}
    spans = [span for example in examples for span in example.spans or [(-1, -1)] * len(example.tokens)]
    relevance = [
        np.zeros(len(example.tokens)) if (given := example.relevance) is None else given.numpy() for example in examples
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
            "special": [special for example in examples for special in example.is_special],
            "relevance": np.concatenate(relevance),
            "readout": positions == np.array(rows.readouts)[numbers],
            **{method: np.concatenate([row.numpy() for row in given]) for method, given in rows.rows.items()},
        }
    )


def method_table(
    faithful: Faithfulness, relevance: pd.DataFrame, agreement: Plausibility | None, settings: ExplanationSettings
) -> pd.DataFrame:
    """Return a row for each method and figure, with its interval over examples."""
    summary = faithful.summary(settings.bootstrap)
    parts = [summary[summary["order"] == "given"].rename(columns={"measure": "figure"})]
    parts += [_less_random(faithful, measure, settings) for measure in MEASURED if RANDOM in settings.methods]
    if agreement is not None:
        plausible = agreement.summary(settings.bootstrap)
        parts.append(plausible[plausible["figure"] == AGREEMENT])
        mass = relevance[(relevance["figure"] == "MRTA") & (relevance["tokens"] == ALL_TOKENS)]
        parts.append(mass.assign(figure=MASS))
    table = pd.concat(parts, ignore_index=True)
    return table.reindex(columns=["method", "figure", "value", "low", "high", "chance", "examples", "interval"])


def _less_random(faithful: Faithfulness, measure: str, settings: ExplanationSettings) -> pd.DataFrame:
    """What each method's figure is beyond that of random rankings, example by example: their spread is in common."""
    given = faithful.aopc().query("order == 'given'")
    by_method = given.pivot_table(index="example", columns="method", values=measure, sort=False)
    others = by_method.drop(columns=RANDOM)
    less = others.sub(by_method[RANDOM], axis=0)
    found = mean_intervals(less.to_numpy().T[:, None], settings.bootstrap)
    return found.assign(method=list(others.columns), figure=beyond_random(measure))


def curve_table(faithful: Faithfulness) -> pd.DataFrame:
    """Return means over examples for each method, order and cut; of random rankings the band of their draws, too."""
    curves = faithful.curves()
    columns = [f"{measure}_{edge}" for measure in MEASURED for edge in ("lowest", "highest")]
    if RANDOM not in set(curves["method"]):
        return curves.assign(**dict.fromkeys(columns, math.nan))
    band = faithful.random_band()[["cut", *columns]].assign(method=RANDOM)
    return curves.merge(band, on=["method", "cut"], how="left")


def _in_words(task: Task, example: Example, alternative: int, name: Written) -> str:
    """An alternative as people would say it."""
    if task.classes:
        return task.classes[alternative]
    if example.continuations:
        return name(example.continuations[alternative])
    return name([alternative])
