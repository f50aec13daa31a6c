"""The measures of one layer's maps, for every head, without copying the maps."""

from collections.abc import Iterator, Mapping

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from ...analyses.dynamics.sequences import Sequences
from ...circuits.algebra.products import upcast
from ..maps.masks import Sides

#: Scratch memory is at most this many numbers, or this share (1/6) of a layer's maps if they are small.
_SCRATCH, _SHARE = 1 << 20, 6


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

    Queries without any weight, which dropout may produce, are left out everywhere, and those of an example without any
    relevant token are left out of `relevant` and `chance`. How far a query can see is taken
    from how far back the last token and how far ahead the first token sees, which holds for causal, bidirectional and
    sliding attention.
    """

    def __init__(self, attention: Float[Tensor, "batch head query key"], sides: Sides, names: tuple[str, ...]) -> None:
        """Measure a layer.

        Args:
            attention: The layer's maps, of any floating type; sums are computed in float32 at least.
            sides: The queries and keys of the maps.
            names: Names of the measures, as in the table; `chance` comes with `relevant`.
        """
        attention = attention.detach()
        rows = _Rows(attention, sides, entropy="entropy" in names)
        # NaN is not 0, so values that are not finite stay visible.
        self.attends: Bool[Tensor, "batch head query"] = rows.total != 0
        self.values: dict[str, Float[Tensor, "batch head query"]] = {}
        self.there: dict[str, Bool[Tensor, "batch head query"]] = {}
        total = rows.total
        if "entropy" in names:
            # -sum p ln p of p = w / s is (-sum w ln w) / s + ln s.
            self._add("entropy", rows.entropy / total + total.log())
        if "largest" in names:
            self._add("largest", rows.largest / total)
        if "sink" in names:
            at = sides.first[:, None, None, None].expand(*attention.shape[:3], 1)
            self._add("sink", attention.gather(-1, at)[..., 0].to(total.dtype) / total)
        for name, step in (("self", 0), ("previous", -1), ("next", 1)):
            if name in names and sides.offset is not None:
                values, exists = _neighbours(attention, sides.keys, sides.offset + step)
                self._add(name, values.to(total.dtype) / total, exists[:, None])
        if "relevant" in names and sides.relevant is not None:
            # Where no token is relevant there is nothing to measure: 0 would say that nobody attends to it.
            exists = sides.relevant.any(dim=1)[:, None, None].expand(-1, 1, total.shape[2])
            self._add("relevant", rows.relevant / total, exists)
            chance = _chance(attention, sides, sides.relevant).to(total.dtype)
            self._add("chance", chance[:, None].expand_as(total), exists)

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


def _neighbours(
    attention: Float[Tensor, "batch head query key"], keys: Bool[Tensor, "batch key"], ahead: int
) -> tuple[Float[Tensor, "batch head query"], Bool[Tensor, "batch query"]]:
    """Return the weight of query i on key i + ahead, and whether that key exists."""
    weights = attention.diagonal(offset=ahead, dim1=-2, dim2=-1)
    values, exists = torch.zeros_like(attention[..., 0]), torch.zeros_like(keys[:, : attention.shape[2]])
    start = max(0, -ahead)
    here = slice(start, start + weights.shape[-1])
    values[..., here] = weights
    exists[:, here] = keys[:, start + ahead :][:, : weights.shape[-1]]
    return values, exists


def _chance(
    attention: Float[Tensor, "batch head query key"], sides: Sides, relevant: Bool[Tensor, "batch key"]
) -> Float[Tensor, "batch query"]:
    """Return the share of relevant keys among those that each query can see."""
    keys = attention.shape[-1]
    exact = torch.promote_types(attention.dtype, torch.float32)
    counts = torch.stack([relevant, sides.keys]).to(exact).cumsum(dim=-1)
    upto = torch.nn.functional.pad(counts, (1, 0))
    if sides.offset is None:
        return (upto[0, :, -1:] / upto[1, :, -1:]).expand(-1, attention.shape[2])
    back, ahead = reach(attention, sides)
    positions = sides.offset + torch.arange(attention.shape[2], device=attention.device)
    first, end = (positions - back).clamp(min=0), (positions + ahead + 1).clamp(max=keys)
    seen = upto[:, :, end] - upto[:, :, first]
    return seen[0] / seen[1]


def reach(attention: Float[Tensor, "batch head query key"], sides: Sides) -> tuple[Int[Tensor, ""], Int[Tensor, ""]]:
    """Return how many keys back the last token of any example sees, and how many keys ahead the first one, at most.

    Args:
        attention: The maps of a layer.
        sides: Their queries and keys.
    """
    examples = torch.arange(len(attention), device=attention.device)
    positions = torch.arange(attention.shape[-1], device=attention.device)
    last = sides.queries.shape[1] - 1 - sides.queries.flip(1).long().argmax(dim=1)
    first = sides.queries.long().argmax(dim=1)
    distances = []
    for query in (last, first):
        seen = (attention[examples, :, query] > 0).any(dim=1) & sides.keys
        distance = positions - (query + (sides.offset or 0))[:, None]
        distances.append(torch.where(seen, distance, 0))
    return -distances[0].min().clamp(max=0), distances[1].max().clamp(min=0)


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
