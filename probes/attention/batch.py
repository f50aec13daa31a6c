"""What one call of a model gave: sums of the measures, figures of each example, and the maps that were asked for."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from ...analyses.attention.measures.rollout import Rollout
from ...circuits.algebra.products import upcast
from ...circuits.errors import CallError
from ..maps.source import GivenMap, GivenRows, HeadKey, LayerKey, MapSource, layer_name
from .masks import Sides, TokenMasks
from .measures import QueryMeasures
from .rollout_mass import RolloutMass

AT_READOUT = ("relevant", "chance")


@dataclass(frozen=True, eq=False)
class HeadSums:
    """Sums of one measure over queries or examples, and how many they are, for every head of a layer."""

    total: Float64[Tensor, " head"]
    count: Float64[Tensor, " head"]

    def __add__(self, other: "HeadSums") -> "HeadSums":
        """Add those of another batch."""
        return HeadSums(self.total + other.total, self.count + other.count)

    def mean(self) -> Float64[Tensor, " head"]:
        """Return the mean; NaN over none."""
        return self.total / self.count


@dataclass(frozen=True)
class BatchSettings:
    """What is measured of each call.

    Attributes:
        names: of the measures of queries.
        masks: of the tokens.
        rollout: how maps are rolled out; None if they are not.
        rollout_rows: whether whole rows are kept.
        maps: heads whose maps are kept; None for all.
    """

    names: tuple[str, ...]
    masks: TokenMasks
    rollout: Rollout | None
    rollout_rows: bool
    maps: frozenset[HeadKey] | None


@dataclass(eq=False)
class ExampleFigures:
    """Figures of each example of one call; all are on the CPU.

    Attributes:
        tokens, relevant: how many there are of each, if it is told.
        readout: position at which attention is read.
        rollout, chance: mass of rollout on the relevant tokens, and their share among the tokens.
        heads: each head's attention on the relevant tokens at the readout, by layer.
        rows: of rollout, if asked for.
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
    """Takes the maps of one call as they come.

    Attributes:
        settings: what is measured.
        source: of the maps.
        arguments: that the model was called with, by name.
        sums: by layer and measure.
        maps: copies of those asked for, on the CPU.
    """

    settings: BatchSettings
    source: MapSource
    arguments: Mapping[str, Any]
    sums: dict[LayerKey, dict[str, HeadSums]] = field(default_factory=dict, init=False)
    maps: dict[HeadKey, Tensor] = field(default_factory=dict, init=False)
    _sides: dict[Any, Sides] = field(default_factory=dict, init=False)
    _queries: dict[str, Tensor] = field(default_factory=dict, init=False)
    _main: Sides | None = field(default=None, init=False)
    _rollout: RolloutMass | None = field(default=None, init=False)
    _heads: dict[LayerKey, Tensor] = field(default_factory=dict, init=False)

    def take(self, given: GivenMap | GivenRows) -> None:
        """Measure a layer.

        Raises:
            CallError: it has been measured in this call, or the masks do not fit it.
        """
        if given.key in self.sums:
            raise CallError(
                f"{layer_name(given.key)} of {self.source.name} gave two maps in one call of the model: put the probe "
                f"on the part that is called twice"
            )
        if isinstance(given, GivenRows):
            self.sums[given.key] = _of_rows(given, self.settings.names)
            return
        attention = given.attention.detach()
        if attention.ndim != 4:
            raise CallError(
                f"{layer_name(given.key)} of {self.source.name} gave a map of shape {list(attention.shape)}; expected "
                f"[batch, head, query, key]"
            )
        # Products of maps are to be as exact as they are outside of the user's mixed precision.
        with torch.no_grad(), torch.autocast(attention.device.type, enabled=False):
            self._measure(given, attention)

    def _measure(self, given: GivenMap, attention: Float[Tensor, "batch head query key"]) -> None:
        stack, layer = given.key
        sides = self._sides_of(given)
        measured = QueryMeasures(attention, sides, self.settings.names)
        queries = upcast(measured.queries(sides.asked).float())
        sums = {"queries": HeadSums(queries, torch.ones_like(queries))}
        if measured.values:
            for name, total, count in zip(measured.values, *measured.sums(sides.asked), strict=True):
                sums[name] = HeadSums(total, count)
        if "relevant" in measured.values:
            for name in AT_READOUT:
                sums[f"{name}_at_readout"] = _over_examples(measured.at(name, sides))
            self._heads[given.key] = measured.at("relevant", sides)
        self.sums[given.key] = sums
        if stack == "" and self.settings.rollout is not None and given.is_self:
            self._roll_out(self.settings.rollout, layer, attention, sides)
        self._keep_maps(given.key, attention)

    def _sides_of(self, given: GivenMap) -> Sides:
        stack, shape = given.key[0], given.attention.shape
        known = (stack, shape[0], *shape[2:], given.attention.device)
        if given.real_keys is not None or known not in self._sides:
            decoder = self._queries.get("decoder") if stack == "decoder cross" else None
            if decoder is not None and decoder.shape != (shape[0], shape[2]):
                decoder = None
            self._sides[known] = self.settings.masks.sides(given, self.source, self.arguments, decoder)
        sides = self._sides[known]
        self._queries[stack] = sides.queries
        if self._main is None:
            self._main = sides
        return sides

    def _roll_out(
        self, settings: Rollout, layer: int, attention: Float[Tensor, "batch head query key"], sides: Sides
    ) -> None:
        if layer == 0 and sides.offset == 0:
            self._rollout = RolloutMass(settings, sides, rows=self.settings.rollout_rows)
        if self._rollout is not None and self._rollout.layers == layer:
            self._rollout.add(layer, attention)

    def _keep_maps(self, key: LayerKey, attention: Float[Tensor, "batch head query key"]) -> None:
        asked = self.settings.maps
        heads = range(attention.shape[1]) if asked is None else [head for *at, head in asked if tuple(at) == key]
        for head in heads:
            if head >= attention.shape[1]:
                raise CallError(
                    f"the map of head {head} was asked for; {layer_name(key)} of {self.source.name} has heads 0 to "
                    f"{attention.shape[1] - 1}"
                )
            self.maps[*key, head] = attention[:, head].cpu().clone()

    def finish(self) -> ExampleFigures | None:
        """Bring what was measured to the CPU, and return the figures of examples where there are any.

        Raises:
            CallError: the model gave no map at all.
        """
        if not self.sums and self.arguments.get("stop_at_layer") is None:
            raise CallError(f"{self.source.name} gave no attention map; load it with eager attention")
        self.sums = {
            key: {name: HeadSums(sums.total.cpu(), sums.count.cpu()) for name, sums in found.items()}
            for key, found in self.sums.items()
        }
        if self._main is None:
            return None
        sides, rollout = self._main, self._rollout
        if rollout is not None and rollout.layers < sum(stack == "" for stack, _ in self.source.keys):
            rollout = None
        relevant = None if sides.relevant is None else sides.relevant.sum(dim=1).cpu()
        return ExampleFigures(
            tokens=sides.keys.sum(dim=1).cpu(),
            readout=(sides.readout + (sides.offset or 0)).cpu(),
            relevant=relevant,
            rollout=None if rollout is None else _on_cpu(rollout.mass()),
            chance=None if rollout is None else _on_cpu(rollout.chance()),
            heads={key: found.float().cpu() for key, found in self._heads.items()},
            rows=_on_cpu(rollout.rows()) if rollout is not None and self.settings.rollout_rows else None,
        )


def _on_cpu(figures: Tensor | None) -> Tensor | None:
    return None if figures is None else figures.cpu()


def _over_examples(figures: Float[Tensor, "batch head"]) -> HeadSums:
    """Sums over the examples that have a figure; what is not finite there is NaN as well, and is not known apart."""
    exact = upcast(figures)
    there = ~exact.isnan()
    return HeadSums(torch.where(there, exact, 0.0).sum(dim=0), there.sum(dim=0).double())


def _of_rows(given: GivenRows, names: tuple[str, ...]) -> dict[str, HeadSums]:
    wanted = {"chance", *(f"{name}_at_readout" for name in AT_READOUT)} if "relevant" in names else set()
    first = next(iter(given.values.values()))
    queries = torch.full((first.shape[1],), len(first), dtype=torch.float64)
    sums = {
        name: HeadSums(upcast(values).sum(dim=0).cpu(), queries)
        for name, values in given.values.items()
        if name in wanted.union(names)
    }
    return {"queries": HeadSums(queries, torch.ones_like(queries)), **sums}
