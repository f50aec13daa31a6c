"""The rows of a model in training, step by step: measured, stored and passed on."""

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from ...analyses.trajectories.measuring import checkpoint_rows
from ...analyses.trajectories.store import IDENTITY, LISTS
from ...analyses.trajectories.view import Opened, TaskDirections, View
from ...analyses.versions import versions
from ...circuits.algebra.factor_steps import STEP_QUANTITIES
from ...circuits.checkpoints.runs import Checkpoint
from ...circuits.reading.options import ReadingOptions
from ...circuits.weights.source import LayersInMemory
from .model import CircuitKey, LiveModel
from .store import LiveStore, MemoryStore

Log = Callable[[int, dict[str, float]], object]
#: The quantities of a step by circuit and name, one value for each head.
StepQuantities = dict[CircuitKey, dict[str, list[float]]]


class LiveRun:
    """The circuits of a model at those steps of its training at which it is measured.

    Attributes:
        model: The model as it is read.
        last_step: The step that was measured last.
    """

    def __init__(
        self,
        model: Any,
        options: ReadingOptions,
        view: View,
        directions: TaskDirections | None,
        folder: Path | str | None,
        log: Log | None,
        start: int,
        resume: bool,
    ) -> None:
        """Measure the start.

        Args:
            model: Any model that `open_model` opens.
            options: How to read the model.
            view: The basis and the rotary offset.
            directions: What the circuits are compared with; by default the weights at the start.
            folder: The folder of the run store; by default the rows are held in memory.
            log: Called after each logged step with the step and its values by name.
            start: The number of steps that the model has been trained already.
            resume: Whether to resume a store that is in the folder.

        Raises:
            CallError: The model is not a model, the view or the directions do not fit it, or the folder holds another
                run.
            QkovError: The model's weights are not recognised, or cannot be read.
        """
        self.model = LiveModel(model, view, options)
        self._view, self._directions, self._log = view, directions, log
        self._name = type(model).__name__
        self._source = f"live: {self._name}"
        identity = None if directions is None else {"name": directions.name, "hash": directions.fingerprint()}
        settings = {
            "reading": options.settings(),
            "directions": identity,
            "basis": view.basis,
            "rotary_offset": view.rotary_offset,
        }
        description = {
            "live": True,
            "source": self._source,
            "settings": settings,
            "reference_step": start if directions is None else None,
            "recognised": self.model.recognised,
            "skipped": self.model.skipped,
            "left_out": {},
            "untested": [vars(untested) for untested in self.model.untested],
            "versions": versions(),
            "checkpoints": [],
            "no_longer_there": [],
        }
        self._store = MemoryStore(start) if folder is None else LiveStore(folder, description, start, resume)
        self.last_step = start
        self._last: Opened | None = None
        layers = LayersInMemory.copied(self.model.layers().layers())
        current = self._at(start, layers)
        reference: LayersInMemory | None = None
        self._reference: Opened | None = None
        if directions is None:
            step, reference = self._store.reference(layers)
            self._reference = self._at(step, reference)
        # Measured before anything is written, so that a wrong call leaves no store behind.
        self._rows = self._measured(current, {})
        is_new = self._store.begin(reference)
        if self._store.dropped:
            dropped = self._store.dropped
            warnings.warn(
                f"{folder} resumes from step {start}: its later steps were deleted, {len(dropped)} of them, up to step "
                f"{dropped[-1]}",
                stacklevel=3,
            )
        self._last = current
        if is_new:
            self._store.write(start, self._rows)
            self._pass_on()

    def measure(self, step: int, quantities: StepQuantities, scalars: dict[str, float]) -> None:
        """Measure the model after a step, store the rows and pass them on.

        Args:
            step: The number of the step.
            quantities: The quantities of the step itself.
            scalars: Values to store with the step, such as the loss.

        Raises:
            QkovError: The weights cannot be read, or the store cannot be written.
        """
        layers = self.model.layers()
        rows = self._measured(self._at(step, LayersInMemory(layers.held, scalars)), quantities)
        last = self._at(step, LayersInMemory.copied(layers.held))
        self._store.write(step, rows)
        # Set only once the step is stored, so that the next step is compared with a stored one.
        self._rows, self._last, self.last_step = rows, last, step
        self._pass_on()

    def add_scalars(self, scalars: dict[str, float]) -> None:
        """Add values that arrived later to the rows of the last step."""
        columns = {f"training_{name}": value for name, value in scalars.items()}
        self._rows = [row | columns for row in self._rows]
        self._store.write(self.last_step, self._rows)

    def table(self) -> pd.DataFrame:
        """Return all rows."""
        return self._store.table()

    def _at(self, step: int, layers: LayersInMemory) -> Opened:
        return Opened(Checkpoint(step, f"{self._name} at step {step}"), layers)

    def _measured(self, current: Opened, quantities: StepQuantities) -> list[dict[str, Any]]:
        rows = checkpoint_rows(current, self._last, self._reference, self._directions, self._view, self._source)
        missing: dict[str, Any] = dict.fromkeys(STEP_QUANTITIES)
        measured = []
        for row in rows:
            of_circuit = quantities.get((row["stack"], row["layer"], row["circuit"]), {})
            measured.append(row | missing | {name: values[row["head"]] for name, values in of_circuit.items()})
        return measured

    def _pass_on(self) -> None:
        if self._log is not None:
            self._log(self.last_step, _record(self._rows))


def _record(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The values of a step under one name each, without those that are missing."""
    record: dict[str, float] = {}
    for row in rows:
        stack = f"{row['stack'].replace(' ', '_')}." if row["stack"] else ""
        head = f"{stack}layer{row['layer']}.head{row['head']}"
        for name, value in row.items():
            if name in IDENTITY.names or name in LISTS or value is None or not math.isfinite(value):
                continue
            is_scalar = name.startswith("training_")
            key = name.replace("training_", "training/", 1) if is_scalar else f"{row['circuit']}.{name}/{head}"
            record[key] = float(value)
    return record
