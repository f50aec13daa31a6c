"""The alternatives that a model chooses among, which are classes or continuations: labels and probabilities."""

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

#: The alternative whose probability is explained: the one that the model finds most probable, or the label.
Target = Literal["predicted", "label"]


def demand_target(target: str) -> None:
    """Refuse a target that is not one of `Target`.

    Raises:
        CallError: It is not.
    """
    if target not in get_args(Target):
        raise CallError(f"target should be 'predicted' or 'label', got {target!r}")


def label_of(example: Example, number: int, alternatives: int | None = None) -> int:
    """Return the label of an example.

    Args:
        example: The example.
        number: The number of the example, for messages.
        alternatives: The number of alternatives, if it is known.

    Raises:
        CallError: The example has no label, or its label is not one of the alternatives.
    """
    name = f"example {example.id or number}"
    if example.label is None:
        raise CallError(f"{name} has no label; use target='predicted' to explain what the model predicts")
    if example.label < 0 or (alternatives is not None and example.label >= alternatives):
        expected = "its alternatives" if alternatives is None else f"its {alternatives} alternatives"
        raise CallError(f"{name} has the label {example.label}; expected one of {expected}, from 0")
    return example.label


def probability_of(
    log_probabilities: Float64[Tensor, " alternative"], chosen: int, *, among_alternatives: bool = False
) -> float:
    """Return the probability of an alternative.

    Args:
        log_probabilities: Log-probabilities of an example's alternatives, as `predictions` returns them.
        chosen: The index of the alternative.
        among_alternatives: Whether to return the probability among the alternatives only; otherwise it is the
            probability in the whole vocabulary. For the classes of a classifier the two are the same.
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
    """Return the probability of an example's label; NaN if it has no label.

    Args:
        example: The example.
        number: The number of the example, for messages.
        log_probabilities: Log-probabilities of its alternatives, as `predictions` returns them.
        among_alternatives: As in `probability_of`.

    Raises:
        CallError: The label is not one of the alternatives.
    """
    if example.label is None:
        return math.nan
    label = label_of(example, number, len(log_probabilities))
    return probability_of(log_probabilities, label, among_alternatives=among_alternatives)


@dataclass(frozen=True, eq=False)
class Answers:
    """A model's answer to each example.

    Attributes:
        predicted: The most probable alternative.
        probability: The probability of that alternative.
        right: The probability of the label; NaN if there is no label.
    """

    predicted: Int[np.ndarray, " example"]
    probability: Float64[np.ndarray, " example"]
    right: Float64[np.ndarray, " example"]


def are_compared(examples: Sequence[Example]) -> bool:
    """Return whether every example has several continuations, so that their probabilities can be compared."""
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
        model: The model that answers.
        task: The task, in tokens.
        among_alternatives: Whether probabilities are those among an example's continuations; otherwise they are those
            in the whole vocabulary.
        batch_tokens: The maximum number of tokens in a batch.
        progress: Called with the number of examples that are done, and with the number of all examples.

    Raises:
        CallError: An example does not fit the model, or the model has other classes than the task.
    """
    examples = task.in_tokens
    predicted, probability, right = [], [], []
    for number, log_probabilities in enumerate(each_prediction(model, examples, batch_tokens=batch_tokens)):
        if task.classes and len(log_probabilities) != len(task.classes):
            raise CallError(
                f"{model.name} has {len(log_probabilities)} classes, and {task.name} has {len(task.classes)} "
                f"({', '.join(task.classes)}); expected a model that was trained for them"
            )
        best = int(log_probabilities.argmax())
        predicted.append(best)
        probability.append(probability_of(log_probabilities, best, among_alternatives=among_alternatives))
        right.append(
            label_probability(examples[number], number, log_probabilities, among_alternatives=among_alternatives)
        )
        if progress is not None:
            progress(number + 1, len(examples))
    return Answers(np.array(predicted), np.array(probability), np.array(right))
