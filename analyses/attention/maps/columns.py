"""The columns that the queries and keys of a map stand in, from the cache that a layer was called with.

A column is a place in the sequence as its padding mask counts it: from 0, padding and cached tokens included. A map has
a row for each column of the call, and a key for each column that the layer still holds: a sliding window has dropped
the first ones, and a static cache has room for columns that do not exist yet.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

#: The names of a cache, or of a layer's part of it, in the calls of attention modules.
_CACHES = ("cache", "past_key_values", "past_key_value", "layer_past", "past", "past_kv_cache_entry")
#: The names of what attention modules read.
_INPUTS = ("hidden_states", "query_input", "query", "input")
#: The names of the number under which a module keeps its keys in the cache.
_INDEXES = ("layer_idx", "layer_id", "_layer_idx", "layer_index")


@dataclass(frozen=True)
class Columns:
    """Where a map stands in its sequence.

    Attributes:
        query: The column of the first query; those of the others follow.
        key: The column of the first key; those of the others follow.
    """

    query: int
    key: int


@dataclass(frozen=True)
class Unknown:
    """That something is not known.

    Attributes:
        reason: Why, as a clause.
    """

    reason: str


#: The columns of a map that holds the whole sequence.
WHOLE = Columns(0, 0)
#: What is known where a source of maps says nothing.
NOT_SAID = Unknown("nothing says which positions the queries and keys of a layer are")
#: What is known of a map whose queries and keys may be of one sequence.
ONE_OR_TWO = Unknown("a layer was called with different tensors of one shape, which may be one sequence or two")


def is_one_sequence(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are certainly one sequence of vectors: the same tensor, or equal values.

    Args:
        one: A sequence, or a batch of them.
        other: The other.
    """
    return one is other or (one.shape == other.shape and torch.equal(one, other))


@dataclass(frozen=True)
class _Held:
    """What a cache says before a layer runs: the columns, and how many keys the map will have."""

    columns: Columns
    keys: int


class CachedColumns:
    """Asks the cache of each layer before the layer runs, and says afterwards which columns its map has."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._held: dict[nn.Module, _Held | Unknown | None] = {}
        self._latest: dict[Any, _Held | Unknown | None] = {}

    def forget(self) -> None:
        """Forget the call that was in progress."""
        self._held, self._latest = {}, {}

    def ask(self, module: nn.Module, arguments: Mapping[str, Any]) -> None:
        """Ask the cache, before the layer adds its keys.

        Args:
            module: The attention module.
            arguments: What it is called with, by name.
        """
        # A layer without keys of its own attends to those of the layer of its kind that ran last.
        kind = getattr(module, "layer_type", None)
        if getattr(module, "is_kv_shared_layer", False):
            self._held[module] = self._latest.get(kind, Unknown("its keys are those of a layer that is not known"))
            return
        held = _held(module, arguments)
        self._held[module] = self._latest[kind] = held

    def of(self, module: nn.Module, queries: int, keys: int) -> Columns | Unknown:
        """Return the columns of the map that a module gave.

        Args:
            module: The module.
            queries: The number of queries of its map.
            keys: The number of keys.
        """
        held = self._held.get(module)
        if isinstance(held, Unknown):
            return held
        if held is None:
            if queries == keys:
                return WHOLE
            return Unknown(f"a layer has {queries} queries and {keys} keys, and no cache says which these are")
        if held.keys != keys:
            return Unknown(f"a layer has {keys} keys, and its cache tells of {held.keys}")
        return held.columns


def _held(module: nn.Module, arguments: Mapping[str, Any]) -> _Held | Unknown | None:
    """Return what the cache of a call says; None without a cache."""
    cache = next((arguments[name] for name in _CACHES if arguments.get(name) is not None), None)
    if cache is None:
        return None
    read = [arguments.get(name) for name in _INPUTS] + [*arguments.values()]
    queries = next(value.shape[1] for value in read if isinstance(value, Tensor) and value.ndim > 2)
    position = arguments.get("cache_position")
    steps = position if isinstance(position, Tensor) and position.shape == (queries,) else None
    if steps is not None and bool((steps.diff() != 1).any()):
        return Unknown("cache_position does not go up by one")
    first_keys = cache[0] if isinstance(cache, tuple | list) and cache else getattr(cache, "past_keys", None)
    if isinstance(first_keys, Tensor):
        # Keys of the legacy form are [batch, head, position, d_head], those of TransformerLens [batch, position, ...].
        length = first_keys.shape[1 if hasattr(cache, "past_keys") else -2]
        return _Held(Columns(length, 0), length + queries)
    index = _index(module)
    if index is None or not hasattr(cache, "get_seq_length"):
        return Unknown(f"the cache, of type {type(cache).__name__}, does not say how long it is")
    return _of_cache(getattr(cache, "self_attention_cache", cache), index, queries, steps)


def _index(module: nn.Module) -> int | None:
    """Return the number under which a module, or the one inside it, keeps its keys; None if it is not known."""
    values = {getattr(part, name, None) for part in module.modules() for name in _INDEXES}
    numbers = [value for value in values if isinstance(value, int)]
    return numbers[0] if len(numbers) == 1 else None


def _of_cache(cache: Any, index: int, queries: int, steps: Tensor | None) -> _Held:
    """Return what a cache of transformers says about one of its layers.

    Args:
        cache: The cache.
        index: The number of the layer in it.
        queries: The number of queries.
        steps: The columns of the queries, if the call has them.
    """
    layers = getattr(cache, "layers", None)
    if layers is not None and index >= len(layers):
        # The cache adds its layers when they first have keys.
        return _Held(WHOLE, queries)
    length = int(getattr(cache, "get_query_offset", cache.get_seq_length)(index))
    first = length if steps is None or not len(steps) else int(steps[0])
    if not hasattr(cache, "get_mask_sizes"):
        return _Held(Columns(first, 0), length + queries)
    size: Any = queries
    if "cache_position" in inspect.signature(cache.get_mask_sizes).parameters:
        # transformers 4
        size = torch.arange(first, first + queries) if steps is None else steps
    keys, key = cache.get_mask_sizes(size, index)
    return _Held(Columns(first, int(key)), int(keys))
