"""The rows of a model in training, step by step: measured, stored and handed on."""

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
from .model import LiveModel, Place
from .store import LiveStore, MemoryStore

Log = Callable[[int, dict[str, float]], object]
StepFigures = dict[Place, dict[str, list[float]]]


class LiveRun:
    """The circuits of a model at the steps of its training at which it is told to look.

    Attributes:
        model: as it is read.
        last_step: that was looked at.
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
        """Look at the start.

        Raises:
            CallError: it is no model, the view or the directions do not fit it, or the folder holds another run.
            QkovError: the model's weights are not recognised, or cannot be read.
        """
        self.model = LiveModel(model, view, options)
        self._view, self._directions, self._log = view, directions, log
        self._name = type(model).__name__
        self._source = f"live: {self._name}"
        hashed = None if directions is None else {"name": directions.name, "hash": directions.fingerprint()}
        settings = {
            "reading": options.settings(),
            "directions": hashed,
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
        held = LayersInMemory.copied(self.model.layers().layers())
        now = self._at(start, held)
        reference: LayersInMemory | None = None
        self._reference: Opened | None = None
        if directions is None:
            step, reference = self._store.reference(held)
            self._reference = self._at(step, reference)
        # Measured before anything is written: a wrong call leaves no store behind.
        self._rows = self._measured(now, {})
        is_new = self._store.begin(reference)
        if self._store.dropped:
            dropped = self._store.dropped
            warnings.warn(
                f"{folder} goes on from step {start}: its later steps were deleted, {len(dropped)} of them, up to step "
                f"{dropped[-1]}",
                stacklevel=3,
            )
        self._last = now
        if is_new:
            self._store.write(start, self._rows)
            self._tell()

    def look(self, step: int, figures: StepFigures, scalars: dict[str, float]) -> None:
        """Measure the model as it is after a step.

        Args:
            step: its number.
            figures: of the step itself.
            scalars: to carry along, such as the loss.
        """
        layers = self.model.layers()
        rows = self._measured(self._at(step, LayersInMemory(layers.held, scalars)), figures)
        last = self._at(step, LayersInMemory.copied(layers.held))
        self._store.write(step, rows)
        # What comes next is compared with what is stored, whatever ended a step before it was.
        self._rows, self._last, self.last_step = rows, last, step
        self._tell()

    def add_scalars(self, scalars: dict[str, float]) -> None:
        """Give the rows of the last step figures that came later."""
        columns = {f"training_{name}": value for name, value in scalars.items()}
        self._rows = [row | columns for row in self._rows]
        self._store.write(self.last_step, self._rows)

    def table(self) -> pd.DataFrame:
        """Return all rows."""
        return self._store.table()

    def _at(self, step: int, layers: LayersInMemory) -> Opened:
        return Opened(Checkpoint(step, f"{self._name} at step {step}"), layers)

    def _measured(self, now: Opened, figures: StepFigures) -> list[dict[str, Any]]:
        rows = checkpoint_rows(now, self._last, self._reference, self._directions, self._view, self._source)
        missing: dict[str, Any] = dict.fromkeys(STEP_QUANTITIES)
        measured = []
        for row in rows:
            of_circuit = figures.get((row["stack"], row["layer"], row["circuit"]), {})
            measured.append(row | missing | {name: values[row["head"]] for name, values in of_circuit.items()})
        return measured

    def _tell(self) -> None:
        if self._log is not None:
            self._log(self.last_step, _record(self._rows))


def _record(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The figures of a step by one name each, without those that are missing."""
    record: dict[str, float] = {}
    for row in rows:
        stack = f"{row['stack'].replace(' ', '_')}." if row["stack"] else ""
        place = f"{stack}layer{row['layer']}.head{row['head']}"
        for name, value in row.items():
            if name in IDENTITY.names or name in LISTS or value is None or not math.isfinite(value):
                continue
            is_scalar = name.startswith("training_")
            key = name.replace("training_", "training/", 1) if is_scalar else f"{row['circuit']}.{name}/{place}"
            record[key] = float(value)
    return record
