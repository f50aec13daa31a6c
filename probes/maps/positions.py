"""The keys that the measures of position read: of each query itself, of the tokens beside it, and of the first one."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ...analyses.attention.maps.columns import Columns, Unknown


@dataclass(frozen=True, eq=False)
class KeyOfQuery:
    """One key for each query.

    Attributes:
        index: The key in the map; 0 where it has none.
        held: Whether the map has the key. A layer that has dropped it, as a sliding window does, gives it no weight.
        exists: Whether there is such a token.
    """

    index: Int[Tensor, "batch query"]
    held: Bool[Tensor, "batch query"]
    exists: Bool[Tensor, "batch query"]


@dataclass(frozen=True, eq=False)
class Positions:
    """Where the queries of a map are in their sequences.

    Attributes:
        keys: The keys that each measure of position reads, by the measure's name.
        start: The column at which the sequence of each query begins.
        end: The column after its last token so far.
    """

    keys: dict[str, KeyOfQuery]
    start: Int[Tensor, "batch query"]
    end: Int[Tensor, "batch query"]

    def sequences_with(self, marked: Bool[Tensor, "batch column"]) -> Bool[Tensor, "batch query"]:
        """Return whether the sequence of each query has a marked token.

        Args:
            marked: The marked columns.
        """
        before = torch.nn.functional.pad(marked.long().cumsum(dim=1), (1, 0))
        return before.gather(1, self.end) > before.gather(1, self.start)

    def block(self, queries: slice) -> "Positions":
        """Return where some of the queries are.

        Args:
            queries: The queries.
        """
        keys = {
            name: KeyOfQuery(key.index[:, queries], key.held[:, queries], key.exists[:, queries])
            for name, key in self.keys.items()
        }
        return Positions(keys, self.start[:, queries], self.end[:, queries])


@dataclass(frozen=True, eq=False)
class Row:
    """The row of columns that the queries and keys of a map are part of.

    Attributes:
        real: True where a column so far is a token.
        columns: Where the map stands in it.
        queries: True where a query is a token.
        width: The number of keys of the map.
        seen: Which keys the queries can see; None if that is not known.
    """

    real: Bool[Tensor, "batch column"]
    columns: Columns
    queries: Bool[Tensor, "batch query"]
    width: int
    seen: Bool[Tensor, "#batch #query key"] | None

    @property
    def places(self) -> Int[Tensor, " query"]:
        """The columns of the queries."""
        return self.columns.query + torch.arange(self.queries.shape[1], device=self.queries.device)


def positions_of(row: Row, ids: Int[Tensor, "batch query"] | None, *, is_split: bool) -> Positions | Unknown:
    """Return where the queries of a map are in their sequences.

    A row of columns holds one sequence, or several that are packed: position_ids that do not go up by one begin another
    one, and so does a mask that hides all tokens before a column from all tokens from there on.

    Args:
        row: The row of columns.
        ids: The position_ids of the call, if it has them.
        is_split: Whether the call itself was given the mask that says which tokens see each other.
    """
    begins = torch.zeros_like(row.queries)
    first = _first(row.real)[:, None]
    start = first.expand_as(row.queries)
    if is_split and row.seen is not None and row.columns.query == 0 and row.width == row.queries.shape[1]:
        begins = _blocks(row.seen.expand(len(begins), row.width, row.width), row.queries)
    if ids is not None:
        begins = begins | _restarts(ids, row)
        start = _before_the_call(ids, row)
    start = torch.where(begins, row.places, start).cummax(dim=1).values
    end = _ends(begins, row)
    is_packed = bool((begins | (row.queries & (start > first))).any())
    if is_packed and not _is_apart(start, end, row):
        return Unknown(
            "position_ids begin again inside a row, and no mask keeps the tokens after that from those before"
        )
    return Positions(_keys(start, end, row, skips_padding=ids is not None), start, end)


def _first(real: Bool[Tensor, "batch column"]) -> Int[Tensor, " batch"]:
    return real.long().argmax(dim=1)


def _restarts(ids: Int[Tensor, "batch query"], row: Row) -> Bool[Tensor, "batch query"]:
    """Return the queries whose position is not one more than that of the token before, which is a query too."""
    before = _last_real(row.queries)
    known = before >= 0
    step = ids - ids.gather(1, before.clamp(min=0))
    return row.queries & known & (step != 1)


def _last_real(real: Bool[Tensor, "batch column"]) -> Int[Tensor, "batch column"]:
    """Return, for each column, the last one before it that is a token; -1 if there is none."""
    places = torch.arange(real.shape[1], device=real.device).expand_as(real)
    latest = torch.where(real, places, -1).cummax(dim=1).values
    return torch.cat([torch.full_like(latest[:, :1], -1), latest[:, :-1]], dim=1)


def _before_the_call(ids: Int[Tensor, "batch query"], row: Row) -> Int[Tensor, "batch query"]:
    """Return the column at which the sequence of the first query begins, among the columns before the call too."""
    first = _first(row.queries)[:, None]
    place, position = row.columns.query + first, ids.gather(1, first)
    counts = row.real.long().cumsum(dim=1)
    before = counts.gather(1, place) - 1
    # Position 0 is as many tokens before as the position says; if there are fewer, the row has only part of it.
    skipped = (before - position).clamp(min=0) * row.queries.any(dim=1, keepdim=True)
    begin = (row.real & (counts > skipped)).long().argmax(dim=1, keepdim=True)
    return begin.expand_as(row.queries)


def _blocks(seen: Bool[Tensor, "batch query key"], queries: Bool[Tensor, "batch query"]) -> Bool[Tensor, "batch query"]:
    """Return the tokens from which on no token sees those before, nor is seen by them."""
    size = queries.shape[1]
    places = torch.arange(size, device=seen.device)
    seen = seen & queries[:, None]
    least = torch.where(seen, places, size).amin(dim=2).masked_fill(~queries, size)
    most = torch.where(seen, places, -1).amax(dim=2).masked_fill(~queries, -1)
    after = least.flip(1).cummin(dim=1).values.flip(1)
    # The first column gets the value of the last one, and does not need it: the first token is no beginning.
    before = most.cummax(dim=1).values.roll(1, dims=1)
    begins = queries & (after >= places) & (before < places)
    begins[torch.arange(len(queries), device=seen.device), _first(queries)] = False
    return begins


def _ends(begins: Bool[Tensor, "batch query"], row: Row) -> Int[Tensor, "batch query"]:
    """Return the column after the last one of each query's sequence."""
    total = row.real.shape[1]
    following = torch.cat([begins[:, 1:], torch.zeros_like(begins[:, :1])], dim=1)
    limits = torch.where(following, row.places + 1, total)
    return limits.flip(1).cummin(dim=1).values.flip(1)


def _is_apart(start: Int[Tensor, "batch query"], end: Int[Tensor, "batch query"], row: Row) -> bool:
    """Return whether the mask of a layer hides from each token what is not in its sequence."""
    if row.seen is None:
        return False
    columns = row.columns.key + torch.arange(row.width, device=start.device)
    other = (columns < start[..., None]) | (columns >= end[..., None])
    tokens = _held(row.real, columns)[:, None] & row.queries[..., None]
    return not bool((other & tokens & row.seen).any())


def _held(real: Bool[Tensor, "batch column"], columns: Int[Tensor, " key"]) -> Bool[Tensor, "batch key"]:
    """Return which columns are tokens; those that do not exist yet are none."""
    inside = columns < real.shape[1]
    return real[:, columns.clamp(max=real.shape[1] - 1)] & inside


def keys_among(real: Bool[Tensor, "batch column"], columns: Columns, width: int) -> Bool[Tensor, "batch key"]:
    """Return which keys of a map are tokens.

    Args:
        real: True where a column is a token.
        columns: Where the map stands among the columns.
        width: The number of keys.
    """
    return _held(real, columns.key + torch.arange(width, device=real.device))


def _keys(
    start: Int[Tensor, "batch query"], end: Int[Tensor, "batch query"], row: Row, *, skips_padding: bool
) -> dict[str, KeyOfQuery]:
    """Return the keys of the measures.

    Args:
        start: The column at which the sequence of each query begins.
        end: The column after its last token so far.
        row: The row of columns.
        skips_padding: Whether positions count tokens only, so that the token before may be some columns away.
    """
    places = row.places.expand_as(start)
    total = row.real.shape[1]

    def key(at: Int[Tensor, "batch query"]) -> KeyOfQuery:
        inside = (at >= start) & (at < end)
        exists = inside & row.real.gather(1, at.clamp(0, total - 1))
        index = at - row.columns.key
        held = exists & (index >= 0) & (index < row.width)
        return KeyOfQuery(torch.where(held, index, 0), held, exists)

    previous, following = places - 1, places + 1
    if skips_padding:
        previous = _last_real(row.real).gather(1, places)
        following = total - 1 - _last_real(row.real.flip(1)).flip(1).gather(1, places)
    return {"sink": key(start), "self": key(places), "previous": key(previous), "next": key(following)}


def first_key(keys: Bool[Tensor, "batch key"], queries: int) -> KeyOfQuery:
    """Return the first key that is a token, for queries of another sequence.

    Args:
        keys: True where a key is a token.
        queries: The number of queries.
    """
    index = _first(keys)[:, None].expand(-1, queries)
    exists = keys.any(dim=1, keepdim=True).expand_as(index)
    return KeyOfQuery(index, exists, exists)
