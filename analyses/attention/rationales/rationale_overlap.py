"""How far a ranking of tokens, or the tokens at its top, overlaps with the rationale of one annotator."""

import numpy as np
from jaxtyping import Bool, Float64

#: Spans of tokens, each from its first position to the one after its last.
Spans = list[tuple[int, int]]


def token_f1(taken: Bool[np.ndarray, " token"], marked: Bool[np.ndarray, " token"]) -> float:
    """Return the token F1, the harmonic mean of precision and recall: 2 |taken and marked| / (|taken| + |marked|).

    Args:
        taken: the tokens at the top of the ranking.
        marked: the tokens of the rationale; at least one of both is not empty.
    """
    return 2 * float((taken & marked).sum()) / float(taken.sum() + marked.sum())


def spans_of(mask: Bool[np.ndarray, " token"]) -> Spans:
    """Return the runs of true entries."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def span_precision_recall(
    taken: Bool[np.ndarray, " token"], marked: Bool[np.ndarray, " token"], iou: float
) -> tuple[float, float]:
    """Return the share of the spans taken that match a marked span, and the share of the marked spans that are matched.

    Two spans match if their intersection over union is at least `iou`. From 0.5 on no span matches two others, so
    precision and recall count the same pairs, as ERASER's scorer does, which counts the spans taken for both.

    Args:
        taken: the tokens at the top of the ranking; at least one.
        marked: the tokens of the rationale; at least one.
        iou: threshold of the intersection over union, from 0.5 to 1.

    Returns:
        Precision and recall.
    """
    ours, theirs = spans_of(taken), spans_of(marked)
    matched = sum(any(_span_iou(one, other) >= iou for other in theirs) for one in ours)
    return matched / len(ours), matched / len(theirs)


def average_precision(weights: Float64[np.ndarray, " token"], marked: Bool[np.ndarray, " token"]) -> float:
    """Return the average precision, sum_n (R_n - R_(n-1)) P_n.

    P_n and R_n are the precision and recall of all tokens whose weight is at least the n-th largest distinct weight.

    Args:
        weights: weight of each token.
        marked: the tokens of the rationale; at least one.
    """
    precision, recall = _curve(weights, marked)
    return float((np.diff(recall, prepend=0.0) * precision).sum())


def trapezoid_area(weights: Float64[np.ndarray, " token"], marked: Bool[np.ndarray, " token"]) -> float:
    """Return the area under precision against recall (AUPRC) by trapezoids, from precision 1 at recall 0.

    Args:
        weights: weight of each token.
        marked: the tokens of the rationale; at least one.
    """
    precision, recall = _curve(weights, marked)
    return float(np.trapezoid(np.concatenate([[1.0], precision]), np.concatenate([[0.0], recall])))


def random_average_precision(tokens: int, marked: int) -> float:
    """Return the average precision of a random ranking without ties, averaged over all rankings.

    With n tokens, m of them marked, and H = 1 + 1/2 + ... + 1/n, it is (H + (m - 1)(n - H) / (n - 1)) / n, because a
    marked token at rank i has (i - 1)(m - 1)/(n - 1) marked tokens before it on average.

    Args:
        tokens: number of tokens, n.
        marked: number of marked tokens, m, from 1 to n.
    """
    harmonic = float((1 / np.arange(1, tokens + 1)).sum())
    if tokens == 1:
        return 1.0
    return (harmonic + (marked - 1) * (tokens - harmonic) / (tokens - 1)) / tokens


def _span_iou(one: tuple[int, int], other: tuple[int, int]) -> float:
    """Return the intersection over union of two spans."""
    shared = max(0, min(one[1], other[1]) - max(one[0], other[0]))
    return shared / (one[1] - one[0] + other[1] - other[0] - shared)


def _curve(
    weights: Float64[np.ndarray, " token"], marked: Bool[np.ndarray, " token"]
) -> tuple[Float64[np.ndarray, " cut"], Float64[np.ndarray, " cut"]]:
    """Return precision and recall down to each distinct weight; tokens of equal weight are taken together."""
    order = np.argsort(-weights, kind="stable")
    last = np.flatnonzero(np.diff(weights[order], append=-np.inf))
    right = np.cumsum(marked[order])[last]
    return right / (last + 1), right / marked.sum()
