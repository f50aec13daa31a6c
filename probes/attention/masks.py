"""Which tokens are there, which are relevant, which queries count and where attention is read, for one call."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ...analyses.attention.models.model import last_token
from ...circuits.errors import CallError, reason
from ..maps.source import GivenMap, MapSource, layer_name

#: True or 1 for some tokens: [position] for all examples or [batch, position], or what makes it of the tokens.
TokenMask = Tensor | Sequence[Any] | Callable[[Any], Any]
#: Where attention is read: at the last or the first token, or at a position for each example.
Readout = Literal["last", "first"] | Tensor | Sequence[int] | Callable[[Any], Any]

_TOKEN_NAMES = ("input_ids", "input", "tokens", "decoder_input_ids")


@dataclass(frozen=True, eq=False)
class Sides:
    """The queries and the keys of a map.

    Attributes:
        keys: true where a key is a token.
        queries: true where a query is a token.
        asked: the queries that count, all of them tokens.
        relevant: the keys that are relevant, all of them tokens; None where that is not told.
        readout: the query at which attention is read.
        readable: whether the query there is a token.
        offset: position of the first query among the keys; None where they are of two sequences.
        padded: whether any query or key is no token.
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
    """What the user tells of the tokens.

    Attributes:
        relevant, mask: as the probe was given them.
        queries: which count: all, the last or some.
        readout: where attention is read.
    """

    relevant: TokenMask | None
    mask: TokenMask | None
    queries: Literal["all", "last"] | TokenMask
    readout: Readout

    def sides(
        self,
        given: GivenMap,
        source: MapSource,
        arguments: Mapping[str, Any],
        known_queries: Bool[Tensor, "batch query"] | None,
    ) -> Sides:
        """Return the two sides of a map.

        Args:
            given: the map.
            source: of the map.
            arguments: that the model was called with, by name.
            known_queries: the queries that are tokens, where an earlier layer told it.

        Raises:
            CallError: a mask is not of the map's length, or has other values than 0 and 1.
        """
        attention, stack = given.attention, given.key[0]
        batch, _, query, key = attention.shape
        if given.is_self and query > key:
            raise CallError(f"a map of self-attention has {query} queries and {key} keys; expected as many or fewer")
        read = _Reader(_tokens_of(arguments), batch, attention.device)
        keys, queries = self._masks(given, source, arguments, read)
        if queries is None:
            queries = known_queries
        if keys is None:
            _demand_no_texts(arguments)
        # Queries that follow cached keys are the last positions.
        if queries is not None and queries.shape[1] == key > query and given.is_self:
            queries = queries[:, -query:]
        everything = keys is None and queries is None
        keys = torch.ones(batch, key, dtype=torch.bool, device=attention.device) if keys is None else keys
        if queries is None:
            cut = keys[:, key - query :] if given.is_self else torch.ones(1, query, dtype=torch.bool)
            queries = cut.to(attention.device).expand(batch, query)
        _demand_length(keys, key, "the mask of the keys", given)
        _demand_length(queries, query, "the mask of the queries", given)
        relevant = None
        if self.relevant is not None and not (stack == "decoder" and source.has_encoder):
            relevant = read(self.relevant, "relevant")
            _demand_length(relevant, key, "relevant", given)
            relevant = relevant & keys
        readout = self._readout(queries, read)
        return Sides(
            keys=keys,
            queries=queries,
            asked=self._asked(queries, key, read, given),
            relevant=relevant,
            readout=readout,
            readable=queries.gather(1, readout[:, None])[:, 0],
            offset=key - query if given.is_self else None,
            padded=not everything and not bool(keys.all() & queries.all()),
        )

    def _masks(
        self, given: GivenMap, source: MapSource, arguments: Mapping[str, Any], read: "_Reader"
    ) -> tuple[Tensor | None, Tensor | None]:
        """The masks of keys and queries: as the probe was told, as the layer was, or as the model was called."""
        stack = given.key[0]
        query_names, key_names = source.mask_names(stack) if source.called_with_masks else ((), ())
        if self.mask is not None and not (stack == "decoder" and source.has_encoder):
            keys = read(self.mask, "mask")
        elif given.real_keys is not None:
            keys = read(given.real_keys, "key_padding_mask")
        else:
            keys = _of_call(key_names, arguments, read)
        if given.is_self:
            return keys, keys
        return keys, _of_call(query_names, arguments, read)

    def _asked(
        self, queries: Bool[Tensor, "batch query"], keys: int, read: "_Reader", given: GivenMap
    ) -> Bool[Tensor, "batch query"]:
        if isinstance(self.queries, str):
            if self.queries == "all":
                return queries
            places = torch.arange(queries.shape[1], device=queries.device)
            return queries & (places == last_token(queries)[:, None])
        asked = read(self.queries, "queries")
        if given.is_self and asked.shape[1] == keys:
            asked = asked[:, keys - queries.shape[1] :]
        _demand_length(asked, queries.shape[1], "queries", given)
        return asked & queries

    def _readout(self, queries: Bool[Tensor, "batch query"], read: "_Reader") -> Int[Tensor, " batch"]:
        if isinstance(self.readout, str):
            return last_token(queries) if self.readout == "last" else queries.long().argmax(dim=1)
        places = read.value(self.readout, "readout").reshape(-1)
        length = queries.shape[1]
        if len(places) != len(queries) or places.is_floating_point() or bool(((places < 0) | (places >= length)).any()):
            raise CallError(
                f"readout should be 'last', 'first' or one of {length} positions for each of {len(queries)} examples, "
                f"got {places.tolist()}"
            )
        return places.long()


@dataclass(frozen=True)
class _Reader:
    """Reads what was given as [batch, position], for the tokens of one call."""

    tokens: Any
    batch: int
    device: torch.device

    def value(self, given: Any, name: str) -> Tensor:
        """What was given, or what the function that was given makes of the tokens."""
        if callable(given):
            if self.tokens is None:
                raise CallError("a mask that is made of the tokens needs a model that is called with a tensor")
            given = given(self.tokens)
        try:
            return torch.as_tensor(given, device=self.device).detach()
        except (TypeError, ValueError, RuntimeError) as error:
            raise CallError(
                f"{name} should be a tensor or numbers as a tensor is made of, got {type(given).__name__} "
                f"({reason(error)})"
            ) from error

    def __call__(self, given: Any, name: str) -> Bool[Tensor, "batch position"]:
        value = self.value(given, name)
        if value.ndim not in (1, 2) or (value.ndim == 2 and len(value) not in (1, self.batch)):
            raise CallError(
                f"{name} has shape {list(value.shape)}; expected [position], or [batch, position] with {self.batch} "
                f"examples; where the model takes a mask of another shape, tell the probe which tokens there are with "
                f"mask="
            )
        if value.dtype != torch.bool:
            if bool(((value != 0) & (value != 1)).any()):
                raise CallError(f"{name} has values other than 0 and 1; expected 1, or true, for the tokens meant")
            value = value != 0
        return value.expand(self.batch, value.shape[-1])


def _of_call(names: Sequence[str], arguments: Mapping[str, Any], read: _Reader) -> Tensor | None:
    for name in names:
        given = arguments.get(name)
        if isinstance(given, Tensor):
            return read(given, name)
        if given is not None:
            raise CallError(
                f"the model was called with {name} of type {type(given).__name__}: tell the probe which tokens there "
                f"are with mask="
            )
    return None


def _tokens_of(arguments: Mapping[str, Any]) -> Tensor | None:
    """The tokens of a call: by the names that models have for them, else the first tensor."""
    named = [arguments[name] for name in _TOKEN_NAMES if name in arguments]
    return next((value for value in [*named, *arguments.values()] if isinstance(value, Tensor)), None)


def _demand_no_texts(arguments: Mapping[str, Any]) -> None:
    """CallError for several texts, whose padding nobody tells."""
    texts = arguments.get("input")
    if isinstance(texts, Sequence) and not isinstance(texts, str) and len(texts) > 1:
        raise CallError(
            f"the model was called with {len(texts)} texts, and nothing says where they were padded: call it with "
            f"tokens and attention_mask, or give the probe mask="
        )


def _demand_length(mask: Tensor, length: int, name: str, given: GivenMap) -> None:
    if mask.shape[1] != length:
        raise CallError(
            f"{name} has {mask.shape[1]} positions, and the map of {layer_name(given.key)} has {length}, with the "
            f"shape {list(given.attention.shape)} as [batch, head, query, key]"
        )
