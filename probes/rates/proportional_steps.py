"""Test on small tensors of what an optimizer's steps are in proportion to the rate: entries, or whole tensors."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...circuits.errors import CallError, reason
from .group_ratios import BASE_RATE, MULTIPLIER

#: Enough steps to reach what changes during training: the end of RAdam's warm-up, and Rprop's limits on a step.
_RATE, _MULTIPLIER, _STEPS = 0.01, 3.0, 60

#: A large rate, at which limits on the rate itself show, as Adafactor's at one over the root of the step.
_LARGE_RATE, _FEW_STEPS = 1.0, 5


def proportional_steps(
    optimizer: Optimizer, group: dict[str, Any], dimensions: Iterable[int]
) -> Literal["entries", "tensors"]:
    """Return of what the steps are in proportion to the rate, so that scaling them is the same as another rate.

    With the options of the group, one tensor [4, 3] whose first two rows have their steps tripled is trained at a rate
    of 0.01 beside two tensors [2, 3] at rates of 0.03 and 0.01. If they agree after 60 steps, each entry moves in
    proportion to the rate. If not, a whole tensor whose steps are tripled is trained beside one at three times the
    rate, at 0.01 and at 1. Neither the optimizer nor torch's random numbers change.

    Args:
        optimizer: The optimizer to test.
        group: The parameter group whose options are used.
        dimensions: The numbers of dimensions of the parameters whose steps are to be scaled.

    Raises:
        CallError: The steps are in proportion in neither way, or the optimizer cannot be tested.
    """
    name = type(optimizer).__name__
    # Fused and captured steps need their device; other devices may lack float64.
    device = torch.device("cuda" if group["params"][0].is_cuda else "cpu")
    try:
        # Some optimizers draw random numbers, as for stochastic rounding.
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            if _entries_agree(optimizer, group, device):
                return "entries"
            if all(_tensors_agree(optimizer, group, device, ndim) for ndim in set(dimensions)):
                return "tensors"
    except Exception as error:
        raise CallError(
            f"{name} cannot be tested on a small tensor for steps in proportion to the rate ({reason(error)}): "
            f"CircuitRates accepts optimizers that are made of parameter groups and options, as AdamW is"
        ) from error
    raise CallError(
        f"{name} does not move each entry separately and in proportion to the rate, nor each tensor, so scaling a step "
        f"does not amount to another rate: use an optimizer that does, such as SGD, Adam, AdamW or Muon"
    )


def _entries_agree(optimizer: Optimizer, group: dict[str, Any], device: torch.device) -> bool:
    draw = _drawing((4, 3), device)
    start = draw()
    joined = start.clone().requires_grad_()
    halves = [half.clone().requires_grad_() for half in start.split(2)]
    scaled = _like(optimizer, group, [(joined, _RATE)])
    separate = _like(optimizer, group, list(zip(halves, (_MULTIPLIER * _RATE, _RATE), strict=True)))
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
    return torch.allclose(joined, torch.cat(halves), rtol=0, atol=1e-10)


def _tensors_agree(optimizer: Optimizer, group: dict[str, Any], device: torch.device, ndim: int) -> bool:
    shape = {0: (), 1: (4,)}.get(ndim, (2,) * (ndim - 2) + (4, 3))
    for rate, steps in ((_RATE, _STEPS), (_LARGE_RATE, _FEW_STEPS)):
        draw = _drawing(shape, device)
        mine, other = [[tensor.clone().requires_grad_() for tensor in pair] for pair in [(draw(), draw())] * 2]
        scaled = _like(optimizer, group, [(tensor, rate) for tensor in mine])
        separate = _like(optimizer, group, list(zip(other, (_MULTIPLIER * rate, rate), strict=True)))
        for _ in range(steps):
            for one, same in zip(mine, other, strict=True):
                one.grad = draw()
                same.grad = one.grad.clone()
            before = mine[0].detach().clone()
            scaled.step()
            separate.step()
            with torch.no_grad():
                mine[0].copy_(before + _MULTIPLIER * (mine[0] - before))
        if not all(torch.allclose(*pair, rtol=1e-10, atol=1e-10) for pair in zip(mine, other, strict=True)):
            return False
    return True


def _drawing(shape: tuple[int, ...], device: torch.device) -> Callable[[], Tensor]:
    """A function that draws the same tensors of a shape every time it is made."""
    generator = torch.Generator().manual_seed(0)
    return lambda: torch.randn(shape, dtype=torch.float64, generator=generator).to(device)


def _like(optimizer: Optimizer, group: dict[str, Any], rates: list[tuple[Tensor, float]]) -> Optimizer:
    """A new optimizer of the same class and options, each tensor with its rate."""
    kind: Any = type(optimizer)
    accepted = inspect.signature(kind).parameters
    defaults = {key: value for key, value in optimizer.defaults.items() if key in accepted}
    # The keys of circuit_parameter_groups would promise a ratio of rates that these tensors do not have.
    left_out = ("params", "param_names", MULTIPLIER, BASE_RATE)
    options = {key: value for key, value in group.items() if key not in left_out}
    return kind([{**options, "params": [tensor], "lr": rate} for tensor, rate in rates], **defaults)
