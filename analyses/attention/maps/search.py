"""The source of a model's attention maps, whatever library the model is from."""

from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from ....circuits.errors import CallError
from .kernel_modules import KernelModules
from .single_layer import SingleLayerMaps
from .source import MapSource
from .torch_modules import TorchMaps
from .transformer_lens import HookedMaps
from .transformers import TransformersMaps

#: Every kind of source; the first that finds attention in a model is taken.
SOURCES = (SingleLayerMaps, HookedMaps, TransformersMaps, TorchMaps, KernelModules)


def unwrapped_model(model: Any) -> nn.Module:
    """Return the model inside the wrappers of parallel training, on which hooks can be registered.

    Raises:
        CallError: It is not a module, or no hook reaches into it.
    """
    if not isinstance(model, nn.Module):
        raise CallError(f"expected a torch.nn.Module whose attention can be read, got {type(model).__name__}")
    if isinstance(model, nn.parallel.DistributedDataParallel | AveragedModel):
        return unwrapped_model(model.module)
    if isinstance(model, nn.DataParallel):
        raise CallError("nn.DataParallel copies the model for every call; use model.module instead and call that")
    if isinstance(model, torch.jit.ScriptModule):
        raise CallError(f"{type(model).__name__} is a TorchScript module, which runs no hooks; give the model itself")
    compiled = next((path for path, module in model.named_modules() if _is_compiled(module)), None)
    if compiled is not None:
        part = f"the model's part {compiled}" if compiled else "the model"
        raise CallError(
            f"{part} is compiled, and compiled code bypasses the modules whose maps are read; give the model as it was "
            f"before torch.compile, and call that"
        )
    return model


def _is_compiled(module: nn.Module) -> bool:
    """Return whether torch.compile was called with a module, or with its forward."""
    return (
        "_orig_mod" in module._modules
        or getattr(module, "_compiled_call_impl", None) is not None
        or hasattr(module.forward, "_torchdynamo_orig_callable")
    )


def source_of(model: nn.Module) -> MapSource:
    """Return the source of a model's attention maps.

    Raises:
        CallError: No attention was found.
    """
    for kind in SOURCES:
        source = kind.of(model)
        if source is not None:
            return source
    raise CallError(
        f"no attention was found in {type(model).__name__}: expected TransformerLens' hook points, a model of "
        f"transformers that gives attention maps, torch.nn.MultiheadAttention, a module that calls torch's "
        f"scaled_dot_product_attention, or qkov's SingleLayerAttention"
    )
