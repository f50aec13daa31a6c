"""The state dict of a model with the weights that torch's parametrisations compute in place of their parts."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize


def effective_state(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's state dict, in which each parametrised weight is what the model computes with.

    A parametrised weight is computed once, as in evaluation, so it does not follow the model's training. The model is
    not changed.

    Args:
        model: The model.
    """
    parts: list[str] = []
    computed: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        if not parametrize.is_parametrized(module):
            continue
        at = f"{path}." if path else ""
        parametrisations: Any = module.parametrizations
        for name, of_weight in parametrisations.items():
            parts.append(f"{at}parametrizations.{name}.")
            computed[f"{at}{name}"] = _computed(module, name, of_weight)
    state = model.state_dict(keep_vars=True)
    kept = {name: tensor for name, tensor in state.items() if not name.startswith(tuple(parts))}
    return kept | computed


def _computed(module: nn.Module, name: str, of_weight: nn.Module) -> Tensor:
    # Some parametrisations, such as spectral_norm, change their buffers each time they compute in training.
    modes = [(part, part.training) for part in of_weight.modules()]
    try:
        for part, _ in modes:
            part.training = False
        with torch.no_grad():
            return getattr(module, name)
    finally:
        for part, mode in modes:
            part.training = mode
