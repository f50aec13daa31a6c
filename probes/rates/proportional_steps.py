"""Test on a small tensor whether an optimizer moves each entry separately and in proportion to the rate."""

import inspect
from typing import Any

import torch
from torch.optim import Optimizer

from ...circuits.errors import CallError, reason

#: Enough steps to reach what changes during training: the end of RAdam's warm-up, and Rprop's limits on a step.
_RATE, _MULTIPLIER, _STEPS = 0.01, 3.0, 60


def demand_proportional_steps(optimizer: Optimizer, group: dict[str, Any]) -> None:
    """Refuse an optimizer for which scaling the step of some entries is not the same as giving them their own rate.

    With the options of the group, one tensor [4, 3] whose first two rows have their steps tripled is trained at a rate
    of 0.01 beside two tensors [2, 3] at rates of 0.03 and 0.01; they must agree after 60 steps. Neither the optimizer
    nor torch's random numbers change.

    Args:
        optimizer: The optimizer to test.
        group: The parameter group whose options are used.

    Raises:
        CallError: The tensors do not agree, or the optimizer cannot be tested.
    """
    name = type(optimizer).__name__
    # Fused and captured steps need their device; other devices may lack float64.
    device = torch.device("cuda" if group["params"][0].is_cuda else "cpu")
    generator = torch.Generator().manual_seed(0)

    def draw() -> torch.Tensor:
        return torch.randn(4, 3, dtype=torch.float64, generator=generator).to(device)

    start = draw()
    joined = start.clone().requires_grad_()
    halves = [half.clone().requires_grad_() for half in start.split(2)]
    rates = (_MULTIPLIER * _RATE, _RATE)
    try:
        # Some optimizers draw random numbers, as for stochastic rounding.
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            scaled = _like(optimizer, group, [(joined, _RATE)])
            separate = _like(optimizer, group, list(zip(halves, rates, strict=True)))
            for _ in range(_STEPS):
                gradient = draw()
                joined.grad = gradient
                for half, part in zip(halves, gradient.split(2), strict=True):
                    half.grad = part.clone()
                before = joined.detach()[:2].clone()
                scaled.step()
                separate.step()
                with torch.no_grad():
                    joined[:2].copy_(before + _MULTIPLIER * (joined[:2] - before))
    except Exception as error:
        raise CallError(
            f"{name} cannot be tested on a small tensor for steps in proportion to the rate ({reason(error)}): "
            f"CircuitRates accepts optimizers that are made of parameter groups and options, as AdamW is"
        ) from error
    if not torch.allclose(joined, torch.cat(halves), rtol=0, atol=1e-10):
        raise CallError(
            f"{name} does not move each entry separately and in proportion to the rate, so scaling a step does not "
            f"amount to another rate: use an optimizer that does, such as SGD, Adam or AdamW"
        )


def _like(optimizer: Optimizer, group: dict[str, Any], rates: list[tuple[torch.Tensor, float]]) -> Optimizer:
    """A new optimizer of the same class and options, each tensor with its rate."""
    kind: Any = type(optimizer)
    accepted = inspect.signature(kind).parameters
    defaults = {key: value for key, value in optimizer.defaults.items() if key in accepted}
    options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    return kind([{**options, "params": [tensor], "lr": rate} for tensor, rate in rates], **defaults)
