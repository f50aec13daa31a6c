"""The attention of each head of each layer at the readout position, and the simplest measures derived from it."""

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from ....circuits.algebra.products import upcast
from ....circuits.errors import CallError, QkovError
from ..models.model import AttentionModel, Batch
from .checks import demand_map, one_hot
from .fusion import HeadFusion, fuse_heads


@dataclass(eq=False)
class ReadoutRows:
    """A collector of a batch's attention maps that keeps every head's row at the readout position.

    A `MapSink`: call it with each layer's number and its map [batch, head, query, key].

    Attributes:
        mask: token mask of the batch, true where there is a token.
        readout: readout position of each example.

    Raises:
        CallError: A readout position is not that of a token, or a map does not have the batch's shape.
        QkovError: A head attends to nothing at the readout position, or its attention there is not finite.
    """

    mask: Bool[Tensor, "batch position"]
    readout: Int[Tensor, " batch"]
    _kept: list[Float64[Tensor, "batch head position"]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        """Refuse readout positions that are not those of tokens."""
        one_hot(self.readout, self.mask)

    def __call__(self, layer: int, attention: Float[Tensor, "batch head query key"]) -> None:
        """Keep a layer's rows, each divided by its sum over the tokens."""
        demand_map(layer, attention, self.mask)
        examples = torch.arange(len(attention), device=attention.device)
        rows = upcast(attention[examples, :, self.readout.to(attention.device)]).cpu()
        rows = rows.masked_fill(~self.mask.cpu()[:, None], 0.0)
        sums = rows.sum(dim=-1, keepdim=True)
        if not ((sums > 0) & sums.isfinite()).all():
            example, head = (~((sums > 0) & sums.isfinite())).nonzero()[0, :2].tolist()
            raise QkovError(
                f"layer {layer}, head {head}: attention at the readout of example {example} in the batch sums to "
                f"{float(sums[example, head, 0])} over its tokens; expected a finite sum above 0"
            )
        self._kept.append(rows / sums)

    def rows(self) -> Float64[Tensor, "batch layer head position"]:
        """Return the rows that were kept; each sums to 1 and is 0 on padding.

        Raises:
            CallError: No map was kept.
        """
        if not self._kept:
            raise CallError("there is no attention map")
        return torch.stack(self._kept, dim=1)


def readout_rows(model: AttentionModel, batch: Batch) -> Float64[Tensor, "batch layer head position"]:
    """Run the model and return every head's attention at the position where each example's prediction is read.

    Args:
        model: the model whose attention is measured.
        batch: examples.

    Returns:
        [batch, layer, head, position]; each row sums to 1 over the tokens of its example and is 0 on padding.

    Raises:
        CallError: The model gives no attention maps.
        QkovError: A head attends to nothing at the readout position, or its attention there is not finite.
    """
    kept = ReadoutRows(batch.mask, model.reading_positions(batch))
    model.watch(batch, kept)
    return kept.rows()


def last_layer(model: AttentionModel, batch: Batch, heads: HeadFusion = "mean") -> Float64[Tensor, "batch position"]:
    """Return the last layer's attention at the readout position, its heads fused and the row divided by its sum.

    Args:
        model: the model whose attention is measured.
        batch: examples.
        heads: how the heads become one row: mean, max or min, or the weights of a weighted sum.

    Returns:
        [batch, position]; each row sums to 1 over the tokens of its example and is 0 on padding.

    Raises:
        CallError: The number of weights differs from the number of heads.
        QkovError: The attention is not finite, or the heads together attend to no token.
    """
    return fuse_rows(readout_rows(model, batch)[:, -1:], heads)[:, 0]


def layer_mean(model: AttentionModel, batch: Batch, heads: HeadFusion = "mean") -> Float64[Tensor, "batch position"]:
    """Return the mean over layers of the attention at the readout position, each layer's heads fused.

    Attention is read at the same position in every layer; the measure does not follow what that position's input is
    made of.

    Args:
        model: the model whose attention is measured.
        batch: examples.
        heads: how the heads of a layer become one row: mean, max or min, or the weights of a weighted sum.

    Returns:
        [batch, position]; each row sums to 1 over the tokens of its example and is 0 on padding.

    Raises:
        CallError: The number of weights differs from the number of heads.
        QkovError: The attention is not finite, or the heads of a layer together attend to no token.
    """
    return fuse_rows(readout_rows(model, batch), heads).mean(dim=1)


def fuse_rows(
    rows: Float64[Tensor, "batch layer head position"], heads: HeadFusion = "mean"
) -> Float64[Tensor, "batch layer position"]:
    """Return one row for each layer over all its heads, divided by its sum.

    Args:
        rows: the rows of every head.
        heads: how the heads become one row.

    Raises:
        CallError: The number of weights differs from the number of heads.
        QkovError: The heads of a layer together attend to no token.
    """
    fused = fuse_heads(rows.transpose(1, 2), heads)
    sums = fused.sum(dim=-1, keepdim=True)
    if not (sums > 0).all():
        example, layer = (sums <= 0).nonzero()[0, :2].tolist()
        raise QkovError(
            f"layer {layer}: the heads together attend to no token of example {example} in the batch, so their {heads} "
            f"cannot be brought to sum 1; fuse by mean or max"
        )
    return fused / sums
