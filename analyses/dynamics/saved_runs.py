"""Training runs saved as folders of checkpoints, with the test of the preconditioner at every saved step."""

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
    """Return about `count` whole numbers from 0 to `last`, evenly spaced in the logarithm, 0 among them."""
    spaced = torch.logspace(0, torch.tensor(float(max(last, 1))).log10().item(), count, dtype=torch.float64)
    return {0, *spaced.round().long().tolist()}


def save_runs(
    states: Iterable[State],
    folders: Sequence[Path],
    settings: Sequence[dict[str, Any]],
    ratios: Sequence[float],
    steps: set[int],
) -> list[dict[float, int]]:
    """Save each run of a training at the given steps and wherever it reaches a loss; return where it did.

    The scalars of a checkpoint are the loss, alpha, time, the rate of the step that follows, and for each factorized
    circuit how that step compares with the preconditioner's (`step_agreement`).

    Args:
        states: what `train` yields.
        folders: of each run.
        settings: of each run, saved with its checkpoints.
        ratios: r of each run.
        steps: at which to save.

    Returns:
        For each run the step at which it reached each loss.
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
                figures = dict.fromkeys(_AGREEMENT, torch.nan)
                if before.right is not None and following is not None and moving:
                    after = getattr(following.attention_weights(run), name)()
                    rate = factor * float(state.rate[run])
                    figures = step_agreement(before, after, getattr(state, f"{name}_gradient")[run], rate)
                scalars |= {f"{figure}_{name}": value for figure, value in figures.items()}
            save_checkpoint(folder, state.step, [state.attention_weights(run)], scalars, settings[run])
            ended[run] = not moving

    last = None
    for state, following in pairwise(states):
        save(state, following)
        last = following
    if last is not None:
        save(last, None)
    return reached


_AGREEMENT = ("omega_cosine", "omega_error", "exact_cosine", "exact_error", "gradient_cosine", "gradient_error")


def step_agreement(
    before: Circuit, after: Circuit, gradient: Float[Tensor, "head rows columns"], rate: float
) -> dict[str, float]:
    """Compare the step that training took with -rate Omega(C) G, with the exact -rate (A A' G + G B'B), and with -G.

    Returns the cosine of the two steps and ||taken - predicted||_F / ||taken||_F, all heads together; -G alone, without
    a preconditioner, is given the size that fits best. The taken step also holds rate^2 G B'A'G, which the
    predictions leave out.
    """
    taken = after.dense() - before.dense()
    figures = {}
    for name, operated in (
        ("omega", Preconditioner(before).apply(gradient)),
        ("exact", exact_step(before, gradient)),
        ("gradient", gradient),
    ):
        cosine = -(taken * operated).sum() / (taken.norm() * operated.norm())
        error = (taken + rate * operated).norm() / taken.norm()
        figures[f"{name}_cosine"] = float(cosine)
        figures[f"{name}_error"] = float(error if name != "gradient" else (1 - cosine.square()).clamp_min(0).sqrt())
    return figures
