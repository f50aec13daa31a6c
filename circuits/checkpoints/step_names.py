"""Training steps in the names of files, folders and revisions."""

import re
from collections.abc import Sequence
from pathlib import PurePath

from ..errors import CallError
from .tensor_file import SUFFIXES

#: Words before a step, the most reliable first.
_MARKS = (
    re.compile(r"step\D{0,2}(\d+)", re.IGNORECASE),
    *(
        re.compile(rf"(?<![a-z]){word}\D{{0,2}}(\d+)", re.IGNORECASE)
        for word in ("iteration", "iter", "checkpoint", "ckpt", "epoch")
    ),
)


def marked_step(name: str) -> int | None:
    """Return the number after the most reliable word for a step in a name, or None if the name has no such word."""
    return next((int(steps[-1]) for mark in _MARKS if (steps := mark.findall(_stem(name)))), None)


def steps_of(names: Sequence[str], where: str) -> list[int | None]:
    """Return the step in each name.

    The step is the number after the word for a step that most names have, preferring "step"; it is None for names
    without that word. If no name has such a word, the step is the one whole number that differs between the names.

    Args:
        names: The names of the files, folders or revisions of one run.
        where: Where they were found, for the message.

    Raises:
        CallError: The names do not tell which number is the step.
    """
    by_mark = [[mark.findall(_stem(name)) for name in names] for mark in _MARKS]
    marked = max(by_mark, key=lambda steps: sum(map(bool, steps)))
    if any(marked):
        return [int(steps[-1]) if steps else None for steps in marked]
    # A decimal fraction, such as a loss, is not a step.
    numbers = [[n for n in re.findall(r"\d+(?:\.\d+)?", _stem(name)) if "." not in n] for name in names]
    if len(names) == 1:
        return [int(numbers[0][0]) if len(numbers[0]) == 1 else 0]
    columns = list(zip(*numbers, strict=False)) if len(set(map(len, numbers))) == 1 else []
    differing = [column for column in columns if len(set(column)) > 1]
    if len(differing) != 1:
        raise CallError(
            f"the names of {names[0]}, {names[-1]} and their like in {where} do not say which number is the step; "
            f"put 'step' before it, as in model_step_500{PurePath(names[0]).suffix}"
        )
    return [int(number) for number in differing[0]]


def _stem(name: str) -> str:
    return name.removesuffix(PurePath(name).suffix) if PurePath(name).suffix in SUFFIXES else name
