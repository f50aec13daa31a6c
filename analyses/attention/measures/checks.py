"""What maps, readouts and rows have to be for their examples."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from ....circuits.errors import CallError, QkovError
from ...tasks.example import Example


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


def demand_rows(method: str, rows: Sequence[Float64[Tensor, " _token"]], examples: Sequence[Example]) -> None:
    """Refuse rows of a method that are not those of the examples.

    Raises:
        CallError: there are not as many, or one has not as many weights as its example has tokens.
        QkovError: a weight is not finite.
    """
    if len(rows) != len(examples):
        raise CallError(f"{method} has rows for {len(rows)} examples; expected {len(examples)}")
    for number, (example, row) in enumerate(zip(examples, rows, strict=True)):
        name = f"example {example.id or number}"
        if len(row) != len(example.tokens):
            raise CallError(
                f"the row of {method} for {name} has {len(row)} weights; expected one for each of its "
                f"{len(example.tokens)} tokens"
            )
        if not bool(row.isfinite().all()):
            raise QkovError(f"a weight of {method} for {name} is not finite")
