"""Track circuits over training: measure every checkpoint of a run into a run store that can be resumed."""

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Unpack

from ...circuits.architectures.mapping import Mapping
from ...circuits.checkpoints.runs import Checkpoint, find_run
from ...circuits.errors import CallError, QkovError
from ...circuits.reading.checkpoint import OpenCheckpoint
from ...circuits.reading.options import ReadingKeywords, ReadingOptions, reading_options
from ...circuits.storage.address import place_of
from ...circuits.storage.places import LocalPlace
from ..versions import versions
from .engines import Engine, demand_whole, engine_named
from .keeping import drop_all_but, folder_for_keeping
from .left_out import LeftOut, UnusableCheckpointError, blaming, left_out_for
from .resuming import Source, demand_resumable
from .store import RunStore
from .sweep import Measurement, OpenedLast
from .view import Opened, TaskDirections, View
from .worker_processes import WorkerLostError

__all__ = ["TaskDirections", "Tracked", "track"]


@dataclass(frozen=True)
class Tracked:
    """What a call of `track` did.

    Attributes:
        store: The run store.
        measured: The steps that were measured by this call; None stands for the step of a single checkpoint that is not
            known.
        kept: The steps that the store held already.
        unusable: Why checkpoints that cannot be read, or that do not agree with the others, are left out, by step.
    """

    store: RunStore
    measured: list[int | None]
    kept: list[int | None]
    unusable: dict[int | None, str] = field(default_factory=dict)


def track(
    run: Path | str,
    store: Path | str,
    *,
    basis: str = "raw",
    rotary_offset: int = 0,
    composition: bool = False,
    engine: str = "processes",
    workers: int | None = None,
    address: str | None = None,
    revisions: str | None = None,
    step: str | Sequence[str] | None = None,
    directions: TaskDirections | None = None,
    progress: Callable[[int, int, int | None, bool], None] | None = None,
    options: ReadingOptions | Mapping | None = None,
    **reading: Unpack[ReadingKeywords],
) -> Tracked:
    """Measure W_QK and W_OV of every checkpoint of a run, and write the run store.

    Every row holds the quantities of `measure` for one layer, head and circuit, the change since the previous
    checkpoint (`motion`), and scale and cosine along a reference: the task's directions if they are given, otherwise
    the checkpoint that was the run's last when the store was begun (the last before it that can be read, as long as it
    cannot). For heads that share keys and values, Omega's
    rates, the imbalance and the agreement of Omega with the exact operator are those of the group. Rows of W_QK of
    rotary models also hold its norm at a series of offsets.

    A checkpoint that cannot be read, or whose layers or shapes are not those of the reference, is left out with the
    reason, and the next one is compared with the last one that can be read; a later call tries it again.

    A step that the store holds already, made from the same files with the same settings by the same version, is kept,
    and so is one whose file the run no longer holds (run.json names it). Each step is written whole, so a sweep that is
    stopped at any point loses at most the steps it was working on, and the same call resumes it. Several sweeps may
    work on one store. What an engine changes in this process as it works (environment variables, loggers, signal
    handlers, numbers of threads) is as before when the call ends.

    Args:
        run: A folder of checkpoints, or one checkpoint: a path, an address that fsspec knows, or a hub id.
        store: The folder of the run store, which is created if it is missing.
        basis: raw, folded or folded_centred.
        rotary_offset: Query position minus key position, for W_QK of layers with rotary positions.
        composition: Whether to measure the composition scores of all pairs of heads as well.
        engine: What does the work: processes (of this machine), dask or ray.
        workers: The number of workers, each with one thread; by default one, or all that the cluster at the address
            has. One worker of the engine processes is this process itself.
        address: The address of a Dask or Ray cluster; by default one is started on this machine.
        revisions: A pattern for the revisions of a model on the hub that are its checkpoints, such as `step*`.
        step: Where the step is in unusual names, such as `A_1_1_{step}.pt`, or several such patterns. `{step}` stands
            for the step, `*` for any text, `{layer}` and `{head}` for numbers where one step is spread over several
            files; `NAME=STEP` states the step of one name.
        directions: The directions with which circuits are compared, in place of the last checkpoint.
        progress: Called after each step with the number of steps done, the number of all steps, the step, and whether
            it was measured by this call.
        options: How to read the checkpoints, as one object. A Mapping stands for `ReadingOptions(mapping=...)`.
        **reading: The same as keywords: any field of `ReadingOptions`.

    Returns:
        The store, which steps were measured, which were kept, and which checkpoints were left out.

    Raises:
        CallError: The run does not exist, the engine, basis or offset is not possible, or the store belongs to another
            run or was made with other settings.
        QkovError: No checkpoint can be measured, the reference of the store can no longer be read, the cluster cannot
            be reached, or a worker was lost or does not share the run and the store with this process.
    """
    view = View.of(basis, rotary_offset)
    chosen_engine = engine_named(engine, workers, address)
    chosen_reading = reading_options(options, reading)
    place = place_of(run)
    patterns = chosen_reading.patterns(step)
    # Absolute, because workers may be in other folders.
    found_run = find_run(
        place.path.absolute() if isinstance(place, LocalPlace) else run, revisions, patterns, chosen_reading.series
    )
    target, source = RunStore(store), Source.of(run)
    settings = _as_json(
        {
            "reading": chosen_reading.settings(),
            "revisions": revisions,
            **({"step": patterns} if patterns else {}),
            "directions": None if directions is None else {"name": directions.name, "hash": directions.fingerprint()},
            "basis": basis,
            "rotary_offset": rotary_offset,
        }
    )
    begun = demand_resumable(target, source, settings)
    pinned = None if begun is None else begun.get("reference_step")
    # The last of the run when the store was begun; while it cannot be read, the last before it that can be stands in.
    intended = None if begun is None else begun.get("intended_reference", pinned)
    unusable: dict[int | None, LeftOut] = {}
    checkpoints = found_run.checkpoints
    with folder_for_keeping(checkpoints) as kept_in:
        opening = OpenedLast(chosen_reading, kept_in)
        # Opening the first checkpoint before run.json is written keeps a wrong call from leaving a store behind.
        first = _first_usable(checkpoints, opening, unusable, view)
        recognised, skipped = first.weights.recognised, first.weights.skipped
        if len(checkpoints) == 1 and isinstance(first.weights, OpenCheckpoint):
            checkpoints = [checkpoints[0].stated_by(first.weights.file)]
        _demand_same_kind_of_steps(target, checkpoints)
        if begun is None and directions is None:
            intended = checkpoints[-1].step
        if begun is None or intended != pinned:
            pinned = _last_usable(checkpoints, intended, opening, unusable)
        opening.keep(set())
        if pinned is not None and pinned not in {checkpoint.step for checkpoint in checkpoints}:
            raise CallError(
                f"{target.folder} compares circuits with step {pinned}, which {source.name} no longer holds; "
                f"give another --out, or delete it"
            )
        fingerprints = _fingerprints(checkpoints, unusable)

        def describe(reference_step: int | None) -> None:
            names = {checkpoint.step: checkpoint.name for checkpoint in checkpoints}
            target.describe(
                {
                    "source": source.name,
                    "source_identity": source.identity,
                    "settings": settings,
                    "reference_step": reference_step,
                    "intended_reference": intended,
                    "recognised": recognised,
                    "skipped": skipped,
                    "left_out": found_run.left_out | {names[step]: left.why for step, left in unusable.items()},
                    "notes": found_run.notes,
                    "unit": checkpoints[0].unit,
                    "versions": versions(),
                    "checkpoints": [
                        {
                            "step": checkpoint.step,
                            "step_origin": checkpoint.step_origin,
                            "uri": checkpoint.address,
                            "fingerprint": fingerprints.get(checkpoint.step),
                        }
                        for checkpoint in checkpoints
                    ],
                    "no_longer_there": _sorted(set(target.steps()) - set(names)),
                }
            )

        def measurements(reference_step: int | None) -> list[Measurement]:
            usable = [checkpoint for checkpoint in checkpoints if checkpoint.step not in unusable]
            reference = next((each for each in usable if each.step is not None and each.step == reference_step), None)
            common = {"settings": settings, "qkov": version("qkov")}
            planned = []
            for before, checkpoint in zip([None, *usable], usable, strict=False):
                made_from = common | {"checkpoint": fingerprints[checkpoint.step]}
                key = made_from | {
                    "previous": None if before is None else [before.step, fingerprints[before.step]],
                    "reference": None if reference is None else [reference.step, fingerprints[reference.step]],
                }
                planned.append(
                    Measurement(
                        store=RunStore(target.folder.absolute()),
                        source=source.name,
                        checkpoint=checkpoint,
                        before=before,
                        reference=reference,
                        directions=directions,
                        options=chosen_reading,
                        view=view,
                        key=json.dumps(key, sort_keys=True),
                        composition_key=json.dumps(made_from, sort_keys=True) if composition else None,
                        kept_in=kept_in,
                    )
                )
            return planned

        describe(pinned)
        sweep = _Sweep(chosen_engine, len(checkpoints), progress, kept_in)
        while True:
            newly = sweep.run(measurements(pinned))
            if not newly:
                break
            unusable |= newly
            if pinned is not None and pinned in newly:
                if sweep.measured or sweep.kept or (begun is not None and intended == pinned):
                    raise QkovError(
                        f"{target.folder} compares circuits with step {pinned}, which cannot be read any more "
                        f"({newly[pinned].why}); restore it, or give another --out"
                    )
                pinned = _last_usable(checkpoints, intended, opening, unusable)
                opening.keep(set())
            describe(pinned)
        if not sweep.measured and not sweep.kept:
            raise _none_usable(checkpoints, unusable)
        describe(pinned)
    return Tracked(
        target, _sorted(sweep.measured), _sorted(sweep.kept), {step: unusable[step].why for step in _sorted(unusable)}
    )


class _Sweep:
    """The measurements of one call, which may take several rounds: each finds checkpoints that cannot be measured.

    Attributes:
        measured: The steps that were measured.
        kept: The steps that the store held already.
    """

    def __init__(
        self,
        engine: Engine,
        total: int,
        progress: Callable[[int, int, int | None, bool], None] | None,
        kept_in: Path | None,
    ) -> None:
        self._engine, self._total, self._progress, self._kept_in = engine, total, progress, kept_in
        self.measured: set[int | None] = set()
        self.kept: set[int | None] = set()

    def run(self, measurements: list[Measurement]) -> dict[int | None, LeftOut]:
        """Do what is not done yet, and return the checkpoints that turned out to be unusable, by step."""
        missing = {}
        for measurement in measurements:
            if not measurement.is_done():
                missing[measurement.step] = measurement
            elif measurement.step not in self.measured | self.kept:
                self._note(measurement.step, new=False)
        unusable: dict[int | None, LeftOut] = {}
        reference = measurements[0].reference if measurements else None
        try:
            with closing(self._engine.run(list(missing.values()))) as outcomes:
                for step, outcome in outcomes:
                    if isinstance(outcome, LeftOut):
                        # What a checkpoint's own measurement says of it goes before what the next one says.
                        if outcome.step == step or outcome.step not in unusable:
                            unusable[outcome.step] = outcome
                        if reference is not None and outcome.step == reference.step:
                            # Nothing can be measured without it.
                            break
                        continue
                    demand_whole(missing[step], outcome, self._engine.patience)
                    self._note(step, outcome.new)
                    del missing[step]
                    if self._kept_in is not None:
                        needed = set().union(*(measurement.needed for measurement in missing.values()))
                        drop_all_but(self._kept_in, needed)
        except WorkerLostError as error:
            done = sum(measurement.is_done() for measurement in measurements)
            raise QkovError(
                f"a worker was killed or ran out of memory: {done} of {self._total} checkpoints are measured and "
                f"remain in the store; run the same command again for the rest"
            ) from error
        return unusable

    def _note(self, step: int | None, new: bool) -> None:
        (self.measured if new else self.kept).add(step)
        if self._progress is not None:
            self._progress(len(self.measured) + len(self.kept), self._total, step, new)


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
    raise _none_usable(checkpoints, unusable)


def _last_usable(
    checkpoints: list[Checkpoint], last: int | None, opening: OpenedLast, unusable: dict[int | None, LeftOut]
) -> int | None:
    """Return the step of the last checkpoint up to a step that can be opened; None without a step."""
    if last is None:
        return None
    known = [checkpoint for checkpoint in checkpoints if checkpoint.step is not None and checkpoint.step <= last]
    return _first_usable(known[::-1], opening, unusable).checkpoint.step


def _none_usable(checkpoints: list[Checkpoint], unusable: dict[int | None, LeftOut]) -> QkovError:
    """Return the error that says that no checkpoint can be measured, with the reason of the first."""
    first, others = unusable[_sorted(unusable)[0]], len(checkpoints) - 1
    error = first.error()
    if others < 1:
        return error
    rest = f"the other {others} checkpoints" if others > 1 else "the other checkpoint"
    return type(error)(f"{error}; {rest} of the run cannot be measured either")


def _sorted(steps: Iterable[int | None]) -> list[int | None]:
    return sorted(steps, key=lambda step: -1 if step is None else step)


def _demand_same_kind_of_steps(store: RunStore, checkpoints: list[Checkpoint]) -> None:
    """Refuse a store of a checkpoint whose step was not known if the steps are known now, and the other way round."""
    are_known = {step is not None for step in store.steps()}
    if are_known - {checkpoint.step is not None for checkpoint in checkpoints}:
        was, now = ("known", "is not") if True in are_known else ("not known", "is")
        raise CallError(
            f"{store.folder} was made when the step of its checkpoint was {was}, and it {now} known now; give another "
            f"--out, or delete it"
        )


def _as_json(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings as run.json returns them, for comparison."""
    return json.loads(json.dumps(settings))
