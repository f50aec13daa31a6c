"""The steps at which a model in training is measured."""

from collections.abc import Callable, Iterable
from numbers import Integral
from typing import Any

import numpy as np

from ...circuits.errors import CallError

#: Whether a step is measured.
Schedule = Callable[[int], bool]


def schedule(every: Any) -> Schedule:
    """Return the function that tells whether a step is measured.

    Args:
        every: Every so many steps, these steps, or the function itself.

    Raises:
        CallError: It is none of these.
    """
    if callable(every):
        return lambda step: bool(every(step))
    if isinstance(every, Integral) and not isinstance(every, bool) and int(every) >= 1:
        return lambda step: step % int(every) == 0
    steps = list(every) if isinstance(every, Iterable) and not isinstance(every, str | bytes) else []
    numbers = [step.item() if hasattr(step, "item") else step for step in steps]
    if numbers and all(isinstance(step, Integral) and not isinstance(step, bool) for step in numbers):
        return frozenset(numbers).__contains__
    raise CallError(
        f"every should be a whole number of at least 1, some steps, or a function of the step, got {every!r}"
    )


def log_spaced(last: Any, per_decade: Any = 10) -> list[int]:
    """Return steps from 1 to `last` whose logarithms are evenly spaced: round(10^(i / per_decade)), each once.

        CircuitProbe(model, every=log_spaced(100_000))

    Args:
        last: The last step, which is always one of them.
        per_decade: How many steps there are from one power of 10 to the next, as far as whole numbers allow.

    Raises:
        CallError: A number is not a whole number of at least 1.
    """
    for name, number in (("last", last), ("per_decade", per_decade)):
        if not isinstance(number, Integral) or isinstance(number, bool) or number < 1:
            raise CallError(f"{name} should be a whole number of at least 1, got {number!r}")
    exponents = np.arange(int(np.log10(last) * per_decade) + 1) / per_decade
    return sorted({*(int(step) for step in np.rint(10**exponents) if step <= last), int(last)})
