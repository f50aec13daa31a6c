"""CircuitProbe: the circuits of a model in training, measured every so many steps into a run store."""

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

    A row holds what `measure` gives of a layer, head and circuit; the change since the step that was logged before
    (`motion`, and the effective ratio r(t)); scale and cosine along the weights at the start, or along a task's
    directions; and what `measure_step` says of the logged step itself, by its gradients: how near the preconditioner
    Omega(C) comes to the step that plain gradient descent takes on the factors, and the step that the optimizer took.

    These last figures are of the parameters as they are trained: in no basis but their own, at rotary offset 0, with
    their biases (`trained_circuits`), and of a whole group in the rows of heads that share keys and values. They are
    missing at the start. Those of Omega are missing too where the loss knows the factors otherwise than by their
    product, as with rotary positions or QK-norm: run.json says of which circuits, and why.

    Gradients are what is in `.grad`, so clipping and the scale of a GradScaler that was not taken away change the sizes
    of steps and rates, though no cosine.

    Copies of the attention weights are held: of the start, of the step that was logged last, and from before a step
    that is to be logged. A step is written whole or not at all, so that `qkov report` reads the store at any time, also
    after a crash.

    Attributes:
        steps: how many steps the model has been trained.
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
        """Log the start, which is the weights as they are.

        Args:
            model: any that `open_model` opens.
            store: folder of the run store, which is made; the rows are held in memory where not given.
            every: which steps to log: every so many, these ones, or those of which this says so.
            basis: raw, folded or folded_centred.
            rotary_offset: of W_QK, query position less key position, in layers with rotary positions.
            directions: what scale and cosine are along, in place of the start.
            log: called after each logged step with the step and its figures by names such as
                QK.frobenius_norm/layer0.head1 and training/loss; those that are missing are left out.
            start: how many steps the model has been trained already.
            resume: go on with the store if it is there: steps up to `start` stay, later ones are deleted, with a
                warning. The new rows are compared with what the store was begun with, which it keeps.
            options: How to read the model, as one object. A Mapping stands for `ReadingOptions(mapping=...)`.
            **reading: The same as keywords: mapping, family, heads or prefix.

        Raises:
            CallError: it is no model, basis, offset, directions or steps cannot be had, or the store holds a run that
                is not to be gone on with.
            QkovError: the model's weights are not recognised, or cannot be read.
        """
        self._is_due = _schedule(every)
        if not isinstance(start, Integral) or start < 0:
            raise CallError(f"start should be a number of steps, got {start!r}")
        if log is not None and not callable(log):
            raise CallError(f"log should be a function of a step and its figures, got {log!r}")
        if directions is not None and not isinstance(directions, TaskDirections):
            raise CallError(f"directions should be TaskDirections, got {type(directions).__name__}")
        view = View.of(basis, rotary_offset)
        chosen = reading_options(options, reading, ModelKeywords)
        self._run = LiveRun(model, chosen, view, directions, store, log, start, resume)
        self.steps = start
        self._attached: Attached | None = None
        self._noted: dict[str, float] = {}
        self._has_warned = False
        self._before: Factors | None = None
        self._gradients: Factors | None = None
        self._is_next_due = self._is_due(start + 1)
        self.begin_step(with_gradients=False)

    def step(self, loss: SupportsFloat | None = None, **scalars: SupportsFloat) -> None:
        """Count a step, after the optimizer took it and before gradients are set to zero, and log it if it is due.

        Args:
            loss: to carry along, as `training_loss`.
            **scalars: likewise, such as learning_rate=...

        Raises:
            CallError: the probe is attached to an optimizer, which tells it of the steps.
            QkovError: the weights cannot be read, or the store cannot be written, as where the disk is full; training
                can go on, and the next step that is due is logged.
        """
        if self._attached is not None:
            raise CallError(
                "the probe is attached to an optimizer and counts its steps itself: call probe.note(loss=...)"
            )
        self.note(**scalars if loss is None else {"loss": loss, **scalars})
        try:
            self.end_step()
        finally:
            # No other call comes before the next step, also where `log` raised and training goes on.
            self.begin_step(with_gradients=False)

    def note(self, **scalars: SupportsFloat) -> None:
        """Give figures to carry along with the step that comes next, such as its loss.

        Raises:
            CallError: one is no number.
        """
        for name, value in scalars.items():
            if not isinstance(value, SupportsFloat) or (isinstance(value, Tensor) and value.numel() != 1):
                raise CallError(f"{name} should be a number to carry along with the step, got {_in_words(value)}")
        if self._is_next_due:
            numbers = {name: value.detach() if isinstance(value, Tensor) else value for name, value in scalars.items()}
            self._noted |= {name: float(value) for name, value in numbers.items()}

    def attach(self, optimizer: Optimizer) -> "Attached":
        """Follow an optimizer: its steps are counted as it takes them, until what is returned is detached.

        Gradients are those from before the step, where the optimizer does not compute them itself from a closure. What
        changes steps by hooks of its own, such as `CircuitRates`, has to be there before, to be part of the step.

        Raises:
            CallError: it is no optimizer, or the probe is attached already.
        """
        if not isinstance(optimizer, Optimizer):
            raise CallError(f"expected a torch.optim.Optimizer to attach the probe to, got {type(optimizer).__name__}")
        if self._attached is not None:
            raise CallError("the probe is attached to an optimizer already: detach it first")
        self._attached = Attached(self, optimizer, self._detached)
        return self._attached

    def begin_step(self, *, with_gradients: bool = True) -> None:
        """Say that a step is about to be taken, in loops of a kind of their own; `end_step` follows it.

        Args:
            with_gradients: whether its gradients are there now; else they are read at its end.
        """
        if self._is_next_due:
            self._before = copied(self._run.model.factors())
            self._gradients = copied(self._run.model.gradients()) if with_gradients else None

    def end_step(self) -> None:
        """Say that the step has been taken; it is counted, and logged if it is due.

        Raises:
            CallError: it is due, and was not begun.
            QkovError: the weights cannot be read.
        """
        self.steps += 1
        is_due, self._is_next_due = self._is_next_due, self._is_due(self.steps + 1)
        if is_due:
            self._look()

    def add_scalars(self, step: int, **scalars: float) -> None:
        """Give the rows of a step figures that came after it, if it is the one that was logged last."""
        if step == self._run.last_step:
            self._run.add_scalars(scalars)

    def table(self) -> pd.DataFrame:
        """Return all that was logged: a row for each step, layer, head and circuit."""
        return self._run.table()

    def _look(self) -> None:
        model = self._run.model
        before, gradients, scalars = self._before, self._gradients, self._noted
        self._before, self._gradients, self._noted = None, None, {}
        if before is None:
            raise CallError(f"step {self.steps} was ended and never begun: call begin_step() before it is taken")
        if not self._has_warned and not model.has_gradients():
            self._has_warned = True
            warnings.warn(
                f"no parameter has a gradient at step {self.steps}, so the preconditioner is not tested: call "
                f"probe.step() before the gradients are set to zero",
                stacklevel=4,
            )
        figures = model.step_figures(before, model.gradients() if gradients is None else gradients)
        self._run.look(self.steps, figures, scalars)

    def _detached(self) -> None:
        self._attached = None
        self.begin_step(with_gradients=False)


class Attached:
    """A probe that follows an optimizer, until it is detached or the block of its `with` is left."""

    def __init__(self, probe: CircuitProbe, optimizer: Optimizer, at_end: Callable[[], None]) -> None:
        """Register the hooks."""
        self._probe, self._at_end = probe, at_end
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def detach(self) -> None:
        """Remove the hooks; again is no fault."""
        if self._hooks:
            for hook in self._hooks:
                hook.remove()
            self._hooks = []
            self._at_end()

    def __enter__(self) -> "Attached":
        """Follow the optimizer in the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Detach."""
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
    raise CallError(f"every should be a number from 1, some steps, or a function of the step, got {every!r}")


def _in_words(value: object) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
