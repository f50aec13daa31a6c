"""An alarm: a head whose largest score passes a limit soon if it keeps growing, in plain English."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...circuits.weights.layer_keys import layer_name


@dataclass(frozen=True)
class Alarm:
    """A head whose largest score has passed a limit, or passes it within the horizon at its present growth.

    Attributes:
        step: The step in whose pass the score was seen.
        stack: The stack of the layer; empty where there is only one.
        layer: The number of the layer.
        head: The number of the head.
        score: Its largest score.
        growth: The growth of the logarithm of the score per step; NaN if it is unknown.
        steps_left: The number of steps to the limit at that growth; 0 where the score has passed it.
        multiple: The multiple of the rate of W_Q and W_K that holds the score under the limit; NaN if it is unknown.
        limit: The limit.
        horizon: The number of steps within which a score has to pass the limit.
    """

    step: int
    stack: str
    layer: int
    head: int
    score: float
    growth: float
    steps_left: float
    multiple: float
    limit: float
    horizon: int

    @property
    def name(self) -> str:
        """The head in words."""
        return f"{layer_name(self.stack, self.layer)} head {self.head}"

    def __str__(self) -> str:
        """Say what was seen, what follows if it goes on, and what would hold it."""
        return f"step {self.step}: {self.sentence}"

    @property
    def sentence(self) -> str:
        """What was seen, what follows if it goes on, and what would hold it."""
        seen = f"the largest score of {self.name} is {self.score:.1f}"
        if self.steps_left > 0:
            return (
                f"{seen} and grows by {_percent(self.growth)} a step, so that it passes {self.limit:g} at step "
                f"{self.step + math.ceil(self.steps_left)} if it goes on; W_Q and W_K at {self.multiple:.2g} times "
                f"their rate would hold it under {self.limit:g} for {self.horizon} steps"
            )
        above = f"{seen}, which is not under the limit of {self.limit:g}"
        if math.isnan(self.growth):
            return f"{above}; its growth is unknown"
        if self.growth <= 0:
            return f"{above}; it does not grow"
        return (
            f"{above}, and grows by {_percent(self.growth)} a step; a lower rate of W_Q and W_K does not bring it back "
            f"under the limit, and CircuitRates with guard_by='clip' does"
        )


def in_one_line(alarms: Sequence[Alarm]) -> str:
    """Return the alarms of one step in a line: the head that passes the limit first, and how many others there are.

    Args:
        alarms: The alarms.
    """
    first = min(alarms, key=lambda alarm: (alarm.steps_left, -alarm.score))
    others = len(alarms) - 1
    more = f" (and {others} other {'head' if others == 1 else 'heads'})" if others else ""
    return f"{first}{more}"


def _percent(growth: float) -> str:
    return f"{100 * math.expm1(growth):.2g} %"
