"""Track circuits over training: measure every checkpoint of a run into a run store that can be resumed."""

import json
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Unpack

from ...circuits.architectures.mapping import Mapping
from ...circuits.checkpoints.runs import find_run
from ...circuits.errors import QkovError
from ...circuits.reading.options import ReadingKeywords, ReadingOptions, reading_options
from ...circuits.storage.address import place_of
from ...circuits.storage.lens import is_lens
from ...circuits.storage.places import LocalPlace
from .engines import Engine, demand_whole, engine_named
from .keeping import drop_all_but, folder_for_keeping
from .left_out import LeftOut
from .planning import Order, Plan, in_order
from .resuming import Source, demand_resumable
from .store import RunStore
from .sweep import Measurement
from .view import TaskDirections, View
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
        run: A folder of checkpoints, or one checkpoint: a path, an address that fsspec knows, or a hub id. Or
            `lens:NAME`, whose checkpoints are those that TransformerLens lists for a model.
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
    place = None if is_lens(run) else place_of(run)
    patterns = chosen_reading.patterns(step)
    # Absolute, because workers may be in other folders.
    found_run = find_run(
        place.path.absolute() if isinstance(place, LocalPlace) else run, revisions, patterns, chosen_reading.series
    )
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
    target, source = RunStore(store), Source.of(run)
    order = Order(target, source, found_run, settings, chosen_reading, view, directions, composition)
    begun = demand_resumable(target, source, settings)
    with folder_for_keeping(found_run.checkpoints) as kept_in:
        # A wrong call must not leave a store behind, so run.json is written once the first checkpoint is open.
        plan = Plan.of(order, begun, kept_in)
        plan.describe()
        sweep = _Sweep(chosen_engine, len(plan.checkpoints), progress, kept_in)
        while newly := sweep.run(plan.measurements()):
            holds_reference = begun is not None and plan.intended_reference == plan.reference_step
            plan.leave_out(newly, bool(sweep.measured or sweep.kept or holds_reference))
            plan.describe()
        if not sweep.measured and not sweep.kept:
            raise plan.nothing_usable()
        plan.describe()
    reasons = {step: plan.unusable[step].why for step in in_order(plan.unusable)}
    return Tracked(target, in_order(sweep.measured), in_order(sweep.kept), reasons)


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


def _as_json(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings as run.json returns them, for comparison."""
    return json.loads(json.dumps(settings))
