"""The measures of one layer's maps, for every head, without copying the maps."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from ...analyses.attention.maps.columns import Unknown
from ...analyses.dynamics.sequences import Sequences
from ...circuits.algebra.products import upcast
from ..maps.positions import first_key
from ..maps.sides import Sides

#: The measures that need to know the positions of queries and keys.
BY_POSITION = ("sink", "self", "previous", "next")
#: Scratch memory is at most this many numbers, or this share (1/6) of a layer's maps if they are small.
_SCRATCH, _SHARE = 1 << 20, 6
_MASK_NOT_KNOWN = Unknown("the layer was called with no mask that says which keys a query can see")


class QueryMeasures:
    """The measures of every query: their values, and which queries have them.

    For a query i with weights p_ij on the keys that are tokens, normalised to sum 1:

    | name | | formula |
    |---|---|---|
    | `entropy` | nats | -sum_j p_ij ln p_ij |
    | `largest` | | max_j p_ij |
    | `relevant` | | sum of p_ij over the relevant j |
    | `chance` | | the share of relevant keys among the keys that i can see |
    | `sink` | | p_ij of the first token |
    | `self`, `previous`, `next` | | p_ii, p_i,i-1, p_i,i+1; queries without such a key are left out |
    | `no_token` | | 1 - (1 - dropout) sum_j w_ij, w_ij the weights on tokens before they are normalised |

    Queries without any weight, which dropout may produce, are left out everywhere but in `no_token`, and those of a
    sequence without any relevant token are left out of `relevant` and `chance`. What a query can see is what the mask
    of its layer says; where that is not known, neither is `chance`. A key that the layer has dropped has no weight.

    Attributes:
        attends: Whether a query attends to anything.
        values: The values of each measure.
        there: Which queries have them.
        unknown: Why a measure that was asked for is not known.
    """

    def __init__(
        self,
        attention: Float[Tensor, "batch head query key"],
        sides: Sides,
        names: tuple[str, ...],
        dropout: float | None,
        logits: Float[Tensor, "batch head query"] | None = None,
    ) -> None:
        """Measure a layer, or a block of its queries.

        Args:
            attention: The layer's maps, of any floating type; sums are computed in float32 at least.
            sides: The queries and keys of the maps.
            names: Names of the measures, as in the table; `chance` comes with `relevant`.
            dropout: The rate of the dropout that the maps have been through; None if it is not known.
            logits: The largest score of each query before the softmax, if it is known.
        """
        self.logits = logits
        attention = attention.detach()
        rows = _Rows(attention, sides, entropy="entropy" in names)
        # NaN is not 0, so values that are not finite stay visible.
        self.attends: Bool[Tensor, "batch head query"] = rows.total != 0
        self.values: dict[str, Float[Tensor, "batch head query"]] = {}
        self.there: dict[str, Bool[Tensor, "batch head query"]] = {}
        self.unknown: dict[str, str] = {}
        total = rows.total
        if "entropy" in names:
            # -sum p ln p of p = w / s is (-sum w ln w) / s + ln s.
            self._add("entropy", rows.entropy / total + total.log())
        if "largest" in names:
            self._add("largest", rows.largest / total)
        if "no_token" in names and dropout is None:
            self.unknown["no_token"] = "the rate of dropout is not known"
        elif "no_token" in names and dropout is not None:
            self.values["no_token"] = 1 - (1 - dropout) * total
            self.there["no_token"] = torch.ones_like(self.attends)
        self._read_positions(attention, sides, names, total)
        if "relevant" in names and sides.relevant is not None and sides.has_relevant is not None:
            # Where no token is relevant there is nothing to measure: 0 would say that nobody attends to it.
            exists = sides.has_relevant[:, None]
            self._add("relevant", rows.relevant / total, exists)
            chance = _chance(attention, sides, sides.relevant)
            if isinstance(chance, Unknown):
                self.unknown["chance"] = chance.reason
            else:
                self._add("chance", chance.to(total.dtype)[:, None].expand_as(total), exists)

    @classmethod
    def joined(cls, parts: Sequence["QueryMeasures"]) -> "QueryMeasures":
        """Return the measures of all queries of a layer from those of its blocks of queries, in their order.

        Args:
            parts: The measures of each block.
        """
        if len(parts) == 1:
            return parts[0]
        whole = cls.__new__(cls)
        whole.attends = torch.cat([part.attends for part in parts], dim=2)
        whole.values = {name: torch.cat([part.values[name] for part in parts], dim=2) for name in parts[0].values}
        whole.there = {name: torch.cat([part.there[name] for part in parts], dim=2) for name in parts[0].there}
        whole.unknown = parts[0].unknown
        logits = [part.logits for part in parts if part.logits is not None]
        whole.logits = torch.cat(logits, dim=2) if logits else None
        return whole

    def _read_positions(
        self,
        attention: Float[Tensor, "batch head query key"],
        sides: Sides,
        names: tuple[str, ...],
        total: Float[Tensor, "batch head query"],
    ) -> None:
        asked = [name for name in BY_POSITION if name in names]
        # Keys without columns are a whole sequence, from its first token on.
        keys = {"sink": first_key(sides.keys, attention.shape[2])} if sides.columns is None else {}
        if isinstance(sides.positions, Unknown):
            self.unknown |= dict.fromkeys((name for name in asked if name not in keys), sides.positions.reason)
        elif sides.positions is not None:
            keys = sides.positions.keys
        for name in asked:
            if name in keys:
                key = keys[name]
                at = key.index[:, None, :, None].expand(*attention.shape[:3], 1)
                weights = attention.gather(-1, at)[..., 0].to(total.dtype)
                self._add(name, torch.where(key.held[:, None], weights, 0.0) / total, key.exists[:, None])

    def _add(
        self,
        name: str,
        values: Float[Tensor, "batch head query"],
        exists: Bool[Tensor, "batch #head query"] | None = None,
    ) -> None:
        self.values[name] = values
        self.there[name] = self.attends if exists is None else self.attends & exists

    def sums(
        self, asked: Bool[Tensor, "batch query"]
    ) -> tuple[Float64[Tensor, "measure head"], Float64[Tensor, "measure head"]]:
        """Return the sums of the measures over the selected queries, and the counts, in the order of `values`."""
        there = torch.stack([self.there[name] for name in self.values]) & asked[:, None]
        values = upcast(torch.stack(list(self.values.values())))
        there = there.to(values.device)
        return torch.where(there, values, 0.0).sum(dim=(1, 3)), there.sum(dim=(1, 3)).double()

    def largest_logits(
        self, asked: Bool[Tensor, "batch query"]
    ) -> tuple[Float64[Tensor, " head"], Float64[Tensor, " head"]] | None:
        """Return the largest score of the selected queries that attend to anything, and how many these are.

        None if scores are not known. Minus infinity where there is no such query.
        """
        if self.logits is None:
            return None
        there = self.attends & asked[:, None]
        logits = upcast(self.logits)
        largest = logits.masked_fill(~there.to(logits.device), -torch.inf).amax(dim=(0, 2))
        return largest, there.sum(dim=(0, 2)).to(logits.device).double()

    def queries(self, asked: Bool[Tensor, "batch query"]) -> Int[Tensor, " head"]:
        """Return how many of the selected queries attend to anything."""
        return (self.attends & asked[:, None]).sum(dim=(0, 2))

    def at(self, name: str, sides: Sides) -> Float[Tensor, "batch head"]:
        """Return a measure at the readout position of each example; NaN where it does not exist.

        Args:
            name: The measure.
            sides: The queries and keys of the maps.
        """
        examples = torch.arange(len(sides.readout), device=sides.readout.device)
        there = self.there[name][examples, :, sides.readout] & sides.readable[:, None]
        return torch.where(there, self.values[name][examples, :, sides.readout], torch.nan)


class _Rows:
    """The quantities that need a pass over the maps: sum, entropy and largest weight of every row, by parts."""

    def __init__(self, attention: Float[Tensor, "batch head query key"], sides: Sides, *, entropy: bool) -> None:
        batch, heads, query, key = attention.shape
        flat = attention.flatten(0, 1)
        dtype = torch.promote_types(attention.dtype, torch.float32)
        results = flat.new_zeros((4, batch * heads, query), dtype=dtype)
        relevant = None if sides.relevant is None else sides.relevant.to(dtype)
        examples = torch.arange(batch, device=flat.device).repeat_interleave(heads)
        for maps, queries in _parts(batch * heads, query, key):
            part, of = flat[maps, queries].to(dtype), examples[maps]
            if sides.padded:
                part = part.masked_fill(~sides.keys[of][:, None], 0.0)
            results[0, maps, queries] = part.sum(dim=-1)
            results[2, maps, queries] = part.amax(dim=-1)
            if relevant is not None:
                results[3, maps, queries] = (part @ relevant[of][..., None])[..., 0]
            if entropy:
                results[1, maps, queries] = torch.special.entr(part).sum(dim=-1)
        self.total, self.entropy, self.largest, self.relevant = results.unflatten(1, (batch, heads))


def _parts(maps: int, queries: int, keys: int) -> Iterator[tuple[slice, slice]]:
    """Yield parts of the maps that fit the scratch memory: several whole maps, or several queries of one map."""
    most = max(1, min(_SCRATCH, maps * queries * keys // _SHARE) // max(1, keys))
    step = max(1, most // max(1, queries))
    for start in range(0, maps, step):
        for first in range(0, queries, min(most, queries)):
            yield slice(start, start + step), slice(first, first + min(most, queries))


def _chance(
    attention: Float[Tensor, "batch head query key"], sides: Sides, relevant: Bool[Tensor, "batch key"]
) -> Float[Tensor, "batch query"] | Unknown:
    """Return the share of relevant keys among those that each query can see."""
    exact = torch.promote_types(attention.dtype, torch.float32)
    batch, _, queries, keys = attention.shape
    counted = torch.stack([relevant, sides.keys], dim=-1).to(exact)
    if sides.seen is not None:
        seen = sides.seen.to(attention.device)
        step = max(1, _SCRATCH // (batch * keys))
        counts = torch.cat([part.to(exact) @ counted for part in seen.split(step, dim=1)], dim=1)
        return (counts[..., 0] / counts[..., 1]).expand(batch, queries)
    if sides.columns is None:
        counts = counted.sum(dim=1, keepdim=True)
        return (counts[..., 0] / counts[..., 1]).expand(batch, queries)
    return sides.columns if isinstance(sides.columns, Unknown) else _MASK_NOT_KNOWN


def sees_ahead(queries: int, sides: Sides, first: int) -> bool | None:
    """Return whether a query of a map of the whole sequence can see a key after it; None if that is not known.

    Args:
        queries: The number of queries, of the map or of a block of it.
        sides: Their queries and keys.
        first: The number of the first query.
    """
    if sides.seen is None:
        return None
    tokens = sides.queries[..., None] & sides.keys[:, None]
    return bool((sides.seen.to(tokens.device).expand(-1, queries, -1) & tokens).triu(1 + first).any())


def row_measures(
    attention: Float[Tensor, "head sequence entry"], sequences: Sequences
) -> Mapping[str, Float[Tensor, "sequence head"]]:
    """Return the measures of rows over vocabulary entries, each of which stands for as many keys as it occurs.

    An entry that occurs c times has a / c of its attention a on each occurrence; the entropy is -sum a ln(a / c).

    Args:
        attention: The attention on each entry.
        sequences: How often each entry occurs, and which entries are relevant.
    """
    counts, weights = sequences.counts.to(attention), attention.transpose(0, 1)
    relevant = sequences.relevant.to(attention)
    # Entries that do not occur have no attention.
    per_key = weights / counts.clamp_min(torch.finfo(counts.dtype).tiny)[:, None]
    entropy = torch.special.entr(weights).sum(dim=-1) + torch.special.xlogy(weights, counts[:, None]).sum(dim=-1)
    occurs = (counts * relevant).sum(dim=1)
    has_relevant = (occurs > 0)[:, None]
    on_relevant = torch.where(has_relevant, (weights * relevant[:, None]).sum(dim=-1), torch.nan)
    chance = torch.where(has_relevant, (occurs / counts.sum(dim=1))[:, None].expand_as(on_relevant), torch.nan)
    return {
        "entropy": entropy,
        "largest": torch.where(counts[:, None] > 0, per_key, 0.0).amax(dim=-1),
        "relevant": on_relevant,
        "chance": chance,
        "relevant_at_readout": on_relevant,
        "chance_at_readout": chance,
    }
