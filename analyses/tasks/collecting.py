"""A task made of what a source yields: examples, and reasons for which records were left out."""

import inspect
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...circuits.errors import CallError
from .example import Example, Task, TextExample


def checked_options(task: str, source: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that a source takes by name, if those are all.

    Raises:
        CallError: one is unknown, or one that has no default is missing; the message lists those there are.
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


@dataclass(frozen=True)
class LeftOut:
    """A record that was left out, or a part of one.

    Attributes:
        reason: in words that stand behind a number.
    """

    reason: str


#: What a source yields.
Found = Example | TextExample | LeftOut


def collected(task: Task, found: Iterable[Found], limit: int | None = None, seed: int = 0) -> Task:
    """Return the task with the examples found, and with how many records were left out for which reason.

    Args:
        task: without examples.
        found: what the source yields; it is read once and not kept.
        limit: keep so many examples, drawn without replacement and left in their order, for files are often sorted.
        seed: of the draw.

    Raises:
        CallError: the limit is below 1, or nothing was found.
    """
    if limit is not None and limit < 1:
        raise CallError(f"limit must be at least 1, or None for all examples; got {limit}")
    generator = np.random.default_rng(seed)
    reasons: Counter[str] = Counter(dict(task.left_out))
    kept: list[tuple[int, Example | TextExample]] = []
    count = 0
    for one in found:
        if isinstance(one, LeftOut):
            reasons[one.reason] += 1
            continue
        if limit is None or len(kept) < limit:
            kept.append((count, one))
        elif (place := int(generator.integers(count + 1))) < limit:
            kept[place] = (count, one)
        count += 1
    if not kept:
        why = ", ".join(f"{number} {reason}" for reason, number in reasons.items())
        raise CallError(f"{task.name} has no examples{f': left out were {why}' if why else ''}")
    if count > len(kept):
        reasons["not drawn under the limit"] += count - len(kept)
    examples = tuple(example for _, example in sorted(kept, key=lambda pair: pair[0]))
    return replace(task, examples=examples, left_out=tuple(reasons.items()))
