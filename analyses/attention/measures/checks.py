"""Checks that attention maps, readout positions and rows of weights fit their examples."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from ....circuits.errors import CallError, QkovError
from ...tasks.example import Example


def demand_map(
    layer: int, attention: Float[Tensor, "batch head query key"], mask: Bool[Tensor, "batch position"]
) -> None:
    """Refuse an attention map that does not have the batch's shape.

    Args:
        layer: number of the layer, for the message.
        attention: the layer's attention map.
        mask: token mask of the batch.

    Raises:
        CallError: The map has another number of examples or positions than the batch.
    """
    examples, length = mask.shape
    if attention.shape[0] != examples or attention.shape[2:] != (length, length):
        raise CallError(
            f"the map of layer {layer} has shape {list(attention.shape)}; expected [batch, head, query, key] with "
            f"{examples} examples and {length} positions on both sides"
        )


def one_hot(readout: Int[Tensor, " batch"], mask: Bool[Tensor, "batch position"]) -> Float64[Tensor, "batch position"]:
    """Return rows that are 1 at the readout position of each example and 0 elsewhere, on the CPU.

    Args:
        readout: readout position of each example.
        mask: token mask of the batch.

    Raises:
        CallError: A readout position is not that of a token.
    """
    readout, mask = readout.cpu(), mask.cpu()
    is_readout = torch.arange(mask.shape[1])[None] == readout[:, None]
    outside = ~(is_readout & mask).any(dim=1)
    if outside.any():
        example = int(outside.nonzero()[0])
        raise CallError(
            f"the readout position {int(readout[example])} of example {example} in the batch is not that of a token: "
            f"the example has {int(mask[example].sum())} tokens, and padding attends to nothing"
        )
    return is_readout.double()


def demand_rows(method: str, rows: Sequence[Float64[Tensor, " _token"]], examples: Sequence[Example]) -> None:
    """Refuse rows of weights that do not fit the examples.

    Args:
        method: name of the method, for the message.
        rows: for each example the weight of each of its tokens.
        examples: the examples.

    Raises:
        CallError: There is not one row for each example, or a row does not have one weight for each token.
        QkovError: A weight is not finite.
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
