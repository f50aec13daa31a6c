"""The alternatives that a model chooses among, classes or continuations: which is meant, and how probable it is."""

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
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
    """Return the probability of an alternative: among all that the model can say, or among the alternatives alone."""
    if among_alternatives:
        log_probabilities = log_probabilities.log_softmax(dim=0)
    return float(log_probabilities[chosen].exp())


def label_probabilities(
    examples: Sequence[Example],
    log_probabilities: Sequence[Float64[Tensor, " _alternative"]],
    *,
    among_alternatives: bool = False,
) -> Float64[np.ndarray, " example"]:
    """Return the probability of each example's label; NaN where there is none.

    Args:
        examples: with or without labels.
        log_probabilities: of the alternatives of each, as `predictions` gives them.
        among_alternatives: whether it is the probability among the alternatives alone, as it is in any case among the
            classes of a classifier; else it is that in the whole vocabulary.

    Raises:
        CallError: there are not as many, or a label is none of the alternatives.
    """
    if len(examples) != len(log_probabilities):
        raise CallError(f"log-probabilities of {len(log_probabilities)} examples were given for {len(examples)}")
    found = np.full(len(examples), np.nan)
    for number, (example, given) in enumerate(zip(examples, log_probabilities, strict=True)):
        if example.label is not None:
            label = label_of(example, number, len(given))
            found[number] = probability_of(given, label, among_alternatives=among_alternatives)
    return found
