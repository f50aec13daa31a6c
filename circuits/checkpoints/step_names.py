"""Steps of training, told by the names of files, folders and revisions."""

import re
from collections.abc import Sequence
from pathlib import PurePath

from ..errors import CallError

#: Words that stand before a step, the surest first.
_MARKS = (
    re.compile(r"step\D{0,2}(\d+)", re.IGNORECASE),
    *(
        re.compile(rf"(?<![a-z]){word}\D{{0,2}}(\d+)", re.IGNORECASE)
        for word in ("iteration", "iter", "checkpoint", "ckpt", "epoch")
    ),
)
_ENDINGS = re.compile(r"\.(safetensors|pt|pth|ckpt|bin)$")


def marked_step(name: str) -> int | None:
    """Return the number behind the surest word for a step in a name, or None where there is no such word."""
    for mark in _MARKS:
        found = mark.findall(_stem(name))
        if found:
            return int(found[-1])
    return None


def steps_of(names: Sequence[str], where: str) -> list[int | None]:
    """Return the step of each name.

    It is the number behind the word for a step that most names have, "step" before others, and None for the names that
    do not have it; where none has such a word, it is the one whole number that tells the names apart.

    Args:
        names: of the files, folders or revisions of one run.
        where: they are, for the message.

    Raises:
        CallError: the names do not tell.
    """
    by_mark = [[mark.findall(_stem(name)) for name in names] for mark in _MARKS]
    marked = max(by_mark, key=lambda found: sum(map(bool, found)))
    if any(marked):
        return [int(found[-1]) if found else None for found in marked]
    # A decimal fraction, such as a loss, is no step.
    numbers = [[n for n in re.findall(r"\d+(?:\.\d+)?", _stem(name)) if "." not in n] for name in names]
    if len(names) == 1:
        return [int(numbers[0][0]) if len(numbers[0]) == 1 else 0]
    columns = list(zip(*numbers, strict=False)) if len({len(found) for found in numbers}) == 1 else []
    telling = [column for column in columns if len(set(column)) > 1]
    if len(telling) != 1:
        raise CallError(
            f"the names of {names[0]}, {names[-1]} and their like in {where} do not say which number is the step; "
            f"put 'step' before it, as in model_step_500{PurePath(names[0]).suffix}"
        )
    return [int(number) for number in telling[0]]


def _stem(name: str) -> str:
    return _ENDINGS.sub("", name)
