"""Open a model in memory: its attention weights are read where they are, at any moment of training."""

from collections.abc import Callable
from typing import Any, Unpack

from torch import Tensor, nn

from ..architectures.mapping import Mapping
from ..architectures.recognition import Recognised, recognise
from ..checkpoints.pickles.module_config import config_of, plain_config
from ..checkpoints.tensor_file import demand_no_adapters
from ..errors import CallError, QkovError
from ..reading.checkpoint import OpenCheckpoint, open_tensors
from ..reading.options import ModelKeywords, ReadingOptions, reading_options
from .adapters import with_adapters
from .hooked_models import OpenHookedModel, has_weight_interface
from .parametrised import effective_state
from .tensors import LiveWeights
from .torch_modules import has_attention_modules, mappings_of


def open_model(
    model: Any,
    options: ReadingOptions | Mapping | None = None,
    *,
    adapters: bool = True,
    **reading: Unpack[ModelKeywords],
) -> OpenCheckpoint | OpenHookedModel:
    """Open a model in memory as if it were a checkpoint. The model is not changed, and nothing is copied on the CPU.

    The layers share the model's memory, so measure them before the next step of training. Weights on another device
    are copied to the CPU, one layer at a time.

    Models with TransformerLens' weight interface (blocks whose attn has W_Q, W_K, W_V and W_O) are read through it, in
    the basis in which their weights are. Other models are recognised as their files would be: by their config, else by
    their torch.nn.MultiheadAttention modules, else by the names of their tensors.

    Weights that adapters of PEFT change are read as the model computes with them in evaluation, W_0 + s B A for LoRA,
    in float64: `open_model(model, adapters=False)` reads W_0, so that the change of a circuit is the difference of two
    circuits, and `compare_models` of `qkov.analyses.trajectories` tabulates it.

    Args:
        model: A torch.nn.Module, or any object with TransformerLens' weight interface.
        options: How to read it, as one object. A Mapping stands for `ReadingOptions(mapping=...)`.
        adapters: Whether adapters count; otherwise the weights are those without them.
        **reading: The same as keywords: mapping, family, heads or prefix.

    Raises:
        CallError: `model` cannot be opened, or the options do not go together.
        QkovError: The names of its tensors are not recognised, or its weights or adapters cannot be read.
    """
    return open_live(model, reading_options(options, reading, ModelKeywords), adapters)


def open_live(
    model: Any, chosen: ReadingOptions, adapters: bool = True, whole: Callable[[Tensor], Tensor] | None = None
) -> OpenCheckpoint | OpenHookedModel:
    """Open a model as `open_model` does.

    Args:
        model: A torch.nn.Module, or any object with TransformerLens' weight interface.
        chosen: How to read it.
        adapters: Whether adapters count.
        whole: Returns the whole value of a tensor that is spread over processes, and any other tensor as it is; by
            default such tensors are refused.

    Raises:
        CallError: As for `open_model`.
        QkovError: As for `open_model`.
    """
    if not chosen.are_given and has_weight_interface(model):
        return OpenHookedModel(model, *_wrapped(model))
    if not isinstance(model, nn.Module):
        raise CallError(
            f"expected a torch.nn.Module, or a model whose blocks have an attn with W_Q, W_K, W_V and W_O as in "
            f"TransformerLens, got {type(model).__name__}"
        )
    address = f"the model {type(model).__name__}"
    tensors = with_adapters(model, effective_state(model), on=adapters)
    config = config_of(model, address)
    if not chosen.are_given and (config is None or "model_type" not in config) and has_attention_modules(model):
        demand_no_adapters(tensors, address)
        modules = mappings_of(model)
        how = "by its torch.nn.MultiheadAttention modules"
        file = LiveWeights(modules.apart(tensors), address, whole=whole)
        return OpenCheckpoint(file, Recognised(how, modules.mappings))
    return open_tensors(LiveWeights(tensors, address, config, whole), chosen)


def _wrapped(model: Any) -> tuple[OpenCheckpoint | None, str | None]:
    """Return the transformers model inside a bridge, or why it cannot be read; neither if there is no such model."""
    inner: Any = getattr(model, "original_model", None)
    config = plain_config(getattr(inner, "config", None))
    if config is None or "model_type" not in config:
        return None, None
    # The bridge replaces each module and keeps the original one inside.
    tensors = {name.replace("._original_component", ""): tensor for name, tensor in inner.state_dict().items()}
    file = LiveWeights(tensors, f"the model {type(inner).__name__} in {type(model).__name__}", config)
    try:
        return OpenCheckpoint(file, recognise(file)), None
    except QkovError as error:
        return None, str(error)
