"""A training step that is known, with how it is known."""

import math
from dataclasses import dataclass
from typing import Any, Literal

#: What a step counts: steps of the optimizer, epochs where nothing better is known, or tokens where a list says so.
Unit = Literal["step", "epoch", "token"]


@dataclass(frozen=True)
class Step:
    """A training step that is known.

    Attributes:
        number: The number of the step.
        origin: Where it was read, in words.
        unit: What it counts.
        firm: Whether the source states steps in so many words. A number after "checkpoint" may just count files, and
            an epoch is a step only where nothing better is known.
    """

    number: int
    origin: str
    unit: Unit = "step"
    firm: bool = True


def step_in_words(step: Any, unit: str = "step") -> str:
    """Return a step as messages and reports name it; one that is not known is called unknown.

    Args:
        step: The number of the step; None, or NaN as in tables, if it is not known.
        unit: What it counts.
    """
    return f"{unit} unknown" if step is None or math.isnan(step) else f"{unit} {int(step)}"
