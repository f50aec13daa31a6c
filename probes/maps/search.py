"""Finding where the attention maps of a model come from, and which of them are wanted."""

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import nn

from ...circuits.errors import CallError
from .single_layer import SingleLayerMaps
from .source import HeadKey, MapSource
from .torch_modules import TorchMaps
from .transformer_lens import HookedMaps
from .transformers import TransformersMaps


def unwrapped_model(model: Any) -> nn.Module:
    """Return the model that is called in the end.

    Raises:
        CallError: it is no module, or one into which no hook reaches.
    """
    if not isinstance(model, nn.Module):
        raise CallError(f"expected a torch.nn.Module to put the probe on, got {type(model).__name__}")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return unwrapped_model(model.module)
    if isinstance(model, nn.DataParallel):
        raise CallError("nn.DataParallel copies the model for every call; put the probe on model.module and call that")
    if isinstance(model, torch.jit.ScriptModule):
        raise CallError(f"{type(model).__name__} is a TorchScript module, which runs no hooks; give the model itself")
    compiled = hasattr(model, "_orig_mod") or any(
        getattr(module, "_compiled_call_impl", None) is not None for module in model.modules()
    )
    if compiled:
        raise CallError(
            "the model is compiled, and compiled code passes by the places where maps are taken; put the probe on the "
            "model before torch.compile, and call that"
        )
    return model


def source_of(model: nn.Module) -> MapSource:
    """Return the source of a model's maps.

    Raises:
        CallError: no attention is found, or it is fused.
    """
    for kind in (SingleLayerMaps, HookedMaps, TransformersMaps, TorchMaps):
        source = kind.of(model)
        if source is not None:
            return source
    raise CallError(
        f"{type(model).__name__} has no attention that a probe knows: expected TransformerLens' hook points, a model "
        f"of transformers that gives attention maps, torch.nn.MultiheadAttention, or qkov's SingleLayerAttention"
    )


def asked_maps(
    maps: Iterable[tuple[int, int] | HeadKey] | Literal["all"] | None, source: MapSource
) -> frozenset[HeadKey] | None:
    """Return the heads whose maps are asked for; None for all.

    Raises:
        CallError: they are no pairs, or the source has no such layer, or no maps at all.
    """
    if maps is None:
        return frozenset()
    if isinstance(source, SingleLayerMaps):
        raise CallError(f"{source.name} has one row of attention for each sequence, and no maps to keep")
    if isinstance(maps, str):
        if maps != "all":
            raise CallError(f"maps should be 'all' or pairs (layer, head), got {maps!r}")
        return None
    given = list(maps) if isinstance(maps, Iterable) else [maps]
    pairs: list[tuple[Any, ...]] = [tuple(pair) if isinstance(pair, Iterable) else () for pair in given]
    if not all(len(pair) in (2, 3) for pair in pairs):
        raise CallError(f"maps should be 'all' or pairs (layer, head), got {maps!r}")
    stacks = list(dict.fromkeys(stack for stack, _ in source.keys))
    asked: set[HeadKey] = set()
    for pair in pairs:
        found = [(stack, *pair) for stack in stacks] if len(pair) == 2 else [pair]
        known = [key for key in found if key[:2] in source.keys and key[2] >= 0]
        if not known:
            layers = ", ".join(f"{stack} {layer}".lstrip() for stack, layer in source.keys)
            raise CallError(f"the map {pair} was asked for; {source.name} has the layers {layers}")
        asked.update(known)
    return frozenset(asked)
