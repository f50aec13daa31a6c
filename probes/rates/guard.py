"""Keeps the largest score of each head under a limit, by lower rates of W_Q and W_K or by scaling them after a step."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Mapping as Dictionary
from typing import Any, Literal

import pandas as pd
import torch
from jaxtyping import Float64
from torch import Tensor, distributed, nn

from ...circuits.errors import CallError
from ...circuits.live.models import open_model
from ...circuits.reading.options import ReadingOptions
from ...circuits.weights.attention_weights import AttentionWeights
from ...circuits.weights.layer_keys import LayerKey, layer_name, layers_in_words
from ..health.alarms import Alarm
from ..health.attention_health import limits_of
from ..health.growth import braking_multiples, clip_factors
from ..health.history import Done, HealthHistory, Limits
from ..health.report import report
from ..health.scores import LayerScores, ScoreWatcher
from ..training.failures import Failures
from .entries import CircuitEntries, HeadBlock

#: By what a guard holds the scores.
GuardedBy = Literal["rate", "clip"]

#: The brake begins at this share of the limit.
_START = 0.1
_HORIZON, _WINDOW, _KEPT = 100, 20, 1000


class ScoreGuard:
    """Sees the largest score of each head in the passes of a step, and decides what is done to W_Q and W_K.

    By "rate", the step of a head's W_Q, W_K, b_Q and b_K is taken at m times its rate, where m falls from 1 at a tenth
    of the limit to 0 at the limit; see `braking_multiples`. By "clip" (QK-clip), these weights are scaled after the
    step, each by sqrt(limit / score), where the score was above the limit; in groups of heads that share a key, the
    whole factor goes to the query, since a shared key would change the scores of other heads. Layers that are frozen
    are left alone.

    Attributes:
        limit: The limit.
        by: By what the scores are held.
    """

    def __init__(
        self, model: nn.Module, entries: Sequence[CircuitEntries], limit: float, by: str, options: ReadingOptions | None
    ) -> None:
        """Find out whether the scores of a model can be held; nothing is watched yet.

        Args:
            model: The model.
            entries: The entries of the QK circuit, with its biases.
            limit: The limit.
            by: "rate" or "clip".
            options: How to read the model.

        Raises:
            CallError: The limit is not a number above 0, `by` is neither, the scores of the model are not seen, or they
                do not depend on W_Q and W_K in such a way that these hold them.
        """
        limits = demand_guard(limit, by)
        self.limit, self.by = limits.limit, by
        self._entries = entries
        self._failures = Failures("warn")
        self._watcher = ScoreWatcher(model, self._failures)
        if not self._watcher.gives_scores:
            raise CallError(
                f"the attention of {self._watcher.name} forms maps, which do not tell the scores that a guard is to "
                f"hold: load it with fused attention (attn_implementation='sdpa')"
            )
        self._heads = _heads_of(entries)
        unseen = [key for key in self._heads if key not in self._watcher.keys]
        if unseen:
            raise CallError(f"the scores of {layers_in_words(unseen)} are not seen as the model runs")
        for weights in open_model(model, options).layers():
            if (weights.stack, weights.layer) in self._heads:
                _demand_that_weights_hold_scores(weights, by)
        if by == "clip":
            _demand_whole_layers(entries)
        self._history = HealthHistory(limits, None)
        self._rates: dict[LayerKey, list[float]] = {key: [1.0] * heads for key, heads in self._heads.items()}
        self._to_clip: list[tuple[CircuitEntries, HeadBlock, float]] = []
        self._steps = 0

    def start(self) -> None:
        """Watch the model from now on."""
        self._watcher.start()

    @property
    def failures(self) -> int:
        """How many readings of scores failed during training."""
        return self._failures.count

    @property
    def alarms(self) -> list[Alarm]:
        """The alarms that `AttentionHealth` would have given with the same limit, under the guard."""
        return list(self._history.alarms)

    @property
    def rates(self) -> Dictionary[LayerKey, Sequence[float]]:
        """The multiple of the rate of W_Q and W_K of each head, by layer, at the next step."""
        return self._rates

    def table(self) -> pd.DataFrame:
        """Return a row for each of the last 1,000 steps and each head.

        The columns are those of `AttentionHealth.table`, and what was done: `rate`, the multiple at which the step of
        W_Q and W_K was taken, and `clip`, the factor by which scores were reduced after it. Steps are counted from the
        beginning of the guard.
        """
        table = self._history.table()
        return table if table["stack"].nunique() > 1 else table.drop(columns="stack")

    def columns(self) -> dict[tuple[str, int, str], dict[str, list[float]]]:
        """Return the last record for `CircuitProbe(..., columns=rates.guard.columns)`, which stores it with its rows.

        The columns are those of `AttentionHealth.columns`, and what was done: `guard_rate` and `guard_clip`.
        """
        return self._history.columns()

    def in_words(self) -> str:
        """Return what the guard does, in plain English."""
        how = (
            f"a lower rate of its W_Q, W_K, b_Q and b_K from {_START * self.limit:g} on"
            if self.by == "rate"
            else "scaling its W_Q, W_K, b_Q and b_K after the step"
        )
        return f"guard: keeps the largest score of each head under {self.limit:g}, by {how}"

    def report(self) -> str:
        """Return what is known of the heads now, and how many are held, in plain English."""
        states = self._history.latest.values()
        heads = sum(len(layer.rate) for layer in states)
        if self.by == "rate":
            held = sum(int((layer.rate < 1).sum()) for layer in states)
            done = f"W_Q and W_K of {held} of {heads} heads learn at a lower rate"
        else:
            held = sum(int((layer.clip < 1).sum()) for layer in states)
            done = f"W_Q and W_K of {held} of {heads} heads were scaled after the last step"
        return f"{report(self._watcher.name, self._history)}\n{done}, to keep scores under {self.limit:g}."

    def look(self, *, is_after_step: bool = False) -> bool:
        """Decide what is done at this step, if scores were seen since the last time, and return whether they were.

        Args:
            is_after_step: Whether the optimizer has stepped; a closure may have run the model then.
        """
        seen = self._watcher.taken()
        if seen or not is_after_step:
            seen = self._over_processes(seen)
        if not seen:
            return False
        self._steps += 1
        frozen = _layers_with_frozen(self._entries) if self.by == "clip" else set()
        self._history.add(self._steps, {key: scores for key, scores in seen.items() if key not in frozen}, self._decide)
        self._to_clip = []
        for key, states in self._history.latest.items():
            self._rates[key] = states.rate.tolist()
        if self.by == "clip":
            self._to_clip = list(self._shares({key: states.clip for key, states in self._history.latest.items()}))
        return True

    @torch.no_grad()
    def clip(self, parameters: Iterable[Tensor]) -> None:
        """Scale what is to be scaled of some parameters after their step.

        Args:
            parameters: The parameters.
        """
        if not self._to_clip:
            return
        held = {id(parameter) for parameter in parameters}
        for part, block, share in self._to_clip:
            if id(part.parameter) in held:
                for view in _views(part.parameter.detach(), block.slices):
                    view.mul_(share)
        self._to_clip = [entry for entry in self._to_clip if id(entry[0].parameter) not in held]

    def close(self) -> None:
        """Watch nothing any more. Calling it again is harmless."""
        self._watcher.stop()

    def _decide(self, scores: Float64[Tensor, " head"], growth: Float64[Tensor, " head"]) -> Done:
        ones = torch.ones_like(scores)
        if self.by == "clip":
            return Done(ones, clip_factors(scores, self.limit))
        return Done(braking_multiples(scores, growth, self.limit, _START * self.limit, _HORIZON), ones)

    def _shares(self, factors: Dictionary[LayerKey, Tensor]) -> Iterator[tuple[CircuitEntries, HeadBlock, float]]:
        """The entries that are scaled, each once, and by what; layers that share weights share the lowest factor."""
        grouped = {
            block.layer
            for part in self._entries
            for block in part.blocks
            if block.weight == "W_K" and len(block.heads) > 1
        }
        for part in self._entries:
            lowest: dict[Any, tuple[float, HeadBlock]] = {}
            for block in part.blocks:
                if block.layer in factors:
                    of_heads = factors[block.layer][block.heads.start : block.heads.stop]
                    share = _share(block.weight, float(of_heads.min()), is_grouped=block.layer in grouped)
                    if share < lowest.get(block.slices, (1.0, block))[0]:
                        lowest[block.slices] = share, block
            for share, block in lowest.values():
                yield part, block, share

    def _over_processes(self, seen: dict[LayerKey, LayerScores]) -> dict[LayerKey, LayerScores]:
        """Return the largest scores over all processes, so that all of them decide alike."""
        if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
            return {key: scores for key, scores in seen.items() if key in self._heads}
        unknown = {key: torch.full((heads,), torch.nan, dtype=torch.float64) for key, heads in self._heads.items()}
        largest = torch.cat([seen[key].largest if key in seen else unknown[key] for key in self._heads])
        shared = largest.nan_to_num(-torch.inf, torch.inf, -torch.inf).to(self._entries[0].parameter.device)
        distributed.all_reduce(shared, distributed.ReduceOp.MAX)
        parts = shared.cpu().masked_fill(shared.cpu() == -torch.inf, torch.nan).split(list(self._heads.values()))
        return {
            key: LayerScores(part, seen[key].entropy if key in seen else unknown[key])
            for key, part in zip(self._heads, parts, strict=True)
            if not bool(part.isnan().all())
        }


def demand_guard(limit: Any, by: Any) -> Limits:
    """Return what an alarm of a guard is, and refuse what is not a guard, before a model is read.

    Args:
        limit: The largest score that is not to be passed.
        by: "rate" or "clip".

    Raises:
        CallError: The limit is not a number above 0, or `by` is neither.
    """
    if by not in ("rate", "clip"):
        raise CallError(f"guard_by should be 'rate' or 'clip', got {by!r}")
    return limits_of(limit, None, _HORIZON, _WINDOW, _KEPT, name="guard")


def _share(weight: str, factor: float, *, is_grouped: bool) -> float:
    """Return by what a weight is scaled so that the scores are scaled by a factor."""
    if weight == "W_QK":
        return factor
    if is_grouped:
        return factor if weight.endswith("Q") else 1.0
    return math.sqrt(factor)


def _views(parameter: Tensor, slices: Sequence[Sequence[range]]) -> Iterator[Tensor]:
    for ranges in itertools.product(*slices):
        view = parameter
        for axis, indices in enumerate(ranges):
            view = view.narrow(axis, indices.start, len(indices))
        yield view


def _heads_of(entries: Iterable[CircuitEntries]) -> dict[LayerKey, int]:
    heads: dict[LayerKey, int] = {}
    for part in entries:
        for block in part.blocks:
            heads[block.layer] = max(heads.get(block.layer, 0), block.heads.stop)
    return heads


def _demand_that_weights_hold_scores(weights: AttentionWeights, by: str) -> None:
    facts, label = weights.facts, weights.label
    unknown = sorted(facts.unknown & {"query_key_norm", "soft_cap"})
    if unknown:
        raise CallError(
            f"{label}: {' and '.join(unknown)} {'is' if len(unknown) == 1 else 'are'} not known, and whether W_Q and "
            f"W_K hold its scores depends on it: state it in a mapping"
        )
    if weights.query_norm is not None or weights.key_norm is not None:
        raise CallError(
            f"{label} normalises its queries and keys (QK-norm), so that the size of W_Q and W_K does not affect its "
            f"scores, and a guard cannot hold them"
        )
    if facts.soft_cap is not None:
        raise CallError(
            f"{label} caps its scores at {facts.soft_cap:g} itself (soft cap), so that they are not in proportion to "
            f"W_Q and W_K, and a guard has nothing to hold"
        )
    if by == "clip" and facts.clip_qkv is not None:
        raise CallError(
            f"{label} clips its queries and keys at {facts.clip_qkv:g}, so that its scores are not in proportion to "
            f"W_Q and W_K: use guard_by='rate'"
        )


def _demand_whole_layers(entries: Iterable[CircuitEntries]) -> None:
    """Refuse to clip layers of which a part is frozen, or spread over processes."""
    entries = list(entries)
    frozen = _layers_with_frozen(entries)
    for part in entries:
        where = layer_name(*part.blocks[0].layer)
        if part.parameter.requires_grad and any(block.layer in frozen for block in part.blocks):
            raise CallError(
                f"{part.name} of {where} is trained, and other weights of its scores are frozen, which QK-clip would "
                f"change: use guard_by='rate', or train them too"
            )
        if hasattr(part.parameter, "full_tensor"):
            raise CallError(
                f"{part.name} of {where} is spread over processes (DTensor), and a head's part of it cannot be scaled"
            )


def _layers_with_frozen(entries: Iterable[CircuitEntries]) -> set[LayerKey]:
    return {block.layer for part in entries if not part.parameter.requires_grad for block in part.blocks}
