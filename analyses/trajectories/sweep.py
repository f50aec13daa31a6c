"""The measurement of one checkpoint as a job that any process can do: it reads, measures and writes by itself."""

from dataclasses import dataclass, field
from pathlib import Path

from ...circuits.checkpoints.runs import Checkpoint
from ...circuits.reading.checkpoint import open_checkpoint
from ...circuits.reading.options import ReadingOptions
from .keeping import files_to_read
from .measuring import checkpoint_rows, composition_columns
from .store import RunStore
from .view import Opened, TaskDirections, View


@dataclass
class OpenedLast:
    """The checkpoints opened last, so that one that serves as itself, and then as the one before, is opened once.

    Attributes:
        options: how they are read.
        kept_in: the folder for what is read of checkpoints at a distance, where it is kept.
        held: those that are open, by their steps.
    """

    options: ReadingOptions
    kept_in: Path | None = None
    held: dict[int, Opened] = field(default_factory=dict)

    def keep(self, steps: set[int]) -> None:
        """Let go of all others."""
        self.held = {step: opened for step, opened in self.held.items() if step in steps}

    def open(self, checkpoint: Checkpoint) -> Opened:
        """Return a checkpoint, opened now or before."""
        if checkpoint.step not in self.held:
            files = files_to_read(checkpoint, self.kept_in)
            self.held[checkpoint.step] = Opened(checkpoint, open_checkpoint(files, self.options))
        return self.held[checkpoint.step]


@dataclass(frozen=True)
class Measurement:
    """What has to be measured of one checkpoint, and all that it takes.

    Attributes:
        store: where the figures go.
        source: the run.
        checkpoint: to be measured.
        before: the checkpoint before it.
        reference: the checkpoint that it is compared with.
        directions: what it is compared with in place of a checkpoint.
        options: how the checkpoints are read.
        view: basis and rotary offset.
        key: of what the figures are made from.
        composition_key: likewise of the composition scores; None where they are not wanted.
        kept_in: the folder for what is read of checkpoints at a distance, where it is kept.
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
    def step(self) -> int:
        """Of training."""
        return self.checkpoint.step

    @property
    def needed(self) -> set[int]:
        """The steps of the checkpoints that are read for it."""
        return {each.step for each in (self.checkpoint, self.before, self.reference) if each is not None}

    def is_done(self) -> bool:
        """Say whether the store holds all that is wanted."""
        return self._has_figures() and self._has_composition()

    def run(self, opened: OpenedLast | None = None) -> bool:
        """Measure what the store does not hold, which another sweep may have measured meanwhile; say whether any was.

        Raises:
            CallError: the view is not possible.
            QkovError: a checkpoint cannot be read, or does not agree with the others.
        """
        opened = OpenedLast(self.options, self.kept_in) if opened is None else opened
        opened.keep(self.needed)
        wanted = {"figures": not self._has_figures(), "composition": not self._has_composition()}
        if wanted["figures"]:
            rows = checkpoint_rows(
                opened.open(self.checkpoint),
                None if self.before is None else opened.open(self.before),
                None if self.reference is None else opened.open(self.reference),
                self.directions,
                self.view,
                self.source,
            )
            self.store.write(self.step, self.key, rows)
        if wanted["composition"] and self.composition_key is not None:
            columns = composition_columns(opened.open(self.checkpoint), self.view, self.source)
            self.store.write_composition(self.step, self.composition_key, columns)
        return any(wanted.values())

    def _has_figures(self) -> bool:
        return self.store.is_done(self.store.path(self.step), self.key)

    def _has_composition(self) -> bool:
        key = self.composition_key
        return key is None or self.store.is_done(self.store.composition_path(self.step), key)
