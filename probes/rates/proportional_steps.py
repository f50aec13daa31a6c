"""Whether an optimizer moves each entry by itself and in proportion to the rate, tried on a small tensor."""

import inspect
from typing import Any

import torch
from torch.optim import Optimizer

from ...circuits.errors import CallError, reason

#: Enough steps for what changes on the way: RAdam's start, Rprop's limits of a step.
_RATE, _MULTIPLIER, _STEPS = 0.01, 3.0, 60


def demand_proportional_steps(optimizer: Optimizer, group: dict[str, Any]) -> None:
    """Refuse an optimizer for which scaling the step of some entries is not the same as a rate of their own.

    A tensor whose first half has its steps scaled, and two that have rates of their own, take some steps with the
    options of the group; they have to agree. Nothing of the optimizer itself is touched.

    Raises:
        CallError: they do not agree, or the optimizer cannot be tried.
    """
    name = type(optimizer).__name__
    # Fused and captured steps want their device; others may have no float64.
    device = torch.device("cuda" if group["params"][0].is_cuda else "cpu")
    generator = torch.Generator().manual_seed(0)

    def draw() -> torch.Tensor:
        return torch.randn(4, 3, dtype=torch.float64, generator=generator).to(device)

    start = draw()
    joined = start.clone().requires_grad_()
    halves = [half.clone().requires_grad_() for half in start.chunk(2)]
    rates = (_MULTIPLIER * _RATE, _RATE)
    try:
        one = _like(optimizer, group, [(joined, _RATE)])
        other = _like(optimizer, group, list(zip(halves, rates, strict=True)))
        for _ in range(_STEPS):
            gradient = draw()
            joined.grad = gradient
            for half, part in zip(halves, gradient.chunk(2), strict=True):
                half.grad = part.clone()
            before = joined.detach()[:2].clone()
            one.step()
            other.step()
            with torch.no_grad():
                joined[:2].copy_(before + _MULTIPLIER * (joined[:2] - before))
    except Exception as error:
        raise CallError(
            f"{name} cannot be tried on a small tensor, to see whether its step is in proportion to the rate "
            f"({reason(error)}): CircuitRates takes optimizers made of parameter groups and options, as AdamW is"
        ) from error
    if not torch.allclose(joined, torch.cat(halves), rtol=0, atol=1e-10):
        raise CallError(
            f"{name} does not move each entry by itself and in proportion to the rate, so scaling its step is not a "
            f"rate of its own: use SGD, Adam, AdamW or another that does"
        )


def _like(optimizer: Optimizer, group: dict[str, Any], rates: list[tuple[torch.Tensor, float]]) -> Optimizer:
    """A new optimizer of the same kind and options, each tensor with its rate."""
    kind: Any = type(optimizer)
    taken = inspect.signature(kind).parameters
    defaults = {key: value for key, value in optimizer.defaults.items() if key in taken}
    options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    return kind([{**options, "params": [tensor], "lr": rate} for tensor, rate in rates], **defaults)
