"""Training of a reproduction: every run of the plan is trained, saved, and tracked from its saved checkpoints."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path

from joblib import cpu_count

from ...circuits.algebra.circuit import Circuit
from ...circuits.errors import CallError, QkovError
from ..dynamics.model import SingleLayerAttention
from ..dynamics.populations import directions, exact_population
from ..dynamics.saved_runs import log_spaced_steps, save_runs
from ..dynamics.setting import Setting
from ..dynamics.starts import aligned_start
from ..dynamics.step_sizes import RelativeStep
from ..dynamics.training import State, train
from ..trajectories.tracking import track
from ..trajectories.view import TaskDirections
from ..trajectories.worker_processes import WorkerLostError, done_by_workers
from ..versions import versions
from .plan import Batch, Plan
from .reproduction import Reproduction, Run, begin_reproduction, is_reproduction, write_reproduction

# The step of each loss, for each run by name.
_Reached = dict[str, dict[float, int]]

# A relative step of 0.004 reaches a loss of 1e-8 in fewer steps. Only the spacing of the checkpoints depends on this.
_LAST_SPACED_STEP = 10_000


def reproduce(
    plan: Plan, folder: Path, progress: Callable[[int, int, str], None] | None = None, command: str = ""
) -> Reproduction:
    """Train every run of the plan, save its checkpoints, and track them as the checkpoints of any run are tracked.

    The folder then contains runs/NAME/step_*.safetensors, stores/NAME and, written last, reproduction.json. An earlier
    reproduction in the folder is replaced.

    Args:
        plan: what to train.
        folder: the folder to write into.
        progress: called with the number of finished batches, the number of batches, and a description.
        command: the command that started the reproduction, for the report.

    Raises:
        CallError: the folder contains something other than a reproduction.
        QkovError: a run did not reach all losses of the plan, or a worker was lost.
    """
    _make_room(folder)
    batches = plan.batches()
    report = progress or (lambda *_: None)
    report(0, len(batches), "training and tracking")
    reached: _Reached = {}
    # One worker per core, each with one thread: more threads gain nothing on matrices this small.
    training = partial(_train_and_track, plan, folder)
    try:
        with closing(done_by_workers(training, batches, min(cpu_count(), len(batches)))) as finished:
            for done, (batch, batch_reached) in enumerate(finished, start=1):
                reached |= batch_reached
                report(done, len(batches), f"{batch.parameterization.value}, {batch.kind}")
    except WorkerLostError as error:
        raise QkovError(
            f"a worker was killed or ran out of memory, so {folder} holds no complete reproduction; "
            f"run the same command again, which starts afresh"
        ) from error
    runs = [
        Run(batch.name(ratio), batch.kind, batch.parameterization, ratio, batch.start, reached[batch.name(ratio)])
        for batch in batches
        for ratio in batch.ratios
    ]
    reproduction = Reproduction(folder, plan, runs, versions(), command)
    write_reproduction(reproduction)
    return reproduction


def task_directions(setting: Setting) -> TaskDirections:
    """Return C_QK and C_OV of a setting as the reference directions along which its runs are tracked."""
    exact = directions(setting)
    return TaskDirections("task direction", {"QK": Circuit(exact.qk), "OV": Circuit(exact.ov)})


def _train_and_track(plan: Plan, folder: Path, batch: Batch) -> tuple[Batch, _Reached]:
    reached = _train(plan, batch, folder)
    for name in reached:
        tracked = track(folder / "runs" / name, folder / "stores" / name, directions=task_directions(plan.setting))
        for why in tracked.unusable.values():
            raise QkovError(f"a checkpoint that was just saved cannot be measured: {why}")
    return batch, reached


def _train(plan: Plan, batch: Batch, folder: Path) -> _Reached:
    population = exact_population(plan.setting)
    model = SingleLayerAttention(
        population.embedding.shape[1],
        plan.setting.M,
        batch.parameterization,
        d_head=plan.setting.M,
        runs=len(batch.ratios),
    )
    aligned_start(model, directions(plan.setting), batch.start, batch.imbalance, batch.spread)
    names = [batch.name(ratio) for ratio in batch.ratios]
    settings = [
        {
            "parameterization": batch.parameterization.value,
            "kind": batch.kind,
            "ratio": ratio,
            "start": asdict(batch.start),
            "setting": asdict(plan.setting),
            "step": plan.step,
            "imbalance": batch.imbalance,
            "spread": batch.spread,
        }
        for ratio in batch.ratios
    ]
    states: Iterator[State] = train(
        model,
        population,
        batch.ratios,
        step_size=RelativeStep(plan.step),
        losses=plan.losses,
        rescaled=batch.kind == "rescaled",
    )
    reached = save_runs(
        states,
        [folder / "runs" / name for name in names],
        settings,
        batch.ratios,
        log_spaced_steps(_LAST_SPACED_STEP, plan.checkpoints),
    )
    for name, losses in zip(names, reached, strict=True):
        missed = [loss for loss in plan.losses if loss not in losses]
        if missed:
            raise QkovError(f"the run {name} did not reach a loss of {missed[0]:g}; use a larger step")
    return dict(zip(names, reached, strict=True))


def _make_room(folder: Path) -> None:
    """Remove an earlier reproduction from the folder, finished or not; refuse any other content."""
    if folder.exists() and not folder.is_dir():
        raise CallError(f"{folder} is a file; expected a folder to write into, or a name that is free")
    if folder.exists() and any(folder.iterdir()) and not is_reproduction(folder):
        raise CallError(f"{folder} is not empty and was not written by qkov reproduce; choose another --out")
    begin_reproduction(folder)
    for name in ("runs", "stores"):
        if (folder / name).exists():
            shutil.rmtree(folder / name)
