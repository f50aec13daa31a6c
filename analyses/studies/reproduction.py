"""The main job: train the four parameterizations at several ratios, save, and track the saved checkpoints."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from joblib import Parallel, cpu_count, delayed, parallel_config

from ...circuits.algebra.circuit import Circuit
from ...circuits.errors import CallError, QkovError
from ...circuits.storage.atomic_write import write_atomically
from ..dynamics.model import SingleLayerAttention
from ..dynamics.populations import directions, exact_population
from ..dynamics.saved_runs import log_spaced_steps, save_runs
from ..dynamics.setting import Parameterization, Setting, Start
from ..dynamics.starts import aligned_start
from ..dynamics.step_sizes import RelativeStep
from ..dynamics.training import State, train
from ..trajectories.store import RunStore
from ..trajectories.tracking import track
from ..trajectories.view import TaskDirections
from ..versions import versions

FORMAT = "qkov reproduction 1"
_DESCRIPTION = "reproduction.json"


@dataclass(frozen=True)
class Plan:
    """What to train.

    With one relevant token in a sequence (m = 1) the fixed directions are stable. With several, the tokens of a class
    compete for attention: any difference between them, be it of rounding, grows at a rate that rises with r, and at
    r = 100 a run leaves the symmetric solution that the theory describes.

    Attributes:
        setting: of the exact population.
        ratios: r = eta_QK / eta_OV.
        losses: at which the runs are compared; every run passes exactly through each of them and ends at the last.
        step: relative size of a step of gradient descent.
        checkpoints: about how many are saved of each run, at log-spaced steps, besides one at each loss.
        imbalance: of the unbalanced run: ln D of its factors A D, D^{-1} B runs from 0 to imbalance.
        spread: of the balanced run whose singular values are not all equal: ln E of its factors A E, E B runs from 0 to
            spread.
        extra_ratio: r of these two runs.
    """

    setting: Setting = field(default_factory=lambda: Setting(M=4, b=4, m=1, n=4, query="token"))
    ratios: tuple[float, ...] = (0.01, 1.0, 100.0)
    losses: tuple[float, ...] = (1.0, 0.5, 0.1, 0.01, 1e-4, 1e-6, 1e-8)
    step: float = 0.004
    checkpoints: int = 40
    imbalance: float = 1.5
    spread: float = 1.0
    extra_ratio: float = 1.0

    @classmethod
    def quick(cls) -> "Plan":
        """Larger steps, fewer checkpoints, and an end at a loss of 1e-4."""
        return cls(losses=(1.0, 0.5, 0.1, 0.01, 1e-4), step=0.02, checkpoints=16)


@dataclass(frozen=True)
class Run:
    """One trained run.

    Attributes:
        name: of its folders.
        kind: "balanced" (and aligned), "rescaled" (collapsed, at the rate that imitates FAFO), "spread" (balanced, with
            unequal singular values) or "unbalanced".
        reached: the step at which it was at each loss.
    """

    name: str
    kind: str
    parameterization: Parameterization
    ratio: float
    start: Start
    reached: dict[float, int]


@dataclass(frozen=True)
class Reproduction:
    """The folder of a finished reproduction: its plan and its runs, each with a store."""

    folder: Path
    plan: Plan
    runs: list[Run]
    versions: dict[str, str]
    command: str

    def store(self, run: Run) -> RunStore:
        """Return the store of a run."""
        return RunStore(self.folder / "stores" / run.name)

    def balanced(self, parameterization: Parameterization) -> list[Run]:
        """Return the balanced runs of one parameterization."""
        return [run for run in self.of_kind("balanced") if run.parameterization is parameterization]

    def of_kind(self, *kinds: str) -> list[Run]:
        """Return the runs of one kind, or of several, kind by kind."""
        return [run for kind in kinds for run in self.runs if run.kind == kind]


#: For each run by name, the step at which it was at each loss.
_Reached = dict[str, dict[float, int]]


@dataclass(frozen=True)
class _Batch:
    """Runs that train as one batched computation: one parameterization, one start, several ratios."""

    kind: str
    parameterization: Parameterization
    ratios: tuple[float, ...]
    start: Start
    imbalance: float = 0.0
    spread: float = 0.0

    def name(self, ratio: float) -> str:
        kind = "" if self.kind == "balanced" else f"_{self.kind}"
        return f"{self.parameterization.value}{kind}_r{ratio:g}"


def reproduce(
    plan: Plan, folder: Path, progress: Callable[[int, int, str], None] | None = None, command: str = ""
) -> Reproduction:
    """Train every run of the plan, save its checkpoints, and track them through the pipeline that any run goes through.

    Writes runs/NAME/step_*.safetensors, stores/NAME and, last, reproduction.json. What an earlier reproduction left
    in the folder is replaced.

    Args:
        plan: what to train.
        folder: to write into.
        progress: called with how much is done, of how much, and what it is at.
        command: that asked for it, for the report.

    Raises:
        CallError: the folder holds something that is no reproduction.
        QkovError: a run did not come down to all losses of the plan.
    """
    _make_room(folder)
    batches = [
        *(_Batch("balanced", chosen, plan.ratios, Start.default(chosen)) for chosen in Parameterization),
        _Batch("rescaled", Parameterization.CACO, plan.ratios, Start.default(Parameterization.FAFO)),
        *(
            _Batch(
                kind,
                Parameterization.FAFO,
                (plan.extra_ratio,),
                Start.default(Parameterization.FAFO),
                imbalance=plan.imbalance if kind == "unbalanced" else 0.0,
                spread=plan.spread if kind == "spread" else 0.0,
            )
            for kind in ("spread", "unbalanced")
        ),
    ]
    report = progress or (lambda *_: None)
    report(0, len(batches), "training and tracking")
    reached: _Reached = {}
    # A worker a core, of one thread each: threads gain nothing on matrices this small.
    with parallel_config(backend="loky", inner_max_num_threads=1):
        finished = Parallel(n_jobs=min(cpu_count(), len(batches)), return_as="generator_unordered")(
            delayed(_train_and_track)(plan, batch, folder) for batch in batches
        )
        for done, (batch, of_batch) in enumerate(cast("Iterator[tuple[_Batch, _Reached]]", finished), start=1):
            reached |= of_batch
            report(done, len(batches), f"{batch.parameterization.value}, {batch.kind}")
    runs = [
        Run(batch.name(ratio), batch.kind, batch.parameterization, ratio, batch.start, reached[batch.name(ratio)])
        for batch in batches
        for ratio in batch.ratios
    ]
    reproduction = Reproduction(folder, plan, runs, versions(), command)
    write_atomically(folder / _DESCRIPTION, json.dumps(_as_json(reproduction), indent=1).encode())
    return reproduction


def task_directions(setting: Setting) -> TaskDirections:
    """Return C_QK and C_OV of a setting as the reference along which its runs are tracked."""
    exact = directions(setting)
    return TaskDirections("task direction", {"QK": Circuit(exact.qk), "OV": Circuit(exact.ov)})


def is_reproduction(folder: Path) -> bool:
    """Say whether `reproduce` wrote the folder, finished or not."""
    try:
        described = json.loads((folder / _DESCRIPTION).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(described, dict) and described.get("format") == FORMAT


def open_reproduction(folder: Path) -> Reproduction:
    """Read back what `reproduce` wrote.

    Raises:
        CallError: the folder holds no finished reproduction of this version.
    """
    try:
        described = json.loads((folder / _DESCRIPTION).read_text(encoding="utf-8"))
        if described["format"] != FORMAT or not described["finished"]:
            raise CallError(f"{folder} holds a reproduction that did not finish; run qkov reproduce --out {folder}")
        plan = described["plan"]
        return Reproduction(
            folder=folder,
            plan=Plan(
                **plan
                | {
                    "setting": Setting(**plan["setting"]),
                    "ratios": tuple(plan["ratios"]),
                    "losses": tuple(plan["losses"]),
                }
            ),
            runs=[
                Run(
                    **run
                    | {
                        "parameterization": Parameterization.parse(run["parameterization"]),
                        "start": Start(**run["start"]),
                        "reached": {float(loss): step for loss, step in run["reached"].items()},
                    }
                )
                for run in described["runs"]
            ],
            versions=described["versions"],
            command=described["command"],
        )
    except CallError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CallError(f"{folder} holds no finished reproduction ({type(error).__name__}: {error})") from error


def _train_and_track(plan: Plan, batch: _Batch, folder: Path) -> tuple[_Batch, _Reached]:
    reached = _train(plan, batch, folder)
    for name in reached:
        track(folder / "runs" / name, folder / "stores" / name, directions=task_directions(plan.setting))
    return batch, reached


def _train(plan: Plan, batch: _Batch, folder: Path) -> _Reached:
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
            raise QkovError(f"the run {name} did not come down to a loss of {missed[0]:g}; use a larger step")
    return dict(zip(names, reached, strict=True))


# A relative step of 0.004 comes down to a loss of 1e-8 in fewer steps; only the spacing of the checkpoints depends on
# it.
_LAST_SPACED_STEP = 10_000


def _make_room(folder: Path) -> None:
    """Clear what an earlier reproduction left, finished or not; touch no folder that is not one."""
    if folder.exists() and not folder.is_dir():
        raise CallError(f"{folder} is a file; expected a folder to write into, or a name that is free")
    if folder.exists() and any(folder.iterdir()) and not is_reproduction(folder):
        raise CallError(f"{folder} is not empty and no reproduction wrote it; give another --out")
    write_atomically(folder / _DESCRIPTION, json.dumps({"format": FORMAT, "finished": False}).encode())
    for name in ("runs", "stores"):
        if (folder / name).exists():
            shutil.rmtree(folder / name)


def _as_json(reproduction: Reproduction) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "finished": True,
        "plan": asdict(reproduction.plan),
        "runs": [{**asdict(run), "parameterization": run.parameterization.value} for run in reproduction.runs],
        "versions": reproduction.versions,
        "command": reproduction.command,
    }
