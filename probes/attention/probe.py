"""The attention of a live model, measured while it runs, in a context around a notebook's or training loop's calls."""

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd
from jaxtyping import Float
from torch import Tensor

from ...analyses.attention.maps.search import source_of, unwrapped_model
from ...analyses.attention.maps.source import LayerReading
from ...analyses.attention.measures.rollout import ABNAR_ZUIDEMA, Rollout
from ...circuits.errors import CallError
from ...circuits.weights.layer_keys import LayerKey
from ..maps.forward import ForwardWatcher, on_call_within, watch_forward
from ..maps.masks import Readout, TokenMasks
from ..maps.model_call import ModelCall
from ..maps.reader import TokenMask
from ..maps.selection import HeadKey, selected_heads
from .batch import MAX_LOGIT, BatchSettings, ExampleValues, WatchedBatch
from .calls_in_progress import CallsInProgress, OpenCall
from .head_sums import HeadSums
from .hook_list import Hook, HookList
from .tables import example_table, head_rows, head_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The names of all measures that can be taken while a model runs.
MEASURES = ("entropy", "relevant", "sink", "self", "previous", "next", "largest", "no_token", "max_logit", "rollout")


class AttentionProbe:
    """Measures the attention of every head while a model runs inside its context, and keeps only sums.

        with AttentionProbe(model, relevant=mask) as probe:
            model(tokens, attention_mask=attention_mask)
        probe.table()

    For a query i with weights p_ij on the keys that are tokens, normalised to sum 1, each measure is averaged over the
    queries that are tokens (or over those selected by `queries`), over all calls together:

    | name | | of one query |
    |---|---|---|
    | `entropy` | nats | -sum_j p_ij ln p_ij |
    | `relevant` | | sum of p_ij over the relevant j; `chance` is their share among the tokens that i can see |
    | `sink` | | p_ij of the first token |
    | `self`, `previous`, `next` | | p_ii, p_i,i-1, p_i,i+1; queries without such a key are left out |
    | `largest` | | max_j p_ij |
    | `no_token` | | 1 - sum_j w_ij before normalisation: what went to learned sinks, padding, dropped weights |
    | `max_logit` | | the largest score before the softmax: a maximum over queries, not a mean; fused kernels only |
    | `rollout` | | mass of (A_L ... A_1) on the relevant tokens at the readout position, in `examples()` |

    `relevant_at_readout` and `chance_at_readout` are taken at one query of each example and averaged over examples.

    `fwd_hooks` gives the same probe as TransformerLens' hooks, in place of the context:

        model.run_with_hooks(tokens, fwd_hooks=[*probe.fwd_hooks, ("blocks.0.attn.hook_z", ablate_head)])

    A probe works on models with TransformerLens' hook points (HookedTransformer, TransformerBridge), on models of
    transformers, on torch.nn.MultiheadAttention alone or in a model, on a user's own modules that call torch's
    scaled_dot_product_attention, and on this project's SingleLayerAttention. The model stays in the mode that it is in;
    what it returns, its random numbers and its gradients stay the same to the bit. The model gets no hook and no
    attribute, so that a copy that is made of it inside the context (by copy, pickle, torch.save or an average of
    weights) is a plain model with its own weights, unwatched.
    Several probes and the user's own hooks can be used together; a probe sees a map as all of the user's hooks have
    left it. In training mode, models of transformers give maps after dropout, which are the maps that the model used;
    those of torch.nn.MultiheadAttention are maps before dropout. The table and the card say which. A call counts once
    it has ended; what the backward pass computes a second time does not count, nor do calls of parts of the model, but
    for the encoder that `generate` calls apart, which is a call of its own with examples of its own.

    Where attention is eager, the maps that the model forms are measured. Fused kernels (sdpa, flash, flex) form none:
    there the weights are computed a second time from the queries and keys that the kernel got, in float32 or better,
    before dropout, some queries at a time, so that no whole map is held unless `maps` asks for it. The kernel runs as
    it is. The score of query i and key j is softcap(scale q_i . k_j); `max_logit` is the largest over the pairs of
    tokens that the mask allows, without what masks and relative positions add to it. It is NaN where a layer gave a
    map, which does not tell its scores; `qkov.circuits.score_bound` bounds it from the weights.

    Positions come from what the call says: the cache and its kind, cache_position, the mask, position_ids. A token that
    a layer has dropped, as a sliding window does, has no weight, so that a call with cached keys gives the figures that
    these tokens have in one call without a cache. Sequences that are packed into a row, as position_ids that begin
    again show, or a mask that keeps blocks of tokens apart, are sequences of their own. Where positions are not known,
    `sink`, `self`, `previous` and `next` (and `chance`, where no mask says what can be seen) are NaN, with the reason
    in `unknown`.

    Masks that are given here count from the first token of the sequence, cached ones included. One that was made for
    the first call may be shorter than the sequence has become: tokens that came since are tokens, and neither relevant
    nor asked for. So `AttentionProbe(model, relevant=part_of_the_prompt, queries="last")` around `model.generate(...)`
    says how much each generated token's step looks at that part: on average in `table()`, step by step in `examples()`.

    With cached keys rollout is left out (NaN). It is also left out for an encoder and a decoder, whose maps form
    three stacks; the masks given here are then those of the encoder's tokens. Where layers have maps of parts of
    the inputs (windows of an image, frames of a video), as their number beside that of the inputs shows, `entropy`
    and `largest` are over all positions of the parts, those with which the model fills windows up among them; the
    other measures are NaN there, with the reason in `unknown`, and `examples()` and the rollout are refused.
    """

    def __init__(
        self,
        model: Any,
        *,
        relevant: TokenMask | None = None,
        measures: Sequence[str] | None = None,
        mask: TokenMask | None = None,
        queries: Literal["all", "last"] | TokenMask = "all",
        readout: Readout = "last",
        maps: Iterable[tuple[int, int] | HeadKey] | Literal["all"] | None = None,
        rollout: Rollout = ABNAR_ZUIDEMA,
        rollout_rows: bool = False,
        tokens: Sequence[str] | None = None,
    ) -> None:
        """Find the model's attention; the model is not touched before the probe is entered.

        Args:
            model: The model that will be called. If it is wrapped by DistributedDataParallel, the model inside is
                watched.
            relevant: True or 1 for the relevant tokens, [position] for all examples or [batch, position]; or a function
                of the tokens that returns such a mask. `probe.relevant = ...` sets it for the next call. In `generate`
                it may be as long as the prompt.
            measures: The names of the measures to take; all by default, `max_logit` only where attention is fused.
            mask: True or 1 where there is a token, in the same forms. The default is the mask that the model is called
                with (attention_mask, or key_padding_mask with its opposite sense); if there is none, every position is
                a token.
            queries: The queries that are averaged over: "all", "last" or a mask in the same forms.
            readout: The position at which attention is read for the values at the readout: the "last" token, where a
                causal model predicts; the "first", where many encoders do; a position for each example; or a function
                of the tokens that returns such positions.
            maps: Pairs (layer, head), or (stack, layer, head), whose maps are kept in `probe.maps`; or "all".
            rollout: How maps are fused and mixed; see `analyses.attention.Rollout`.
            rollout_rows: Whether to keep the whole row of the rollout for each example, in `probe.rollout_rows`.
            tokens: Labels of the tokens, for maps in the figure.

        Raises:
            CallError: No attention was found, or how it calls its kernel is not known, or an argument is none of the
                above.
        """
        known = isinstance(measures, Sequence) and not isinstance(measures, str) and set(measures) <= set(MEASURES)
        if measures is not None and not known:
            raise CallError(f"measures should be some of {', '.join(MEASURES)}, got {measures!r}")
        if isinstance(queries, str) and queries not in ("all", "last"):
            raise CallError(f"queries should be 'all', 'last' or a mask, got {queries!r}")
        if isinstance(readout, str) and readout not in ("last", "first"):
            raise CallError(f"readout should be 'last', 'first' or positions, got {readout!r}")
        if not isinstance(rollout, Rollout):
            raise CallError(f"rollout should be a Rollout, got {rollout!r}; to leave it out, leave it out of measures")
        self._model = unwrapped_model(model)
        self._source = source_of(self._model)
        self._source.demand_readable()
        if measures is None:
            measures = [name for name in MEASURES if name != MAX_LOGIT or self._source.gives_scores]
        self._settings = BatchSettings(
            names=tuple(name for name in MEASURES if name in measures and name != "rollout"),
            masks=TokenMasks(relevant, mask, queries, readout),
            rollout=rollout if "rollout" in measures else None,
            rollout_rows=rollout_rows,
            maps=selected_heads(maps, self._source),
        )
        self.tokens = tokens
        self._ends: list[Callable[[], None]] = []
        self._calls = CallsInProgress()
        self._adding = threading.Lock()
        self._hooks: weakref.ref[HookList] | None = None
        self.reset()

    @property
    def relevant(self) -> TokenMask | None:
        """The tokens that are relevant in the next call."""
        return self._settings.masks.relevant

    @relevant.setter
    def relevant(self, relevant: TokenMask | None) -> None:
        self._settings = replace(self._settings, masks=replace(self._settings.masks, relevant=relevant))

    @property
    def mask(self) -> TokenMask | None:
        """The positions that are tokens in the next call, if the call has no mask."""
        return self._settings.masks.mask

    @mask.setter
    def mask(self, mask: TokenMask | None) -> None:
        self._settings = replace(self._settings, masks=replace(self._settings.masks, mask=mask))

    def reset(self) -> None:
        """Discard everything that was measured."""
        self._sums: dict[LayerKey, dict[str, HeadSums]] = {}
        self._modes: dict[LayerKey, list[str]] = {}
        self._examples: list[ExampleValues] = []
        self._no_examples: str | None = None
        self._maps: dict[HeadKey, list[Tensor]] = {}
        self._strays = 0
        self._calls.forget()
        self._earlier: Tensor | None = None

    def __enter__(self) -> "AttentionProbe":
        """Start watching the model.

        Raises:
            CallError: The probe is already watching.
        """
        if self._ends:
            raise CallError("this probe is already watching; leave its block first, or make another probe")
        try:
            # One by one, so that an interrupt in between leaves no hook behind.
            for end in self._source.attach(self._take, on_call=on_call_within(self._model)):
                self._ends.append(end)
            self._ends.append(watch_forward(self._model, self._watcher()))
            part = self._source.called_apart()
            if part is not None:
                apart = ForwardWatcher(
                    self._begin_apart, lambda _arguments, _output: self._end_apart(), self._fail_apart
                )
                self._ends.append(watch_forward(part, apart))
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop watching, and leave the model as it was."""
        self._stop()

    @property
    def fwd_hooks(self) -> list[Hook]:
        """The probe as hooks of TransformerLens: pairs of the name of a hook point, one for each layer, and a function.

            model.run_with_hooks(tokens, fwd_hooks=[*probe.fwd_hooks, *my_hooks])
            with model.hooks(fwd_hooks=probe.fwd_hooks):
                model(tokens, attention_mask=attention_mask)

        TransformerLens calls the hooks of one hook point in the order of the list. The order of these hooks and your
        own makes no difference: a map is read when it leaves its hook point, after every hook there, and is therefore
        the map that the layer attends with, also where your hook comes after the probe's in the list. What your hooks
        change at earlier points (an ablated head, a patched residual stream) is in the maps of the layers after it.

        The calls that count are those in which TransformerLens runs these hooks, in any of its ways, and the layers
        are those whose hooks are in the list; `reset_hooks` takes them away like any others. Inside `with probe:` all
        calls count, and these hooks add nothing. The model is watched for as long as the hooks exist.

        Raises:
            CallError: The model has no hook points of TransformerLens.
        """
        if not self._source.hook_points:
            raise CallError(
                f"{self._source.name} has no hook points of TransformerLens; use the probe as a context: `with probe:`"
            )
        hooks = None if self._hooks is None else self._hooks()
        if hooks is None:
            hooks = HookList(
                self._model, self._source, self._watcher(), self._take, self._calls.drop, lambda: bool(self._ends)
            )
            self._hooks = weakref.ref(hooks)
        return hooks.hooks()

    def table(self) -> pd.DataFrame:
        """Return a row for each head: stack, layer, head, queries, measures, finite, unknown, partial, mode, hook.

        `stack` is there if there are several. `unknown` is there if a measure that was asked for is not known, as where
        positions are not, and says why; its mean is NaN. `partial` is there if calls were left out, because they ended
        by an error, ran at once in several threads, or had another call of the model inside; it says how many, in
        words. `mode` is there if a layer ran in training mode, and says what its dropout did to the maps. `hook` is
        there in models with TransformerLens' hooks, and is the name of the hook point that the layer's map passes.
        Measures are means over `queries` queries; NaN if there was nothing to average, as for `relevant` where no
        example has a relevant token. Where `finite` is false, the head's maps had values that are not finite, and so
        have its means.

        Raises:
            CallError: The model has not been called.
        """
        self._demand_calls()
        sums = {key: self._sums[key] for key in self._source.keys if key in self._sums}
        return head_table(sums, self._modes, self._source.hook_points, self._calls.in_words())

    def examples(self, *, by_head: bool = False) -> pd.DataFrame:
        """Return a row for each example, in the order in which they came.

        Columns: example, tokens (their number), readout (its position), relevant (the number of relevant tokens),
        chance (their share among the tokens, in a causal model among those up to the readout), rollout (its mass on the
        relevant tokens at the readout), attention (the mean over all heads of theirs there). NaN where a value does not
        exist, as for an example without a relevant token. The attention of every head is kept for every example, which
        takes 4 bytes a head; call `reset()` from time to time in a long run.

        Args:
            by_head: Whether to return a row for each example and head, with the head's attention on the relevant
                tokens.

        Raises:
            CallError: The model has not been called, or a layer has maps of parts of the inputs, such as windows.
        """
        self._demand_calls()
        self._demand_examples()
        return head_rows(self._examples) if by_head else example_table(self._examples)

    @property
    def maps(self) -> dict[tuple[int, int] | HeadKey, list[Float[Tensor, "batch query key"]]]:
        """The kept maps, by (layer, head) or (stack, layer, head): one tensor on the CPU for each call."""
        return {key if key[0] else key[1:]: list(kept) for key, kept in sorted(self._maps.items())}

    @property
    def rollout_rows(self) -> list[Float[Tensor, " position"]]:
        """The row of the rollout at the readout of each example; zero on padding.

        Raises:
            CallError: Rows were not asked for, or a call with cached keys, several stacks or maps of parts had none.
        """
        if not self._settings.rollout_rows:
            raise CallError("rows of rollout were not asked for: AttentionProbe(model, rollout_rows=True)")
        self._demand_examples()
        by_call = [examples.rows for examples in self._examples]
        known = [rows for rows in by_call if rows is not None]
        if len(known) < len(by_call):
            raise CallError("some calls have no rollout: it needs every layer's map of all tokens to all tokens")
        return [row for rows in known for row in rows]

    def figure(self, measures: Sequence[str] | None = None) -> "Figure":
        """Return a figure with a grid of layers and heads for each measure, and the kept maps of a single example.

        Args:
            measures: Columns of the table to draw; all measures by default. An empty list draws only maps.

        Raises:
            CallError: The model has not been called, or a measure is not a column of the table.
        """
        from .figure import draw

        is_single = sum(len(examples.tokens) for examples in self._examples) == 1
        maps = {key: kept[0][0] for key, kept in self.maps.items()} if is_single else {}
        return draw(self.table(), maps, measures=measures, tokens=self.tokens)

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows: the figure and the table."""
        from .page import message_page, page

        try:
            return page(
                self.name,
                self.table(),
                None if self._no_examples else self.examples(),
                self.figure(),
                self._mode_in_words(),
                self._calls.in_words(),
            )
        except CallError as error:
            return message_page(self.name, str(error))

    def _mode_in_words(self) -> str:
        modes = list(dict.fromkeys(mode for of_layer in self._modes.values() for mode in of_layer))
        return "; ".join(f"{mode.split(',')[0]} mode{mode.partition(',')[1]}{mode.partition(',')[2]}" for mode in modes)

    def __repr__(self) -> str:
        """Return the watched model's name, its number of layers and the number of examples seen."""
        examples = sum(len(call.tokens) for call in self._examples)
        layers = len(self._source.keys)
        partial = self._calls.in_words()
        said = f"; partial: {partial}" if partial else ""
        return f"AttentionProbe({self._source.name}, {layers} layers, {examples} examples{said})"

    @property
    def name(self) -> str:
        """The name of the model."""
        return self._source.name

    def _watcher(self) -> ForwardWatcher:
        """Return what is called when a forward of the model begins and ends."""
        return ForwardWatcher(self._begin, lambda _arguments, _output: self._end(), self._calls.fail)

    def _begin(self, arguments: dict[str, Any], *, is_apart: bool = False) -> None:
        batch = WatchedBatch(self._settings, ModelCall(self._source, arguments, self._earlier))
        self._calls.begin(OpenCall(batch, self._source.during(), is_apart))

    def _end(self) -> None:
        batch = self._calls.end()
        if batch is None:
            return
        try:
            examples = batch.finish()
        except BaseException:
            self._calls.note_failure()
            raise
        with self._adding:
            self._add(batch, examples)

    def _add(self, batch: WatchedBatch, examples: ExampleValues | None) -> None:
        sums = dict(self._sums)
        for key, by_name in batch.sums.items():
            before = sums.get(key, {})
            sums[key] = before | {name: before[name] + new if name in before else new for name, new in by_name.items()}
        for key, mode in batch.modes.items():
            modes = self._modes.setdefault(key, [])
            if mode not in modes:
                modes.append(mode)
        for key, kept in batch.maps.items():
            self._maps.setdefault(key, []).append(kept)
        self._no_examples = self._no_examples or batch.no_examples
        if examples is not None:
            self._examples.append(examples)
        tokens = batch.call.tokens
        self._earlier = None if tokens is None or tokens.is_floating_point() else tokens.clone()
        self._sums = sums

    def _begin_apart(self, arguments: dict[str, Any]) -> None:
        # Inside a call of the model, the part belongs to that call.
        if self._calls.current() is None:
            self._begin(arguments, is_apart=True)

    def _end_apart(self) -> None:
        call = self._calls.current()
        if call is not None and call.is_apart:
            self._end()

    def _fail_apart(self) -> None:
        call = self._calls.current()
        if call is not None and call.is_apart:
            self._calls.fail()

    def _take(self, layer_map: LayerReading) -> None:
        call = self._calls.current()
        if call is None:
            self._strays += 1
        elif call.left_out is None:
            call.batch.take(layer_map)

    def _stop(self) -> None:
        try:
            self._end_all()
        finally:
            # An interrupt may have ended the first pass early.
            self._end_all()

    def _end_all(self) -> None:
        self._calls.stop()
        while self._ends:
            self._ends[-1]()
            self._ends.pop()

    def _demand_calls(self) -> None:
        if self._sums:
            return
        strays = f"{self._strays} maps came from calls of its parts alone" if self._strays else ""
        others = "".join(f"; {words}" for words in (self._calls.in_words(), strays) if words)
        raise CallError(f"nothing was measured; call {self._source.name} inside `with probe:`{others}")

    def _demand_examples(self) -> None:
        if self._no_examples is not None:
            raise CallError(f"there are no examples to list and no rollout over all layers; {self._no_examples}")
