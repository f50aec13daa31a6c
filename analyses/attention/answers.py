"""What a model answers to each example: how probable it finds what is right, and what it predicts instead."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int

from ...circuits.errors import CallError
from ..tasks.example import Example, Task
from .alternatives import label_probabilities, probability_of
from .model import AttentionModel
from .predictions import predictions

#: How many examples' predictions are had at once: each may be as large as the vocabulary.
_AT_ONCE = 256


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
    for start in range(0, len(examples), _AT_ONCE):
        some = examples[start : start + _AT_ONCE]
        found = predictions(model, some, batch_tokens=batch_tokens)
        if task.classes and len(found[0]) != len(task.classes):
            raise CallError(
                f"{model.name} has {len(found[0])} classes, and {task.name} has {len(task.classes)} "
                f"({', '.join(task.classes)}); expected a model that was trained for them"
            )
        right.append(label_probabilities(some, found, among_alternatives=among_alternatives))
        for given in found:
            best = int(given.argmax())
            predicted.append(best)
            probability.append(probability_of(given, best, among_alternatives=among_alternatives))
        if progress is not None:
            progress(len(predicted), len(examples))
    return Answers(np.array(predicted), np.array(probability), np.concatenate(right))
