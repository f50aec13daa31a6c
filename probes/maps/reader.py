"""The masks that users give: read as tensors, and fitted to a sequence that grows as tokens are generated."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from ...analyses.attention.maps.source import LayerOverPositions
from ...circuits.errors import CallError, reason
from ...circuits.weights.layer_keys import layer_name

#: True or 1 for some tokens: [position] for all examples or [batch, position]; or a function that makes such a mask of
#: the tokens.
TokenMask = Tensor | Sequence[Any] | Callable[[Any], Any]


@dataclass(frozen=True)
class Reader:
    """Turns what a user gave into a tensor of shape [batch, position], for the tokens of one call."""

    tokens: Any
    batch: int
    device: torch.device

    def value(self, given: Any, name: str) -> Tensor:
        """Return what was given as a tensor; a function is called with the tokens."""
        if callable(given):
            if self.tokens is None:
                raise CallError("a mask that is made of the tokens needs a model that is called with a tensor")
            given = given(self.tokens)
        try:
            return torch.as_tensor(given, device=self.device).detach()
        except (TypeError, ValueError, RuntimeError) as error:
            raise CallError(
                f"{name} should be a tensor, or numbers that torch can make a tensor of, got {type(given).__name__} "
                f"({reason(error)})"
            ) from error

    def __call__(self, given: Any, name: str) -> Bool[Tensor, "batch position"]:
        """Return what was given as a mask of every example.

        Args:
            given: What was given.
            name: Its name, for messages.

        Raises:
            CallError: It has another shape, or values other than 0 and 1.
        """
        value = self.value(given, name)
        if value.ndim not in (1, 2) or (value.ndim == 2 and len(value) not in (1, self.batch)):
            raise CallError(
                f"{name} has shape {list(value.shape)}; expected [position], or [batch, position] with {self.batch} "
                f"examples; if the model takes a mask of another shape, give the probe the padding mask as mask="
            )
        if value.dtype != torch.bool:
            if bool(((value != 0) & (value != 1)).any()):
                raise CallError(f"{name} has values other than 0 and 1; expected 1, or true, for the tokens meant")
            value = value != 0
        return value.expand(self.batch, value.shape[-1])


@dataclass(frozen=True)
class Line:
    """The columns of a sequence so far.

    Attributes:
        known: The number of columns of earlier calls.
        total: The number of columns with those of this call.
        layer_map: The map that is measured, for messages.
    """

    known: int
    total: int
    layer_map: LayerOverPositions

    def fitted(
        self, mask: Bool[Tensor, "batch position"], name: str, *, grows: bool, fill: bool
    ) -> Bool[Tensor, "batch column"]:
        """Return a mask with a value for every column.

        Args:
            mask: The mask; it may end before the tokens of this call if it was made for the first tokens.
            name: Its name, for messages.
            grows: Whether it may.
            fill: The value of the columns after its end.

        Raises:
            CallError: It has another length.
        """
        length = mask.shape[1]
        if grows and length <= self.known:
            return torch.nn.functional.pad(mask, (0, self.total - length), value=fill)
        if length != self.total and self.known:
            raise CallError(
                f"{name} has {length} positions; expected the {self.total} of the sequence so far, or as many as an "
                f"earlier call had, of {self.known}"
            )
        demand_length(mask, self.total, name, self.layer_map)
        return mask


def demand_length(mask: Tensor, length: int, name: str, layer_map: LayerOverPositions) -> None:
    """Refuse a mask of another length.

    Args:
        mask: The mask.
        length: The length that is expected.
        name: The name of the mask, for messages.
        layer_map: The map that is measured, for messages.

    Raises:
        CallError: It has another length.
    """
    if mask.shape[1] != length:
        raise CallError(
            f"{name} has {mask.shape[1]} positions, and the map of {layer_name(*layer_map.key)} has {length}, with the "
            f"shape {list(layer_map.shape)} as [batch, head, query, key]"
        )
