"""Steps shortened to end exactly at given losses, so that runs can be compared at equal loss."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

# A step that was shortened to end at a loss counts as having reached it within this relative distance. Otherwise the
# next step is shortened as well.
_LANDED = 1e-2


class Landing:
    """The losses that each run has reached, and the shortening of its next step so that it ends at the next one."""

    def __init__(self, losses: Sequence[float], runs: int) -> None:
        """Start with no loss reached.

        Args:
            losses: the losses at which steps end, in any order.
            runs: number of runs.
        """
        self.losses = sorted(losses, reverse=True)
        self._passed = [0] * runs
        self._shortened = [False] * runs

    def reach(self, loss: Float[Tensor, " run"]) -> list[list[float]]:
        """Return, for each run, the losses that it has reached since the last call."""
        reached: list[list[float]] = [[] for _ in self._passed]
        for run, value in enumerate(loss.tolist()):
            near = 1 + (_LANDED if self._shortened[run] else 0)
            while self._passed[run] < len(self.losses) and value <= near * self.losses[self._passed[run]]:
                reached[run].append(self.losses[self._passed[run]])
                self._passed[run] += 1
        return reached

    @property
    def active(self) -> Bool[Tensor, " run"]:
        """The runs that have a loss left to reach; all runs if there are no losses at all."""
        return torch.tensor([not self.losses or count < len(self.losses) for count in self._passed])

    def shorten(
        self, rate: Float[Tensor, " run"], loss: Float[Tensor, " run"], power: Float[Tensor, " run"]
    ) -> Float[Tensor, " run"]:
        """Return the rates, reduced for each run whose step would pass its next loss.

        To first order a step of rate eta lowers the loss by eta * power, so ln(loss) falls by eta * power / loss.

        Args:
            rate: rate of each run's next step.
            loss: current loss of each run.
            power: loss that each run's step takes off per unit rate.
        """
        shortened = rate.clone()
        falls = (rate * power / loss).tolist()
        for run, (count, value, fall) in enumerate(zip(self._passed, loss.tolist(), falls, strict=True)):
            wanted = math.log(value / self.losses[count]) if count < len(self.losses) else math.inf
            self._shortened[run] = fall >= wanted
            if self._shortened[run]:
                shortened[run] *= wanted / fall
        return shortened
