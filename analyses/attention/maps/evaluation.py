"""A model in evaluation mode and with eager attention for the time of a call, and as it was afterwards."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


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
        # Some modules do more than set a flag in train(), such as merging weights, so it has to be called.
        if was_training:
            model.train()
        for module in model.modules():
            module.training = module in training


#: The attention implementations of transformers that compute no map; a function that a user has registered may.
_FUSED = ("sdpa", "flash", "flex", "paged|")


def is_fused(kind: str | None) -> bool:
    """Return whether an attention implementation is one of transformers' own, or of the kernels of a hub, without maps.

    Args:
        kind: The name of the implementation; None if there is no choice.
    """
    return kind is not None and (kind.startswith(_FUSED) or "/" in kind)


@contextmanager
def eager_attention(model: nn.Module) -> Iterator[str | None]:
    """Set fused attention of a model of transformers to eager, and set it back afterwards.

    A function that the user has registered with transformers is part of the model, and stays.

    Yields:
        The implementation that stays set because the model cannot be changed once it is built; None for eager.
    """
    before = [(config, config._attn_implementation) for config in _configs(model)]
    if not any(is_fused(kind) for _, kind in before):
        yield None
        return
    can_be_set: Any = getattr(model, "_can_set_attn_implementation", None)
    try:
        if hasattr(model, "set_attn_implementation") and (can_be_set is None or can_be_set()):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model.set_attn_implementation("eager")  # pyright: ignore[reportCallIssue]
        kind = getattr(getattr(model, "config", None), "_attn_implementation", None)
        yield None if kind == "eager" else kind
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
