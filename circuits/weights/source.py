"""Sources of attention layers: the base of checkpoints, live models and layers that are held in memory."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TypeVar

from ..algebra.threads import side_by_side
from .attention_weights import BIASES, NAMES, AttentionWeights

Result = TypeVar("Result")


@dataclass(frozen=True)
class StackTensors:
    """The tensors from which the layers of one stack are read.

    Attributes:
        names: The name of each tensor by role, with {layer} for the layer's number.
        layouts: The axes of each weight by role, in einops' notation.
    """

    names: dict[str, str] = field(default_factory=dict)
    layouts: dict[str, str] = field(default_factory=dict)


class AttentionSource(ABC):
    """Something whose attention layers can be read one after another: a checkpoint, a live model, layers in memory.

    Attributes:
        address: The path, URL or model, as messages name it.
        recognised: How the layers were found, in words.
        skipped: What is not read, with the reason.
        tensor_count: Number of tensors at the address; None if that is unknown.
        config_origin: Where the config was found; None if there is none.
        not_read: What else the file holds, from which no layer is read, in words by its name.
        doubts: What the weights' file has or lacks against its family, with the facts that are unknown therefore.
    """

    address: str
    recognised: str
    skipped: dict[str, str]
    tensor_count: int | None = None
    config_origin: str | None = None
    not_read: Mapping[str, str] = MappingProxyType({})
    doubts: Mapping[str, str] = MappingProxyType({})

    @property
    @abstractmethod
    def layer_keys(self) -> list[tuple[str, int]]:
        """The stack and the number of every layer, in the order of reading."""

    @property
    @abstractmethod
    def scalars(self) -> dict[str, float]:
        """The numbers that come with the weights, such as the loss."""

    @abstractmethod
    def layers(self) -> Iterator[AttentionWeights]:
        """Yield the attention weights of one layer after another.

        Raises:
            QkovError: A layer cannot be read, or its tensors do not fit each other.
        """

    def each_layer(self, job: Callable[[AttentionWeights], Result]) -> list[Result]:
        """Return the results of a job for every layer, in order; up to four layers at a time share torch's threads.

        This is faster than the same job in a loop over `layers`, because no thread waits for others within a layer.
        Each job runs in a thread of its own, in which settings of the calling thread, such as autocast, do not hold.

        Args:
            job: A function of a layer's weights.

        Returns:
            What the job returned for each layer, in the order of `layer_keys`.

        Raises:
            QkovError: A layer cannot be read, or its tensors do not fit each other.
        """
        return side_by_side(job, self.layers())

    def stack_tensors(self, stack: str) -> StackTensors:
        """Return the names and layouts of the tensors of a stack; none if its layers were not read from tensors."""
        del stack
        return StackTensors()


class LayersInMemory(AttentionSource):
    """Layers that are held in memory, such as those of a model at one step of its training.

    Attributes:
        held: The layers.
    """

    address = "layers in memory"
    recognised = "as layers in memory"

    def __init__(self, held: Iterable[AttentionWeights], scalars: dict[str, float] | None = None) -> None:
        """Hold layers.

        Args:
            held: The layers, in order.
            scalars: Numbers that come with them, such as the loss.
        """
        self.held = tuple(held)
        self.skipped = {}
        self._scalars = dict(scalars or {})

    @classmethod
    def copied(cls, layers: Iterable[AttentionWeights]) -> "LayersInMemory":
        """Hold copies of the weights and biases, which training does not change."""
        return cls(_copied(weights) for weights in layers)

    @property
    def layer_keys(self) -> list[tuple[str, int]]:
        """The stack and the number of every layer, in the order of reading."""
        return [(weights.stack, weights.layer) for weights in self.held]

    @property
    def scalars(self) -> dict[str, float]:
        """The numbers that come with the layers, such as the loss."""
        return self._scalars

    def layers(self) -> Iterator[AttentionWeights]:
        """Yield one layer after another."""
        yield from self.held


def _copied(weights: AttentionWeights) -> AttentionWeights:
    tensors = {name: getattr(weights, name) for name in (*NAMES, *BIASES)}
    return replace(weights, **{name: tensor.clone() for name, tensor in tensors.items() if tensor is not None})
