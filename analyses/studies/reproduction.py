"""A reproduction as a folder: its plan and its runs, written to and read from reproduction.json."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from ...circuits.errors import CallError, named_input
from ...circuits.storage.atomic_write import write_atomically
from ..dynamics.setting import Parameterization, Setting, Start
from ..trajectories.store import RunStore
from .plan import Plan

FORMAT = "qkov reproduction 1"
_DESCRIPTION = "reproduction.json"


@dataclass(frozen=True)
class Run:
    """One trained run.

    Attributes:
        name: name of the run's folders.
        kind: "balanced" (balanced and aligned), "rescaled" (collapsed, at the rate that imitates FAFO), "spread"
            (balanced, with unequal singular values) or "unbalanced".
        parameterization: which circuits are factorized.
        ratio: ratio r = eta_QK / eta_OV.
        start: the scales at time 0.
        reached: the step at which the run reached each loss.
    """

    name: str
    kind: str
    parameterization: Parameterization
    ratio: float
    start: Start
    reached: dict[float, int]


@dataclass(frozen=True)
class Reproduction:
    """A finished reproduction.

    Attributes:
        folder: the folder that contains it.
        plan: what was trained.
        runs: the trained runs, each with a store.
        versions: versions of the software that trained them.
        command: the command that started the training, for the report.
    """

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
        """Return the runs of one or several kinds, in the order of the kinds."""
        return [run for kind in kinds for run in self.runs if run.kind == kind]


def is_reproduction(folder: Path) -> bool:
    """Return whether `reproduce` wrote the folder, finished or not."""
    try:
        description = json.loads((folder / _DESCRIPTION).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(description, dict) and description.get("format") == FORMAT


def open_reproduction(folder: Path) -> Reproduction:
    """Read a finished reproduction from its folder.

    Raises:
        CallError: the folder does not contain a finished reproduction of this version.
    """
    with named_input(folder, "a finished reproduction", "run qkov reproduce again", CallError):
        description = json.loads((folder / _DESCRIPTION).read_text(encoding="utf-8"))
        if description["format"] != FORMAT or not description["finished"]:
            raise CallError(f"the reproduction in {folder} did not finish; run qkov reproduce --out {folder}")
        plan = description["plan"]
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
                for run in description["runs"]
            ],
            versions=description["versions"],
            command=description["command"],
        )


def begin_reproduction(folder: Path) -> None:
    """Mark a folder as a reproduction that has not finished."""
    write_atomically(folder / _DESCRIPTION, json.dumps({"format": FORMAT, "finished": False}).encode())


def write_reproduction(reproduction: Reproduction) -> None:
    """Write the description of a finished reproduction into its folder."""
    description = {
        "format": FORMAT,
        "finished": True,
        "plan": asdict(reproduction.plan),
        "runs": [{**asdict(run), "parameterization": run.parameterization.value} for run in reproduction.runs],
        "versions": reproduction.versions,
        "command": reproduction.command,
    }
    write_atomically(reproduction.folder / _DESCRIPTION, json.dumps(description, indent=1).encode())
