"""The tensors of a model in memory, in the form of a file of weights."""

from collections.abc import Mapping as Dictionary
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..checkpoints.tensor_file import TensorFile, in_memory


class LiveWeights(TensorFile):
    """The tensors of a model by name. They are not copied, so reading returns their current values."""

    def __init__(self, tensors: Dictionary[str, Tensor], address: str, config: dict[str, Any] | None = None) -> None:
        """Take the tensors of a model.

        Args:
            tensors: The state dict.
            address: The model in words, for messages.
            config: Config of the model; None if there is none.
        """
        super().__init__(address)
        self._tensors = dict(tensors)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}
        self.config = config
        self.config_origin = None if config is None else "the model's config"

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return tensors by name, without gradient and on the CPU, where they share the model's memory.

        Args:
            names: Names of the tensors.

        Raises:
            QkovError: A tensor is not in memory, or is spread over devices.
        """
        return {name: in_memory(self._tensors[name], f"{name} of {self.address}") for name in names}
