"""The attention that each head of each layer pays at the readout, and the plainest measures made of it."""

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
    """Takes the maps of a batch layer by layer, as a `MapSink`, and keeps every head's row at the readout.

    Attributes:
        mask: of the batch, true where there is a token.
        readout: position of each example at which attention is read.

    Raises:
        CallError: a readout is not at a token, or a map has another shape than the batch's.
        QkovError: a head attends to nothing there, or its attention is not finite.
    """

    mask: Bool[Tensor, "batch position"]
    readout: Int[Tensor, " batch"]
    _kept: list[Float64[Tensor, "batch head position"]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        """Refuse readouts that are not at a token."""
        one_hot(self.readout, self.mask)

    def __call__(self, layer: int, attention: Float[Tensor, "batch head query key"]) -> None:
        """Keep a layer's rows, brought to sum 1 over the tokens."""
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
        """Return what was kept: rows sum to 1 and are zero on padding.

        Raises:
            CallError: nothing was kept.
        """
        if not self._kept:
            raise CallError("there is no attention map")
        return torch.stack(self._kept, dim=1)


def readout_rows(model: AttentionModel, batch: Batch) -> Float64[Tensor, "batch layer head position"]:
    """Run the model and return every head's attention where each example's prediction is read; rows sum to 1."""
    kept = ReadoutRows(batch.mask, model.reading_positions(batch))
    model.watch(batch, kept)
    return kept.rows()


def last_layer(model: AttentionModel, batch: Batch, heads: HeadFusion = "mean") -> Float64[Tensor, "batch position"]:
    """Return the last layer's attention at the readout, heads fused and brought to sum 1."""
    return fuse_rows(readout_rows(model, batch)[:, -1:], heads)[:, 0]


def layer_mean(model: AttentionModel, batch: Batch, heads: HeadFusion = "mean") -> Float64[Tensor, "batch position"]:
    """Return the mean over layers of the attention at the readout, the heads of each fused and brought to sum 1.

    It is read at the same position in every layer, and does not follow what that position's inputs are made of.
    """
    return fuse_rows(readout_rows(model, batch), heads).mean(dim=1)


def fuse_rows(
    rows: Float64[Tensor, "batch layer head position"], heads: HeadFusion = "mean"
) -> Float64[Tensor, "batch layer position"]:
    """Return one row a layer over all heads, brought to sum 1.

    Raises:
        QkovError: the heads attend to no token together.
    """
    fused = fuse_heads(rows.transpose(1, 2), heads)
    sums = fused.sum(dim=-1, keepdim=True)
    if not (sums > 0).all():
        example, layer = (sums <= 0).nonzero()[0, :2].tolist()
        raise QkovError(
            f"layer {layer}: the heads attend to no token of example {example} in the batch together, so their {heads} "
            f"cannot be brought to sum 1; fuse by mean or max"
        )
    return fused / sums
