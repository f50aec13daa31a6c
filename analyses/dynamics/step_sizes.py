"""Step sizes of gradient descent: a constant rate, or a rate that keeps every step small relative to the state."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ...circuits.errors import CallError


@dataclass(frozen=True)
class CircuitMotion:
    """The motion of one circuit in a step of rate 1, for every run.

    Attributes:
        power: the circuit's learning-rate factor times the squared norm of its gradient, which is the loss that it
            takes off per unit rate.
        relative_speed: the norm of the circuit's update per unit rate, divided by the norm of its weights. For a
            collapsed circuit, which may start at zero, it is divided by the distance moved since the start instead (0
            if it has not moved yet).
        from_zero: whether the distance moved since the start is used.
    """

    power: Float[Tensor, " run"]
    relative_speed: Float[Tensor, " run"]
    from_zero: bool


@dataclass(frozen=True)
class ConstantRate:
    """Plain gradient descent, with the same rate at every step.

    Attributes:
        rate: eta_OV of every step, in units of the gradient flow's time.

    Raises:
        CallError: the rate is not positive.
    """

    rate: float

    def __post_init__(self) -> None:
        """Refuse rates that are not positive."""
        _demand_positive("rate", self.rate)

    def __call__(self, loss: Float[Tensor, " run"], motions: list[CircuitMotion]) -> Float[Tensor, " run"]:  # noqa: ARG002
        """Return the rate of every run's next step.

        Args:
            loss: current loss of each run.
            motions: motion of each circuit.
        """
        return torch.full_like(loss, self.rate)


@dataclass(frozen=True)
class RelativeStep:
    """A rate chosen at every step so that the step is small relative to the state, at any scale of time.

    The rate is the largest one at which the step, to first order, lowers the loss by at most the fraction `step`, moves
    each factorized circuit by at most that fraction of its norm, and moves each collapsed circuit, which may start at
    zero, by at most five times that fraction of the distance moved so far. Both circuits share the rate, so their ratio
    r is kept, and the path in (mu_OV, mu_QK) is that of gradient flow up to an error proportional to `step`. The sum of
    the rates is the time. Late in training the loss falls as 1/time, so a constant rate needs a number of steps
    proportional to 1/loss; this one needs a number proportional to ln(1/loss).

    Attributes:
        step: the fraction, dimensionless.

    Raises:
        CallError: the step is not positive.
    """

    step: float = 0.005

    def __post_init__(self) -> None:
        """Refuse steps that are not positive."""
        _demand_positive("step", self.step)

    def __call__(self, loss: Float[Tensor, " run"], motions: list[CircuitMotion]) -> Float[Tensor, " run"]:
        """Return the rate of every run's next step.

        Args:
            loss: current loss of each run.
            motions: motion of each circuit.
        """
        rate = loss / torch.stack([motion.power for motion in motions]).sum(dim=0)
        for motion in motions:
            limit = torch.where(motion.relative_speed > 0, 1 / motion.relative_speed, _FIRST_STEP * rate)
            rate = torch.minimum(rate, _AWAY_FROM_ZERO * limit if motion.from_zero else limit)
        return self.step * rate


# A circuit at zero has no scale yet, and a first step limited by the loss alone is too long for the other circuit.
_FIRST_STEP = 0.01
# Errors made early are soon small relative to the distance that a collapsed circuit has moved.
_AWAY_FROM_ZERO = 5


def _demand_positive(name: str, value: float) -> None:
    if not value > 0:
        raise CallError(f"{name} must be positive, got {value}")
