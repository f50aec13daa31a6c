"""The measurement of one checkpoint as a job that any process can do: it reads, measures and writes on its own."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from ...circuits.checkpoints.runs import Checkpoint
from ...circuits.checkpoints.steps.stated import stated_step
from ...circuits.reading.checkpoint import open_checkpoint
from ...circuits.reading.options import ReadingOptions
from ...circuits.weights.content import ContentRecorder
from .contents import content_columns
from .keeping import files_to_read
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
        """Return a checkpoint, which is opened unless it is open already."""
        if checkpoint.step not in self.held:
            files = files_to_read(checkpoint, self.kept_in)
            weights = open_checkpoint(files, self.options)
            stated = stated_step(weights.file)
            number = None if stated is None or stated.unit != checkpoint.unit else stated.number
            self.held[checkpoint.step] = Opened(checkpoint, weights, number)
        return self.held[checkpoint.step]


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

    def run(self, opened: OpenedLast | None = None) -> bool:
        """Measure what the store does not hold; another sweep may have measured it meanwhile.

        Args:
            opened: The checkpoints that are open already.

        Returns:
            Whether anything was measured.

        Raises:
            CallError: The view is not possible.
            QkovError: A checkpoint cannot be read, or does not agree with the others.
        """
        opened = OpenedLast(self.options, self.kept_in) if opened is None else opened
        opened.keep(self.needed)
        missing = {"rows": not self._has_rows(), "composition": not self._has_composition()}
        if missing["rows"]:
            current = opened.open(self.checkpoint)
            recorder = ContentRecorder(current.weights)
            rows = checkpoint_rows(
                replace(current, weights=recorder),
                None if self.before is None else opened.open(self.before),
                None if self.reference is None else opened.open(self.reference),
                self.directions,
                self.view,
                self.source,
            )
            columns = content_columns(recorder.contents.values(), self.step, self.source)
            self.store.write_contents(self.step, self.key, columns)
            self.store.write(self.step, self.key, rows)
        if missing["composition"] and self.composition_key is not None:
            columns = composition_columns(opened.open(self.checkpoint), self.view, self.source)
            self.store.write_composition(self.step, self.composition_key, columns)
        return any(missing.values())

    def _has_rows(self) -> bool:
        return self.store.is_done(self.store.path(self.step), self.key)

    def _has_composition(self) -> bool:
        key = self.composition_key
        return key is None or self.store.is_done(self.store.composition_path(self.step), key)
