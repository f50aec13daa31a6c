"""Plausibility: how well a ranking of tokens agrees with what people marked as their reason."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float64
from torch import Tensor

from ....circuits.errors import CallError
from ...tasks.example import Example
from ..intervals import DEFAULT, Bootstrap, mean_intervals
from ..measures.checks import demand_rows
from .rationale_agreement import average_precision, random_average_precision, span_agreement, token_f1, trapezoid_area

#: Against what an example is held that several people marked: each one's tokens, the figures being averaged over the
#: people, or the tokens that any of them marked.
Annotators = Literal["mean", "union"]

#: Readings of the figures.
PLAUSIBILITY_READINGS = {
    "token F1": "F1 of the k tokens of the highest weights against the marked ones, averaged over examples",
    "IOU F1": "F1 of the spans of those tokens, a span being right where it shares at least half of its union with a "
    "marked one, from precision and recall averaged over examples",
    "average precision": "mean, over the marked tokens, of the precision of the ranking down to each: the area under "
    "the precision-recall curve by steps",
    "AUPRC": "area under the precision-recall curve by trapezoids, as ERASER's scorer has it; of tied weights it makes "
    "too much",
}
#: Of the figures those whose average under random rankings has a formula.
_WITH_CHANCE = ("token_f1", "average_precision")


@dataclass(frozen=True)
class Rationales:
    """How rankings are held against rationales. Special tokens take no part.

    Attributes:
        share: of an example's n tokens the first k = ceil(share n) are taken as marked by the model, at least 1; None
            for the mean share that people marked in these examples.
        annotators: against what an example is held that several people marked.
        iou: from which intersection over union on two spans agree; below a half a span could agree with several.

    Raises:
        CallError: a setting is out of its range.
    """

    share: float | None = None
    annotators: Annotators = "mean"
    iou: float = 0.5

    def __post_init__(self) -> None:
        """Refuse settings out of their range."""
        if self.share is not None and not 0 < self.share <= 1:
            raise CallError(f"share is that of the tokens, above 0 and at most 1; got {self.share}")
        if self.annotators not in ("mean", "union"):
            raise CallError(f"annotators should be 'mean' or 'union'; got {self.annotators!r}")
        if not 0.5 <= self.iou <= 1:
            raise CallError(f"iou is a share, from 0.5 to 1; got {self.iou}")


#: As ERASER's scorer does with one rationale an example.
ERASER_RATIONALES = Rationales()


@dataclass(frozen=True)
class Plausibility:
    """What `plausibility` found.

    Attributes:
        table: a row for each example and method, with the columns example (its number among those given), id, group,
            method, k, tokens (of so many), token_f1, iou_precision, iou_recall, average_precision, auprc (the last two
            NaN where every token is marked, and there is nothing to rank), and token_f1_chance and
            average_precision_chance, what a random ranking gives on average.
        share: of the tokens, that k is taken from.
        settings: how rankings were held against rationales.
        left_out: how many examples took no part, by reason.
    """

    table: pd.DataFrame
    share: float
    settings: Rationales
    left_out: tuple[tuple[str, int], ...]

    def summary(self, settings: Bootstrap = DEFAULT) -> pd.DataFrame:
        """Return the figures of each method with their intervals over examples.

        Columns: method, figure, reading, value, low, high, chance (NaN where no formula is known: see the method
        random), examples and interval.
        """
        methods = self.table["method"].unique().tolist()
        parts = []
        for figure, reading in PLAUSIBILITY_READINGS.items():
            column = figure.lower().replace(" ", "_")
            of = _f1_of_means if figure == "IOU F1" else None
            names = ("iou_precision", "iou_recall") if of else (column,)
            values = np.concatenate([self._by_method(name, methods) for name in names])
            found = mean_intervals(values[:, None], settings, of=of)
            chance = [math.nan] * len(methods)
            if column in _WITH_CHANCE:
                chance = self.table.groupby("method", sort=False)[f"{column}_chance"].mean().tolist()
            parts.append(found.assign(method=methods, figure=figure, reading=reading, chance=chance))
        columns = ["method", "figure", "reading", "value", "low", "high", "chance", "examples", "interval"]
        return pd.concat(parts).sort_index(kind="stable", ignore_index=True)[columns]

    def _by_method(self, column: str, methods: list[str]) -> Float64[np.ndarray, "method example"]:
        return np.stack([self.table[column][self.table["method"] == method].to_numpy() for method in methods])


def plausibility(
    examples: Sequence[Example],
    rows: Mapping[str, Sequence[Float64[Tensor, " _token"]]],
    settings: Rationales = ERASER_RATIONALES,
) -> Plausibility:
    """Hold rankings against the tokens that people marked.

    Args:
        examples: of any length; those without a relevant token are left out.
        rows: for each method and example the weights of its tokens, in any unit; of equal ones the earlier goes first.
        settings: what is held against what.

    Raises:
        CallError: the rows are not those of the examples, or no example takes part.
        QkovError: a weight is not finite.

    Source: DeYoung et al., "ERASER: A Benchmark to Evaluate Rationalized NLP Models", 2020, section 4.1, and its
    scorer, which counts an intersection over union of just the threshold.
    """
    if not rows:
        raise CallError("expected the rows of at least one method, got none")
    for method, given in rows.items():
        demand_rows(method, given, examples)
    marked: dict[int, list[Bool[np.ndarray, " token"]]] = {}
    left_out: Counter[str] = Counter()
    for number, example in enumerate(examples):
        masks = _rationales(example, settings.annotators)
        if masks:
            marked[number] = masks
        else:
            cut = example.cut and example.relevance is None
            left_out["whose relevant tokens were cut off" if cut else "without a relevant token"] += 1
    if not marked:
        why = ", ".join(f"{count} {reason}" for reason, count in left_out.items()) or "none was given"
        raise CallError(f"no example can be held against a rationale: {why}")
    share = settings.share or float(np.mean([np.mean(masks) for masks in marked.values()]))
    table = [
        {
            "example": number,
            "id": examples[number].id,
            "group": examples[number].group,
            "method": method,
            **_figures(given[number].numpy()[_countable(examples[number])], masks, share, settings.iou),
        }
        for method, given in rows.items()
        for number, masks in marked.items()
    ]
    return Plausibility(pd.DataFrame(table), share, settings, tuple(left_out.items()))


def _rationales(example: Example, annotators: Annotators) -> list[Bool[np.ndarray, " token"]]:
    """The rationales that an example is held against, over the tokens that are not special."""
    masks = [mask for mask in (np.array(given)[_countable(example)] for given in example.relevant) if mask.any()]
    return [np.any(masks, axis=0)] if masks and annotators == "union" else masks


def _countable(example: Example) -> Bool[np.ndarray, " token"]:
    """Which tokens are not special."""
    return ~np.array(example.is_special)


def _figures(
    weights: Float64[np.ndarray, " token"], masks: list[Bool[np.ndarray, " token"]], share: float, iou: float
) -> dict[str, int | float]:
    tokens = len(weights)
    k = max(1, math.ceil(round(share * tokens, 9)))
    taken = np.zeros(tokens, dtype=bool)
    taken[np.argsort(-weights, kind="stable")[:k]] = True
    figures = [_against(weights, taken, mask, iou) for mask in masks]
    return {"k": k, "tokens": tokens} | {name: _mean(one[name] for one in figures) for name in figures[0]}


def _against(
    weights: Float64[np.ndarray, " token"],
    taken: Bool[np.ndarray, " token"],
    mask: Bool[np.ndarray, " token"],
    iou: float,
) -> dict[str, float]:
    tokens, k, marked = len(mask), int(taken.sum()), int(mask.sum())
    precision, recall = span_agreement(taken, mask, iou)
    # Where every token is marked there is nothing to rank.
    ranked = marked < tokens
    return {
        "token_f1": token_f1(taken, mask),
        "iou_precision": precision,
        "iou_recall": recall,
        "average_precision": average_precision(weights, mask) if ranked else math.nan,
        "auprc": trapezoid_area(weights, mask) if ranked else math.nan,
        # A random k of the tokens holds k marked / tokens marked ones on average.
        "token_f1_chance": 2 * k * marked / tokens / (k + marked),
        "average_precision_chance": random_average_precision(tokens, marked) if ranked else math.nan,
    }


def _mean(values: Iterable[float]) -> float:
    """The mean of those that are known."""
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def _f1_of_means(means: Float64[np.ndarray, "figure resample"]) -> Float64[np.ndarray, "method resample"]:
    """F1 of every method, from the precisions of all and then their recalls."""
    precision, recall = np.split(means, 2)
    total = precision + recall
    return np.divide(2 * precision * recall, total, out=np.zeros_like(total), where=total > 0)
