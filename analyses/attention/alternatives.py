"""The alternatives that a model chooses among, classes or continuations: which is meant, and how probable it is."""

import math
from typing import Literal, get_args

from jaxtyping import Float64
from torch import Tensor

from ...circuits.errors import CallError
from ..tasks.example import Example

#: Whose probability is explained: of the alternative that the model finds most probable, or of the example's label.
Target = Literal["predicted", "label"]


def demand_target(target: str) -> None:
    """CallError for what is no target."""
    if target not in get_args(Target):
        raise CallError(f"target should be 'predicted' or 'label', got {target!r}")


def label_of(example: Example, number: int, alternatives: int | None = None) -> int:
    """Return the label of an example.

    Args:
        example: that should have one.
        number: of the example, for messages.
        alternatives: how many there are, where that is known.

    Raises:
        CallError: it has none, or one that is none of the alternatives.
    """
    name = f"example {example.id or number}"
    if example.label is None:
        raise CallError(f"{name} has no label; use target='predicted' to explain what the model predicts")
    if example.label < 0 or (alternatives is not None and example.label >= alternatives):
        known = "its alternatives" if alternatives is None else f"its {alternatives} alternatives"
        raise CallError(f"{name} has the label {example.label}; expected one of {known}, from 0")
    return example.label


def probability_of(
    log_probabilities: Float64[Tensor, " alternative"], chosen: int, *, among_alternatives: bool = False
) -> float:
    """Return the probability of an alternative.

    Args:
        log_probabilities: of an example's alternatives, as `predictions` gives them.
        chosen: which one.
        among_alternatives: whether it is the probability among the alternatives alone, as it is in any case among the
            classes of a classifier; else it is that in the whole vocabulary.
    """
    if among_alternatives:
        log_probabilities = log_probabilities.log_softmax(dim=0)
    return float(log_probabilities[chosen].exp())


def label_probability(
    example: Example,
    number: int,
    log_probabilities: Float64[Tensor, " alternative"],
    *,
    among_alternatives: bool = False,
) -> float:
    """Return the probability of an example's label, NaN where it has none; arguments as of the functions above.

    Raises:
        CallError: the label is none of the alternatives.
    """
    if example.label is None:
        return math.nan
    label = label_of(example, number, len(log_probabilities))
    return probability_of(log_probabilities, label, among_alternatives=among_alternatives)
