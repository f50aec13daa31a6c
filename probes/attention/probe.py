"""Attention of a live model, measured while it runs: a context around the calls of a notebook or a training loop."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd
from jaxtyping import Float
from torch import Tensor

from ...analyses.attention.measures.rollout import ABNAR_ZUIDEMA, Rollout
from ...circuits.errors import CallError
from ..maps.forward import ForwardWatcher, watch_forward
from ..maps.search import asked_maps, source_of, unwrapped_model
from ..maps.source import GivenMap, GivenRows, HeadKey, LayerKey
from .batch import BatchSettings, ExampleFigures, HeadSums, WatchedBatch
from .masks import Readout, TokenMask, TokenMasks
from .tables import example_table, head_rows, head_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Everything that is measured while a model runs.
MEASURES = ("entropy", "relevant", "sink", "self", "previous", "next", "largest", "rollout")


class AttentionProbe:
    """Measures every head's attention while a model runs inside its context, and keeps sums alone.

        with AttentionProbe(model, relevant=mask) as probe:
            model(tokens, attention_mask=attention_mask)
        probe.table()

    For a query i with weights p_ij on the keys that are tokens, brought to sum 1, each measure is averaged over the
    queries that are tokens (or those asked for), those of all calls alike:

    | name | | of one query |
    |---|---|---|
    | `entropy` | nats | -sum_j p_ij ln p_ij |
    | `relevant` | | sum of p_ij over the relevant j; `chance` is their share of the tokens that i can see |
    | `sink` | | p_ij of the first token |
    | `self`, `previous`, `next` | | p_ii, p_i,i-1, p_i,i+1; queries without such a key are left out |
    | `largest` | | max_j p_ij |
    | `rollout` | | mass of (A_L ... A_1) on the relevant tokens at the readout, in `examples()` |

    `relevant_at_readout` and `chance_at_readout` are those at one query of each example alone, averaged over examples.

    Works on models with TransformerLens' hook points (HookedTransformer, TransformerBridge), models of transformers
    with eager attention, torch.nn.MultiheadAttention alone or in a model, and this project's SingleLayerAttention. What
    the model returns, its random numbers and its gradients stay as they are. Several probes, and the user's own hooks,
    go together; a probe sees a map before a hook of the user's that was added later changes it. Layers of
    transformers give maps after dropout, so that in training they are those that the model used. Only what happens in
    calls of the model counts, and a call counts when it has ended: what the backward pass computes again does not.

    With cached keys, as in `generate`, queries are the last positions, and rollout is left out (NaN); so it is with an
    encoder and a decoder, whose maps are three stacks. There masks given here are those of the encoder's tokens.
    """

    def __init__(
        self,
        model: Any,
        *,
        relevant: TokenMask | None = None,
        measures: Sequence[str] = MEASURES,
        mask: TokenMask | None = None,
        queries: Literal["all", "last"] | TokenMask = "all",
        readout: Readout = "last",
        maps: Iterable[tuple[int, int] | HeadKey] | Literal["all"] | None = None,
        rollout: Rollout = ABNAR_ZUIDEMA,
        rollout_rows: bool = False,
        tokens: Sequence[str] | None = None,
    ) -> None:
        """Find where the model's maps come from; it is not touched before the probe is entered.

        Args:
            model: that will be called; for one wrapped by DistributedDataParallel, the model inside is watched.
            relevant: true or 1 for the relevant tokens, [position] for all examples or [batch, position]; or a function
                that makes it of the tokens. `probe.relevant = ...` sets it anew for the next call.
            measures: names of those wanted.
            mask: true or 1 where there is a token, in the same ways; by default what the model is called with
                (attention_mask, or key_padding_mask with its opposite sense), and without any everything is a token.
            queries: which are averaged over: "all", "last" or a mask in the same ways.
            readout: where attention is read for the figures at the readout: the "last" token, where a causal model
                predicts, the "first", where many encoders do, or a position for each example, or a function of the
                tokens.
            maps: pairs (layer, head), or (stack, layer, head), whose maps are kept in `probe.maps`; or "all".
            rollout: how maps are fused and mixed; see `analyses.attention.rollout_settings`.
            rollout_rows: whether the whole row of rollout is kept for each example, in `probe.rollout_rows`.
            tokens: labels of the tokens, for maps in the figure.

        Raises:
            CallError: no attention is found or it is fused, or an argument is not one of those above.
        """
        known = isinstance(measures, Sequence) and not isinstance(measures, str) and set(measures) <= set(MEASURES)
        if not known:
            raise CallError(f"measures should be some of {', '.join(MEASURES)}, got {measures!r}")
        if isinstance(queries, str) and queries not in ("all", "last"):
            raise CallError(f"queries should be 'all', 'last' or a mask, got {queries!r}")
        if isinstance(readout, str) and readout not in ("last", "first"):
            raise CallError(f"readout should be 'last', 'first' or positions, got {readout!r}")
        if not isinstance(rollout, Rollout):
            raise CallError(f"rollout should be a Rollout, got {rollout!r}; to leave it out, leave it out of measures")
        self._model = unwrapped_model(model)
        self._source = source_of(self._model)
        self._settings = BatchSettings(
            names=tuple(name for name in MEASURES if name in measures and name != "rollout"),
            masks=TokenMasks(relevant, mask, queries, readout),
            rollout=rollout if "rollout" in measures else None,
            rollout_rows=rollout_rows,
            maps=asked_maps(maps, self._source),
        )
        self.tokens = tokens
        self._ends: list[Callable[[], None]] = []
        self._batch: WatchedBatch | None = None
        self._held: AbstractContextManager[None] | None = None
        self.reset()

    @property
    def relevant(self) -> TokenMask | None:
        """Which tokens are relevant in the next call."""
        return self._settings.masks.relevant

    @relevant.setter
    def relevant(self, relevant: TokenMask | None) -> None:
        self._settings = replace(self._settings, masks=replace(self._settings.masks, relevant=relevant))

    @property
    def mask(self) -> TokenMask | None:
        """Where there are tokens in the next call, if the call does not say it."""
        return self._settings.masks.mask

    @mask.setter
    def mask(self, mask: TokenMask | None) -> None:
        self._settings = replace(self._settings, masks=replace(self._settings.masks, mask=mask))

    def reset(self) -> None:
        """Forget what was measured."""
        self._sums: dict[LayerKey, dict[str, HeadSums]] = {}
        self._examples: list[ExampleFigures] = []
        self._maps: dict[HeadKey, list[Tensor]] = {}
        self._strays = 0

    def __enter__(self) -> "AttentionProbe":
        """Watch the model."""
        if self._ends:
            raise CallError("this probe is watching already; leave its block first, or make another")
        try:
            # One by one, so that an interrupt in between leaves no hook of which nobody knows.
            for end in self._source.attach(self._take):
                self._ends.append(end)
            watcher = ForwardWatcher(self._begin, lambda _arguments, _output: self._end(), self._abandon)
            self._ends.append(watch_forward(self._model, watcher))
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave the model as it was."""
        self._stop()

    def table(self) -> pd.DataFrame:
        """Return a row for each head: stack (if there are several), layer, head, queries, measures, finite.

        Measures are means over `queries` queries; NaN where there was none to measure. Where `finite` is false, the
        head's maps had values that are not finite, and so have its means.

        Raises:
            CallError: no call was seen.
        """
        self._demand_calls()
        return head_table({key: self._sums[key] for key in self._source.keys if key in self._sums})

    def examples(self, *, by_head: bool = False) -> pd.DataFrame:
        """Return a row for each example, in the order in which they came.

        Columns: example, tokens, readout (its position), relevant (how many tokens are), chance (their share among the
        tokens, in a causal model those up to the readout), rollout (its mass on them at the readout), attention (the
        mean of all heads' there). NaN where a figure does not exist. Each head's is kept for every example, 4 bytes a
        head: a long run should `reset()` now and then.

        Args:
            by_head: a row for each example and head instead, with the attention of each on the relevant tokens.

        Raises:
            CallError: no call was seen.
        """
        self._demand_calls()
        return head_rows(self._examples) if by_head else example_table(self._examples)

    @property
    def maps(self) -> dict[tuple[int, int] | HeadKey, list[Float[Tensor, "batch query key"]]]:
        """The maps asked for, by (layer, head) or (stack, layer, head): one tensor on the CPU for each call."""
        return {key if key[0] else key[1:]: list(kept) for key, kept in sorted(self._maps.items())}

    @property
    def rollout_rows(self) -> list[Float[Tensor, " position"]]:
        """The row of rollout at the readout of each example; zero on padding.

        Raises:
            CallError: rows were not asked for, or there are none for a call with cached keys or several stacks.
        """
        if not self._settings.rollout_rows:
            raise CallError("rows of rollout were not asked for: AttentionProbe(model, rollout_rows=True)")
        rows = [examples.rows for examples in self._examples]
        found = [row for row in rows if row is not None]
        if len(found) < len(rows):
            raise CallError("some calls have no rollout: it needs every layer's map of all tokens to all tokens")
        return [row for batch in found for row in batch]

    def figure(self, measures: Sequence[str] | None = None) -> "Figure":
        """Return a picture: for each measure a grid of layers and heads; of one example also the maps kept.

        Args:
            measures: columns of the table; those of all measures if not given, none of them for maps alone.

        Raises:
            CallError: no call was seen, or a measure is no column of the table.
        """
        from .figure import draw

        one = sum(len(examples.tokens) for examples in self._examples) == 1
        maps = {key: kept[0][0] for key, kept in self.maps.items()} if one else {}
        return draw(self.table(), maps, measures=measures, tokens=self.tokens)

    def _repr_html_(self) -> str:
        """What a notebook shows: figure and table."""
        from .page import message_page, page

        try:
            return page(self.name, self.table(), self.examples(), self.figure())
        except CallError as error:
            return message_page(self.name, str(error))

    def __repr__(self) -> str:
        """Return what is watched, and how much was seen."""
        examples = sum(len(found.tokens) for found in self._examples)
        layers = len(self._source.keys)
        return f"AttentionProbe({self._source.name}, {layers} layers, {examples} examples)"

    @property
    def name(self) -> str:
        """Name of the model."""
        return self._source.name

    def _begin(self, arguments: dict[str, Any]) -> None:
        self._abandon()
        self._held = self._source.during()
        self._held.__enter__()
        self._batch = WatchedBatch(self._settings, self._source, arguments)

    def _end(self) -> None:
        batch = self._batch
        if batch is None:
            return
        examples = batch.finish()
        sums = dict(self._sums)
        for key, found in batch.sums.items():
            before = sums.get(key, {})
            sums[key] = before | {name: before[name] + new if name in before else new for name, new in found.items()}
        for key, kept in batch.maps.items():
            self._maps.setdefault(key, []).append(kept)
        if examples is not None:
            self._examples.append(examples)
        self._sums = sums
        self._abandon()

    def _abandon(self) -> None:
        self._batch = None
        if self._held is not None:
            self._held.__exit__(None, None, None)
            self._held = None

    def _take(self, given: GivenMap | GivenRows) -> None:
        if self._batch is None:
            self._strays += 1
        else:
            self._batch.take(given)

    def _stop(self) -> None:
        try:
            self._end_all()
        finally:
            # What an interrupt left in the middle.
            self._end_all()

    def _end_all(self) -> None:
        self._abandon()
        while self._ends:
            self._ends[-1]()
            self._ends.pop()

    def _demand_calls(self) -> None:
        if self._sums:
            return
        strays = f"; {self._strays} maps came outside of any call of it" if self._strays else ""
        raise CallError(f"nothing was measured: call {self._source.name} inside `with probe:`{strays}")
