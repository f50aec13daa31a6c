"""Which positions of a call are tokens, which are relevant, which queries count, and where attention is read."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ...analyses.attention.maps.columns import ONE_OR_TWO, Columns, Unknown
from ...analyses.attention.maps.source import LayerOverPositions
from ...analyses.attention.models.model import last_token
from ...circuits.errors import CallError
from ...circuits.weights.layer_keys import layer_name
from .model_call import ModelCall
from .positions import Positions, Row, keys_among, positions_of
from .reader import Line, Reader, TokenMask, demand_length
from .sides import Sides

#: Where attention is read: at the last or the first token, or at a position for each example.
Readout = Literal["last", "first"] | Tensor | Sequence[int] | Callable[[Any], Any]


@dataclass(frozen=True, eq=False)
class MapInCall:
    """A map, and the call of the model that it comes from.

    Attributes:
        layer_map: The map.
        seen: Where a query can see a key; None if that is not known.
        call: The call.
    """

    layer_map: LayerOverPositions
    seen: Bool[Tensor, "#batch #query key"] | None
    call: ModelCall

    @property
    def read(self) -> Reader:
        """What reads the masks that were given for this map."""
        return Reader(self.call.tokens, self.layer_map.shape[0], self.layer_map.device)

    def mask_in_call(self, length: int) -> Any:
        """Return the mask of the keys that the model was called with; None if there is none, or if it hides nothing.

        A mask of another length that hides nothing is of what the model reads, such as the frames of a sound, and not
        of the positions that it makes of that.

        Args:
            length: The number of positions.
        """
        mask = self.call.key_mask(self.layer_map)
        is_flat = isinstance(mask, Tensor) and mask.ndim == 2
        return None if is_flat and mask.shape[1] != length and bool((mask == 1).all()) else mask

    def everything(self, length: int) -> Bool[Tensor, "batch position"]:
        """Return a mask that is true everywhere; several texts, whose padding is not known, are refused."""
        self.call.demand_no_texts()
        return torch.ones(self.layer_map.shape[0], length, dtype=torch.bool, device=self.layer_map.device)


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

    def sides(self, of: MapInCall, decoder: Sides | None) -> Sides:
        """Return the queries and the keys of a map.

        Args:
            of: The map, and the call that it comes from.
            decoder: The sides of the decoder's maps, where the queries of a map to the encoder come from.

        Raises:
            CallError: A mask does not have the length of the sequence, or has values other than 0 and 1.
        """
        columns = of.layer_map.columns
        if not of.layer_map.is_self:
            return self._between(of, decoder)
        return self._unplaced(of, columns) if isinstance(columns, Unknown) else self._placed(of, columns)

    def _placed(self, of: MapInCall, columns: Columns) -> Sides:
        """Return the sides of a map whose columns are known."""
        query, key = of.layer_map.shape[2:]
        line = Line(columns.query or of.call.continued(), columns.query + query, of.layer_map)
        ids, in_call = of.call.position_ids(of.layer_map), of.mask_in_call(line.total)
        # Such a mask says which query sees which key, and not only what is padding.
        is_split = isinstance(in_call, Mapping) or (isinstance(in_call, Tensor) and in_call.ndim > 2)
        real = self._stated(of)
        if real is not None:
            real = line.fitted(real, "the mask of the keys", grows=_grows(self.mask), fill=True)
        elif is_split:
            real = _real_by_sight(of, columns, ids, in_call)
        elif in_call is not None:
            real = line.fitted(of.read(in_call, "attention_mask"), "the mask of the keys", grows=False, fill=True)
        is_given = real is not None
        real = of.everything(line.total) if real is None else real
        keys, queries = keys_among(real, columns, key), real[:, columns.query :]
        relevant = None
        if self._knows_relevant(of):
            marked = of.read(self.relevant, "relevant")
            relevant = real & line.fitted(marked, "relevant", grows=_grows(self.relevant), fill=False)
        readout = self._readout(queries, of.read)
        is_split = is_split and isinstance(in_call, Tensor)
        positions = positions_of(Row(real, columns, queries, key, of.seen), ids, is_split=is_split)
        return Sides(
            keys=keys,
            queries=queries,
            asked=self._asked(queries, of, line),
            relevant=None if relevant is None else keys_among(relevant, columns, key),
            relevant_tokens=None if relevant is None else relevant.sum(dim=1),
            has_relevant=None if relevant is None else _has(relevant, positions, query),
            tokens=real.sum(dim=1),
            readout=readout,
            readable=queries.gather(1, readout[:, None])[:, 0],
            columns=columns,
            positions=positions,
            seen=of.seen,
            padded=columns.key + key > line.total or (is_given and not bool(keys.all() & queries.all())),
        )

    def _unplaced(self, of: MapInCall, columns: Unknown) -> Sides:
        """Return the sides of a map of which it is not known where its queries are among its keys."""
        batch, _, query, key = of.layer_map.shape
        keys = self._keys(of)
        if query != key and not bool(keys.all()):
            raise CallError(
                f"{layer_name(*of.layer_map.key)} of {of.call.source.name} has a map of {query} queries and {key} "
                f"keys, and which of the queries are padding is not known: {columns.reason}"
            )
        queries = keys if query == key else keys.new_ones((batch, query))
        return self._sides(of, keys, queries, Line(0, query, of.layer_map), columns, columns)

    def _between(self, of: MapInCall, decoder: Sides | None) -> Sides:
        """Return the sides of a map from one sequence to another one."""
        batch, _, query, _ = of.layer_map.shape
        keys, in_call = self._keys(of), of.call.query_mask(of.layer_map)
        start = 0
        if decoder is not None and decoder.queries.shape == (batch, query):
            queries = decoder.queries
            start = decoder.columns.query if isinstance(decoder.columns, Columns) else 0
        elif in_call is not None:
            queries = of.read(in_call, "attention_mask")
            demand_length(queries, query, "the mask of the queries", of.layer_map)
        else:
            queries = keys.new_ones((batch, query))
        # Between two sequences there are no positions to know.
        positions = ONE_OR_TWO if of.layer_map.columns is ONE_OR_TWO else None
        return self._sides(of, keys, queries, Line(start, start + query, of.layer_map), None, positions)

    def _sides(
        self,
        of: MapInCall,
        keys: Bool[Tensor, "batch key"],
        queries: Bool[Tensor, "batch query"],
        line: Line,
        columns: Unknown | None,
        positions: Unknown | None,
    ) -> Sides:
        """Return the sides of a map whose queries and keys have no columns in common that are known."""
        relevant = None
        if self._knows_relevant(of):
            relevant = of.read(self.relevant, "relevant")
            demand_length(relevant, keys.shape[1], "relevant", of.layer_map)
            relevant = relevant & keys
        readout = self._readout(queries, of.read)
        return Sides(
            keys=keys,
            queries=queries,
            asked=self._asked(queries, of, line),
            relevant=relevant,
            relevant_tokens=None if relevant is None else relevant.sum(dim=1),
            has_relevant=None if relevant is None else _has(relevant, columns, queries.shape[1]),
            tokens=keys.sum(dim=1),
            readout=readout,
            readable=queries.gather(1, readout[:, None])[:, 0],
            columns=columns,
            positions=positions,
            seen=of.seen,
            padded=not bool(keys.all() & queries.all()),
        )

    def _keys(self, of: MapInCall) -> Bool[Tensor, "batch key"]:
        """Return which keys of a map are tokens, from a mask that has a value for each of them."""
        length = of.layer_map.shape[3]
        keys, in_call = self._stated(of), of.mask_in_call(length)
        if keys is None:
            keys = of.everything(length) if in_call is None else of.read(in_call, "attention_mask")
        demand_length(keys, length, "the mask of the keys", of.layer_map)
        return keys

    def _knows_relevant(self, of: MapInCall) -> bool:
        return self.relevant is not None and not of.call.is_decoder(of.layer_map)

    def _stated(self, of: MapInCall) -> Tensor | None:
        """Return the mask of the keys that the probe was given, or else the layer; None if there is none."""
        if self.mask is not None and not of.call.is_decoder(of.layer_map):
            return of.read(self.mask, "mask")
        return None if of.layer_map.real_keys is None else of.read(of.layer_map.real_keys, "key_padding_mask")

    def _asked(self, queries: Bool[Tensor, "batch query"], of: MapInCall, line: Line) -> Bool[Tensor, "batch query"]:
        if self.queries == "all":
            return queries
        if isinstance(self.queries, str):
            positions = torch.arange(queries.shape[1], device=queries.device)
            return queries & (positions == last_token(queries)[:, None])
        marked = line.fitted(of.read(self.queries, "queries"), "queries", grows=_grows(self.queries), fill=False)
        return queries & marked[:, line.total - queries.shape[1] :]

    def _readout(self, queries: Bool[Tensor, "batch query"], read: Reader) -> Int[Tensor, " batch"]:
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


def _grows(given: Any) -> bool:
    """Return whether a mask may stand for the first tokens of a sequence that has grown since."""
    return not callable(given)


def _has(
    relevant: Bool[Tensor, "batch column"], positions: Positions | Unknown | None, queries: int
) -> Bool[Tensor, "batch query"]:
    """Return whether the sequence of each query has a relevant token; where it is not known, the row that it is in."""
    if isinstance(positions, Positions):
        return positions.sequences_with(relevant)
    return relevant.any(dim=1, keepdim=True).expand(-1, queries)


def _real_by_sight(
    of: MapInCall, columns: Columns, ids: Int[Tensor, "batch query"] | None, in_call: Any
) -> Bool[Tensor, "batch column"]:
    """Return which columns are tokens: a token sees itself; in a cache, they begin where the positions begin.

    Raises:
        CallError: That is not known.
    """
    batch, _, query, key = of.layer_map.shape
    if of.seen is None or (columns.query and ids is None):
        shape = f"has shape {list(in_call.shape)}" if isinstance(in_call, Tensor) else "is one for each kind of layer"
        raise CallError(
            f"attention_mask {shape}, and does not say what is padding; give the probe the padding mask as mask="
        )
    places = torch.arange(query, device=of.layer_map.device)
    seen = of.seen.to(places.device).expand(batch, query, key)
    own = seen[:, places, columns.query - columns.key + places]
    if not columns.query or ids is None:
        return own
    first = own.long().argmax(dim=1, keepdim=True)
    begin = columns.query + first - ids.gather(1, first)
    cached = torch.arange(columns.query, device=places.device) >= begin
    return torch.cat([cached, own], dim=1)
