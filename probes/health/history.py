"""What was seen of every head step by step, how fast its largest score grows, and the alarms."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pandas as pd
import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from ...circuits.weights.layer_keys import LayerKey
from .alarms import Alarm, in_one_line
from .growth import growth_rates, holding_multiples, steps_to_limit
from .scores import LayerScores

#: Takes a sentence.
Tell = Callable[[str], object]
#: Takes the largest scores of a layer's heads and the growth of their logarithms, and returns what a guard does.
Decide = Callable[[Float64[Tensor, " head"], Float64[Tensor, " head"]], "Done"]


@dataclass(frozen=True, eq=False)
class HeadStates:
    """The heads of a layer at one step.

    Attributes:
        step: The number of the step.
        scores: What was seen of them in its passes, with the weights from before the step.
        growth: The growth of the logarithm of their largest scores per step; NaN if it is unknown.
        steps_left: The number of steps to the limit at that growth; NaN if it is unknown.
        multiple: The multiple of the rate of W_Q and W_K that holds the score under the limit; NaN if it is unknown.
        rate: The multiple of the rate of W_Q and W_K at which the step was taken.
        clip: The factor by which the scores were reduced after the step.
    """

    step: int
    scores: LayerScores
    growth: Float64[Tensor, " head"]
    steps_left: Float64[Tensor, " head"]
    multiple: Float64[Tensor, " head"]
    rate: Float64[Tensor, " head"]
    clip: Float64[Tensor, " head"]

    def alarm(self, key: LayerKey, head: int, limits: "Limits") -> Alarm:
        """Return what an alarm says of a head.

        Args:
            key: The layer.
            head: The number of the head.
            limits: What an alarm is.
        """
        largest, growth = float(self.scores.largest[head]), float(self.growth[head])
        left, multiple = float(self.steps_left[head]), float(self.multiple[head])
        return Alarm(self.step, *key, head, largest, growth, left, multiple, limits.limit, limits.horizon)


@dataclass(frozen=True, eq=False)
class Done:
    """What a guard did to the heads of a layer at a step.

    Attributes:
        rate: The multiple of the rate of W_Q and W_K.
        clip: The factor on the scores.
    """

    rate: Float64[Tensor, " head"]
    clip: Float64[Tensor, " head"]


@dataclass(frozen=True)
class Limits:
    """What an alarm is.

    Attributes:
        limit: The largest score that is not to be passed.
        least: The smallest score that gives an alarm.
        horizon: The number of steps within which a score passes it for an alarm.
        window: The number of records that growth is read from.
        kept: The number of records that are kept for the table.
    """

    limit: float
    least: float
    horizon: int
    window: int
    kept: int

    def in_danger(self, states: HeadStates) -> Bool[Tensor, " head"]:
        """Return which heads of a layer are in danger.

        Args:
            states: The heads.
        """
        return (states.steps_left <= self.horizon) & (states.scores.largest >= self.least)


class HealthHistory:
    """The states of every head at the last recorded steps.

    Attributes:
        limits: What an alarm is.
        alarms: Every alarm, in order: a head gives one when it begins to be in danger, and another one only after it
            was out of danger.
    """

    def __init__(self, limits: Limits, tell: Tell | None) -> None:
        """Begin with nothing.

        Args:
            limits: What an alarm is.
            tell: Called with a sentence for each step with new alarms.
        """
        self.limits, self.alarms = limits, list[Alarm]()
        self._tell = tell
        self._records: deque[dict[LayerKey, HeadStates]] = deque(maxlen=limits.kept)
        self._layers: dict[LayerKey, _Layer] = {}

    def add(self, step: int, scores: Mapping[LayerKey, LayerScores], decide: Decide | None = None) -> None:
        """Add the scores of a step, and tell new alarms.

        Args:
            step: The number of the step.
            scores: What was seen in its passes.
            decide: Says what a guard does to the heads of a layer at this step; None where there is no guard.
        """
        record, new = {}, []
        for key, seen in scores.items():
            layer = self._layers.setdefault(key, _Layer(self.limits))
            record[key] = layer.states(step, seen, decide)
            new += layer.new_alarms(key, record[key])
        self._records.append(record)
        self.alarms += new
        if new and self._tell is not None:
            self._tell(in_one_line(new))

    @property
    def latest(self) -> dict[LayerKey, HeadStates]:
        """The states at the step that was recorded last; empty if there is none."""
        return self._records[-1] if self._records else {}

    def columns(self) -> dict[tuple[str, int, str], dict[str, list[float]]]:
        """Return what `CircuitProbe(columns=...)` stores: the values of the last recorded step, by layer and name."""
        return {
            (*key, "QK"): {
                "max_logit": states.scores.largest.tolist(),
                "attention_entropy": states.scores.entropy.tolist(),
                "max_logit_growth": states.growth.tolist(),
                "guard_rate": states.rate.tolist(),
                "guard_clip": states.clip.tolist(),
            }
            for key, states in self.latest.items()
        }

    def table(self) -> pd.DataFrame:
        """Return a row for each recorded step and head; see `AttentionHealth.table`."""
        columns = ["step", "stack", "layer", "head", "max_logit", "entropy", "growth", "passes_at", "holding_rate"]
        parts = [
            pd.DataFrame(
                {
                    "step": states.step,
                    "stack": stack,
                    "layer": layer,
                    "head": range(len(states.growth)),
                    "max_logit": states.scores.largest.numpy(),
                    "entropy": states.scores.entropy.numpy(),
                    "growth": states.growth.numpy(),
                    "passes_at": (states.step + states.steps_left.ceil()).numpy(),
                    "holding_rate": states.multiple.numpy(),
                    "rate": states.rate.numpy(),
                    "clip": states.clip.numpy(),
                }
            )
            for record in self._records
            for (stack, layer), states in record.items()
        ]
        if not parts:
            return pd.DataFrame(columns=[*columns, "rate", "clip"])
        return pd.concat(parts, ignore_index=True)


class _Layer:
    """What is remembered of a layer from one record to the next."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._window: deque[tuple[Tensor, Tensor, Tensor]] = deque(maxlen=limits.window)
        self._last: HeadStates | None = None
        self._in_danger: Tensor | None = None

    def states(self, step: int, seen: LayerScores, decide: Decide | None) -> HeadStates:
        """Return the states of the heads at a step."""
        scores, limits, last = seen.largest, self._limits, self._last
        ones = torch.ones_like(scores)
        position = 0 * ones if last is None else self._window[-1][1] + (step - last.step) * last.rate
        self._window.append((step * ones, position, scores))
        steps, positions, logged = (torch.stack(part) for part in zip(*self._window, strict=True))
        growth = at_full_rate = growth_rates(steps, logged)
        if last is not None and not torch.equal(positions - positions[0], steps - steps[0]):
            at_full_rate = growth_rates(positions, logged)
        done = Done(ones, ones) if decide is None else decide(scores, at_full_rate)
        self._last = HeadStates(
            step,
            seen,
            growth,
            steps_to_limit(scores, growth, limits.limit),
            holding_multiples(scores, at_full_rate, limits.limit, limits.horizon),
            done.rate,
            done.clip,
        )
        return self._last

    def new_alarms(self, key: LayerKey, states: HeadStates) -> list[Alarm]:
        """Return an alarm for each head that is in danger now and was not before."""
        in_danger = self._limits.in_danger(states)
        new = in_danger if self._in_danger is None else in_danger & ~self._in_danger
        self._in_danger = in_danger
        return [states.alarm(key, head, self._limits) for head in new.nonzero()[:, 0].tolist()]
