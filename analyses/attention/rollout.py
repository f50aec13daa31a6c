"""Attention rollout: how much of each input token reaches a place through all layers of attention."""

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from ...circuits.errors import CallError, QkovError
from ...circuits.products import upcast
from .fusion import discard_smallest, fuse_heads, hide_padding
from .map_checks import demand_map, one_hot
from .model import AttentionModel, Batch
from .rollout_settings import ABNAR_ZUIDEMA, Rollout


@dataclass(frozen=True, eq=False)
class _FusedMap:
    """A layer's fused map, its rows not yet divided by their sums, which are at least as exact as the map."""

    layer: int
    residual: float
    weights: Float[Tensor, "batch query key"]
    sums: Float64[Tensor, "batch query"]

    def demand_attention(self, asked: Bool[Tensor, "batch query"]) -> None:
        """QkovError where a query whose attention is asked for has none."""
        empty = (self.sums <= 0) & asked.to(self.sums.device)
        if empty.any():
            example, query = empty.nonzero()[0].tolist()
            raise QkovError(
                f"layer {self.layer}: query {query} of example {example} in the batch attends to no token once heads "
                f"are fused, so its row cannot be brought to sum 1; where heads attend apart, fuse by mean or max"
            )

    def carry(self, row: Float64[Tensor, "batch position"]) -> Float64[Tensor, "batch position"]:
        """Return row A_l."""
        row = row.to(self.sums.device)
        self.demand_attention(row > 0)
        divided = torch.where(self.sums > 0, row / self.sums, 0.0)
        attended = (divided[:, None] @ upcast(self.weights))[:, 0]
        return (1 - self.residual) * attended + self.residual * row

    def dense(self, mask: Bool[Tensor, "batch position"]) -> Float64[Tensor, "batch query key"]:
        """Return A_l, zero in the rows and columns of padding."""
        self.demand_attention(mask)
        mixed = (
            upcast(self.weights)
            * ((1 - self.residual) / self.sums.clamp_min(torch.finfo(torch.float64).tiny))[..., None]
        )
        mixed.diagonal(dim1=-2, dim2=-1).add_(self.residual * mask.to(mixed.device, torch.float64))
        return mixed


@dataclass(eq=False)
class FusedMaps:
    """Takes the maps of a batch layer by layer, as a `MapSink`, and keeps one fused map of each.

    What is kept is in the type of the maps, float32 at least: its entries are not negative, so sums of their products
    cancel nothing, and rounding them moves the result by no more than layers * 6e-8 of itself, which is less than what
    the model's own softmax is off by. Sums of rows, products and results are float64; results are on the CPU.

    Attributes:
        mask: of the batch, true where there is a token.
        settings: how maps are fused and mixed.

    Raises:
        CallError: on a map of another shape than the batch's, or layers that do not come in order.
        QkovError: on a map that is not finite, and on asking for a query that attends to nothing.
    """

    mask: Bool[Tensor, "batch position"]
    settings: Rollout = ABNAR_ZUIDEMA
    _kept: list[_FusedMap] = field(default_factory=list, init=False)

    def __call__(self, layer: int, attention: Float[Tensor, "batch head query key"]) -> None:
        """Fuse a layer's map and keep the result."""
        demand_map(layer, attention, self.mask)
        if self._kept and layer <= self._kept[-1].layer:
            raise CallError(f"the map of layer {layer} came after that of layer {self._kept[-1].layer}")
        if not self.settings.takes(layer):
            return
        fused = hide_padding(fuse_heads(attention, self.settings.heads_of(layer)), self.mask)
        if fused.device.type == "mps":  # which has no float64
            fused = fused.cpu()
        discard_smallest(fused, self.settings.discard)
        sums = fused.sum(dim=-1, dtype=torch.float64)
        if not sums.isfinite().all():
            raise QkovError(f"the attention of layer {layer} is not finite where there are tokens")
        self._kept.append(_FusedMap(layer, self.settings.residual_of(layer), fused, sums))

    @property
    def layers(self) -> tuple[int, ...]:
        """Numbers of the layers that were kept."""
        return tuple(kept.layer for kept in self._kept)

    def row(self, readout: Int[Tensor, " batch"]) -> Float64[Tensor, "batch position"]:
        """Return the rollout's row at one position of each example, in O(layers * n^2).

        A row vector goes back through the layers, from the last to the first. Rows sum to 1 and are zero on padding.

        Raises:
            CallError: no layer was kept, or a position is not that of a token.
        """
        kept = self._demand_layers()
        row = one_hot(readout, self.mask)
        for fused in reversed(kept):
            row = fused.carry(row)
        return row.cpu()

    def matrix(self) -> Float64[Tensor, "batch query key"]:
        """Return the whole rollout, a row for every query; zero in the rows and columns of padding.

        Raises:
            CallError: no layer was kept.
        """
        first, *later = self._demand_layers()
        product = first.dense(self.mask)
        for fused in later:
            mixed = fused.dense(self.mask)
            product = mixed @ product.to(mixed.device)
        return product.cpu()

    def mixed(self, example: int) -> list[Float64[Tensor, "query key"]]:
        """Return A_1 to A_L of one example over its tokens alone.

        Raises:
            CallError: no layer was kept.
        """
        length = int(self.mask[example].sum())
        mask = self.mask[example : example + 1, :length]
        return [
            _FusedMap(
                kept.layer,
                kept.residual,
                kept.weights[example : example + 1, :length, :length],
                kept.sums[example : example + 1, :length],
            )
            .dense(mask)[0]
            .cpu()
            for kept in self._demand_layers()
        ]

    def _demand_layers(self) -> list[_FusedMap]:
        if not self._kept:
            asked = "" if self.settings.layers is None else f" of the layers asked for, {list(self.settings.layers)}"
            raise CallError(f"there is no attention map{asked}")
        return self._kept


def rollout(
    model: AttentionModel, batch: Batch, settings: Rollout = ABNAR_ZUIDEMA
) -> Float64[Tensor, "batch position"]:
    """Return the rollout's row where each example's prediction is read; rows sum to 1.

    Raises:
        CallError: the settings do not fit the model.
        QkovError: the model's attention is not finite, or fuses to nothing.
    """
    return fused_maps(model, batch, settings).row(model.reading_positions(batch))


def fused_maps(model: AttentionModel, batch: Batch, settings: Rollout = ABNAR_ZUIDEMA) -> FusedMaps:
    """Run the model and keep one fused map a layer.

    Raises:
        CallError: the settings do not fit the model.
    """
    settings.demand_fit(model)
    maps = FusedMaps(batch.mask, settings)
    model.watch(batch, maps)
    return maps
