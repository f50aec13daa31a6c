"""Attention rollout: how much of each input token reaches a position through all layers of attention."""

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
    """How the attention maps of the layers are fused and multiplied.

        A_l = (1 - residual) F_l + residual I,      rollout = A_L ... A_2 A_1

    F_l is the map of layer l, [query, key], after its heads have been fused and each of its rows has been divided by
    its sum over the real tokens, so the rows of F_l and of A_l sum to 1. Other authors write a A + (1 - a) I; their a
    is 1 - residual.

    Attributes:
        residual: share of the identity, which stands for the residual stream, from 0 to 1; one number for all layers or
            one for each. Abnar & Zuidema use 0.5.
        heads: how the heads of a layer become one map: "mean", "max", "min", or the weights of a weighted sum, one
            tuple for all layers or one for each.
        discard: share of each query's keys that is dropped, smallest first, from 0 to less than 1; see
            `measures.fusion.discard_smallest`.
        layers: numbers of the layers that take part; None for all. The other layers are skipped.

    Raises:
        CallError: A setting is out of its range, or the weights of heads are negative or all zero.

    Source: Abnar & Zuidema, "Quantifying Attention Flow in Transformers", 2020.
    """

    residual: float | tuple[float, ...] = 0.5
    heads: HeadFusion | tuple[tuple[float, ...], ...] = "mean"
    discard: float = 0.0
    layers: range | None = None

    def __post_init__(self) -> None:
        """Refuse settings that are out of range."""
        for residual in self.residual if isinstance(self.residual, tuple) else (self.residual,):
            if not 0 <= residual <= 1:
                raise CallError(f"residual is a share of the identity, from 0 to 1, got {residual}")
        if not 0 <= self.discard < 1:
            raise CallError(f"discard is a share of each query's keys, from 0 to less than 1, got {self.discard}")
        if self.layers is not None and (not self.layers or min(self.layers) < 0):
            raise CallError(f"layers should be a range of layer numbers, from 0 up, got {self.layers}")
        if isinstance(self.heads, str):
            if self.heads not in ("mean", "max", "min"):
                raise CallError(f"heads should be mean, max, min or weights, got {self.heads!r}")
            return
        for weights in self._weights_by_layer or (self._weights,):
            if not all(0 <= weight < math.inf for weight in weights) or not any(weights):
                raise CallError(f"weights of heads should be finite, none negative and not all zero, got {weights}")

    def takes(self, layer: int) -> bool:
        """Return whether a layer takes part in the rollout."""
        return self.layers is None or layer in self.layers

    def residual_of(self, layer: int) -> float:
        """Return the share of the identity in a layer.

        Raises:
            CallError: The settings give one share for each layer, and none for this one.
        """
        if not isinstance(self.residual, tuple):
            return self.residual
        if layer >= len(self.residual):
            raise CallError(f"residual was given for {len(self.residual)} layers, and there is a layer {layer}")
        return self.residual[layer]

    def heads_of(self, layer: int) -> HeadFusion:
        """Return how the heads of a layer are fused.

        Raises:
            CallError: The settings give weights for each layer, and none for this one.
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
        """Refuse a model whose number of layers does not fit these settings.

        Raises:
            CallError: The settings name a layer that the model lacks, or list another number of layers.
        """
        if self.layers is not None and max(self.layers) >= model.layers:
            raise CallError(
                f"layers {list(self.layers)} were requested; {model.name} has layers 0 to {model.layers - 1}"
            )
        for name, by_layer in (("residual", self.residual), ("heads", self._weights_by_layer)):
            if isinstance(by_layer, tuple) and by_layer and len(by_layer) != model.layers:
                raise CallError(f"{name} was given for {len(by_layer)} layers; {model.name} has {model.layers}")

    @property
    def _weights(self) -> tuple[float, ...]:
        """The weights of heads that hold for all layers alike."""
        return tuple(weight for weight in self.heads if not isinstance(weight, str | tuple))

    @property
    def _weights_by_layer(self) -> tuple[tuple[float, ...], ...]:
        return tuple(weights for weights in self.heads if isinstance(weights, tuple))


#: The settings of Abnar & Zuidema: heads averaged, half of the identity.
ABNAR_ZUIDEMA = Rollout()


def rollout(
    model: AttentionModel, batch: Batch, settings: Rollout = ABNAR_ZUIDEMA
) -> Float64[Tensor, "batch position"]:
    """Return the rollout's row at the position where each example's prediction is read.

        rollout = A_L ... A_2 A_1,      A_l = (1 - residual) F_l + residual I

    F_l, [query, key], is the attention map of layer l with its heads fused and its rows divided by their sums. The row
    is computed alone, as a row vector times A_L, ..., A_1, in O(layers * n^2) for n positions.

    Args:
        model: the model whose attention is measured.
        batch: examples.
        settings: how heads are fused, how much of the identity is mixed in, and which layers take part.

    Returns:
        [batch, position]; each row sums to 1 over the tokens of its example and is 0 on padding.

    Raises:
        CallError: The settings do not fit the model.
        QkovError: The model's attention is not finite, or a row has no attention once its heads are fused.

    Source: Abnar & Zuidema, "Quantifying Attention Flow in Transformers", 2020.
    """
    return fused_maps(model, batch, settings).row(model.reading_positions(batch))


def fused_maps(model: AttentionModel, batch: Batch, settings: Rollout = ABNAR_ZUIDEMA) -> "FusedMaps":
    """Run the model and return one fused attention map for each layer.

    Args:
        model: the model whose attention is measured.
        batch: examples.
        settings: how heads are fused, and which layers are kept.

    Raises:
        CallError: The settings do not fit the model.
        QkovError: The model's attention is not finite.
    """
    settings.demand_fit(model)
    maps = FusedMaps(batch.mask, settings)
    model.watch(batch, maps)
    return maps


@dataclass(frozen=True, eq=False)
class _FusedMap:
    """The fused map of one layer.

    Its rows have not been divided by their sums, which are at least as exact as the map.
    """

    layer: int
    residual: float
    weights: Float[Tensor, "batch query key"]
    sums: Float64[Tensor, "batch query"]

    def demand_attention(self, needed: Bool[Tensor, "batch query"]) -> None:
        """Raise `QkovError` if a query whose attention is needed has none."""
        empty = (self.sums <= 0) & needed.to(self.sums.device)
        if empty.any():
            example, query = empty.nonzero()[0].tolist()
            raise QkovError(
                f"layer {self.layer}: query {query} of example {example} in the batch attends to no token once heads "
                f"are fused, so its row cannot be brought to sum 1; if its heads attend to different tokens, fuse them "
                f"by mean or max"
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
    """A collector of a batch's attention maps that keeps one fused map for each layer.

    A `MapSink`: call it with each layer's number and its map [batch, head, query, key], layers in rising order. The
    map itself is not kept.

    Attributes:
        mask: token mask of the batch, true where there is a token.
        settings: how heads are fused, how much of the identity is mixed in, and which layers are kept.

    Raises:
        CallError: A map does not have the batch's shape, or layers do not come in rising order.
        QkovError: A map is not finite where there are tokens, or a query whose row is needed attends to nothing.
    """

    mask: Bool[Tensor, "batch position"]
    settings: Rollout = ABNAR_ZUIDEMA
    _kept: list[_FusedMap] = field(default_factory=list, init=False)

    def __call__(self, layer: int, attention: Float[Tensor, "batch head query key"]) -> None:
        """Fuse the heads of a layer's map and keep the result."""
        demand_map(layer, attention, self.mask)
        if self._kept and layer <= self._kept[-1].layer:
            raise CallError(f"the map of layer {layer} came after that of layer {self._kept[-1].layer}")
        if not self.settings.takes(layer):
            return
        fused = hide_padding(fuse_heads(attention, self.settings.heads_of(layer)), self.mask)
        if fused.device.type == "mps":  # MPS has no float64.
            fused = fused.cpu()
        discard_smallest(fused, self.settings.discard)
        sums = fused.sum(dim=-1, dtype=torch.float64)
        if not sums.isfinite().all():
            raise QkovError(f"the attention of layer {layer} is not finite where there are tokens")
        self._kept.append(_FusedMap(layer, self.settings.residual_of(layer), fused, sums))

    @property
    def layers(self) -> tuple[int, ...]:
        """The numbers of the layers that were kept."""
        return tuple(kept.layer for kept in self._kept)

    def row(self, readout: Int[Tensor, " batch"]) -> Float64[Tensor, "batch position"]:
        """Return the rollout's row at one position of each example, in O(layers * n^2) for n positions.

        A row vector goes back through the layers, from the last to the first.

        Args:
            readout: one position for each example.

        Returns:
            [batch, position]; each row sums to 1 and is 0 on padding.

        Raises:
            CallError: No layer was kept, or a position is not that of a token.
            QkovError: A query through which the row passes attends to nothing.
        """
        kept = self._demand_layers()
        row = one_hot(readout, self.mask)
        for fused in reversed(kept):
            row = fused.carry(row)
        return row.cpu()

    def matrix(self) -> Float64[Tensor, "batch query key"]:
        """Return the whole rollout, one row for every query; the rows and columns of padding are 0.

        Raises:
            CallError: No layer was kept.
            QkovError: A query attends to nothing.
        """
        first, *later = self._demand_layers()
        product = first.dense(self.mask)
        for fused in later:
            mixed = fused.dense(self.mask)
            product = mixed @ product.to(mixed.device)
        return product.cpu()

    def mixed(self, example: int) -> list[Float64[Tensor, "query key"]]:
        """Return A_1 to A_L of one example, over its tokens only.

        Args:
            example: number of the example in the batch.

        Raises:
            CallError: No layer was kept.
            QkovError: A query attends to nothing.
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
            requested = (
                "" if self.settings.layers is None else f" of the requested layers, {list(self.settings.layers)}"
            )
            raise CallError(f"there is no attention map{requested}")
        return self._kept
