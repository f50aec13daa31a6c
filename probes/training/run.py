"""The rows of a model in training, step by step: measured, stored and passed on."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from ...analyses.trajectories.measuring import checkpoint_rows
from ...analyses.trajectories.view import Opened, TaskDirections, View
from ...analyses.versions import versions
from ...circuits.algebra.factor_steps import STEP_QUANTITIES
from ...circuits.checkpoints.runs import Checkpoint
from ...circuits.reading.options import ReadingOptions
from ...circuits.weights.layer_keys import LayerKey
from ...circuits.weights.source import LayersInMemory
from .adapter_changes import ADAPTER_QUANTITIES, AdapterChanges
from .history import History
from .log_filter import RowLog
from .model import MOVERS, CircuitKey, LiveModel
from .store import LiveStore, MemoryStore

#: The quantities of a step by circuit and name, one value for each head.
StepQuantities = dict[CircuitKey, dict[str, list[float]]]
#: Returns more of them, which others have measured.
HeadColumns = Callable[[], Mapping[CircuitKey, Mapping[str, list[float]]]]


class LiveRun:
    """The circuits of a model at those steps of its training at which it is measured.

    Attributes:
        model: The model as it is read.
        last_step: The step that was measured last.
        history: A few figures of the steps that were measured.
    """

    def __init__(
        self,
        model: LiveModel,
        options: ReadingOptions,
        view: View,
        directions: TaskDirections | None,
        folder: Path | str | None,
        log: RowLog | None,
        start: int | None,
        resume: bool,
    ) -> None:
        """Measure the start.

        Args:
            model: The model.
            options: How it is read.
            view: The basis and the rotary offset.
            directions: What the circuits are compared with; by default the weights at the start.
            folder: The folder of the run store; by default the rows are held in memory.
            log: What the rows of each logged step are passed on to.
            start: The number of steps that the model has been trained already; 0 for a new store if None.
            resume: Whether to resume a store that is in the folder.

        Raises:
            CallError: The directions or the heads to log do not fit the model, or the folder holds another run.
            QkovError: The model's weights cannot be read.
        """
        self.model = model
        self._view, self._directions, self._log = view, directions, log
        self._adapters = AdapterChanges(model, view)
        self.history = History()
        self._name = model.name
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
            "reference_step": (start or 0) if directions is None else None,
            "recognised": self.model.recognised,
            "skipped": self.model.skipped,
            "left_out": {},
            "untested": [vars(untested) for untested in self.model.untested],
            "versions": versions(),
            "checkpoints": [],
            "no_longer_there": [],
        }
        self._store = MemoryStore() if folder is None else LiveStore(folder, description, start, resume)
        start = start or 0
        self.last_step = start
        self._last: Opened | None = None
        layers = LayersInMemory.copied(self.model.layers().layers())
        current = self._at(start, layers)
        reference: LayersInMemory | None = None
        self._reference: Opened | None = None
        if directions is None:
            step, reference = self._store.reference(start, layers)
            self._reference = self._at(step, reference)
        # Measured before anything is written, so that a wrong call leaves no store behind.
        self._rows = self._measured(current, {}, {})
        if log is not None:
            log.demand_heads(self._rows)
        is_new = self._store.begin(start, reference, self._rows)
        for warning in self._store.warnings:
            warnings.warn(warning, stacklevel=3)
        self._last = current
        self.history.add(start, self._rows)
        if is_new:
            self._store.write(start, self._rows, {})
            self._pass_on()

    def measure(
        self,
        step: int,
        quantities: StepQuantities,
        movers: dict[CircuitKey, dict[str, Any]],
        scalars: dict[str, float],
    ) -> None:
        """Measure the model after a step, store the rows and pass them on.

        Args:
            step: The number of the step.
            quantities: The quantities of the step itself.
            movers: The columns `MOVERS` of each circuit.
            scalars: Values to store with the step, such as the loss.

        Raises:
            QkovError: The weights cannot be read, or the store cannot be written.
        """
        layers = self.model.layers()
        rows = self._measured(self._at(step, layers), quantities, movers)
        last = self._at(step, LayersInMemory.copied(layers.held))
        self._store.note_untested([vars(untested) for untested in self.model.untested])
        self._store.write(step, rows, scalars)
        # Set only once the step is stored, so that the next step is compared with a stored one.
        self._rows, self._last, self.last_step = _with_columns(rows, scalars), last, step
        self.history.add(step, self._rows)
        self._pass_on()

    def add_scalars(self, scalars: dict[str, float]) -> None:
        """Add values that arrived later to the rows of the last step."""
        self._rows = _with_columns(self._rows, scalars)
        self.history.add(self.last_step, self._rows)
        self._store.add_numbers(self.last_step, scalars)

    def note_failures(self, count: int, last: str) -> None:
        """Store how many measurements failed, and what the last failure was."""
        self._store.note_failures(count, last)

    def table(self) -> pd.DataFrame:
        """Return all rows."""
        return self._store.table()

    def _at(self, step: int, layers: LayersInMemory) -> Opened:
        return Opened(Checkpoint(step, f"{self._name} at step {step}"), layers)

    def _measured(
        self, current: Opened, quantities: StepQuantities, movers: dict[CircuitKey, dict[str, Any]]
    ) -> list[dict[str, Any]]:
        rows = [row for parts in self._comparable(current) for row in self._rows_of(*parts)]
        adapted = self._adapters.quantities(current.weights.layers())
        columns = dict.fromkeys(column for row in rows for column in row)
        more = dict.fromkeys(name for of_circuit in quantities.values() for name in of_circuit)
        known = (*columns, *STEP_QUANTITIES, *MOVERS, *(ADAPTER_QUANTITIES if adapted else ()), *more)
        missing: dict[str, Any] = dict.fromkeys(known)
        measured = []
        for row in rows:
            key = row["stack"], row["layer"], row["circuit"]
            of_circuit = quantities.get(key, {}) | adapted.get(key, {})
            of_head = {name: values[row["head"]] for name, values in of_circuit.items()}
            measured.append(missing | row | movers.get(key, {}) | of_head)
        return measured

    def _rows_of(self, current: Opened, last: Opened | None, reference: Opened | None) -> list[dict[str, Any]]:
        return checkpoint_rows(current, last, reference, self._directions, self._view, self._source)

    def _comparable(self, current: Opened) -> Iterator[tuple[Opened, Opened | None, Opened | None]]:
        """Yield the layers, those together that the step before has, and those that the reference has.

        Layers that were added to the model are compared with nothing, and removed ones are no longer there.
        """
        others = (self._last, self._reference)
        known = [set() if other is None else set(other.weights.layer_keys) for other in others]
        groups: dict[tuple[bool, ...], list[LayerKey]] = {}
        for key in current.weights.layer_keys:
            groups.setdefault(tuple(key in keys for keys in known), []).append(key)
        for (has_last, has_reference), keys in groups.items():
            last, reference = (
                _only(other, keys) if other is not None and is_there else None
                for other, is_there in zip(others, (has_last, has_reference), strict=True)
            )
            yield _only(current, keys), last, reference

    def _pass_on(self) -> None:
        if self._log is not None:
            self._log(self.last_step, self._rows)


def _with_columns(rows: list[dict[str, Any]], scalars: dict[str, float]) -> list[dict[str, Any]]:
    columns = {f"training_{name}": value for name, value in scalars.items()}
    return [row | columns for row in rows]


def _only(opened: Opened, keys: list[LayerKey]) -> Opened:
    """Return some of the layers of a step."""
    held = [weights for weights in opened.weights.layers() if (weights.stack, weights.layer) in keys]
    return Opened(opened.checkpoint, LayersInMemory(held, opened.weights.scalars))
