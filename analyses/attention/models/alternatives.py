"""The alternatives that a model chooses among, classes or continuations: which is meant, and how probable it is."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from jaxtyping import Float64, Int
from torch import Tensor

from ....circuits.errors import CallError
from ...tasks.example import Example, Task
from .model import AttentionModel
from .predictions import each_prediction

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


@dataclass(frozen=True, eq=False)
class Answers:
    """One answer for each example.

    Attributes:
        predicted: the most probable alternative.
        probability: of it.
        right: probability of the label; NaN where there is none.
    """

    predicted: Int[np.ndarray, " example"]
    probability: Float64[np.ndarray, " example"]
    right: Float64[np.ndarray, " example"]


def are_compared(examples: Sequence[Example]) -> bool:
    """Whether every example gives continuations to choose among, so that one is probable beside the others."""
    return all(len(example.continuations) > 1 for example in examples)


def answers(
    model: AttentionModel,
    task: Task,
    *,
    among_alternatives: bool,
    batch_tokens: int = 8192,
    progress: Callable[[int, int], None] | None = None,
) -> Answers:
    """Run the model on the whole examples of a task.

    Args:
        model: that answers.
        task: in tokens.
        among_alternatives: whether probabilities are those among an example's continuations; else those in the whole
            vocabulary.
        batch_tokens: at most so many tokens at once.
        progress: called with how many examples are done, of how many.

    Raises:
        CallError: an example does not fit the model, or the model has other classes than the task.
    """
    examples = task.in_tokens
    predicted, probability, right = [], [], []
    for number, given in enumerate(each_prediction(model, examples, batch_tokens=batch_tokens)):
        if task.classes and len(given) != len(task.classes):
            raise CallError(
                f"{model.name} has {len(given)} classes, and {task.name} has {len(task.classes)} "
                f"({', '.join(task.classes)}); expected a model that was trained for them"
            )
        best = int(given.argmax())
        predicted.append(best)
        probability.append(probability_of(given, best, among_alternatives=among_alternatives))
        right.append(label_probability(examples[number], number, given, among_alternatives=among_alternatives))
        if progress is not None:
            progress(number + 1, len(examples))
    return Answers(np.array(predicted), np.array(probability), np.array(right))
