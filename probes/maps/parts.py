"""Whether the maps of a layer are of the inputs of a call, or of parts of them such as the windows of an image."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...analyses.attention.maps.source import LayerOverPositions
from ...circuits.errors import CallError
from .masks import TokenMasks
from .model_call import PADDING_MASKS, ModelCall
from .sides import Sides

#: The names of a model's main input: ids before vectors, and what a decoder reads where the encoder has already run.
_INPUTS = (
    "input_ids",
    "input",
    "tokens",
    "inputs_embeds",
    "pixel_values",
    "pixel_values_videos",
    "input_features",
    "input_values",
    "decoder_input_ids",
    "decoder_inputs_embeds",
)
_IDS = (torch.int32, torch.int64)


def why_in_parts(layer_map: LayerOverPositions, call: ModelCall) -> str | None:
    """Return why the maps of a layer are not one for each input of the call; None if they are.

    Vision models attend within windows of an image, models of video within frames and between them, models of audio
    within chunks; their layers then see a batch of these parts, and nothing says where in the inputs they lie.

    Args:
        layer_map: The maps.
        call: The call of the model that they come from.
    """
    maps, source = layer_map.shape[0], call.source
    given = _main_input(call.arguments)
    if given is None:
        return f"the call of {source.name} has no tensor that shows how many inputs it has"
    counts = {given} if isinstance(given, int) else _counts(given, layer_map, positions_first=source.positions_first)
    if maps in counts:
        return None
    count = min(counts)
    return (
        f"the layer has maps of {maps} parts (windows, frames or the like) for {count} "
        f"{'input' if count == 1 else 'inputs'}, and where these lie in the input is not known"
    )


def sides_of_parts(layer_map: LayerOverPositions, call: ModelCall, masks: TokenMasks) -> Sides:
    """Return the queries and keys of maps of parts: all of them, or those that the layer itself takes for tokens.

    Args:
        layer_map: The maps.
        call: The call of the model that they come from.
        masks: The user's masks of the tokens of the inputs.

    Raises:
        CallError: A mask of the inputs would have to be known for the parts.
    """
    batch, _, query, key = layer_map.shape
    padding = [name for name in PADDING_MASKS if _hides(call.arguments.get(name)) and layer_map.real_keys is None]
    if masks.mask is not None:
        padding.append("the probe's mask")
    if not isinstance(masks.queries, str) or masks.queries != "all":
        padding.append("the probe's queries")
    if padding:
        layer = f"{call.source.layer_name(layer_map.key)} of {call.source.name}"
        raise CallError(
            f"{padding[0]} is of the inputs, and {layer} has maps of parts of them, whose positions are not known; "
            f"call the model with inputs without padding, and the probe with queries='all' and without mask="
        )
    device = layer_map.device
    real = torch.ones(batch, key, dtype=torch.bool) if layer_map.real_keys is None else layer_map.real_keys
    keys = real.to(device).expand(batch, key)
    queries = keys if layer_map.is_self and query == key else keys.new_ones(batch, query)
    return Sides(
        keys=keys,
        queries=queries,
        asked=queries,
        relevant=None,
        relevant_tokens=None,
        has_relevant=None,
        tokens=keys.sum(dim=1),
        readout=torch.zeros(batch, dtype=torch.long, device=device),
        readable=keys.new_zeros(batch),
        columns=None,
        positions=None,
        seen=None,
        padded=not bool(keys.all()),
    )


def _hides(mask: Any) -> bool:
    """Return whether a mask takes any position for padding."""
    return isinstance(mask, Tensor) and not bool((mask != 0).all())


def _main_input(arguments: Mapping[str, Any]) -> Tensor | int | None:
    """Return the tensor that a model reads, or the number of its texts; None if there is neither."""
    ordered = [arguments[name] for name in _INPUTS if name in arguments] + list(arguments.values())
    for value in ordered:
        if isinstance(value, str):
            return 1
        if isinstance(value, Sequence) and value and all(isinstance(text, str) for text in value):
            return len(value)
        inside = _tensor_in(value)
        if inside is not None:
            return inside
    return None


def _tensor_in(value: Any) -> Tensor | None:
    """Return a value if it is a tensor with a batch, or else the main one, or the first one, that it holds."""
    if isinstance(value, Tensor):
        return value if value.ndim else None
    if isinstance(value, Mapping):
        held = [value[name] for name in _INPUTS if name in value] + list(value.values())
    elif isinstance(value, tuple | list):
        held = list(value)
    else:
        held = list(getattr(value, "__dict__", {}).values())
    return next((tensor for tensor in held if isinstance(tensor, Tensor) and tensor.ndim), None)


def _counts(given: Tensor, layer_map: LayerOverPositions, *, positions_first: bool) -> set[int]:
    """Return the numbers of inputs that a tensor may stand for.

    The first dimension counts them, with these exceptions: ids of several sequences for each example, as for multiple
    choice; ids or vectors of one sequence without a batch; torch's modules that read [position, batch].
    """
    is_length = given.size(0) in layer_map.shape[2:]
    if given.dtype in _IDS and given.ndim == 1:
        return {1}
    if given.dtype in _IDS and given.ndim == 3:
        return {given.size(0), given.size(0) * given.size(1)}
    if is_length and given.ndim == 2 and given.is_floating_point():
        return {given.size(0), 1}
    if is_length and given.ndim > 1 and positions_first:
        return {given.size(0), given.size(1)}
    return {given.size(0)}
