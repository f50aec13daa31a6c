"""The results of one call of a model: sums of the measures, values for each example, and the maps that are kept."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ...analyses.attention.maps.columns import WHOLE
from ...analyses.attention.maps.source import LayerMap, LayerOverPositions, LayerReading, LayerRows, LayerScores
from ...analyses.attention.measures.rollout import Rollout
from ...circuits.algebra.products import upcast
from ...circuits.errors import CallError
from ...circuits.weights.layer_keys import LayerKey
from ..maps.masks import MapInCall, TokenMasks
from ..maps.model_call import ModelCall
from ..maps.parts import sides_of_parts, why_in_parts
from ..maps.selection import HeadKey
from ..maps.sides import Sides
from .head_sums import HeadMaxima, HeadSums
from .measures import QueryMeasures, row_measures
from .rollout_mass import RolloutMass

AT_READOUT = ("relevant", "chance")
#: The measures of a query that need no position in the input.
_WITHOUT_POSITIONS = ("entropy", "largest", "no_token")
#: The measure of scores, which maps do not have.
MAX_LOGIT = "max_logit"
_NO_SCORES = "the layer gave its map, which does not tell the scores that it was formed of; those of a fused kernel are"


@dataclass(frozen=True)
class BatchSettings:
    """What is measured in each call.

    Attributes:
        names: Names of the measures of queries.
        masks: The user's masks of the tokens.
        rollout: How maps are rolled out; None if they are not.
        rollout_rows: Whether whole rows of the rollout are kept.
        maps: The heads whose maps are kept; None for all.
    """

    names: tuple[str, ...]
    masks: TokenMasks
    rollout: Rollout | None
    rollout_rows: bool
    maps: frozenset[HeadKey] | None


@dataclass(eq=False)
class ExampleValues:
    """The values of each example of one call; all tensors are on the CPU.

    Attributes:
        tokens: Number of tokens.
        readout: Position at which attention is read.
        relevant: Number of relevant tokens; None if it is not known which are.
        rollout: Mass of the rollout on the relevant tokens.
        chance: Share of relevant tokens among the tokens that can be seen.
        heads: Each head's attention on the relevant tokens at the readout position, by layer.
        rows: Rows of the rollout, if they are kept.
    """

    tokens: Tensor
    readout: Tensor
    relevant: Tensor | None
    rollout: Tensor | None
    chance: Tensor | None
    heads: dict[LayerKey, Float[Tensor, "batch head"]]
    rows: Tensor | None


@dataclass(eq=False)
class WatchedBatch:
    """Takes the maps of one call as the layers give them.

    Attributes:
        settings: What is measured.
        call: The call.
        sums: The sums by layer and measure.
        modes: The mode that each layer ran in.
        no_examples: Why there is nothing to say of single examples; None if there is.
        maps: Copies of the maps that are kept, on the CPU.
    """

    settings: BatchSettings
    call: ModelCall
    sums: dict[LayerKey, dict[str, HeadSums]] = field(default_factory=dict, init=False)
    modes: dict[LayerKey, str] = field(default_factory=dict, init=False)
    no_examples: str | None = field(default=None, init=False)
    maps: dict[HeadKey, Tensor] = field(default_factory=dict, init=False)
    _sides: dict[Any, Sides] = field(default_factory=dict, init=False)
    _latest: dict[str, Sides] = field(default_factory=dict, init=False)
    _main: Sides | None = field(default=None, init=False)
    _rollout: RolloutMass | None = field(default=None, init=False)
    _heads: dict[LayerKey, Tensor] = field(default_factory=dict, init=False)

    @property
    def name(self) -> str:
        """The name of the model."""
        return self.call.source.name

    def take(self, layer_map: LayerReading) -> None:
        """Measure a layer.

        Raises:
            CallError: The layer has already been measured in this call, or the masks do not fit its map.
        """
        name = self.call.source.layer_name(layer_map.key)
        if layer_map.key in self.sums:
            raise CallError(
                f"{name} of {self.name} gave two maps in one call of the model; put the probe on the part that is "
                f"called twice"
            )
        if isinstance(layer_map, LayerRows):
            self.sums[layer_map.key] = _of_rows(layer_map, self.settings.names)
            return
        attention = layer_map.call.query if isinstance(layer_map, LayerScores) else layer_map.attention
        if torch._C._functorch.is_batchedtensor(attention):  # pyright: ignore[reportAttributeAccessIssue]
            raise CallError(
                f"{self.name} is called inside torch.func.vmap, where the values of a map cannot be read; call "
                f"it outside"
            )
        if attention.ndim != 4:
            raise CallError(
                f"{name} of {self.name} gave a map of shape {list(attention.shape)}; expected [batch, head, query, key]"
            )
        # The user's mixed precision must not make products of maps less exact.
        with torch.no_grad(), torch.autocast(attention.device.type, enabled=False):
            self._measure(layer_map)

    def _measure(self, layer_map: LayerMap | LayerScores) -> None:
        self.modes[layer_map.key] = layer_map.mode.words
        names = self.settings.names
        why = why_in_parts(layer_map, self.call)
        if why is None:
            sides = self._sides_of(layer_map)
        else:
            sides = sides_of_parts(layer_map, self.call, self.settings.masks)
            names = tuple(name for name in names if name in _WITHOUT_POSITIONS)
            self.no_examples = f"{self.call.source.layer_name(layer_map.key)} of {self.name}: {why}"
        rollout = self._rollout_at(layer_map, sides) if why is None else None
        measured = self._read(layer_map, sides, names, rollout)
        sums = _sums_of(measured, sides)
        if MAX_LOGIT in self.settings.names:
            sums[MAX_LOGIT] = _largest_logits(measured, sides)
        if "relevant" in measured.values:
            for name in AT_READOUT:
                known = name in measured.values
                sums[f"{name}_at_readout"] = _over_examples(measured.at(name, sides)) if known else sums[name]
            self._heads[layer_map.key] = measured.at("relevant", sides)
        self.sums[layer_map.key] = sums if why is None else sums | self._unknown_of_parts(sums, why)

    def _read(
        self, layer_map: LayerMap | LayerScores, sides: Sides, names: tuple[str, ...], rollout: RolloutMass | None
    ) -> QueryMeasures:
        """Return the measures of a layer, and take what else is asked of its weights, in one pass over them."""
        heads = self._kept_heads(layer_map)
        parts: list[QueryMeasures] = []
        kept: list[Tensor] = []
        for queries, attention, part, logits in self._blocks(layer_map, sides):
            parts.append(QueryMeasures(attention, part, names, layer_map.mode.dropout, logits))
            if rollout is not None:
                rollout.add(layer_map.key[1], queries, part, attention)
            if heads:
                kept.append(attention[:, heads].cpu())
        for number, head in enumerate(heads):
            self.maps[*layer_map.key, head] = torch.cat([part[:, number] for part in kept], dim=1)
        return QueryMeasures.joined(parts)

    def _blocks(
        self, layer_map: LayerMap | LayerScores, sides: Sides
    ) -> Iterator[tuple[slice, Float[Tensor, "batch head query key"], Sides, Float[Tensor, "batch head query"] | None]]:
        """Yield queries, their weights, their sides and their largest scores: of a map, all queries at once."""
        if isinstance(layer_map, LayerMap):
            yield slice(0, layer_map.shape[2]), layer_map.attention.detach(), sides, None
            return
        for block in layer_map.call.blocks(sides.keys, largest=MAX_LOGIT in self.settings.names):
            yield block.queries, block.weights, sides.block(block.queries, block.seen), block.largest

    def _unknown_of_parts(self, sums: Mapping[str, HeadSums], why: str) -> dict[str, HeadSums]:
        """Return the measures that maps of parts of the inputs do not have, whose positions are not known."""
        names = self.settings.names
        unknown = [name for name in names if name not in sums and name != "relevant"]
        if "relevant" in names and self.settings.masks.relevant is not None:
            unknown += [*AT_READOUT, *(f"{name}_at_readout" for name in AT_READOUT)]
        nothing = torch.zeros_like(sums["queries"].total)
        return dict.fromkeys(unknown, HeadSums(nothing, nothing, (why,)))

    def _sides_of(self, layer_map: LayerOverPositions) -> Sides:
        stack, shape = layer_map.key[0], layer_map.shape
        # The sides keep the tensor that layers with the same mask share, so that no other one takes its identity.
        seen = layer_map.seen()
        known = (stack, shape[0], *shape[2:], layer_map.device, layer_map.columns, id(seen))
        if layer_map.real_keys is not None or known not in self._sides:
            decoder = self._latest.get("decoder") if stack == "decoder cross" else None
            self._sides[known] = self.settings.masks.sides(MapInCall(layer_map, seen, self.call), decoder)
        sides = self._sides[known]
        self._latest[stack] = sides
        if self._main is None:
            self._main = sides
        return sides

    def _rollout_at(self, layer_map: LayerOverPositions, sides: Sides) -> RolloutMass | None:
        """Return the rollout that this layer is the next one of; None if there is none."""
        (stack, layer), settings = layer_map.key, self.settings.rollout
        if stack or settings is None or not layer_map.is_self:
            return None
        if sides.columns != WHOLE:
            self._rollout = None
        elif layer == 0:
            self._rollout = RolloutMass(settings, sides, rows=self.settings.rollout_rows)
        if self._rollout is not None and not self._rollout.fits(layer_map.shape):
            self._rollout = None
        return self._rollout if self._rollout is not None and self._rollout.layers == layer else None

    def _kept_heads(self, layer_map: LayerOverPositions) -> list[int]:
        """Return the heads whose maps are kept.

        Raises:
            CallError: The layer has no such head.
        """
        selected, number = self.settings.maps, layer_map.shape[1]
        if selected is None:
            return list(range(number))
        heads = [head for *at, head in selected if tuple(at) == layer_map.key]
        for head in heads:
            if head >= number:
                raise CallError(
                    f"the map of head {head} was asked for; {self.call.source.layer_name(layer_map.key)} of "
                    f"{self.name} has heads 0 to {number - 1}"
                )
        return heads

    def finish(self) -> ExampleValues | None:
        """Copy the sums to the CPU, and return the values of the examples if there are any.

        Raises:
            CallError: The model gave no map at all.
        """
        if not self.sums and self.call.arguments.get("stop_at_layer") is None:
            raise CallError(f"{self.name} gave no attention map; load it with eager attention")
        self.sums = {key: {name: sums.on_cpu() for name, sums in by_name.items()} for key, by_name in self.sums.items()}
        if self._main is None or self.no_examples is not None:
            return None
        sides, rollout = self._main, self._rollout
        if rollout is not None and rollout.layers < sum(stack == "" for stack, _ in self.call.source.keys):
            rollout = None
        relevant = None if sides.relevant_tokens is None else sides.relevant_tokens.cpu()
        return ExampleValues(
            tokens=sides.tokens.cpu(),
            readout=sides.column_of_readout().cpu(),
            relevant=relevant,
            rollout=None if rollout is None else _on_cpu(rollout.mass()),
            chance=None if rollout is None else _on_cpu(rollout.chance()),
            heads={key: attention.float().cpu() for key, attention in self._heads.items()},
            rows=_on_cpu(rollout.rows()) if rollout is not None and self.settings.rollout_rows else None,
        )


def _sums_of(measured: QueryMeasures, sides: Sides) -> dict[str, HeadSums]:
    queries = upcast(measured.queries(sides.asked).float())
    sums = {"queries": HeadSums(queries, torch.ones_like(queries))}
    if measured.values:
        for name, total, count in zip(measured.values, *measured.sums(sides.asked), strict=True):
            sums[name] = HeadSums(total, count)
    nothing = torch.zeros_like(queries)
    return sums | {name: HeadSums(nothing, nothing, (reason,)) for name, reason in measured.unknown.items()}


def _largest_logits(measured: QueryMeasures, sides: Sides) -> HeadMaxima:
    known = measured.largest_logits(sides.asked)
    if known is not None:
        return HeadMaxima(*known)
    nothing = torch.zeros(measured.attends.shape[1], dtype=torch.float64)
    return HeadMaxima(nothing, nothing, (_NO_SCORES,))


def _on_cpu(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.cpu()


def _over_examples(values: Float[Tensor, "batch head"]) -> HeadSums:
    """Sum over the examples that have a value; a value that is not finite is NaN too and cannot be told apart."""
    exact = upcast(values)
    there = ~exact.isnan()
    return HeadSums(torch.where(there, exact, 0.0).sum(dim=0), there.sum(dim=0).double())


def _of_rows(rows: LayerRows, names: tuple[str, ...]) -> dict[str, HeadSums]:
    wanted = {"chance", *(f"{name}_at_readout" for name in AT_READOUT)} if "relevant" in names else set()
    heads, sequences = rows.attention.shape[:2]
    queries = torch.full((heads,), sequences, dtype=torch.float64)
    has_relevant = (rows.sequences.counts * rows.sequences.relevant).sum(dim=-1) > 0
    sums = {}
    for name, values in row_measures(rows.attention, rows.sequences).items():
        if name in wanted.union(names):
            # Sequences without a relevant entry count for the other measures alone.
            counted = has_relevant if name.startswith(("relevant", "chance")) else torch.ones_like(has_relevant)
            total = upcast(torch.where(counted.to(values.device)[:, None], values, 0.0)).sum(dim=0).cpu()
            sums[name] = HeadSums(total, counted.sum().cpu().double().expand(heads))
    return {"queries": HeadSums(queries, torch.ones_like(queries)), **sums}
