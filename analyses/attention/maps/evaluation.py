"""A model in evaluation mode and with eager attention for the time of a call, and as it was afterwards."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ....circuits.errors import CallError


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, without dropout, and give every module its own mode back afterwards."""
    training = {module for module in model.modules() if module.training}
    if not training:
        yield
        return
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        # Some modules do more than set a flag when the mode changes, such as merging weights, so they are told.
        if was_training:
            model.train()
        for module in model.modules():
            module.training = module in training


@contextmanager
def eager_attention(model: nn.Module, name: str) -> Iterator[None]:
    """Set the attention of a model of transformers to eager, and set it back afterwards.

    Args:
        model: The model.
        name: Its name, for messages.

    Raises:
        CallError: The attention is fused and cannot be changed once the model is built.
    """
    before = [(config, config._attn_implementation) for config in _configs(model)]
    if all(kind in (None, "eager") for _, kind in before):
        yield
        return
    try:
        if hasattr(model, "set_attn_implementation"):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model.set_attn_implementation("eager")  # pyright: ignore[reportCallIssue]
        kind = getattr(getattr(model, "config", None), "_attn_implementation", None)
        if kind not in (None, "eager"):
            raise CallError(
                f"the attention of {name} is {kind} and cannot be changed, and fused attention gives no maps; load the "
                f"model again with attn_implementation='eager'"
            )
        yield
    finally:
        for config, kind in before:
            # The public attribute would also set the configs inside, each of which has its own.
            config._attn_implementation_internal = kind


def _configs(model: nn.Module) -> list[Any]:
    """Return the distinct configs of a model's modules and the configs inside them."""
    waiting = [module.config for module in model.modules() if hasattr(module, "config")]
    found: dict[int, Any] = {}
    while waiting:
        config = waiting.pop()
        if id(config) in found or not hasattr(config, "_attn_implementation"):
            continue
        found[id(config)] = config
        waiting += [getattr(config, key, None) for key in getattr(config, "sub_configs", None) or ()]
    return list(found.values())
