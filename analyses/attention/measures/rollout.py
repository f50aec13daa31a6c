"""Attention rollout: how much of each input token reaches a place through all layers of attention."""

import math
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from ....circuits.algebra.products import upcast
from ....circuits.errors import CallError, QkovError
from ..models.model import AttentionModel, Batch
from .checks import demand_map, one_hot
from .fusion import HeadFusion, discard_smallest, fuse_heads, hide_padding


@dataclass(frozen=True)
class Rollout:
    """A_l = (1 - residual) fused map of layer l + residual I; the rollout is A_L ... A_2 A_1.

    The rows of a fused map sum to 1 over the real tokens before the identity is mixed in, so those of A_l do too. Where
    others write a A + (1 - a) I, a is 1 - residual.

    Attributes:
        residual: share of the identity, which stands for the residual stream, from 0 to 1; one for all layers or one
            for each. Abnar & Zuidema take 0.5.
        heads: how heads become one map; weights are one tuple for all layers or one for each.
        discard: share of each query's keys that is dropped, smallest first, from 0 to less than 1: see
            `fusion.discard_smallest`.
        layers: numbers of the layers that are rolled out; None for all. The others are passed over.

    Raises:
        CallError: a setting is out of its range, or weights are negative or all zero.

    Source: Abnar & Zuidema, "Quantifying Attention Flow in Transformers", 2020.
    """

    residual: float | tuple[float, ...] = 0.5
    heads: HeadFusion | tuple[tuple[float, ...], ...] = "mean"
    discard: float = 0.0
    layers: range | None = None

    def __post_init__(self) -> None:
        """Refuse settings out of their range."""
        for residual in self.residual if isinstance(self.residual, tuple) else (self.residual,):
            if not 0 <= residual <= 1:
                raise CallError(f"residual is a share of the identity, from 0 to 1, got {residual}")
        if not 0 <= self.discard < 1:
            raise CallError(f"discard is a share of each query's keys, from 0 to less than 1, got {self.discard}")
        if self.layers is not None and (not self.layers or min(self.layers) < 0):
            raise CallError(f"layers should be a range of numbers of layers, from 0 up, got {self.layers}")
        if isinstance(self.heads, str):
            if self.heads not in ("mean", "max", "min"):
                raise CallError(f"heads should be mean, max, min or weights, got {self.heads!r}")
            return
        for weights in self._weights_by_layer or (self._weights,):
            if not all(0 <= weight < math.inf for weight in weights) or not any(weights):
                raise CallError(f"weights of heads should be finite, none negative and not all zero, got {weights}")

    def takes(self, layer: int) -> bool:
        """Whether a layer is rolled out."""
        return self.layers is None or layer in self.layers

    def residual_of(self, layer: int) -> float:
        """Return the share of the identity in a layer.

        Raises:
            CallError: the settings have none for that layer.
        """
        if not isinstance(self.residual, tuple):
            return self.residual
        if layer >= len(self.residual):
            raise CallError(f"residual was given for {len(self.residual)} layers, and there is a layer {layer}")
        return self.residual[layer]

    def heads_of(self, layer: int) -> HeadFusion:
        """Return how the heads of a layer are fused.

        Raises:
            CallError: the settings have no weights for that layer.
        """
        if isinstance(self.heads, str):
            return self.heads
        by_layer = self._weights_by_layer
        if not by_layer:
            return self._weights
        if layer >= len(by_layer):
            raise CallError(f"weights of heads were given for {len(by_layer)} layers, and there is a layer {layer}")
        return by_layer[layer]

    def demand_fit(self, model: AttentionModel) -> None:
        """CallError for settings of other layers or heads than the model's."""
        if self.layers is not None and max(self.layers) >= model.layers:
            raise CallError(f"layers {list(self.layers)} were asked for; {model.name} has 0 to {model.layers - 1}")
        for name, given in (("residual", self.residual), ("heads", self._weights_by_layer)):
            if isinstance(given, tuple) and given and len(given) != model.layers:
                raise CallError(f"{name} was given for {len(given)} layers; {model.name} has {model.layers}")

    @property
    def _weights(self) -> tuple[float, ...]:
        """Weights for all layers alike."""
        return tuple(weight for weight in self.heads if not isinstance(weight, str | tuple))

    @property
    def _weights_by_layer(self) -> tuple[tuple[float, ...], ...]:
        return tuple(weights for weights in self.heads if isinstance(weights, tuple))


#: The settings of Abnar & Zuidema: heads averaged, half of the identity.
ABNAR_ZUIDEMA = Rollout()


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
