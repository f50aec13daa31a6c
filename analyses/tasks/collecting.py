"""Assembly of a task from the records of its source: examples, and the reasons for which records were left out."""

import inspect
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...circuits.errors import CallError
from .example import Example, Task, TextExample


@dataclass(frozen=True)
class LeftOut:
    """A record, or a part of one, that was left out.

    Attributes:
        reason: the reason, worded so that it can follow a number, such as "without words".
    """

    reason: str


#: An item that a source yields.
SourceItem = Example | TextExample | LeftOut


def collected(task: Task, items: Iterable[SourceItem], limit: int | None = None, seed: int = 0) -> Task:
    """Return the task with the examples of a source and the number of records left out for each reason.

    Args:
        task: the task without examples.
        items: the items that the source yields. They are read once, and at most `limit` of them are kept in memory.
        limit: maximum number of examples; None keeps all. The examples are drawn without replacement, because files are
            often sorted, and keep their order.
        seed: seed of the draw.

    Raises:
        CallError: the limit is below 1, or there are no examples.
    """
    if limit is not None and limit < 1:
        raise CallError(f"limit must be at least 1, or None for all examples; got {limit}")
    generator = np.random.default_rng(seed)
    reasons: Counter[str] = Counter(dict(task.left_out))
    kept: list[tuple[int, Example | TextExample]] = []
    count = 0
    for item in items:
        if isinstance(item, LeftOut):
            reasons[item.reason] += 1
            continue
        if limit is None or len(kept) < limit:
            kept.append((count, item))
        elif (index := int(generator.integers(count + 1))) < limit:
            kept[index] = (count, item)
        count += 1
    if not kept:
        why = ", ".join(f"{number} {reason}" for reason, number in reasons.items())
        raise CallError(f"{task.name} has no examples{f'; left out: {why}' if why else ''}")
    if count > len(kept):
        reasons["not drawn under the limit"] += count - len(kept)
    examples = tuple(example for _, example in sorted(kept, key=lambda pair: pair[0]))
    return replace(task, examples=examples, left_out=tuple(reasons.items()))


def checked_options(task: str, source: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a task if its source takes all of them by name and none is missing.

    Args:
        task: name of the task, for the message.
        source: the function that makes the task; its keyword-only parameters are the options.
        options: the options to check.

    Raises:
        CallError: an option is unknown, or one without a default is missing; the message lists the known options.
    """
    known = {
        name: parameter
        for name, parameter in inspect.signature(source).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    unknown = sorted(set(options) - set(known))
    missing = [
        name for name, parameter in known.items() if parameter.default is parameter.empty and name not in options
    ]
    if unknown or missing:
        wrong = f"has no option {', '.join(unknown)}" if unknown else f"needs the option {', '.join(missing)}"
        raise CallError(f"task {task} {wrong}; its options here: {', '.join(known) or 'none'}")
    return options
