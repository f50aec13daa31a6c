"""The measurement of one checkpoint as a job that any process can do: it reads, measures and writes on its own."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...circuits.checkpoints.runs import Checkpoint
from ...circuits.checkpoints.steps.stated import stated_step
from ...circuits.live.lens_models import open_run_checkpoint
from ...circuits.reading.checkpoint import OpenCheckpoint
from ...circuits.reading.options import ReadingOptions
from ...circuits.weights.content import ContentRecorder
from .integrity.contents import content_columns
from .keeping import files_to_read
from .left_out import LeftOut, UnusableCheckpointError, blaming
from .measuring import checkpoint_rows, composition_columns
from .store import RunStore
from .view import Opened, TaskDirections, View


@dataclass
class OpenedLast:
    """The checkpoints opened last, so that a checkpoint which is measured, and then the previous one, is opened once.

    Attributes:
        options: How the checkpoints are read.
        kept_in: The folder in which what is read of remote checkpoints is kept; None to keep nothing.
        held: The open checkpoints by step.
    """

    options: ReadingOptions
    kept_in: Path | None = None
    held: dict[int | None, Opened] = field(default_factory=dict)

    def keep(self, steps: set[int | None]) -> None:
        """Close all checkpoints but those of some steps."""
        self.held = {step: opened for step, opened in self.held.items() if step in steps}

    def open(self, checkpoint: Checkpoint) -> Opened:
        """Return a checkpoint, which is opened unless it is open already.

        Raises:
            UnusableCheckpointError: The checkpoint cannot be opened.
        """
        if checkpoint.step not in self.held:
            with blaming(checkpoint):
                files = files_to_read(checkpoint, self.kept_in)
                weights = open_run_checkpoint(checkpoint, self.options, files)
                stated = stated_step(weights.file) if isinstance(weights, OpenCheckpoint) else None
                number = None if stated is None or stated.unit != checkpoint.unit else stated.number
                self.held[checkpoint.step] = Opened(checkpoint, weights, number)
        return self.held[checkpoint.step]


@dataclass(frozen=True)
class Measured:
    """What a measurement did.

    Attributes:
        new: Whether anything was measured, or all was in the store.
        rows: The number of rows of each of its files, as the process that measured sees them in the store.
    """

    new: bool
    rows: tuple[int | None, ...]


@dataclass(frozen=True)
class Measurement:
    """What has to be measured of one checkpoint, with everything that the measurement needs.

    Attributes:
        store: The store to which the rows are written.
        source: The name of the run.
        checkpoint: The checkpoint to measure.
        before: The previous checkpoint; None at the first.
        reference: The checkpoint with which it is compared; None if there is none.
        directions: The directions with which it is compared, in place of a reference.
        options: How the checkpoints are read.
        view: The basis and the rotary offset.
        key: A text that states what the rows are made from.
        composition_key: The same for the composition scores; None if they are not measured.
        kept_in: The folder in which what is read of remote checkpoints is kept; None to keep nothing.
    """

    store: RunStore
    source: str
    checkpoint: Checkpoint
    before: Checkpoint | None
    reference: Checkpoint | None
    directions: TaskDirections | None
    options: ReadingOptions
    view: View
    key: str
    composition_key: str | None
    kept_in: Path | None = None

    @property
    def step(self) -> int | None:
        """The step of training; None if it is not known."""
        return self.checkpoint.step

    @property
    def needed(self) -> set[int | None]:
        """The steps of the checkpoints that the measurement reads."""
        checkpoints = (self.checkpoint, self.before, self.reference)
        return {checkpoint.step for checkpoint in checkpoints if checkpoint is not None}

    def is_done(self) -> bool:
        """Return whether the store holds everything that is to be measured."""
        return self._has_rows() and self._has_composition()

    def rows_in_store(self) -> tuple[int | None, ...]:
        """Return the number of rows of each file that belongs to the measurement; None for one that is not there."""
        files = [(self.store.path(self.step), self.key), (self.store.contents_path(self.step), self.key)]
        if self.composition_key is not None:
            files.append((self.store.composition_path(self.step), self.composition_key))
        return tuple(self.store.rows_in(path, key) for path, key in files)

    def run(self, opened: OpenedLast | None = None) -> Measured | LeftOut:
        """Measure what the store does not hold; another sweep may have measured it meanwhile.

        Args:
            opened: The checkpoints that are open already.

        Returns:
            What was measured; or the checkpoint that cannot be read or does not agree with the others, which may be the
            previous one or the reference.

        Raises:
            CallError: The store cannot be written to.
        """
        opened = OpenedLast(self.options, self.kept_in) if opened is None else opened
        opened.keep(self.needed)
        missing = {"rows": not self._has_rows(), "composition": not self._has_composition()}
        rows, contents, composition = [], {}, {}
        try:
            with blaming(self.checkpoint):
                if missing["rows"]:
                    rows, contents = self._rows(opened)
                if missing["composition"]:
                    composition = composition_columns(opened.open(self.checkpoint), self.view, self.source)
        except UnusableCheckpointError as error:
            return error.left_out
        if missing["rows"]:
            self.store.write_contents(self.step, self.key, contents)
            self.store.write(self.step, self.key, rows)
        if missing["composition"] and self.composition_key is not None:
            self.store.write_composition(self.step, self.composition_key, composition)
        return Measured(any(missing.values()), self.rows_in_store())

    def _rows(self, opened: OpenedLast) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        # The reference first: if it cannot be opened, nothing else needs to be read.
        reference = None if self.reference is None else opened.open(self.reference)
        current = opened.open(self.checkpoint)
        before = None if self.before is None else opened.open(self.before)
        recorder = ContentRecorder(current.weights)
        rows = checkpoint_rows(
            replace(current, weights=recorder), before, reference, self.directions, self.view, self.source
        )
        return rows, content_columns(recorder.contents.values(), self.step, self.source)

    def _has_rows(self) -> bool:
        return self.store.is_done(self.store.path(self.step), self.key)

    def _has_composition(self) -> bool:
        key = self.composition_key
        return key is None or self.store.is_done(self.store.composition_path(self.step), key)
