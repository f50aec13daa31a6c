"""How maps are fused and mixed before they are rolled out."""

import math
from dataclasses import dataclass

from ...circuits.errors import CallError
from .fusion import HeadFusion
from .model import AttentionModel


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
