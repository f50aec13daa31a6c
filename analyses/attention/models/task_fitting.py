"""Fitting a task to a model: in the model's tokens, within its context, and of the kind that it can answer."""

import warnings
from dataclasses import replace
from typing import Any

from ....circuits.errors import CallError
from ...tasks.encoding import encode_task
from ...tasks.example import Example, Task, TextExample
from .model import AttentionModel
from .tokenisers import blank_labels


def with_class_names(task: Task, model: AttentionModel) -> Task:
    """Return a task whose classes have names, and whose labels count the classes in the model's order.

    Where a model and a task name the same classes, labels are matched by name. Where the task names none, the names are
    the model's.

    Args:
        task: The task.
        model: The model that answers it.
    """
    names = model.class_names
    if not model.classifies or not names or task.classes == names:
        return task
    if not task.classes:
        return replace(task, classes=names) if not any(example.continuations for example in task.examples) else task
    known = [name.casefold() for name in names]
    wanted = [name.casefold() for name in task.classes]
    if len(set(known)) < len(known) or sorted(known) != sorted(wanted):
        return task
    numbers = [known.index(name) for name in wanted]
    examples = tuple(
        example if example.label is None else replace(example, label=numbers[example.label])
        for example in task.examples
    )
    return replace(task, classes=names, examples=examples)


def fit_task(task: Task, model: AttentionModel, tokeniser: Any | None = None) -> Task:
    """Return the task in the model's tokens.

    Texts are cut to the model's context. The tokenizer's token types are kept if the model takes any. For a masked
    language model, its mask token is added at the end. If a language model is given only the right continuation and
    none to compare it with, it has to predict the first token of that continuation among the whole vocabulary, and the
    first with content where the tokenizer puts a space apart; a warning says how many labels that concerns.

    Args:
        task: A task of texts or of tokens.
        model: The model that answers it.
        tokeniser: The model's tokenizer; not needed if the task is in tokens.

    Raises:
        CallError: The model classifies and the task does not, or the other way round; or the task has texts and there
            is no tokenizer.
    """
    asks_for_text = any(example.continuations for example in task.examples)
    if model.classifies and asks_for_text:
        raise CallError(
            f"{model.name} classifies whole sequences, and {task.name} asks how a text continues; give a language model"
        )
    if task.classes and not model.classifies:
        raise CallError(
            f"{model.name} predicts tokens, and {task.name} has classes ({', '.join(task.classes)}); give a classifier"
        )
    task = with_class_names(task, model)
    texts = [example for example in task.examples if isinstance(example, TextExample)]
    of_tokens = [example for example in task.examples if isinstance(example, Example)]
    blank = 0 if model.classifies or tokeniser is None else blank_labels(of_tokens, tokeniser)
    if blank:
        warnings.warn(
            f"{blank} of {len(of_tokens)} labels in tokens are only white space, and are predicted as they are",
            stacklevel=2,
        )
    if not texts:
        return task
    if tokeniser is None:
        raise CallError(f"{task.name} has texts, which need the tokenizer of {model.name}; none was given")
    return encode_task(
        task,
        tokeniser,
        context=model.context,
        mask_at_end=not (model.classifies or model.causal),
        next_token=asks_for_text and all(len(example.continuations) == 1 for example in texts),
        token_types=model.takes_token_types,
    )
