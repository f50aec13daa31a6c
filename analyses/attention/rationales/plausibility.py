"""Plausibility: how well a ranking of tokens matches the tokens that people marked as the reason for a label."""

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
from .rationale_overlap import (
    average_precision,
    random_average_precision,
    span_precision_recall,
    token_f1,
    trapezoid_area,
)

#: What a ranking is compared with if several people marked the example: the tokens of each person, the metrics being
#: averaged over the people, or the tokens that any of them marked.
Annotators = Literal["mean", "union"]

#: What each metric is.
PLAUSIBILITY_DEFINITIONS = {
    "token F1": "F1 of the k tokens with the highest weights against the marked ones, averaged over examples",
    "IOU F1": "F1 of the spans of those tokens, from precision and recall averaged over examples; a span counts as "
    "right if its intersection with a marked span is at least half of their union",
    "average precision": "mean, over the marked tokens, of the precision of the ranking down to each: the area under "
    "the precision-recall curve by steps",
    "AUPRC": "area under the precision-recall curve by trapezoids, as ERASER's scorer computes it; it is too high for "
    "tied weights",
}
#: The metrics whose average over random rankings has a formula.
_WITH_CHANCE = ("token_f1", "average_precision")


@dataclass(frozen=True)
class Rationales:
    """How rankings are compared with rationales. Special tokens take no part.

    Attributes:
        share: of an example's n tokens, the first k = ceil(share n) of the ranking, at least 1, are taken as the
            model's rationale. None for the mean share of tokens that people marked in these examples.
        annotators: what a ranking is compared with if several people marked the example: "mean" or "union".
        iou: intersection over union from which two spans match, from 0.5 to 1; below 0.5 a span could match several.

    Raises:
        CallError: A setting is out of its range.
    """

    share: float | None = None
    annotators: Annotators = "mean"
    iou: float = 0.5

    def __post_init__(self) -> None:
        """Refuse settings that are out of range."""
        if self.share is not None and not 0 < self.share <= 1:
            raise CallError(f"share is a share of the tokens, above 0 and at most 1; got {self.share}")
        if self.annotators not in ("mean", "union"):
            raise CallError(f"annotators should be 'mean' or 'union'; got {self.annotators!r}")
        if not 0.5 <= self.iou <= 1:
            raise CallError(f"iou is a share, from 0.5 to 1; got {self.iou}")


#: The settings of ERASER's scorer for one rationale for each example.
ERASER_RATIONALES = Rationales()


@dataclass(frozen=True)
class Plausibility:
    """The results of `plausibility`.

    Attributes:
        table: one row for each example and method, with the columns example (its number), id, group, method, k, tokens
            (their number), token_f1, iou_precision, iou_recall, average_precision and auprc (these two are NaN if every
            token is marked, since there is nothing to rank), and token_f1_chance and average_precision_chance, the
            averages over random rankings.
        share: share of the tokens from which k is computed.
        settings: how rankings were compared with rationales.
        left_out: number of examples that took no part, by reason.
    """

    table: pd.DataFrame
    share: float
    settings: Rationales
    left_out: tuple[tuple[str, int], ...]

    def summary(self, settings: Bootstrap = DEFAULT) -> pd.DataFrame:
        """Return each metric of each method, averaged over examples, with its interval over examples.

        Args:
            settings: how the intervals are drawn.

        Returns:
            One row for each metric and method, with the columns method, metric, definition, value, low, high, chance,
            examples and interval. The chance level is NaN for metrics without a formula; for these compare with the
            method "random".
        """
        methods = self.table["method"].unique().tolist()
        parts = []
        for metric, definition in PLAUSIBILITY_DEFINITIONS.items():
            column = metric.lower().replace(" ", "_")
            of = _f1_of_means if metric == "IOU F1" else None
            names = ("iou_precision", "iou_recall") if of else (column,)
            values = np.concatenate([self._by_method(name, methods) for name in names])
            intervals = mean_intervals(values[:, None], settings, of=of)
            chance = [math.nan] * len(methods)
            if column in _WITH_CHANCE:
                chance = self.table.groupby("method", sort=False)[f"{column}_chance"].mean().tolist()
            parts.append(intervals.assign(method=methods, metric=metric, definition=definition, chance=chance))
        columns = ["method", "metric", "definition", "value", "low", "high", "chance", "examples", "interval"]
        return pd.concat(parts).sort_index(kind="stable", ignore_index=True)[columns]

    def _by_method(self, column: str, methods: list[str]) -> Float64[np.ndarray, "method example"]:
        return np.stack([self.table[column][self.table["method"] == method].to_numpy() for method in methods])


def plausibility(
    examples: Sequence[Example],
    rows: Mapping[str, Sequence[Float64[Tensor, " _token"]]],
    settings: Rationales = ERASER_RATIONALES,
) -> Plausibility:
    """Compare rankings of tokens with the tokens that people marked.

    With T the k tokens of the highest weights and M the marked tokens of an example,

        token F1          = 2 |T and M| / (|T| + |M|)
        IOU F1            = 2 P R / (P + R), P and R the shares of spans of T and of M that match a span of the other
        average precision = sum_n (R_n - R_(n-1)) P_n, with P_n and R_n the precision and recall down to the n-th weight
        AUPRC             = area under precision against recall by trapezoids

    Args:
        examples: examples of any length; those without a relevant token are left out.
        rows: for each method and example the weight of each token, in any unit; the earlier of equal weights is ranked
            first.
        settings: how many tokens are taken, and how they are compared with the rationales of several people.

    Returns:
        The metrics of every example and method.

    Raises:
        CallError: There is no method, the rows do not fit the examples, or no example has a rationale.
        QkovError: A weight is not finite.

    Source: DeYoung et al., "ERASER: A Benchmark to Evaluate Rationalized NLP Models", 2020, section 4.1, and its
    scorer, for which an intersection over union equal to the threshold is a match.
    """
    if not rows:
        raise CallError("expected the rows of at least one method, got none")
    for method, method_rows in rows.items():
        demand_rows(method, method_rows, examples)
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
        raise CallError(f"no example can be compared with a rationale: {why}")
    share = settings.share or float(np.mean([np.mean(masks) for masks in marked.values()]))
    table = [
        {
            "example": number,
            "id": examples[number].id,
            "group": examples[number].group,
            "method": method,
            **_metrics(method_rows[number].numpy()[_countable(examples[number])], masks, share, settings.iou),
        }
        for method, method_rows in rows.items()
        for number, masks in marked.items()
    ]
    return Plausibility(pd.DataFrame(table), share, settings, tuple(left_out.items()))


def _rationales(example: Example, annotators: Annotators) -> list[Bool[np.ndarray, " token"]]:
    """Return the rationales with which an example is compared, over the tokens that are not special."""
    masks = [mask for mask in (np.array(relevant)[_countable(example)] for relevant in example.relevant) if mask.any()]
    return [np.any(masks, axis=0)] if masks and annotators == "union" else masks


def _countable(example: Example) -> Bool[np.ndarray, " token"]:
    """Return which tokens are not special."""
    return ~np.array(example.is_special)


def _metrics(
    weights: Float64[np.ndarray, " token"], masks: list[Bool[np.ndarray, " token"]], share: float, iou: float
) -> dict[str, int | float]:
    tokens = len(weights)
    k = max(1, math.ceil(round(share * tokens, 9)))
    taken = np.zeros(tokens, dtype=bool)
    taken[np.argsort(-weights, kind="stable")[:k]] = True
    metrics = [_metrics_against(weights, taken, mask, iou) for mask in masks]
    return {"k": k, "tokens": tokens} | {name: _known_mean(one[name] for one in metrics) for name in metrics[0]}


def _metrics_against(
    weights: Float64[np.ndarray, " token"],
    taken: Bool[np.ndarray, " token"],
    mask: Bool[np.ndarray, " token"],
    iou: float,
) -> dict[str, float]:
    """Return the metrics of a ranking against one rationale."""
    tokens, k, marked = len(mask), int(taken.sum()), int(mask.sum())
    precision, recall = span_precision_recall(taken, mask, iou)
    # If every token is marked there is nothing to rank.
    ranked = marked < tokens
    return {
        "token_f1": token_f1(taken, mask),
        "iou_precision": precision,
        "iou_recall": recall,
        "average_precision": average_precision(weights, mask) if ranked else math.nan,
        "auprc": trapezoid_area(weights, mask) if ranked else math.nan,
        # A random choice of k tokens holds k marked / tokens marked ones on average.
        "token_f1_chance": 2 * k * marked / tokens / (k + marked),
        "average_precision_chance": random_average_precision(tokens, marked) if ranked else math.nan,
    }


def _known_mean(values: Iterable[float]) -> float:
    """Return the mean of the values that are not NaN, or NaN if there is none."""
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def _f1_of_means(means: Float64[np.ndarray, "metric resample"]) -> Float64[np.ndarray, "method resample"]:
    """Return the F1 of every method, given the precision of all methods followed by their recall."""
    precision, recall = np.split(means, 2)
    total = precision + recall
    return np.divide(2 * precision * recall, total, out=np.zeros_like(total), where=total > 0)
