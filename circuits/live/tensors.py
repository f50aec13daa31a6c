"""The tensors of a model in memory, in the form of a file of weights."""

from collections.abc import Callable, Sequence
from collections.abc import Mapping as Dictionary
from typing import Any

from torch import Tensor

from ..checkpoints.tensor_file import TensorFile, in_memory
from .adapters import AdaptedLayer, AdaptedWeight, Entry


class LiveWeights(TensorFile):
    """The tensors of a model by name. They are not copied, so reading returns their current values.

    Weights that adapters change are computed when they are read.
    """

    def __init__(
        self,
        tensors: Dictionary[str, Entry],
        address: str,
        config: dict[str, Any] | None = None,
        whole: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Take the tensors of a model.

        Args:
            tensors: The state dict, or what takes its place in a model with adapters.
            address: The model in words, for messages.
            config: Config of the model; None if there is none.
            whole: Returns the whole value of a tensor that is spread over processes, and any other tensor as it is; by
                default such tensors are refused.
        """
        super().__init__(address)
        self._tensors = dict(tensors)
        self._whole = whole or _as_it_is
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}
        self.config = config
        self.config_origin = None if config is None else "the model's config"

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return tensors by name, without gradient and on the CPU, where they share the model's memory.

        Args:
            names: Names of the tensors.

        Raises:
            QkovError: A tensor is not in memory, or is spread over devices; or adapters change it in a way that is not
                read.
        """
        adapted: dict[AdaptedLayer, dict[str, Tensor]] = {}
        read = {}
        for name in names:
            entry = self._tensors[name]
            if isinstance(entry, AdaptedWeight):
                entry.demand_readable()
                if entry.layer not in adapted:
                    adapted[entry.layer] = entry.layer.weights(self._whole)
                entry = adapted[entry.layer][entry.name]
            read[name] = in_memory(self._whole(entry), f"{name} of {self.address}")
        return read


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor
