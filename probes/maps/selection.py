"""The heads whose maps a probe is asked to keep."""

from collections.abc import Iterable
from typing import Any, Literal

from ...analyses.attention.maps.source import MapSource
from ...circuits.errors import CallError
from ...circuits.weights.layer_keys import layer_label

#: The stack, the layer and the head.
HeadKey = tuple[str, int, int]


def selected_heads(
    maps: Iterable[tuple[int, int] | HeadKey] | Literal["all"] | None, source: MapSource
) -> frozenset[HeadKey] | None:
    """Return the heads whose maps are to be kept; None stands for all heads.

    Args:
        maps: Pairs (layer, head), which select a head of every stack; or (stack, layer, head); or "all"; None for none.
        source: The source of the maps.

    Raises:
        CallError: The selection has another form, or the source has no such layer, or no maps at all.
    """
    if maps is None:
        return frozenset()
    if not source.has_maps:
        raise CallError(f"{source.name} has one row of attention for each sequence, and no maps to keep")
    if isinstance(maps, str):
        if maps != "all":
            raise CallError(f"maps should be 'all' or pairs (layer, head), got {maps!r}")
        return None
    items = list(maps) if isinstance(maps, Iterable) else [maps]
    pairs: list[tuple[Any, ...]] = [tuple(pair) if isinstance(pair, Iterable) else () for pair in items]
    if not all(len(pair) in (2, 3) for pair in pairs):
        raise CallError(f"maps should be 'all' or pairs (layer, head), got {maps!r}")
    stacks = list(dict.fromkeys(stack for stack, _ in source.keys))
    selected: set[HeadKey] = set()
    for pair in pairs:
        candidates = [(stack, *pair) for stack in stacks] if len(pair) == 2 else [pair]
        known = [key for key in candidates if key[:2] in source.keys and key[2] >= 0]
        if not known:
            layers = ", ".join(layer_label(*key) for key in source.keys)
            raise CallError(f"the map {pair} was asked for; {source.name} has the layers {layers}")
        selected.update(known)
    return frozenset(selected)
