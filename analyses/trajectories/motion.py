"""How far circuits moved between two checkpoints."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from ...circuits.algebra.circuit import Circuit
from ...circuits.algebra.comparison import compare

#: The quantities of `motion`, which are all missing at a run's first checkpoint.
MOTION = ("change_norm", "relative_speed", "previous_scale", "previous_cosine")


def motion(circuit: Circuit, previous: Circuit, steps: int) -> dict[str, Float[Tensor, "*batch"]]:
    """Return how far each head of a circuit moved since the previous checkpoint, computed through its factors.

    With C the circuit now and C_before the circuit at the previous checkpoint:

    | name | formula | unit |
    |---|---|---|
    | change_norm | ||C - C_before||_F | that of C |
    | relative_speed | ||C - C_before||_F / (||C_before||_F steps) | per step; NaN where C_before is zero |
    | previous_scale | <C, C_before> / <C_before, C_before> | 1; NaN where C_before is zero |
    | previous_cosine | <C, C_before> / (||C||_F ||C_before||_F) | 1; NaN where either is zero |

    Args:
        circuit: The circuit at this checkpoint.
        previous: The circuit at the previous checkpoint, of the same shape.
        steps: The number of training steps between the two.

    Returns:
        The quantities by name, one value for each head.
    """
    change = (circuit - previous).frobenius_norm()
    return _quantities(circuit.frobenius_norm(), previous.frobenius_norm(), change, circuit.inner(previous), steps)


def motion_and_direction(
    circuit: Circuit, previous: Circuit, steps: int, direction: Circuit
) -> dict[str, Float[Tensor, "*batch"]]:
    """Return what `motion` returns, with scale and cosine along a direction, as `measure` returns them, at once.

    Args:
        circuit: The circuit at this checkpoint.
        previous: The circuit at the previous checkpoint, of the same shape.
        steps: The number of training steps between the two.
        direction: The direction.

    Returns:
        The quantities of `motion`, `reference_scale` and `reference_cosine`, one value for each head.
    """
    found = compare(circuit, previous, direction)
    moved = _quantities(found.norm, found.norm_before, found.change_norm, found.inner, steps)
    return {"reference_scale": found.scale, "reference_cosine": found.cosine} | moved


def _quantities(norm: Tensor, before: Tensor, change: Tensor, inner: Tensor, steps: int) -> dict[str, Tensor]:
    undefined = torch.full_like(before, torch.nan)
    return {
        "change_norm": change,
        "relative_speed": torch.where(before > 0, change / (before * steps), undefined),
        "previous_scale": torch.where(before > 0, inner / before**2, undefined),
        "previous_cosine": torch.where((before > 0) & (norm > 0), inner / (norm * before), undefined),
    }


def effective_ratio(relative_speeds: dict[str, list[float] | None], head: int) -> float:
    """Return r(t) of a head as the weights alone show it: the relative speed of W_QK divided by that of W_OV.

    It is a ratio of speeds, not of learning rates; for qkov's own runs, `fit_ratio` computes the latter from the
    scales. It is NaN if one of the speeds is missing, undefined or zero.

    Args:
        relative_speeds: The relative speeds of the heads by circuit, QK and OV.
        head: The number of the head.
    """
    qk, ov = relative_speeds.get("QK"), relative_speeds.get("OV")
    if qk is None or ov is None or len(qk) != len(ov) or not (qk[head] > 0 and ov[head] > 0):
        return math.nan
    return qk[head] / ov[head]
