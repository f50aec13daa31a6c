"""Which positions of a call are tokens, which are relevant, which queries count, and where attention is read."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ...analyses.attention.maps.source import LayerMap, MapSource
from ...analyses.attention.models.model import last_token
from ...circuits.errors import CallError, reason
from ...circuits.weights.layer_keys import layer_name

#: True or 1 for some tokens: [position] for all examples or [batch, position]; or a function that makes such a mask of
#: the tokens.
TokenMask = Tensor | Sequence[Any] | Callable[[Any], Any]
#: Where attention is read: at the last or the first token, or at a position for each example.
Readout = Literal["last", "first"] | Tensor | Sequence[int] | Callable[[Any], Any]

_TOKEN_NAMES = ("input_ids", "input", "tokens", "decoder_input_ids")
#: The names that padding masks have where a model is called with them.
_ENCODER_MASKS = ("attention_mask", "one_zero_attention_mask")
_DECODER_MASKS = ("decoder_attention_mask",)
_CROSS_MASKS = ("encoder_attention_mask",)


@dataclass(frozen=True, eq=False)
class Sides:
    """The queries and the keys of a map.

    Attributes:
        keys: True where a key is a token.
        queries: True where a query is a token.
        asked: The queries that count; all of them are tokens.
        relevant: The keys that are relevant; all of them are tokens. None if that is not known.
        readout: The query at which attention is read.
        readable: Whether the query there is a token.
        offset: The position of the first query among the keys; None if they are of two sequences.
        padded: Whether any query or key is not a token.
    """

    keys: Bool[Tensor, "batch key"]
    queries: Bool[Tensor, "batch query"]
    asked: Bool[Tensor, "batch query"]
    relevant: Bool[Tensor, "batch key"] | None
    readout: Int[Tensor, " batch"]
    readable: Bool[Tensor, " batch"]
    offset: int | None
    padded: bool

    @property
    def first(self) -> Int[Tensor, " batch"]:
        """The first key of each example that is a token."""
        return self.keys.long().argmax(dim=1)


@dataclass(frozen=True, eq=False)
class TokenMasks:
    """The user's statements about the tokens.

    Attributes:
        relevant: Which tokens are relevant, as the probe was given it.
        mask: Which positions are tokens, as the probe was given it.
        queries: Which queries count: all, the last or some.
        readout: Where attention is read.
    """

    relevant: TokenMask | None
    mask: TokenMask | None
    queries: Literal["all", "last"] | TokenMask
    readout: Readout

    def sides(
        self,
        layer_map: LayerMap,
        source: MapSource,
        arguments: Mapping[str, Any],
        known_queries: Bool[Tensor, "batch query"] | None,
    ) -> Sides:
        """Return the queries and the keys of a map.

        Args:
            layer_map: The map.
            source: The source of the map.
            arguments: The arguments that the model was called with, by name.
            known_queries: The queries that are tokens, if an earlier layer showed that.

        Raises:
            CallError: A mask does not have the map's length, or has values other than 0 and 1.
        """
        attention, stack = layer_map.attention, layer_map.key[0]
        batch, _, query, key = attention.shape
        if layer_map.is_self and query > key:
            raise CallError(f"a map of self-attention has {query} queries and {key} keys; expected as many or fewer")
        read = _Reader(_tokens_of(arguments), batch, attention.device)
        keys, queries = self._masks(layer_map, source, arguments, read)
        if queries is None:
            queries = known_queries
        if keys is None:
            _demand_no_texts(arguments)
        # Queries that follow cached keys are the last positions.
        if queries is not None and queries.shape[1] == key > query and layer_map.is_self:
            queries = queries[:, -query:]
        everything = keys is None and queries is None
        keys = torch.ones(batch, key, dtype=torch.bool, device=attention.device) if keys is None else keys
        if queries is None:
            cut = keys[:, key - query :] if layer_map.is_self else torch.ones(1, query, dtype=torch.bool)
            queries = cut.to(attention.device).expand(batch, query)
        _demand_length(keys, key, "the mask of the keys", layer_map)
        _demand_length(queries, query, "the mask of the queries", layer_map)
        relevant = None
        if self.relevant is not None and not (stack == "decoder" and has_encoder(source)):
            relevant = read(self.relevant, "relevant")
            _demand_length(relevant, key, "relevant", layer_map)
            relevant = relevant & keys
        readout = self._readout(queries, read)
        return Sides(
            keys=keys,
            queries=queries,
            asked=self._asked(queries, key, read, layer_map),
            relevant=relevant,
            readout=readout,
            readable=queries.gather(1, readout[:, None])[:, 0],
            offset=key - query if layer_map.is_self else None,
            padded=not everything and not bool(keys.all() & queries.all()),
        )

    def _masks(
        self, layer_map: LayerMap, source: MapSource, arguments: Mapping[str, Any], read: "_Reader"
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the masks of keys and queries: the probe's, the layer's, or those of the model's call."""
        stack = layer_map.key[0]
        query_names, key_names = _mask_names(stack, source) if source.masks_in_call else ((), ())
        if self.mask is not None and not (stack == "decoder" and has_encoder(source)):
            keys = read(self.mask, "mask")
        elif layer_map.real_keys is not None:
            keys = read(layer_map.real_keys, "key_padding_mask")
        else:
            keys = _of_call(key_names, arguments, read)
        if layer_map.is_self:
            return keys, keys
        return keys, _of_call(query_names, arguments, read)

    def _asked(
        self, queries: Bool[Tensor, "batch query"], keys: int, read: "_Reader", layer_map: LayerMap
    ) -> Bool[Tensor, "batch query"]:
        if isinstance(self.queries, str):
            if self.queries == "all":
                return queries
            positions = torch.arange(queries.shape[1], device=queries.device)
            return queries & (positions == last_token(queries)[:, None])
        asked = read(self.queries, "queries")
        if layer_map.is_self and asked.shape[1] == keys:
            asked = asked[:, keys - queries.shape[1] :]
        _demand_length(asked, queries.shape[1], "queries", layer_map)
        return asked & queries

    def _readout(self, queries: Bool[Tensor, "batch query"], read: "_Reader") -> Int[Tensor, " batch"]:
        if isinstance(self.readout, str):
            return last_token(queries) if self.readout == "last" else queries.long().argmax(dim=1)
        at = read.value(self.readout, "readout").reshape(-1)
        length = queries.shape[1]
        if len(at) != len(queries) or at.is_floating_point() or bool(((at < 0) | (at >= length)).any()):
            raise CallError(
                f"readout should be 'last', 'first' or one of {length} positions for each of {len(queries)} examples, "
                f"got {at.tolist()}"
            )
        return at.long()


def has_encoder(source: MapSource) -> bool:
    """Return whether the model has an encoder beside a decoder."""
    stacks = {stack for stack, _ in source.keys}
    return "encoder" in stacks or "decoder cross" in stacks


def _mask_names(stack: str, source: MapSource) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names that the masks of a stack's queries and keys have in a call of the model."""
    if stack == "decoder" and has_encoder(source):
        return _DECODER_MASKS, _DECODER_MASKS
    if stack == "decoder cross":
        return _DECODER_MASKS, _ENCODER_MASKS
    if stack == "cross":
        return _ENCODER_MASKS, _CROSS_MASKS
    return _ENCODER_MASKS, _ENCODER_MASKS


@dataclass(frozen=True)
class _Reader:
    """Turns what a user gave into a tensor of shape [batch, position], for the tokens of one call."""

    tokens: Any
    batch: int
    device: torch.device

    def value(self, given: Any, name: str) -> Tensor:
        """Return what was given as a tensor; a function is called with the tokens."""
        if callable(given):
            if self.tokens is None:
                raise CallError("a mask that is made of the tokens needs a model that is called with a tensor")
            given = given(self.tokens)
        try:
            return torch.as_tensor(given, device=self.device).detach()
        except (TypeError, ValueError, RuntimeError) as error:
            raise CallError(
                f"{name} should be a tensor, or numbers that torch can make a tensor of, got {type(given).__name__} "
                f"({reason(error)})"
            ) from error

    def __call__(self, given: Any, name: str) -> Bool[Tensor, "batch position"]:
        value = self.value(given, name)
        if value.ndim not in (1, 2) or (value.ndim == 2 and len(value) not in (1, self.batch)):
            raise CallError(
                f"{name} has shape {list(value.shape)}; expected [position], or [batch, position] with {self.batch} "
                f"examples; if the model takes a mask of another shape, give the probe the padding mask as mask="
            )
        if value.dtype != torch.bool:
            if bool(((value != 0) & (value != 1)).any()):
                raise CallError(f"{name} has values other than 0 and 1; expected 1, or true, for the tokens meant")
            value = value != 0
        return value.expand(self.batch, value.shape[-1])


def _of_call(names: Sequence[str], arguments: Mapping[str, Any], read: _Reader) -> Tensor | None:
    for name in names:
        mask = arguments.get(name)
        if isinstance(mask, Tensor):
            return read(mask, name)
        if mask is not None:
            raise CallError(
                f"the model was called with {name} of type {type(mask).__name__}; give the probe the padding mask as "
                f"mask="
            )
    return None


def _tokens_of(arguments: Mapping[str, Any]) -> Tensor | None:
    """Return the tokens of a call: the argument with one of the usual names, or else the first tensor."""
    named = [arguments[name] for name in _TOKEN_NAMES if name in arguments]
    return next((value for value in [*named, *arguments.values()] if isinstance(value, Tensor)), None)


def _demand_no_texts(arguments: Mapping[str, Any]) -> None:
    """Raise CallError for several texts, since nothing shows how they were padded."""
    texts = arguments.get("input")
    if isinstance(texts, Sequence) and not isinstance(texts, str) and len(texts) > 1:
        raise CallError(
            f"the model was called with {len(texts)} texts, and nothing shows where they were padded; call it with "
            f"tokens and attention_mask, or give the probe mask="
        )


def _demand_length(mask: Tensor, length: int, name: str, layer_map: LayerMap) -> None:
    if mask.shape[1] != length:
        raise CallError(
            f"{name} has {mask.shape[1]} positions, and the map of {layer_name(*layer_map.key)} has {length}, with the "
            f"shape {list(layer_map.attention.shape)} as [batch, head, query, key]"
        )
