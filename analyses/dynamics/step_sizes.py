"""How large a step of gradient descent is: a constant rate, or one that keeps every step small against the state."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ...circuits.errors import CallError


@dataclass(frozen=True)
class CircuitMotion:
    """What one circuit would do in a step of rate 1, for every run.

    Attributes:
        power: its learning-rate factor times the squared norm of its gradient: the loss it takes off per unit rate.
        relative_speed: the norm of its update, per unit rate, over the norm of its weights; for a collapsed circuit,
            which may start at zero, over the distance it has come since the start (0 where it has not moved yet).
        from_zero: whether it is such a circuit.
    """

    power: Float[Tensor, " run"]
    relative_speed: Float[Tensor, " run"]
    from_zero: bool


@dataclass(frozen=True)
class ConstantRate:
    """Plain gradient descent: the same rate at every step, in units of time."""

    rate: float

    def __post_init__(self) -> None:
        """Refuse a rate that is not positive."""
        _demand_positive("rate", self.rate)

    def __call__(self, loss: Float[Tensor, " run"], motions: list[CircuitMotion]) -> Float[Tensor, " run"]:  # noqa: ARG002
        """Return the rate of the next step of every run."""
        return torch.full_like(loss, self.rate)


@dataclass(frozen=True)
class RelativeStep:
    """A rate for every step such that the step is small against the state, whatever the scale of time.

    The rate is the largest at which the step (to first order) lowers the loss by no more than the fraction `step`,
    moves no factorized circuit by more than that fraction of its norm, and no collapsed circuit, which may start at
    zero, by more than five times that fraction of the way it has come. Both circuits share the rate, so their ratio r
    is kept and the path in (mu_OV, mu_QK) is that of gradient flow, up to an error proportional to `step`; the time
    that has passed is the sum of the rates. Late in training the loss falls as 1/time: a constant rate needs steps in
    proportion to 1/loss, this one to ln(1/loss).
    """

    step: float = 0.005

    def __post_init__(self) -> None:
        """Refuse a step that is not positive."""
        _demand_positive("step", self.step)

    def __call__(self, loss: Float[Tensor, " run"], motions: list[CircuitMotion]) -> Float[Tensor, " run"]:
        """Return the rate of the next step of every run."""
        rate = loss / torch.stack([motion.power for motion in motions]).sum(dim=0)
        for motion in motions:
            limit = torch.where(motion.relative_speed > 0, 1 / motion.relative_speed, _FIRST_STEP * rate)
            rate = torch.minimum(rate, _AWAY_FROM_ZERO * limit if motion.from_zero else limit)
        return self.step * rate


# A circuit at zero has no scale yet, and a first step that its loss alone would allow is too long for the other
# circuit.
_FIRST_STEP = 0.01
# What is wrong early on is soon small against the way that a collapsed circuit has come.
_AWAY_FROM_ZERO = 5


def _demand_positive(name: str, value: float) -> None:
    if not value > 0:
        raise CallError(f"{name} must be positive, got {value}")
