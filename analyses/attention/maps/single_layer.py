"""Attention of this project's single-layer model, which has one query for each sequence and no positions."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ...dynamics.model import SingleLayerAttention
from .calls import OnCall, on_call
from .source import InputReceiver, LayerRows, MapSource, Receiver


class SingleLayerMaps(MapSource):
    """The rows of attention of a `SingleLayerAttention`; runs that train side by side are stacks."""

    has_maps = False

    def __init__(self, model: SingleLayerAttention) -> None:
        """Take the model."""
        self.name, self._model = type(model).__name__, model
        self._stacks = [""] if model.runs == 1 else [f"run {run}" for run in range(model.runs)]
        self.keys = tuple((stack, 0) for stack in self._stacks)

    @classmethod
    def of(cls, model: nn.Module) -> "SingleLayerMaps | None":
        """Take a model of that class; return None for others."""
        return cls(model) if isinstance(model, SingleLayerAttention) else None

    def attach(
        self,
        receive: Receiver,
        *,
        inputs: InputReceiver | None = None,
        consume: bool = False,
        on_call: OnCall = on_call,
    ) -> Iterator[Callable[[], None]]:
        """Compute the attention of every call a second time, without gradients.

        There are no maps to consume: a measure reads this model through `SingleLayerModel`.
        """
        del inputs, consume

        def hook(args: tuple[Any, ...], kwargs: dict[str, Any], _output: Any) -> None:
            sequences = args[0] if args else kwargs["sequences"]
            with torch.no_grad():
                attention = self._model.attention(sequences, self._model.products()[0])
            for stack, run in zip(self._stacks, attention, strict=True):
                receive(LayerRows((stack, 0), run, sequences))

        yield on_call(self._model, hook)
