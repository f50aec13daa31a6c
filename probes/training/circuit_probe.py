"""CircuitProbe measures the circuits of a model in training, at chosen steps, into a run store."""

import warnings
from collections.abc import Callable, Iterable
from numbers import Integral
from pathlib import Path
from typing import Any, SupportsFloat, Unpack

import pandas as pd
from torch import Tensor
from torch.optim import Optimizer

from ...analyses.trajectories.view import TaskDirections, View
from ...circuits.architectures.mapping import Mapping
from ...circuits.errors import CallError
from ...circuits.reading.options import ModelKeywords, ReadingOptions, reading_options
from .model import Factors, copied
from .run import LiveRun, Log


class CircuitProbe:
    """Measures W_QK and W_OV of every head as a model trains, and writes the run store that `qkov track` writes.

        probe = CircuitProbe(model, store="run/", every=100)
        for batch in batches:
            loss = model(batch)
            loss.backward()
            optimizer.step()
            probe.step(loss)
            optimizer.zero_grad()

    A row holds what `measure` returns for one layer, head and circuit; the change since the step that was logged before
    (`motion`, and the effective ratio r(t)); scale and cosine along the weights at the start, or along a task's
    directions; and what `measure_step` computes for the logged step itself from its gradients: how near the
    preconditioner Omega(C) comes to the step that plain gradient descent takes on the factors, and the step that the
    optimizer took.

    These last quantities describe the parameters as they are trained: in their own basis, at rotary offset 0, with
    their biases (`trained_circuits`); in the rows of heads that share keys and values they describe the whole group.
    They are missing at the start. Those of Omega are also missing where the loss depends on the factors other than
    through their product, as with rotary positions or QK-norm; run.json lists these circuits and the reasons.

    Gradients are read from `.grad`, so clipping, or the scale of a GradScaler that was not removed, changes the sizes
    of steps and rates, but no cosine.

    The probe holds copies of the attention weights at the start, at the step that was logged last, and from before a
    step that is to be logged. A step is written whole or not at all, so `qkov report` can read the store at any time,
    also after a crash.

    Attributes:
        steps: The number of steps that the model has been trained.
    """

    def __init__(
        self,
        model: Any,
        store: Path | str | None = None,
        every: int | Iterable[int] | Callable[[int], bool] = 100,
        *,
        basis: str = "raw",
        rotary_offset: int = 0,
        directions: TaskDirections | None = None,
        log: Log | None = None,
        start: int = 0,
        resume: bool = False,
        options: ReadingOptions | Mapping | None = None,
        **reading: Unpack[ModelKeywords],
    ) -> None:
        """Log the start, with the current weights.

        Args:
            model: Any model that `open_model` opens.
            store: The folder of the run store, which is created; by default the rows are held in memory.
            every: The steps to log: every so many steps, these steps, or those for which this function returns True.
            basis: raw, folded or folded_centred.
            rotary_offset: Query position minus key position, for W_QK of layers with rotary positions.
            directions: What scale and cosine are measured along, in place of the weights at the start.
            log: Called after each logged step with the step and its values by names such as
                QK.frobenius_norm/layer0.head1 and training/loss; missing values are left out.
            start: The number of steps that the model has been trained already.
            resume: Whether to resume the store if it exists: steps up to `start` stay, and later ones are deleted, with
                a warning. New rows are compared with the weights with which the store was begun, which it keeps.
            options: How to read the model, as one object. A Mapping stands for `ReadingOptions(mapping=...)`.
            **reading: The same as keywords: mapping, family, heads or prefix.

        Raises:
            CallError: The model is not a model, the basis, offset, directions or steps are not possible, or the store
                holds a run that is not to be resumed.
            QkovError: The model's weights are not recognised, or cannot be read.
        """
        self._is_due = _schedule(every)
        if not isinstance(start, Integral) or start < 0:
            raise CallError(f"start should be a number of steps, got {start!r}")
        if log is not None and not callable(log):
            raise CallError(f"log should be a function of a step and its values, got {log!r}")
        if directions is not None and not isinstance(directions, TaskDirections):
            raise CallError(f"directions should be TaskDirections, got {type(directions).__name__}")
        view = View.of(basis, rotary_offset)
        chosen = reading_options(options, reading, ModelKeywords)
        self._run = LiveRun(model, chosen, view, directions, store, log, start, resume)
        self.steps = start
        self._attached: Attached | None = None
        self._scalars: dict[str, float] = {}
        self._has_warned = False
        self._before: Factors | None = None
        self._gradients: Factors | None = None
        self._is_next_due = self._is_due(start + 1)
        self.begin_step(with_gradients=False)

    def step(self, loss: SupportsFloat | None = None, **scalars: SupportsFloat) -> None:
        """Count a step and log it if it is due; call this after the optimizer's step and before zero_grad().

        Args:
            loss: The loss, stored with the step as `training_loss`.
            **scalars: Other numbers to store with the step, such as learning_rate=...

        Raises:
            CallError: The probe is attached to an optimizer and counts its steps itself.
            QkovError: The weights cannot be read, or the store cannot be written, for example because the disk is full;
                training can continue, and the next step that is due is logged.
        """
        if self._attached is not None:
            raise CallError(
                "the probe is attached to an optimizer and counts its steps itself: call probe.note(loss=...)"
            )
        self.note(**scalars if loss is None else {"loss": loss, **scalars})
        try:
            self.end_step()
        finally:
            # No other call comes before the next step, not even if `log` raised and training continues.
            self.begin_step(with_gradients=False)

    def note(self, **scalars: SupportsFloat) -> None:
        """Store numbers with the next step, such as its loss.

        Args:
            **scalars: The numbers by name.

        Raises:
            CallError: A value is not a number.
        """
        for name, value in scalars.items():
            if not isinstance(value, SupportsFloat) or (isinstance(value, Tensor) and value.numel() != 1):
                raise CallError(f"{name} should be a number to store with the step, got {_in_words(value)}")
        if self._is_next_due:
            numbers = {name: value.detach() if isinstance(value, Tensor) else value for name, value in scalars.items()}
            self._scalars |= {name: float(value) for name, value in numbers.items()}

    def attach(self, optimizer: Optimizer) -> "Attached":
        """Follow an optimizer: count its steps as it takes them, until the object that is returned is detached.

        Gradients are those from before the step, unless the optimizer computes them itself by a closure. Whatever
        changes steps by hooks of its own, such as `CircuitRates`, must be there first to be part of the step.

        Args:
            optimizer: The optimizer that trains the model.

        Returns:
            A context manager with a method `detach`.

        Raises:
            CallError: The argument is not an optimizer, or the probe is attached already.
        """
        if not isinstance(optimizer, Optimizer):
            raise CallError(f"expected a torch.optim.Optimizer to attach the probe to, got {type(optimizer).__name__}")
        if self._attached is not None:
            raise CallError("the probe is attached to an optimizer already: detach it first")
        self._attached = Attached(self, optimizer, self._detached)
        return self._attached

    def begin_step(self, *, with_gradients: bool = True) -> None:
        """Announce a step that is about to be taken, in a custom training loop; `end_step` must follow.

        Args:
            with_gradients: Whether the gradients of the step are there already; otherwise `end_step` reads them.
        """
        if self._is_next_due:
            self._before = copied(self._run.model.factors())
            self._gradients = copied(self._run.model.gradients()) if with_gradients else None

    def end_step(self) -> None:
        """Count the step that has been taken, and log it if it is due.

        Raises:
            CallError: The step is due, but was not begun.
            QkovError: The weights cannot be read, or the store cannot be written.
        """
        self.steps += 1
        is_due, self._is_next_due = self._is_next_due, self._is_due(self.steps + 1)
        if is_due:
            self._log_step()

    def add_scalars(self, step: int, **scalars: float) -> None:
        """Add numbers that became known after a step to its rows, if it is the step that was logged last.

        Args:
            step: The step.
            **scalars: The numbers by name.
        """
        if step == self._run.last_step:
            self._run.add_scalars(scalars)

    def table(self) -> pd.DataFrame:
        """Return everything that was logged: one row for each step, layer, head and circuit."""
        return self._run.table()

    def _log_step(self) -> None:
        model = self._run.model
        before, gradients, scalars = self._before, self._gradients, self._scalars
        self._before, self._gradients, self._scalars = None, None, {}
        if before is None:
            raise CallError(f"step {self.steps} was ended but never begun: call begin_step() before it is taken")
        if not self._has_warned and not model.has_gradients():
            self._has_warned = True
            warnings.warn(
                f"no parameter has a gradient at step {self.steps}, so the preconditioner is not tested: call "
                f"probe.step() before the gradients are set to zero",
                stacklevel=4,
            )
        quantities = model.step_quantities(before, model.gradients() if gradients is None else gradients)
        self._run.measure(self.steps, quantities, scalars)

    def _detached(self) -> None:
        self._attached = None
        self.begin_step(with_gradients=False)


class Attached:
    """The connection of a probe to an optimizer; leaving its `with` block, or `detach`, ends it."""

    def __init__(self, probe: CircuitProbe, optimizer: Optimizer, at_end: Callable[[], None]) -> None:
        """Register the hooks.

        Args:
            probe: The probe that counts and logs the steps.
            optimizer: The optimizer that takes them.
            at_end: Called when the hooks are removed.
        """
        self._probe, self._at_end = probe, at_end
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def detach(self) -> None:
        """Remove the hooks. Calling it again is harmless."""
        if self._hooks:
            for hook in self._hooks:
                hook.remove()
            self._hooks = []
            self._at_end()

    def __enter__(self) -> "Attached":
        """Follow the optimizer inside the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the hooks."""
        self.detach()

    def _before_step(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        self._probe.begin_step(with_gradients=closure is None)

    def _after_step(self, *_: Any) -> None:
        self._probe.end_step()


def _schedule(every: int | Iterable[int] | Callable[[int], bool]) -> Callable[[int], bool]:
    if callable(every):
        return every
    steps = frozenset(every) if isinstance(every, Iterable) else frozenset()
    if steps and all(isinstance(step, Integral) for step in steps):
        return steps.__contains__
    if isinstance(every, int) and every >= 1:
        return lambda step: step % every == 0
    raise CallError(
        f"every should be a whole number of at least 1, some steps, or a function of the step, got {every!r}"
    )


def _in_words(value: object) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
