"""The mode that a layer of attention ran in, and what its dropout did to the map that is read, in words."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Mode:
    """The mode that a layer of attention ran in.

    Attributes:
        words: The mode in words, with what dropout did to the map.
        dropout: The rate of the dropout that the map has been through, after which weights that stay are 1 / (1 - rate)
            as large; None if it is not known.
    """

    words: str
    dropout: float | None = 0.0


#: The mode of a layer that drops nothing.
EVALUATION = Mode("evaluation")
#: The names under which attention modules keep the dropout of their weights, or its rate.
_DROPOUTS = ("attn_dropout", "attention_dropout", "dropout", "dropout_prob")


def training_mode(rate: float | None, *, before: bool = False) -> Mode:
    """Return the mode of a layer in training.

    Args:
        rate: The rate of the dropout of its attention; None if that is not known.
        before: Whether its map is the one before dropout; otherwise it is the one that the layer attended with.
    """
    if rate == 0:
        return Mode("training, without dropout of attention")
    size = "of an unknown rate" if rate is None else f"of {rate:g}"
    return Mode(f"training, {'before' if before else 'after'} dropout {size}", 0.0 if before else rate)


def mode_before_dropout(rate: float, *, is_training: bool) -> Mode:
    """Return the mode of an attention whose weights are computed from the call of its kernel, without dropout.

    Args:
        rate: The rate of dropout that the kernel was called with.
        is_training: Whether the module is in training mode.
    """
    return training_mode(rate, before=True) if is_training or rate else EVALUATION


def mode_after_dropout(modules: Iterable[nn.Module]) -> Mode:
    """Return the mode of an attention whose map is read after dropout.

    Args:
        modules: The modules that may hold its dropout, the one that is called first among them.
    """
    modules = list(modules)
    kept: list[Any] = [getattr(module, name) for module in modules for name in _DROPOUTS if hasattr(module, name)]
    parts = [part for module in modules for part in module.modules() if isinstance(part, nn.Dropout)]
    if not modules[0].training and not any(part.training for part in parts):
        return EVALUATION
    rates = {float(value.p if isinstance(value, nn.Dropout) else value) for value in kept if _is_dropout(value)}
    if not rates and not parts:
        rates = {0.0}
    return training_mode(rates.pop() if len(rates) == 1 else None)


def _is_dropout(value: Any) -> bool:
    return isinstance(value, nn.Dropout | float | int) and not isinstance(value, bool)
