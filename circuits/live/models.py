"""A model in memory as a source: its attention weights are read where they are, at any moment of training."""

import dataclasses
from collections.abc import Iterable
from collections.abc import Mapping as Dictionary
from typing import Any

from torch import nn

from ..architectures.mapping import Mapping
from ..architectures.recognition import Recognised, recognise
from ..checkpoints.tensor_file import demand_no_adapters
from ..checkpoints.wrapped_names import unwrapped
from ..errors import CallError, QkovError
from ..reading.checkpoint import OpenCheckpoint
from ..reading.options import ReadingOptions
from .hooked_models import OpenHookedModel, has_weight_interface
from .tensors import LiveWeights
from .torch_modules import has_attention_modules, mappings_of

_PLAIN = (bool, int, float, str, list, tuple, dict, type(None))


def open_model(
    model: Any,
    mapping: Mapping | None = None,
    *,
    family: str | None = None,
    heads: int | None = None,
    prefix: str | None = None,
) -> OpenCheckpoint | OpenHookedModel:
    """Open a model in memory as if it were a checkpoint; it is not changed, and nothing of it is copied on the CPU.

    What the layers hold shares the model's memory, so take its figures before the next step of training. Weights on
    another device come to the CPU, one layer at a time.

    Models with TransformerLens' weight interface (blocks whose attn has W_Q, W_K, W_V and W_O) are read through it, in
    the basis in which they are. Other models are recognised as their files would be: by their config, else by their
    torch.nn.MultiheadAttention modules, else by the names of their tensors.

    Args:
        model: a torch.nn.Module, or any object with TransformerLens' weight interface.
        mapping: says which tensors to read; nothing is recognised then.
        family: of the architecture, in place of what would be recognised.
        heads: number of query heads, where nothing else tells it.
        prefix: of the tensor names, where they are there under several.

    Raises:
        CallError: it is no such model, or the options do not go together.
        QkovError: its names are not recognised, or its weights cannot be read.
    """
    return open_live(model, ReadingOptions(mapping, family, heads, prefix))


def open_live(model: Any, options: ReadingOptions) -> OpenCheckpoint | OpenHookedModel:
    """`open_model`, with its options in one."""
    if not options.are_given and has_weight_interface(model):
        return OpenHookedModel(model, *_wrapped(model))
    if not isinstance(model, nn.Module):
        raise CallError(
            f"expected a torch.nn.Module, or a model whose blocks have an attn with W_Q, W_K, W_V and W_O as in "
            f"TransformerLens, got {type(model).__name__}"
        )
    stated = options.stated()
    address = f"the model {type(model).__name__}"
    tensors, config = model.state_dict(), config_of(model, address)
    demand_no_adapters(tensors, address)
    if stated is not None:
        return OpenCheckpoint(LiveWeights(tensors, address), stated)
    if not options.are_given and (config is None or "model_type" not in config) and has_attention_modules(model):
        found = mappings_of(model)
        how = "by its torch.nn.MultiheadAttention modules"
        return OpenCheckpoint(LiveWeights(found.apart(tensors), address), Recognised(how, found.mappings))
    file = unwrapped(LiveWeights(tensors, address, config))
    return OpenCheckpoint(file, options.recognise(file))


def _wrapped(model: Any) -> tuple[OpenCheckpoint | None, str | None]:
    """The transformers model inside a bridge, and if it cannot be read, why; neither where there is none."""
    inner: Any = getattr(model, "original_model", None)
    config = _plain(getattr(inner, "config", None))
    if config is None or "model_type" not in config:
        return None, None
    # The bridge puts itself in the place of each module, and keeps the module inside.
    tensors = {name.replace("._original_component", ""): tensor for name, tensor in inner.state_dict().items()}
    file = LiveWeights(tensors, f"the model {type(inner).__name__} in {type(model).__name__}", config)
    try:
        return OpenCheckpoint(file, recognise(file)), None
    except QkovError as error:
        return None, str(error)


def config_of(model: nn.Module, address: str) -> dict[str, Any] | None:
    """Return the config of the model, or of the one model inside it that has one, as of one wrapped for training."""
    found: dict[str, dict[str, Any]] = {}
    for name, module in model.named_modules():
        config = None if _lies_in(name, found) else _plain(getattr(module, "config", None))
        if config is not None:
            found[name] = config
    if len(found) > 1:
        named = ", ".join(found)
        raise QkovError(f"{address} holds several models with a config of their own, {named}: open one of them")
    return next(iter(found.values()), None)


def _lies_in(name: str, outer: Iterable[str]) -> bool:
    return any(not path or name.startswith(f"{path}.") for path in outer)


def _plain(config: Any) -> dict[str, Any] | None:
    """A config as JSON could hold it; None for what is none."""
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    elif dataclasses.is_dataclass(config) and not isinstance(config, type):
        config = dataclasses.asdict(config)
    if not isinstance(config, Dictionary):
        return None
    return {str(key): value for key, value in config.items() if isinstance(value, _PLAIN)}
