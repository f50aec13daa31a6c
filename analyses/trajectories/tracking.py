"""Track circuits over training: measure every checkpoint of a run into a run store that can be resumed."""

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Unpack

from ...circuits.architectures.mapping import Mapping
from ...circuits.checkpoints.runs import Checkpoint, find_run
from ...circuits.errors import CallError, QkovError
from ...circuits.reading.checkpoint import open_checkpoint
from ...circuits.reading.options import ReadingKeywords, ReadingOptions, reading_options
from ...circuits.storage.address import place_of
from ...circuits.storage.places import LocalPlace
from ..versions import versions
from .engines import Engine, engine_named
from .keeping import drop_all_but, files_to_read, folder_for_keeping
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
    """

    store: RunStore
    measured: list[int | None]
    kept: list[int | None]


def track(
    run: Path | str,
    store: Path | str,
    *,
    basis: str = "raw",
    rotary_offset: int = 0,
    composition: bool = False,
    engine: str = "loky",
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
    the checkpoint that was the run's last when the store was begun. For heads that share keys and values, Omega's
    rates, the imbalance and the agreement of Omega with the exact operator are those of the group. Rows of W_QK of
    rotary models also hold its norm at a series of offsets.

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
        engine: What does the work: loky (processes of this machine), dask or ray.
        workers: The number of workers, each with one thread; by default one, or all that the cluster at the address
            has. With one worker, loky works in this process.
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
        The store, and which steps were measured and which were kept.

    Raises:
        CallError: The run does not exist, the engine, basis or offset is not possible, or the store belongs to another
            run or was made with other settings.
        QkovError: A checkpoint cannot be read, two of them have circuits of different shapes, the cluster cannot be
            reached, or a worker was lost.
    """
    view = View.of(basis, rotary_offset)
    chosen_engine = engine_named(engine, workers, address)
    chosen_reading = reading_options(options, reading)
    patterns = chosen_reading.patterns(step)
    found_run = find_run(run, revisions, patterns, chosen_reading.series)
    checkpoints = found_run.checkpoints
    target = RunStore(store)
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
    source = _source(run)
    fingerprints = [checkpoint.fingerprint() for checkpoint in checkpoints]
    with folder_for_keeping(checkpoints) as kept_in:
        # Opening the first checkpoint before run.json is written keeps a wrong call from leaving a store behind.
        first = open_checkpoint(files_to_read(checkpoints[0], kept_in), chosen_reading)
        view.demand_possible(first, first.file.address)
        checkpoints = [checkpoints[0].stated_by(first.file), *checkpoints[1:]]
        reference_step = _pinned_reference(target, source, settings, checkpoints)
        target.describe(
            {
                "source": source,
                "settings": settings,
                "reference_step": reference_step,
                "recognised": first.recognised,
                "skipped": first.skipped,
                "left_out": found_run.left_out,
                "notes": found_run.notes,
                "unit": checkpoints[0].unit,
                "versions": versions(),
                "checkpoints": [
                    {
                        "step": checkpoint.step,
                        "step_origin": checkpoint.step_origin,
                        "uri": checkpoint.address,
                        "fingerprint": fingerprint,
                    }
                    for checkpoint, fingerprint in zip(checkpoints, fingerprints, strict=True)
                ],
                "no_longer_there": _sorted(set(target.steps()) - {checkpoint.step for checkpoint in checkpoints}),
            }
        )
        reference = next((each for each in checkpoints if each.step is not None and each.step == reference_step), None)
        fingerprint_of = {checkpoint.step: each for checkpoint, each in zip(checkpoints, fingerprints, strict=True)}
        common = {"settings": settings, "qkov": version("qkov")}
        measurements = []
        for position, checkpoint in enumerate(checkpoints):
            before = checkpoints[position - 1] if position else None
            made_from = common | {"checkpoint": fingerprint_of[checkpoint.step]}
            key = made_from | {
                "previous": None if before is None else [before.step, fingerprint_of[before.step]],
                "reference": None if reference is None else [reference.step, fingerprint_of[reference.step]],
            }
            measurements.append(
                Measurement(
                    store=target,
                    source=source,
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
        return _measure(measurements, target, chosen_engine, progress, kept_in)


def _measure(
    measurements: list[Measurement],
    store: RunStore,
    engine: Engine,
    progress: Callable[[int, int, int | None, bool], None] | None,
    kept_in: Path | None,
) -> Tracked:
    measured: list[int | None] = []
    kept: list[int | None] = []

    def note(step: int | None, new: bool) -> None:
        (measured if new else kept).append(step)
        if progress is not None:
            progress(len(measured) + len(kept), len(measurements), step, new)

    missing = {}
    for measurement in measurements:
        if measurement.is_done():
            note(measurement.step, new=False)
        else:
            missing[measurement.step] = measurement
    try:
        with closing(engine.run(list(missing.values()))) as outcomes:
            for step, new in outcomes:
                note(step, new)
                del missing[step]
                if kept_in is not None:
                    drop_all_but(kept_in, set().union(*(measurement.needed for measurement in missing.values())))
    except WorkerLostError as error:
        done = sum(measurement.is_done() for measurement in measurements)
        raise QkovError(
            f"a worker was killed or ran out of memory: {done} of {len(measurements)} checkpoints are measured and "
            f"remain in the store; run the same command again for the rest"
        ) from error
    return Tracked(store=store, measured=_sorted(measured), kept=_sorted(kept))


def _sorted(steps: Iterable[int | None]) -> list[int | None]:
    return sorted(steps, key=lambda step: -1 if step is None else step)


def _source(run: Path | str) -> str:
    place = place_of(run)
    return str(place.path.resolve()) if isinstance(place, LocalPlace) else place.address


def _as_json(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings as run.json returns them, for comparison."""
    return json.loads(json.dumps(settings))


def _pinned_reference(
    store: RunStore, source: str, settings: dict[str, Any], checkpoints: list[Checkpoint]
) -> int | None:
    """The step of the reference, fixed when a store is begun, so that its rows stay valid as checkpoints are added."""
    last = None if settings["directions"] is not None else checkpoints[-1].step
    if not store.exists():
        return last
    description = store.description()
    if description.get("live"):
        raise CallError(
            f"{store.folder} holds the run of a model in training, which a CircuitProbe writes; give another --out"
        )
    expected = (("source", source, "another source"), ("settings", settings, "other settings"))
    for key, value, difference in expected:
        if description.get(key) != value:
            raise CallError(
                f"{store.folder} was made with {difference} ({json.dumps(description.get(key))} instead of "
                f"{json.dumps(value)}); give another --out, or delete it"
            )
    pinned = description.get("reference_step")
    if pinned is not None and pinned not in {checkpoint.step for checkpoint in checkpoints}:
        raise CallError(
            f"{store.folder} compares circuits with step {pinned}, which {source} no longer holds; "
            f"give another --out, or delete it"
        )
    return pinned
