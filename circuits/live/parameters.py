"""The attention parameters of a model in training, so that whatever belongs to them is read as its weights are."""

from collections.abc import Callable, Iterator
from collections.abc import Mapping as Dictionary
from typing import Any

import torch
from torch import Tensor, nn

from ..architectures.recognition import Recognised, recognise
from ..checkpoints.tensor_file import TensorFile, demand_no_adapters
from ..checkpoints.wrapped_names import unwrapped
from ..errors import CallError, QkovError
from ..reading.checkpoint import OpenCheckpoint
from ..reading.options import ReadingOptions
from ..weights.attention_weights import NAMES
from .hooked_models import has_weight_interface
from .models import config_of, open_model
from .tensors import LiveWeights
from .torch_modules import FoundModules, has_attention_modules, mappings_of

#: The families of TransformerLens' models; how a bridge keeps its output projection, its names do not always tell.
_HOOKED = ("transformer_lens", "transformer_lens_bridge", "transformer_lens_bridge_conv1d")


class LiveParameters:
    """The parameters that hold a model's attention, known by the names of its state dict.

    Attributes:
        recognised: the mapping of each stack of layers, and how it was found.
    """

    def __init__(self, model: nn.Module, options: ReadingOptions | None = None) -> None:
        """Recognise a model as `open_model` does, but always by its parameters.

        Raises:
            CallError: it is no torch.nn.Module, or the options do not go together.
            QkovError: its names are not recognised, or its attention is not kept in parameters of its own.
        """
        if not isinstance(model, nn.Module):
            raise CallError(f"expected a torch.nn.Module, got {type(model).__name__}")
        options = options or ReadingOptions()
        stated = options.stated()
        self.model = model
        self._address = f"the model {type(model).__name__}"
        hooked = not options.are_given and has_weight_interface(model)
        # The parts of TransformerLens' models may have configs of their own; the model itself tells its heads.
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

    def tensors(self) -> dict[str, Tensor]:
        """Return the parameters and buffers of the model by name, as they are."""
        return self.model.state_dict(keep_vars=True)

    def read(self, value: Callable[[nn.Parameter], Tensor]) -> OpenCheckpoint:
        """Read what belongs to the parameters, arranged as attention weights: W_Q holds what belongs to W_Q.

        The layers' facts, norms and basis are those of weights and mean nothing for anything else.

        Args:
            value: of a parameter, of its shape: itself, its gradient, a state of its optimizer.
        """
        tensors = {
            name: value(tensor) if isinstance(tensor, nn.Parameter) else tensor
            for name, tensor in self.tensors().items()
        }
        return OpenCheckpoint(self._file(tensors), self.recognised)

    def _file(self, tensors: Dictionary[str, Tensor]) -> TensorFile:
        if self._modules is not None:
            return LiveWeights(self._modules.apart(tensors), self._address)
        return unwrapped(LiveWeights(tensors, self._address, self._config))

    def _of_hooked(self, model: Any) -> Recognised:
        """The mapping by which the parameters are the weights that the interface gives."""
        file = self._file(self.tensors())
        for family in _HOOKED:
            try:
                recognised = recognise(file, family, model.cfg.n_heads)
                if _same_weights(OpenCheckpoint(file, recognised), open_model(model).layers()):
                    how = f"by the parameters of {type(model).__name__}, which are the weights of its interface"
                    return Recognised(how, recognised.stacks)
            except QkovError:
                continue
        raise QkovError(
            f"the weights that {type(model).__name__} gives are not kept in parameters of known names, so they cannot "
            f"be followed in training: give the model of transformers inside it, or a mapping"
        )


def _same_weights(opened: OpenCheckpoint, layers: Iterator[Any]) -> bool:
    pairs = zip(opened.layers(), layers, strict=True)
    try:
        return all(_equal(getattr(one, name), getattr(other, name)) for one, other in pairs for name in NAMES)
    except ValueError:  # not as many layers
        return False


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)
