"""The attention layers of a model at one moment of training, as something to be measured like a checkpoint."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from .attention_weights import BIASES, NAMES, AttentionWeights


@dataclass(frozen=True)
class LayersInMemory:
    """Layers that are held, and figures to carry along, such as the loss."""

    held: tuple[AttentionWeights, ...]
    scalars: dict[str, float] = field(default_factory=dict)

    @classmethod
    def copied(cls, layers: Iterable[AttentionWeights]) -> "LayersInMemory":
        """Hold copies of the weights and biases, which training does not change."""
        return cls(tuple(_copied(weights) for weights in layers))

    @property
    def layer_keys(self) -> list[tuple[str, int]]:
        """The stack and the number of every layer, in the order of reading."""
        return [(weights.stack, weights.layer) for weights in self.held]

    def layers(self) -> Iterator[AttentionWeights]:
        """Yield one layer after the other."""
        yield from self.held


def _copied(weights: AttentionWeights) -> AttentionWeights:
    tensors = {name: getattr(weights, name) for name in (*NAMES, *BIASES)}
    return replace(weights, **{name: tensor.clone() for name, tensor in tensors.items() if tensor is not None})
