"""What a sweep is going to do: which checkpoints it can read, with which one it compares them, and what it measures."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ...circuits.checkpoints.runs import Checkpoint, Run
from ...circuits.errors import CallError, QkovError
from ...circuits.reading.checkpoint import OpenCheckpoint
from ...circuits.reading.options import ReadingOptions
from ..versions import versions
from .left_out import LeftOut, UnusableCheckpointError, blaming, left_out_for
from .resuming import Source
from .store import RunStore
from .sweep import Measurement, OpenedLast
from .view import Opened, TaskDirections, View


@dataclass(frozen=True)
class Order:
    """What a call of `track` asks for.

    Attributes:
        store: The store to which the sweep writes.
        source: The run, as the store names it.
        run: The checkpoints that were found.
        settings: The settings of the call, as run.json returns them.
        options: How the checkpoints are read.
        view: The basis and the rotary offset.
        directions: The directions with which circuits are compared, in place of a checkpoint.
        composition: Whether the composition scores are measured as well.
    """

    store: RunStore
    source: Source
    run: Run
    settings: dict[str, Any]
    options: ReadingOptions
    view: View
    directions: TaskDirections | None = None
    composition: bool = False


@dataclass
class Plan:
    """What of an order can be done, as far as it is known: checkpoints may turn out to be unusable on the way.

    Attributes:
        order: What the call asks for.
        checkpoints: The checkpoints of the run, with their steps.
        unusable: The checkpoints that cannot be measured, by step.
        intended_reference: The step of the run's last checkpoint when the store was begun; None with directions.
        reference_step: The step of the checkpoint with which the others are compared: the intended one, or, as long as
            that cannot be read, the last before it that can be.
        recognition: What the first checkpoint that can be read was recognised as, and what is unknown or skipped in it.
        fingerprints: What the files of the checkpoints are, by step.
        kept_in: The folder in which what is read of remote checkpoints is kept; None to keep nothing.
    """

    order: Order
    checkpoints: list[Checkpoint]
    unusable: dict[int | None, LeftOut]
    intended_reference: int | None
    reference_step: int | None
    recognition: dict[str, Any]
    fingerprints: dict[int | None, str]
    kept_in: Path | None

    @classmethod
    def of(cls, order: Order, begun: dict[str, Any] | None, kept_in: Path | None) -> "Plan":
        """Open as many checkpoints as the plan needs, and return it. Nothing is written.

        Args:
            order: What the call asks for.
            begun: The description of the store if the sweep goes on with one; None if it begins one.
            kept_in: The folder in which what is read of remote checkpoints is kept; None to keep nothing.

        Raises:
            CallError: The view is not possible, or the reference of the store is no longer in the run.
            QkovError: No checkpoint can be opened.
        """
        opening = OpenedLast(order.options, kept_in)
        unusable: dict[int | None, LeftOut] = {}
        checkpoints = order.run.checkpoints
        weights = _first_usable(checkpoints, opening, unusable, order.view).weights
        if len(checkpoints) == 1 and isinstance(weights, OpenCheckpoint):
            checkpoints = [checkpoints[0].stated_by(weights.file)]
        _demand_same_kind_of_steps(order.store, checkpoints)
        reference = None if begun is None else begun.get("reference_step")
        intended = None if begun is None else begun.get("intended_reference", reference)
        if begun is None and order.directions is None:
            intended = checkpoints[-1].step
        if begun is None or intended != reference:
            reference = _last_usable(checkpoints, intended, opening, unusable)
        if reference is not None and reference not in {checkpoint.step for checkpoint in checkpoints}:
            raise CallError(
                f"{order.store.folder} compares circuits with step {reference}, which {order.source.name} no longer "
                f"holds; give another --out, or delete it"
            )
        recognition = {
            "recognised": weights.recognised,
            "skipped": dict(weights.skipped),
            "doubts": dict(weights.doubts),
        }
        fingerprints = _fingerprints(checkpoints, unusable)
        return cls(order, checkpoints, unusable, intended, reference, recognition, fingerprints, kept_in)

    def describe(self) -> None:
        """Write what is known of the run into the store's run.json."""
        order = self.order
        names = {checkpoint.step: checkpoint.name for checkpoint in self.checkpoints}
        order.store.describe(
            {
                "source": order.source.name,
                "source_identity": order.source.identity,
                "settings": order.settings,
                "reference_step": self.reference_step,
                "intended_reference": self.intended_reference,
                **self.recognition,
                "left_out": order.run.left_out | {names[step]: left.why for step, left in self.unusable.items()},
                "notes": order.run.notes,
                "unit": self.checkpoints[0].unit,
                "versions": versions(),
                "checkpoints": [
                    {
                        "step": checkpoint.step,
                        "step_origin": checkpoint.step_origin,
                        "uri": checkpoint.address,
                        "fingerprint": self.fingerprints.get(checkpoint.step),
                    }
                    for checkpoint in self.checkpoints
                ],
                "no_longer_there": in_order(set(order.store.steps()) - set(names)),
            }
        )

    def measurements(self) -> list[Measurement]:
        """Return what is to be measured of each usable checkpoint, whether or not the store holds it already."""
        order = self.order
        usable = [checkpoint for checkpoint in self.checkpoints if checkpoint.step not in self.unusable]
        reference = next((each for each in usable if each.step is not None and each.step == self.reference_step), None)
        common = {"settings": order.settings, "qkov": version("qkov")}
        planned = []
        for before, checkpoint in zip([None, *usable], usable, strict=False):
            made_from = common | {"checkpoint": self.fingerprints[checkpoint.step]}
            key = made_from | {"previous": self._identified(before), "reference": self._identified(reference)}
            planned.append(
                Measurement(
                    # Absolute, because workers may be in other folders.
                    store=RunStore(order.store.folder.absolute()),
                    source=order.source.name,
                    checkpoint=checkpoint,
                    before=before,
                    reference=reference,
                    directions=order.directions,
                    options=order.options,
                    view=order.view,
                    key=json.dumps(key, sort_keys=True),
                    composition_key=json.dumps(made_from, sort_keys=True) if order.composition else None,
                    kept_in=self.kept_in,
                )
            )
        return planned

    def leave_out(self, newly: dict[int | None, LeftOut], is_fixed: bool) -> None:
        """Leave out checkpoints that turned out to be unusable, and choose another reference if it is among them.

        Args:
            newly: The checkpoints, by step.
            is_fixed: Whether rows were compared with the reference already, so that it cannot be another.

        Raises:
            QkovError: The reference is among them and fixed, or no checkpoint can be opened any more.
        """
        self.unusable |= newly
        reference = self.reference_step
        if reference is None or reference not in newly:
            return
        if is_fixed:
            raise QkovError(
                f"{self.order.store.folder} compares circuits with step {reference}, which cannot be read any more "
                f"({newly[reference].why}); restore it, or give another --out"
            )
        opening = OpenedLast(self.order.options, self.kept_in)
        self.reference_step = _last_usable(self.checkpoints, self.intended_reference, opening, self.unusable)

    def nothing_usable(self) -> QkovError:
        """Return the error that says that no checkpoint can be measured."""
        return _nothing_usable(self.checkpoints, self.unusable)

    def _identified(self, checkpoint: Checkpoint | None) -> list[int | str | None] | None:
        return None if checkpoint is None else [checkpoint.step, self.fingerprints[checkpoint.step]]


def in_order(steps: Iterable[int | None]) -> list[int | None]:
    """Return steps in order; one that is not known comes first."""
    return sorted(steps, key=lambda step: -1 if step is None else step)


def _fingerprints(checkpoints: list[Checkpoint], unusable: dict[int | None, LeftOut]) -> dict[int | None, str]:
    """Return the fingerprints by step, and note the checkpoints whose files cannot be read."""
    fingerprints = {}
    for checkpoint in checkpoints:
        try:
            with blaming(checkpoint):
                fingerprints[checkpoint.step] = checkpoint.fingerprint()
        except UnusableCheckpointError as error:
            unusable[checkpoint.step] = error.left_out
    return fingerprints


def _first_usable(
    checkpoints: list[Checkpoint], opening: OpenedLast, unusable: dict[int | None, LeftOut], view: View | None = None
) -> Opened:
    """Return the first checkpoint that can be opened, and note those that cannot.

    Args:
        checkpoints: The checkpoints, in the order in which they are tried.
        opening: Opens them.
        unusable: Where to note those that cannot be opened.
        view: A view that the checkpoint must have as well.

    Raises:
        CallError: A checkpoint can be opened but does not have the view.
        QkovError: No checkpoint can be opened.
    """
    for checkpoint in checkpoints:
        if checkpoint.step in unusable:
            continue
        try:
            opened = opening.open(checkpoint)
            if view is not None:
                view.demand_possible(opened.weights, opened.weights.address)
            return opened
        except CallError:
            raise
        except UnusableCheckpointError as error:
            unusable[checkpoint.step] = error.left_out
        except QkovError as error:
            unusable[checkpoint.step] = left_out_for(checkpoint, error)
    raise _nothing_usable(checkpoints, unusable)


def _last_usable(
    checkpoints: list[Checkpoint], last: int | None, opening: OpenedLast, unusable: dict[int | None, LeftOut]
) -> int | None:
    """Return the step of the last checkpoint up to a step that can be opened; None without a step."""
    if last is None:
        return None
    known = [checkpoint for checkpoint in checkpoints if checkpoint.step is not None and checkpoint.step <= last]
    return _first_usable(known[::-1], opening, unusable).checkpoint.step


def _nothing_usable(checkpoints: list[Checkpoint], unusable: dict[int | None, LeftOut]) -> QkovError:
    """Return the error that says that no checkpoint can be measured, with the reason of the first."""
    first, others = unusable[in_order(unusable)[0]], len(checkpoints) - 1
    error = first.error()
    if others < 1:
        return error
    rest = f"the other {others} checkpoints" if others > 1 else "the other checkpoint"
    return type(error)(f"{error}; {rest} of the run cannot be measured either")


def _demand_same_kind_of_steps(store: RunStore, checkpoints: list[Checkpoint]) -> None:
    """Refuse a store of a checkpoint whose step was not known if the steps are known now, and the other way round."""
    are_known = {step is not None for step in store.steps()}
    if are_known - {checkpoint.step is not None for checkpoint in checkpoints}:
        was, now = ("known", "is not") if True in are_known else ("not known", "is")
        raise CallError(
            f"{store.folder} was made when the step of its checkpoint was {was}, and it {now} known now; give another "
            f"--out, or delete it"
        )
