"""The attention parameters of a model in training, so that their gradients are read as the weights are."""

from collections.abc import Callable, Iterator
from collections.abc import Mapping as Dictionary
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..architectures.recognition import Recognised, recognise
from ..checkpoints.pickles.module_config import config_of
from ..checkpoints.tensor_file import TensorFile, demand_no_adapters
from ..checkpoints.views.wrapped_names import unwrapped
from ..errors import CallError, QkovError
from ..reading.checkpoint import OpenCheckpoint
from ..reading.options import ReadingOptions
from ..weights.attention_weights import NAMES
from .adapters import AdaptedWeight, Entry, with_adapters
from .hooked_models import has_weight_interface
from .models import open_model
from .tensors import LiveWeights
from .torch_modules import FoundModules, has_attention_modules, mappings_of

#: The families of TransformerLens' models. Names alone do not always show the layout of a bridge's output projection.
_HOOKED = ("transformer_lens", "transformer_lens_bridge", "transformer_lens_bridge_conv1d")


class LiveParameters:
    """The parameters that hold a model's attention, under the names of its state dict.

    Attributes:
        model: The model.
        recognised: The mapping of each stack of layers, and how it was found.
    """

    def __init__(
        self,
        model: nn.Module,
        options: ReadingOptions | None = None,
        whole: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Recognise a model as `open_model` does, but always by its parameters.

        Args:
            model: The model.
            options: How to read it, if that is not left to recognition.
            whole: Returns the whole value of a tensor that is spread over processes, and any other tensor as it is; by
                default such tensors are refused.

        Raises:
            CallError: `model` is not a torch.nn.Module, or the options do not go together.
            QkovError: The names are not recognised, or the attention weights are not parameters of the model.
        """
        if not isinstance(model, nn.Module):
            raise CallError(f"expected a torch.nn.Module, got {type(model).__name__}")
        options = options or ReadingOptions()
        stated = options.stated()
        self.model, self._whole = model, whole
        self._address = f"the model {type(model).__name__}"
        hooked = not options.are_given and has_weight_interface(model)
        # Parts of TransformerLens' models may have their own configs. The model itself states the number of heads.
        self._config = None if hooked else config_of(model, self._address)
        self._modules: FoundModules | None = None
        tensors = self.tensors()
        demand_no_adapters(tensors, self._address)
        if stated is not None:
            self.recognised = stated
        elif hooked:
            self.recognised = self._of_hooked(model)
        elif not options.are_given and "model_type" not in (self._config or {}) and has_attention_modules(model):
            self._modules = mappings_of(model)
            self.recognised = Recognised("by its torch.nn.MultiheadAttention modules", self._modules.mappings)
        else:
            self.recognised = options.recognise(self._file(tensors))

    def tensors(self) -> dict[str, Entry]:
        """Return the parameters and buffers of the model by name, as they are, and the weights that adapters change."""
        return with_adapters(self.model, self.model.state_dict(keep_vars=True))

    def read(
        self, value: Callable[[nn.Parameter], Tensor], adapted: Callable[[AdaptedWeight], Entry] | None = None
    ) -> OpenCheckpoint:
        """Read a value of each parameter, such as its gradient, arranged as attention weights.

        W_Q of the layers then holds the values of W_Q. The facts, norms and basis of the layers describe weights, and
        mean nothing for other values.

        Args:
            value: Returns a tensor of the parameter's shape: the parameter itself, its gradient, or a state of its
                optimizer.
            adapted: The same for a weight that adapters change, which may be returned as it is; by default layers with
                such weights are refused when they are read.
        """
        tensors: dict[str, Entry] = {}
        for name, entry in self.tensors().items():
            if isinstance(entry, AdaptedWeight):
                tensors[name] = replace(entry, is_refused=True) if adapted is None else adapted(entry)
            else:
                tensors[name] = value(entry) if isinstance(entry, nn.Parameter) else entry
        return OpenCheckpoint(self._file(tensors), self.recognised)

    def _file(self, tensors: Dictionary[str, Entry]) -> TensorFile:
        if self._modules is not None:
            return LiveWeights(self._modules.apart(tensors), self._address, whole=self._whole)
        return unwrapped(LiveWeights(tensors, self._address, self._config, self._whole))

    def _of_hooked(self, model: Any) -> Recognised:
        """Return the mapping that reads from the parameters the weights that the interface gives."""
        file = self._file(self.tensors())
        for family in _HOOKED:
            try:
                recognised = recognise(file, family, model.cfg.n_heads)
                if _same_weights(OpenCheckpoint(file, recognised), open_model(model).layers()):
                    how = f"by the parameters of {type(model).__name__}, which equal the weights of its interface"
                    return Recognised(how, recognised.stacks)
            except QkovError:
                continue
        raise QkovError(
            f"the weights of {type(model).__name__}'s interface are not parameters with known names, so they cannot be "
            f"followed in training; use the transformers model inside it, or give a mapping"
        )


def _same_weights(opened: OpenCheckpoint, layers: Iterator[Any]) -> bool:
    pairs = zip(opened.layers(), layers, strict=True)
    try:
        return all(_equal(getattr(one, name), getattr(other, name)) for one, other in pairs for name in NAMES)
    except ValueError:  # The numbers of layers differ.
        return False


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)
