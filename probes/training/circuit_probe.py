"""CircuitProbe measures the circuits of a model in training, at chosen steps, into a run store."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from numbers import Integral
from pathlib import Path
from typing import Any, SupportsFloat, Unpack

import pandas as pd
from torch import Tensor, distributed
from torch.optim import Optimizer

from ...analyses.trajectories.view import TaskDirections, View
from ...circuits.architectures.mapping import Mapping
from ...circuits.errors import CallError
from ...circuits.reading.options import ModelKeywords, ReadingOptions, reading_options
from .beside_run import BesideRun
from .failures import Failures
from .gathering import Gathering
from .log_filter import Log, LogFilter, RowLog
from .model import Factors, LiveModel, copied, same
from .optimizer_steps import OptimizerSteps, listed, unwrapped
from .run import HeadColumns, LiveRun
from .schedule import schedule


class CircuitProbe:
    """Measures W_QK and W_OV of every head as a model trains, and writes the run store that `qkov track` writes.

        probe = CircuitProbe(model, store="run/", every=100, optimizer=optimizer)
        for batch in batches:
            loss = model(batch)
            loss.backward()
            optimizer.step()
            probe.step(loss)
            optimizer.zero_grad()

    The probe counts the steps of the optimizers that it is given, and `step` only notes the loss. Without them it
    counts calls of `step`, except those between which no optimizer moved the attention, such as micro-batches whose
    gradients are accumulated.

    A row holds what `measure` returns for one layer, head and circuit; the change since the step that was logged before
    (`motion`, and the effective ratio r(t)); scale and cosine along the weights at the start, or along a task's
    directions; and what `measure_step` computes for the logged step itself from its gradients: how near the
    preconditioner Omega(C) comes to the step that plain gradient descent takes on the factors, and the step that the
    optimizer took.

    These last quantities describe the parameters as they are trained: in their own basis, at rotary offset 0, with
    their biases (`trained_circuits`); in the rows of heads that share keys and values they describe the whole group.
    They are missing at the start. Those of Omega are also missing where the loss depends on the factors other than
    through their product, as with rotary positions or QK-norm; run.json lists these circuits and the reasons.

    Gradients are those that the optimizer finds in `.grad`, before its own code can change them, and after the first
    call of a closure; clipping before the step is part of them. Without an optimizer of torch they are read as `step`
    is called.

    A failure while training (a full disk, a layer that cannot be read, a `log` that raises) is told once, counted in
    `failures`, and does not stop training. Where several processes train the model, the probes of all but the first,
    of rank 0, do nothing. Where they share its parameters (`fully_shard`), every process has to make the probe, with
    the same arguments, and call it alike: they gather the attention weights and their gradients together, at due steps
    alone, and the first one measures.

    The probe holds copies of the attention weights at the start, at the step that was logged last, and from before a
    step that is to be logged. A step is written whole or not at all, so `qkov report` can read the store at any time,
    also after a crash.

    Attributes:
        steps: The number of steps that the model has been trained; not counted in processes that do not measure.
    """

    def __init__(
        self,
        model: Any,
        store: Path | str | None = None,
        every: Any = 100,
        *,
        optimizer: Any = None,
        basis: str = "raw",
        rotary_offset: int = 0,
        directions: TaskDirections | None = None,
        log: Log | None = None,
        log_filter: LogFilter | Callable[[str], bool] | None = None,
        columns: HeadColumns | None = None,
        start: int | None = None,
        resume: bool = False,
        on_error: str = "warn",
        options: ReadingOptions | Mapping | None = None,
        **reading: Unpack[ModelKeywords],
    ) -> None:
        """Log the start, with the current weights.

        Args:
            model: Any model that `open_model` opens.
            store: The folder of the run store, which is created; by default the rows are held in memory.
            every: The steps to log: every so many steps, these steps, or those for which this function returns True.
            optimizer: The optimizer that trains the model, or several in a list; see `attach`.
            basis: raw, folded or folded_centred.
            rotary_offset: Query position minus key position, for W_QK of layers with rotary positions.
            directions: What scale and cosine are measured along, in place of the weights at the start.
            log: Called after each logged step with the step and its values by names such as
                QK.frobenius_norm/layer0.median and training/loss; see `log_to_tensorboard`, `log_to_wandb`, `log_to`.
            log_filter: The values that `log` gets: a `LogFilter`, which names figures and heads, or a function that
                returns for the name of each value, such as QK.frobenius_norm/layer0.head1, whether it is passed. By
                default medians and largest values of each layer, 15 in all.
            columns: Returns more values to store with the rows of a logged step, such as `AttentionHealth.columns` or
                `CircuitRates.guard.columns`: one for each head, by (stack, layer, circuit) and name.
            start: The number of steps that the model has been trained already; 0 by default, and needed where a store
                is resumed.
            resume: Whether to resume the store if it exists: steps up to `start` stay, and later ones are moved aside,
                with a warning. The weights have to be those of the row of step `start`, if there is one. New rows are
                compared with the weights with which the store was begun, which it keeps.
            on_error: What to do where a measurement fails during training: "warn" once and go on, or "raise".
            options: How to read the model, as one object. A Mapping stands for `ReadingOptions(mapping=...)`.
            **reading: The same as keywords: mapping, family, heads or prefix.

        Raises:
            CallError: The model is not a model, the basis, offset, directions, steps or logged heads are not possible,
                the store holds a run that is not to be resumed or other weights at that step, or an optimizer trains no
                attention parameter of the model.
            QkovError: The model's weights are not recognised, or cannot be read.
        """
        self._is_due = schedule(every)
        if start is not None and (not isinstance(start, Integral) or isinstance(start, bool) or start < 0):
            raise CallError(f"start should be a number of steps, got {start!r}")
        row_log = None if log is None else RowLog(log, log_filter)
        if columns is not None and not callable(columns):
            raise CallError(f"columns should be a function that returns values of heads, got {columns!r}")
        self._columns = columns
        if directions is not None and not isinstance(directions, TaskDirections):
            raise CallError(f"directions should be TaskDirections, got {type(directions).__name__}")
        gathering = Gathering.of(model)
        self._is_idle = gathering is None and _is_beside_the_first()
        self._failures = Failures(on_error)
        if self._is_idle:
            self.steps = start or 0
            return
        view = View.of(basis, rotary_offset)
        chosen = reading_options(options, reading, ModelKeywords)
        optimizers = None if optimizer is None else listed(optimizer)
        if gathering is not None:
            stated = "a function" if callable(every) else every, start, basis, rotary_offset
            gathering.agree(", ".join(map(str, stated)), "the arguments (every, start, basis, rotary_offset)")
        live = LiveModel(model, view, chosen, gathering, start or 0)
        # Whatever is wrong with the call is found before anything is written.
        self._optimizers = OptimizerSteps(live.named_parameters(), self._step_begins, self._step_ended)
        missing = [] if optimizers is None else self._optimizers.give(optimizers)
        self._run: LiveRun | BesideRun = BesideRun(live, start or 0)
        if gathering is None or gathering.is_first:
            with nullcontext() if gathering is None else gathering.concluded():
                self._run = LiveRun(live, chosen, view, directions, store, row_log, start, resume)
        else:
            gathering.demand_concluded()
        self._failures.noted = self._run.note_failures
        self.steps = self._run.last_step
        self._attached: Attached | None = None
        self._scalars: dict[str, float] = {}
        self._told: set[str] = set()
        self._before: Factors | None = None
        self._gradients: Factors | None = None
        self._has_gradients = False
        self._is_by_hand = self._is_pending = self._is_noted_after = False
        self._uncertain = 0
        self._is_next_due = self._is_due(self.steps + 1)
        if optimizers is not None:
            self._attached = self._follow(optimizers, missing)
        self._keep_weights()
        self._optimizers.watch()

    @property
    def failures(self) -> int:
        """How many measurements failed during training."""
        return self._failures.count

    def __repr__(self) -> str:
        """Say what the probe does."""
        if self._is_idle:
            return "CircuitProbe(measures nothing: the first process does)"
        if isinstance(self._run, BesideRun):
            return f"CircuitProbe(gathers weights for the first process, which measures; step {self.steps})"
        return f"CircuitProbe({self._run.model.name}, step {self.steps}, {self.failures} failures)"

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows: loss, norms, r(t) and largest scores, as curves over the steps."""
        from .card import card

        if self._is_idle:
            return card("CircuitProbe", ["it measures nothing: the first process does"], [])
        if isinstance(self._run, BesideRun):
            return card("CircuitProbe", ["it gathers weights for the first process, which measures"], [])
        words = [f"step {self.steps}", f"last logged step {self._run.last_step}"]
        words += [f"{self.failures} failures; the last: {self._failures.last}"] if self.failures else []
        return card(f"CircuitProbe of {self._run.model.name}", words, self._run.history.curves())

    def __enter__(self) -> "CircuitProbe":
        """Return the probe, which is closed at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the probe."""
        self.close()

    def close(self) -> None:
        """Follow no optimizer any more. Calling it again is harmless."""
        if self._is_idle:
            return
        if self._attached is not None:
            self._attached.detach()
        self._optimizers.close()

    def step(self, loss: SupportsFloat | None = None, **scalars: SupportsFloat) -> None:
        """Count a step and log it if it is due; call this after the optimizer's step and before zero_grad().

        If the probe follows given optimizers, it counts their steps itself, and this notes the numbers of the last one.

        Args:
            loss: The loss, stored with the step as `training_loss`.
            **scalars: Other numbers to store with the step, such as learning_rate=...
        """
        if self._is_idle:
            return
        numbers = scalars if loss is None else {"loss": loss, **scalars}
        if self._attached is not None:
            self._is_noted_after = True
            with self._failures.told(f"noting the numbers of step {self.steps}"):
                if self._is_pending:
                    self._scalars |= _numbers(numbers)
                else:
                    self.add_scalars(self.steps, **_numbers(numbers))
            self._log_pending()
            return
        self.note(**numbers)
        with self._failures.told(f"logging step {self.steps + 1}"):
            if self._optimizers.seen:
                if not self._optimizers.stepped:
                    return
                self._demand_order()
            elif self._has_not_moved():
                return
            else:
                self._uncertain += not self._is_next_due
            try:
                self._end()
            finally:
                # No other call comes before the next step, not even if `log` raised and training continues.
                self._optimizers.forget_step()
                self._keep_weights()

    def note(self, **scalars: SupportsFloat) -> None:
        """Store numbers with the next step, such as its loss.

        Args:
            **scalars: The numbers by name.

        Raises:
            CallError: A value is not a number, with `on_error="raise"`.
        """
        if self._is_idle:
            return
        with self._failures.told(f"noting numbers for step {self.steps + 1}"):
            if self._is_next_due:
                self._scalars |= _numbers(scalars)
            else:
                _demand_numbers(scalars)

    def attach(self, optimizer: Any) -> "Attached":
        """Follow optimizers: count their steps as they take them, until the object that is returned is detached.

        A step of training is one step of each of the optimizers that train the attention. Wrapped optimizers, such as
        accelerate's, are followed inside, so that micro-batches do not count. Another optimizer that moves the
        attention is followed too, with a warning.

        Args:
            optimizer: The optimizer that trains the model, or several in a list.

        Returns:
            A context manager with a method `detach`.

        Raises:
            CallError: The argument is not an optimizer, it trains no attention parameter of the model, or the probe is
                attached already.
        """
        optimizers = listed(optimizer)
        if self._is_idle:
            return Attached(self, [], self.close)
        if self._attached is not None:
            raise CallError("the probe is attached to an optimizer already: detach it first")
        # Adapters may have been added to the model.
        self._optimizers.name(self._run.model.named_parameters())
        self._attached = self._follow(optimizers, self._optimizers.give(optimizers))
        return self._attached

    def _follow(self, optimizers: list[Optimizer], missing: list[str]) -> "Attached":
        if missing:
            warnings.warn(
                f"no optimizer that the probe was given trains {_in_few_words(missing)}: give the probe all of them, "
                f"as optimizer=[...], or their steps are those of other optimizers, or none",
                stacklevel=3,
            )
        return Attached(self, optimizers, self._detached)

    def begin_step(self, *, with_gradients: bool = True) -> None:
        """Announce a step that is about to be taken, in a custom training loop; `end_step` must follow.

        Args:
            with_gradients: Whether the gradients of the step are there already, as the optimizer will use them. If not,
                they are those that an optimizer of torch finds as it steps, or, without one, those that `end_step`
                reads.
        """
        if self._is_idle:
            return
        with self._failures.told(f"beginning step {self.steps + 1}"):
            self._is_by_hand = True
            self._optimizers.forget_step()
            if self._is_next_due:
                self._run.model.gather(self.steps, with_gradients)
                self._before = copied(self._run.model.factors())
                self._gradients = copied(self._run.model.gradients()) if with_gradients else None
                self._run.model.release()
                self._has_gradients = self._optimizers.has_gradients()

    def end_step(self) -> None:
        """Count the step that has been taken, and log it if it is due."""
        if self._is_idle:
            return
        with self._failures.told(f"logging step {self.steps + 1}"):
            try:
                self._end()
            finally:
                self._is_by_hand = False

    def add_scalars(self, step: int, **scalars: float) -> None:
        """Add numbers that became known after a step to its rows, if it is the step that was logged last.

        Args:
            step: The step.
            **scalars: The numbers by name.
        """
        if self._is_idle:
            return
        with self._failures.told(f"storing numbers of step {step}"):
            if step == self._run.last_step:
                self._run.add_scalars(scalars)

    def is_trained_by(self, optimizer: Any) -> bool:
        """Return whether an optimizer, without its wrappers, is one of torch that holds attention weights.

        Args:
            optimizer: The optimizer.
        """
        inner = unwrapped(optimizer) if isinstance(optimizer, Optimizer) else None
        return not self._is_idle and inner is not None and self._optimizers.holds(inner)

    def table(self) -> pd.DataFrame:
        """Return everything that was logged: one row for each step, layer, head and circuit.

        Raises:
            CallError: This process measures nothing, since it is not the first of several.
        """
        if self._is_idle:
            raise CallError("this process measures nothing, since another one is the first: ask the probe of rank 0")
        self._log_pending()
        return self._run.table()

    def _end(self) -> None:
        if self._count():
            self._gather_after()
            self._log_step()

    def _count(self) -> bool:
        """Count a step, and return whether it is due."""
        self.steps += 1
        is_due, self._is_next_due = self._is_next_due, self._is_due(self.steps + 1)
        return is_due

    def _log_step(self) -> None:
        model = self._run.model
        before, gradients, scalars = self._before, self._gradients, self._scalars
        self._before, self._gradients, self._scalars = None, None, {}
        if before is None:
            raise CallError(f"step {self.steps} was ended but never begun: call begin_step() before it is taken")
        if gradients is None:
            copies = self._copies()
            gradients = model.gradients(copies)
            self._has_gradients = self._optimizers.has_gradients(copies is not None)
        if self._optimizers.is_trained() and not self._has_gradients:
            self._tell(
                f"the gradients of all attention weights are 0 or missing at step {self.steps}, so what depends on "
                f"them is missing: set them to zero after the optimizer's step and after probe.step()"
            )
            gradients = model.gradients({})
        quantities = model.step_quantities(before, gradients)
        for key, values in ({} if self._columns is None else self._columns()).items():
            quantities[key] = {**quantities.get(key, {}), **values}
        self._run.measure(self.steps, quantities, model.movers(self._optimizers.movers), scalars)
        model.release()

    def _copies(self) -> dict[int, Tensor] | None:
        """Return the gradients that were copied before the step; None if those are wanted that are there now."""
        return self._optimizers.gradients if self._optimizers.stepped else None

    def _gather_after(self) -> None:
        """Gather the weights as they are after a step, at once: the other processes go on to the next step."""
        copies = self._copies()
        self._run.model.gather(self.steps, self._gradients is None and (True if copies is None else copies))

    def _keep_weights(self) -> None:
        """Keep the weights from before the next step, unless the hooks of an optimizer will do so in time."""
        is_needed = self._is_next_due and not self._optimizers.seen and self._attached is None
        if is_needed and not self._run.model.is_spread:
            self._before, self._gradients = copied(self._run.model.factors()), None

    def _step_begins(self) -> bool:
        self._log_pending()
        if self._uncertain:
            # Calls of `step` before the first step of any optimizer were micro-batches, or came too early.
            self.steps, self._uncertain = self.steps - self._uncertain, 0
            self._is_next_due = self._is_due(self.steps + 1)
        if self._is_by_hand:
            return self._is_next_due and self._gradients is None
        if not self._is_next_due:
            return False
        with self._failures.told(f"beginning step {self.steps + 1}"):
            self._run.model.gather(self.steps)
            self._before, self._gradients = copied(self._run.model.factors()), None
            self._run.model.release()
            return True
        return False

    def _step_ended(self) -> None:
        # Where a step could not be begun, the processes have stopped gathering, which was told.
        is_begun = self._before is not None or not self._run.model.is_spread
        if not self._is_by_hand and self._count() and is_begun:
            with self._failures.told(f"gathering the weights of step {self.steps}"):
                self._gather_after()
                self._is_pending = True
            # Where `step` is called after the optimizer, what it notes belongs to this step.
            if not self._is_noted_after:
                self._log_pending()

    def _log_pending(self) -> None:
        if self._is_pending:
            self._is_pending = False
            with self._failures.told(f"logging step {self.steps}"):
                self._log_step()

    def _has_not_moved(self) -> bool:
        """Return whether the weights are those of before, although there are gradients; or no optimizer was seen."""
        if self._run.model.is_spread:
            # Processes that share a model count the steps of torch's optimizers alone, which are the same in all.
            return True
        if not self._is_next_due or self._before is None:
            return False
        return self._optimizers.has_gradients() and same(self._before, self._run.model.factors())

    def _demand_order(self) -> None:
        if self._optimizers.has_new_gradients():
            self._tell(
                f"there are new gradients after the optimizer's step when step {self.steps + 1} is logged, so "
                f"probe.step() comes before optimizer.step() in the loop, and its loss is that of the next batch: call "
                f"it after the optimizer, or give the probe optimizer=..."
            )

    def _tell(self, message: str) -> None:
        """Warn, once for each kind of message."""
        kind = message[:20]
        if kind not in self._told:
            self._told.add(kind)
            warnings.warn(message, stacklevel=4)

    def _detached(self) -> None:
        self._log_pending()
        self._attached = None
        self._optimizers.give([])
        self._keep_weights()


class Attached:
    """The connection of a probe to optimizers; leaving its `with` block, or `detach`, ends it."""

    def __init__(self, probe: CircuitProbe, optimizers: Sequence[Optimizer], at_end: Callable[[], None]) -> None:
        """Keep the probe for as long as the optimizers live.

        Args:
            probe: The probe that counts and logs the steps.
            optimizers: The optimizers that take them.
            at_end: Called when the connection ends.
        """
        self._probe, self._at_end = probe, at_end

        def keep(*_: object, kept: CircuitProbe = probe) -> None:
            del kept

        self._hooks = [optimizer.register_step_post_hook(keep) for optimizer in optimizers]

    def detach(self) -> None:
        """End the connection. Calling it again is harmless."""
        if self._hooks:
            for hook in self._hooks:
                hook.remove()
            self._hooks = []
            self._at_end()

    def __enter__(self) -> "Attached":
        """Follow the optimizers inside the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the connection."""
        self.detach()


def _is_beside_the_first() -> bool:
    """Return whether several processes train the model and this is not the first of them, which is said."""
    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0:
        return False
    warnings.warn(
        f"this is process {distributed.get_rank()} of {distributed.get_world_size()}: the first one, of rank 0, "
        f"measures, and the probe of this one does nothing",
        stacklevel=3,
    )
    return True


def _demand_numbers(scalars: dict[str, SupportsFloat]) -> None:
    for name, value in scalars.items():
        if not isinstance(value, SupportsFloat) or (isinstance(value, Tensor) and value.numel() != 1):
            raise CallError(f"{name} should be a number to store with the step, got {_in_words(value)}")


def _numbers(scalars: dict[str, SupportsFloat]) -> dict[str, float]:
    _demand_numbers(scalars)
    return {name: float(value.detach() if isinstance(value, Tensor) else value) for name, value in scalars.items()}


def _in_words(value: object) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)


def _in_few_words(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
