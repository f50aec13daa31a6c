"""Attention of this project's single-layer model, which has one row for each sequence and no positions."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ...analyses.dynamics.model import SingleLayerAttention
from ...analyses.dynamics.sequences import Sequences
from .forward import on_output
from .source import GivenRows, MapSource, Receiver


class SingleLayerMaps(MapSource):
    """Rows of a `SingleLayerAttention`; runs side by side are stacks, and the sequences say what is relevant."""

    def __init__(self, model: SingleLayerAttention) -> None:
        """Take the model."""
        self.name, self._model = type(model).__name__, model
        self._stacks = [""] if model.runs == 1 else [f"run {run}" for run in range(model.runs)]
        self.keys = tuple((stack, 0) for stack in self._stacks)

    @classmethod
    def of(cls, model: nn.Module) -> "SingleLayerMaps | None":
        """Take a model of that class; None for others."""
        return cls(model) if isinstance(model, SingleLayerAttention) else None

    def attach(self, receive: Receiver) -> Iterator[Callable[[], None]]:
        """Compute the attention of every forward once more, without gradient."""

        def taken(_args: tuple[Any, ...], kwargs: dict[str, Any], _output: Any) -> None:
            sequences = kwargs["sequences"]
            with torch.no_grad():
                attention = self._model.attention(sequences, self._model.products()[0])
                for stack, run in zip(self._stacks, attention, strict=True):
                    receive(GivenRows((stack, 0), row_measures(run, sequences)))

        yield on_output(self._model, self._model, taken)


def row_measures(
    attention: Float[Tensor, "head sequence token"], sequences: Sequences
) -> Mapping[str, Float[Tensor, "sequence head"]]:
    """Return the measures of rows over vocabulary entries, each standing for as many keys as it occurs.

    An entry that occurs c times has a / c of the attention a on each: entropy is -sum a ln(a / c).
    """
    counts, weights = sequences.counts.to(attention), attention.transpose(0, 1)
    relevant = sequences.relevant.to(attention)
    # Entries that do not occur have no attention.
    each = weights / counts.clamp_min(torch.finfo(counts.dtype).tiny)[:, None]
    spread = torch.special.entr(weights).sum(dim=-1) + torch.special.xlogy(weights, counts[:, None]).sum(dim=-1)
    on_relevant = (weights * relevant[:, None]).sum(dim=-1)
    chance = ((counts * relevant).sum(dim=-1) / counts.sum(dim=-1))[:, None].expand_as(on_relevant)
    return {
        "entropy": spread,
        "largest": torch.where(counts[:, None] > 0, each, 0.0).amax(dim=-1),
        "relevant": on_relevant,
        "chance": chance,
        "relevant_at_readout": on_relevant,
        "chance_at_readout": chance,
    }
