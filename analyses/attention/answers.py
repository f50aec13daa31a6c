"""What a model answers to each example: how probable it finds what is right, and what it predicts instead."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int

from ...circuits.errors import CallError
from ..tasks.example import Example, Task
from .alternatives import label_probability, probability_of
from .model import AttentionModel
from .predictions import each_prediction


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
