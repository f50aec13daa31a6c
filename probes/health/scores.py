"""The largest score and the entropy of every head in the forward passes of a step of training."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor, nn

from ...analyses.attention.maps.calls import CallHook, OnCall, Stop
from ...analyses.attention.maps.search import source_of, unwrapped_model
from ...analyses.attention.maps.source import LayerReading
from ...circuits.weights.layer_keys import LayerKey
from ..attention.batch import MAX_LOGIT, BatchSettings, WatchedBatch
from ..attention.calls_in_progress import CallsInProgress, OpenCall
from ..attention.head_sums import HeadSums
from ..maps.forward import ForwardWatcher, on_call_within, watch_forward
from ..maps.masks import TokenMasks
from ..maps.model_call import ModelCall
from ..training.failures import Failures

_SETTINGS = BatchSettings(
    names=("entropy", MAX_LOGIT),
    masks=TokenMasks(None, None, "all", "last"),
    rollout=None,
    rollout_rows=False,
    maps=frozenset(),
)


@dataclass(frozen=True, eq=False)
class LayerScores:
    """What was seen of the heads of one layer.

    Attributes:
        largest: The largest score before the softmax, over the queries and keys of all passes; NaN if it is unknown.
        entropy: The mean entropy of the weights of a query, in nats.
    """

    largest: Float64[Tensor, " head"]
    entropy: Float64[Tensor, " head"]


class ScoreWatcher:
    """Sees the largest scores and the entropies of a model's heads in the passes that compute gradients.

    Passes under `torch.no_grad`, such as those of an evaluation between two steps, do not count.

    Attributes:
        gives_scores: Whether the scores of any layer can be seen; maps alone do not tell them.
        name: The model's class.
        keys: The layers.
    """

    def __init__(self, model: nn.Module, failures: Failures) -> None:
        """Find the model's attention; nothing is watched yet.

        Args:
            model: The model, as `AttentionProbe` takes it.
            failures: What becomes of failures while the model runs.

        Raises:
            CallError: No attention was found, or it cannot be read.
        """
        self._model = unwrapped_model(model)
        self._source = source_of(self._model)
        self._source.demand_readable()
        self.gives_scores, self.name, self.keys = self._source.gives_scores, self._source.name, self._source.keys
        self._failures = failures
        self._calls = CallsInProgress()
        self._sums: dict[LayerKey, dict[str, HeadSums]] = {}
        self._stops: list[Stop] = []

    def start(self) -> None:
        """Watch from now on."""
        if self._stops:
            return
        try:
            # One by one, so that an interrupt in between leaves no hook behind.
            for stop in self._source.attach(self._take, on_call=self._quiet()):
                self._stops.append(stop)
            watcher = ForwardWatcher(self._begin, lambda _arguments, _output: self._end(), self._calls.fail)
            self._stops.append(watch_forward(self._model, watcher))
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop watching, and leave the model as it was. Calling it again is harmless."""
        self._calls.stop()
        while self._stops:
            self._stops[-1]()
            self._stops.pop()

    def taken(self) -> dict[LayerKey, LayerScores]:
        """Return what was seen since the last time, layer by layer; empty if there was no pass."""
        sums, self._sums = self._sums, {}
        seen: dict[LayerKey, LayerScores] = {}
        with self._failures.told("reading the scores of attention"):
            parts = [_mean(by_name, name) for by_name in sums.values() for name in (MAX_LOGIT, "entropy")]
            # One copy from the device for all layers.
            on_cpu = torch.cat(parts).cpu().split([len(part) for part in parts]) if parts else ()
            for number, key in enumerate(sums):
                largest, entropy = on_cpu[2 * number], on_cpu[2 * number + 1]
                seen[key] = LayerScores(torch.where(largest == -torch.inf, torch.nan, largest), entropy)
        return seen

    def _begin(self, arguments: dict[str, Any]) -> None:
        batch = WatchedBatch(_SETTINGS, ModelCall(self._source, arguments))
        call = OpenCall(batch, self._source.during())
        if not torch.is_grad_enabled():
            call.left_out = "computed no gradients"
        self._calls.begin(call)

    def _end(self) -> None:
        batch = self._calls.end()
        if batch is None:
            return
        for key, by_name in batch.sums.items():
            before = self._sums.get(key)
            self._sums[key] = by_name if before is None else {name: before[name] + by_name[name] for name in before}

    def _take(self, reading: LayerReading) -> None:
        call = self._calls.current()
        if call is not None and call.left_out is None:
            call.batch.take(reading)

    def _quiet(self) -> OnCall:
        """Return the way to register a hook whose failure does not reach the model."""
        register = on_call_within(self._model)

        def on_call(module: nn.Module, hook: CallHook) -> Callable[[], None]:
            def quiet(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
                with self._failures.told("reading the scores of attention"):
                    return hook(args, kwargs, output)
                return None

            return register(module, quiet)

        return on_call


def _mean(sums: dict[str, HeadSums], name: str) -> Tensor:
    return sums[name].mean() if name in sums else torch.full_like(sums["queries"].total, torch.nan)
