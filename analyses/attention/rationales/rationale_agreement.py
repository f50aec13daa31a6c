"""How a ranking of tokens, or those taken from its top, agree with one rationale."""

import numpy as np
from jaxtyping import Bool, Float64

#: Places of tokens, from one to the one before another.
Spans = list[tuple[int, int]]


def token_f1(taken: Bool[np.ndarray, " token"], marked: Bool[np.ndarray, " token"]) -> float:
    """Return 2 |taken and marked| / (|taken| + |marked|), the harmonic mean of precision and recall."""
    return 2 * float((taken & marked).sum()) / float(taken.sum() + marked.sum())


def spans_of(mask: Bool[np.ndarray, " token"]) -> Spans:
    """Return the runs of true entries."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def span_agreement(
    taken: Bool[np.ndarray, " token"], marked: Bool[np.ndarray, " token"], iou: float
) -> tuple[float, float]:
    """Return the shares of the spans taken, and of those marked, that agree with one of the other.

    Spans agree from an intersection over union of `iou` on. From a half on no span agrees with two: precision and
    recall then count the same pairs, as ERASER's scorer does, which counts the spans taken for both.
    """
    ours, theirs = spans_of(taken), spans_of(marked)
    right = sum(any(_overlap(one, other) >= iou for other in theirs) for one in ours)
    return right / len(ours), right / len(theirs)


def average_precision(weights: Float64[np.ndarray, " token"], marked: Bool[np.ndarray, " token"]) -> float:
    """Return sum_n (R_n - R_(n-1)) P_n, with P_n and R_n the precision and recall of all weights down to the n-th."""
    precision, recall = _curve(weights, marked)
    return float((np.diff(recall, prepend=0.0) * precision).sum())


def trapezoid_area(weights: Float64[np.ndarray, " token"], marked: Bool[np.ndarray, " token"]) -> float:
    """Return the area under precision against recall by trapezoids, from precision 1 at recall 0."""
    precision, recall = _curve(weights, marked)
    return float(np.trapezoid(np.concatenate([[1.0], precision]), np.concatenate([[0.0], recall])))


def random_average_precision(tokens: int, marked: int) -> float:
    """Return the average precision of a random ranking without ties, on average over rankings.

    With H the harmonic number of n tokens, m of them marked: (H + (m - 1)(n - H) / (n - 1)) / n. A marked token at rank
    i has (i - 1)(m - 1)/(n - 1) marked ones before it on average.
    """
    harmonic = float((1 / np.arange(1, tokens + 1)).sum())
    if tokens == 1:
        return 1.0
    return (harmonic + (marked - 1) * (tokens - harmonic) / (tokens - 1)) / tokens


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> float:
    """Intersection over union."""
    shared = max(0, min(one[1], other[1]) - max(one[0], other[0]))
    return shared / (one[1] - one[0] + other[1] - other[0] - shared)


def _curve(
    weights: Float64[np.ndarray, " token"], marked: Bool[np.ndarray, " token"]
) -> tuple[Float64[np.ndarray, " cut"], Float64[np.ndarray, " cut"]]:
    """Precision and recall of all tokens down to each different weight: equal ones come together."""
    order = np.argsort(-weights, kind="stable")
    last = np.flatnonzero(np.diff(weights[order], append=-np.inf))
    right = np.cumsum(marked[order])[last]
    return right / (last + 1), right / marked.sum()
