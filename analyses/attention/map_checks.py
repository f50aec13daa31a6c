"""What maps and readouts have to be for a batch."""

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from ...circuits.errors import CallError


def demand_map(
    layer: int, attention: Float[Tensor, "batch head query key"], mask: Bool[Tensor, "batch position"]
) -> None:
    """CallError for a map that is not of the batch."""
    examples, length = mask.shape
    if attention.shape[0] != examples or attention.shape[2:] != (length, length):
        raise CallError(
            f"the map of layer {layer} has shape {list(attention.shape)}; expected [batch, head, query, key] with "
            f"{examples} examples and {length} positions on both sides"
        )


def one_hot(readout: Int[Tensor, " batch"], mask: Bool[Tensor, "batch position"]) -> Float64[Tensor, "batch position"]:
    """Return rows that are 1 at one position of each example, on the CPU.

    Raises:
        CallError: a position is not that of a token.
    """
    readout, mask = readout.cpu(), mask.cpu()
    places = torch.arange(mask.shape[1])[None] == readout[:, None]
    outside = ~(places & mask).any(dim=1)
    if outside.any():
        example = int(outside.nonzero()[0])
        raise CallError(
            f"attention was to be read at position {int(readout[example])} of example {example} in the batch, which "
            f"has {int(mask[example].sum())} tokens: padding attends to nothing"
        )
    return places.double()
