"""Training runs saved as folders of checkpoints, with a test of the preconditioner at every saved step."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ...circuits.algebra.circuit import Circuit
from ...circuits.algebra.preconditioner import Preconditioner, exact_step
from ...circuits.reading.saved_format import save_checkpoint
from .training import State


def log_spaced_steps(last: int, count: int) -> set[int]:
    """Return about `count` whole numbers from 0 to `last`, including 0, evenly spaced in the logarithm."""
    spaced = torch.logspace(0, torch.tensor(float(max(last, 1))).log10().item(), count, dtype=torch.float64)
    return {0, *spaced.round().long().tolist()}


def save_runs(
    states: Iterable[State],
    folders: Sequence[Path],
    settings: Sequence[dict[str, Any]],
    ratios: Sequence[float],
    steps: set[int],
) -> list[dict[float, int]]:
    """Save the checkpoints of each run at the given steps, wherever it reaches a loss, and at its end.

    The scalars of a checkpoint are the loss, alpha, the time, the rate of the step that follows, and for each
    factorized circuit the comparison of that step with the preconditioner's (`compare_step`).

    Args:
        states: the states that `train` yields.
        folders: folder of each run.
        settings: settings of each run, which are saved with its checkpoints.
        ratios: ratio r of each run.
        steps: the steps at which to save.

    Returns:
        For each run, the step at which it reached each loss.
    """
    reached: list[dict[float, int]] = [{} for _ in folders]
    ended = [False] * len(folders)

    def save(state: State, following: State | None) -> None:
        for run, folder in enumerate(folders):
            reached[run].update(dict.fromkeys(state.reached[run], state.step))
            moving = bool(state.active[run])
            if ended[run] or not (state.step in steps or state.reached[run] or not moving):
                continue
            scalars = {
                "loss": float(state.loss[run]),
                "attention": float(state.attention[run]),
                "time": float(state.time[run]),
                "rate": float(state.rate[run]),
            }
            for name, factor in (("qk", ratios[run]), ("ov", 1.0)):
                before = getattr(state.attention_weights(run), name)()
                comparison = dict.fromkeys(STEP_COMPARISONS, torch.nan)
                if before.right is not None and following is not None and moving:
                    after = getattr(following.attention_weights(run), name)()
                    rate = factor * float(state.rate[run])
                    comparison = compare_step(before, after, getattr(state, f"{name}_gradient")[run], rate)
                scalars |= {f"{quantity}_{name}": value for quantity, value in comparison.items()}
            save_checkpoint(folder, state.step, [state.attention_weights(run)], scalars, settings[run])
            ended[run] = not moving

    last = None
    for state, following in pairwise(states):
        save(state, following)
        last = following
    if last is not None:
        save(last, None)
    return reached


#: Names of the comparisons of a step with -Omega(C) G, with the exact operator and with -G alone.
STEP_COMPARISONS = (
    "omega_cosine",
    "omega_error",
    "exact_cosine",
    "exact_error",
    "gradient_cosine",
    "gradient_error",
)


def compare_step(
    before: Circuit, after: Circuit, gradient: Float[Tensor, "head rows columns"], rate: float
) -> dict[str, float]:
    """Compare the step that training took with three predictions of it.

        omega     -rate Omega(C) G, with vec(Omega(C) G) = [(C'C)^{1/2} (+) (C C')^{1/2}] vec(G)
        exact     -rate (A A' G + G B'B)
        gradient  -G alone, without a preconditioner, scaled to the size that fits best

    C = A B is the circuit before the step and G = dL/dC is its gradient. The step taken also contains
    rate^2 G B'A'G, which the predictions leave out.

    Args:
        before: the circuit before the step.
        after: the circuit after the step.
        gradient: G.
        rate: learning rate of the circuit's factors in that step.

    Returns:
        For each prediction, its cosine with the step taken and ||taken - predicted||_F / ||taken||_F, over all heads
        together, under the names in STEP_COMPARISONS.

    Source: derived for this project; see docs/theory, the preconditioner.
    """
    taken = after.dense() - before.dense()
    comparison = {}
    for name, operated in (
        ("omega", Preconditioner(before).apply(gradient)),
        ("exact", exact_step(before, gradient)),
        ("gradient", gradient),
    ):
        cosine = -(taken * operated).sum() / (taken.norm() * operated.norm())
        error = (taken + rate * operated).norm() / taken.norm()
        comparison[f"{name}_cosine"] = float(cosine)
        comparison[f"{name}_error"] = float(error if name != "gradient" else (1 - cosine.square()).clamp_min(0).sqrt())
    return comparison
