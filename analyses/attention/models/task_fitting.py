"""A task made ready for a model: in its tokens, within its context, and of the kind that it answers."""

from typing import Any

from ....circuits.errors import CallError
from ...tasks.encoding import encode_task
from ...tasks.example import Task, TextExample
from .model import AttentionModel


def fit_task(task: Task, model: AttentionModel, tokeniser: Any | None = None) -> Task:
    """Return the task in tokens of the model.

    Texts are cut to the model's context. A masked language model gets its mask token behind them. Where a language
    model is given the one right continuation alone and none to compare it with, its first token is to be predicted
    among the whole vocabulary.

    Args:
        task: of texts or of tokens.
        model: that is to answer it.
        tokeniser: of the model; None where the task is in tokens.

    Raises:
        CallError: the model classifies and the task does not, or the other way round; or there are texts and no
            tokeniser.
    """
    asks_for_text = any(example.continuations for example in task.examples)
    if model.classifies and asks_for_text:
        raise CallError(
            f"{model.name} classifies whole sequences, and {task.name} asks how a text goes on; give a language model"
        )
    if task.classes and not model.classifies:
        raise CallError(
            f"{model.name} predicts tokens, and {task.name} has classes ({', '.join(task.classes)}); give a classifier"
        )
    texts = [example for example in task.examples if isinstance(example, TextExample)]
    if not texts:
        return task
    if tokeniser is None:
        raise CallError(f"{task.name} is of texts, which take the tokeniser of {model.name}: none was given")
    return encode_task(
        task,
        tokeniser,
        context=model.context,
        mask_at_end=not (model.classifies or model.causal),
        next_token=asks_for_text and all(len(example.continuations) == 1 for example in texts),
    )
