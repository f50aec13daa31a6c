"""Find the checkpoints of a training run, and put them in order."""

import hashlib
import json
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from ..errors import CallError, QkovError
from ..storage.address import place_of
from ..storage.hub import revisions_of
from ..storage.places import Place
from .files import TRAINER_STATE, CheckpointFiles, files_at, files_beside
from .folders import Contents, Folder, contents_of, no_checkpoint_in
from .sharded_file import read_index
from .sidecars import global_step, read_config
from .step_names import marked_step, steps_of


@dataclass(frozen=True)
class Checkpoint:
    """The weights of a training run at one step, located but not yet read.

    Attributes:
        step: The training step.
        address: A path or an fsspec address of a file or folder.
        known_files: The files of the checkpoint, if they were found already; `files` finds them otherwise.
    """

    step: int
    address: str
    known_files: CheckpointFiles | None = field(default=None, repr=False, compare=False)

    @property
    def name(self) -> str:
        """The last part of the address."""
        return place_of(self.address).name

    @cached_property
    def files(self) -> CheckpointFiles:
        """The weights, the config and the trainer's state of the checkpoint, found at most once.

        Raises:
            CallError: There is nothing at the address.
            QkovError: The address holds no weights that can be read, or cannot be reached.
        """
        return self.known_files or files_at(place_of(self.address))

    def weight_places(self) -> list[Place]:
        """Return the file of the weights, or the index and the files that it names.

        Raises:
            QkovError: The index is damaged or cannot be read.
        """
        weights = self.files.weights
        if weights.parent is None or not weights.name.endswith(".index.json"):
            return [weights]
        return [weights, *(weights.parent.child(shard) for shard in sorted(set(read_index(weights).values())))]

    def fingerprint(self) -> str:
        """Return a hash that changes when one of the checkpoint's files does: weights, config or trainer's state.

        Raises:
            QkovError: A file is missing or cannot be read.
        """
        places = [*self.weight_places(), *self.files.sidecars]
        return hashlib.blake2b(json.dumps([place.stamp() for place in places]).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Run:
    """The checkpoints of a training run in the order of their steps, and what was left out.

    Attributes:
        checkpoints: At least one checkpoint.
        left_out: The reason for each file or folder that was left out, by its name.
    """

    checkpoints: list[Checkpoint]
    left_out: dict[str, str]


@dataclass(frozen=True)
class _Candidate:
    """A checkpoint whose step is not known yet."""

    name: str
    place: Place
    files: CheckpointFiles | None = None

    def at(self, step: int) -> Checkpoint:
        return Checkpoint(step, self.place.address, self.files)


def find_checkpoints(run: Path | str, revisions: str | None = None) -> list[Checkpoint]:
    """Find the checkpoints of a training run, in the order of their steps.

    A run is a single file, a model's folder, a folder of files or of checkpoint folders, or a model on the hub with
    one revision for each step.

    Args:
        run: A path, an fsspec address, or a hub id `organisation/model@revision`.
        revisions: A pattern for the revisions of a model on the hub that are the checkpoints, such as `step*`.

    Returns:
        At least one checkpoint. Files and folders that are not checkpoints are left out.

    Raises:
        CallError: There is no such run, it holds no checkpoint, the names do not tell the steps, or two checkpoints
            have the same step.
        QkovError: The run cannot be read as it is, or its address cannot be reached.
    """
    return find_run(run, revisions).checkpoints


def find_run(run: Path | str, revisions: str | None = None) -> Run:
    """Find the checkpoints of a run as `find_checkpoints` does, and say what was left out.

    Args:
        run: A path, an fsspec address, or a hub id `organisation/model@revision`.
        revisions: A pattern for the revisions of a model on the hub that are the checkpoints, such as `step*`.

    Returns:
        The checkpoints in order, and the reason for each file or folder that was left out.

    Raises:
        CallError: There is no such run, it holds no checkpoint, the names do not tell the steps, or two checkpoints
            have the same step.
        QkovError: The run cannot be read as it is, or its address cannot be reached.
    """
    if revisions is not None:
        # The files of a revision are found when they are needed: there may be hundreds of revisions.
        candidates = [_Candidate(name, place) for name, place in revisions_of(str(run), revisions)]
        return _in_order(candidates, str(run), {})
    place = place_of(run)
    if place.is_folder():
        in_folder = _run_in(Folder(place))
        return replace(in_folder, left_out=in_folder.left_out | place.refused_names)
    if place.is_file():
        return Run([_lone_file(place, None if place.parent is None else Folder(place.parent))], {})
    raise place.not_found("a folder of checkpoints, or one checkpoint")


def _run_in(folder: Folder) -> Run:
    contents = contents_of(folder)
    members, left_out = _members(folder, contents)
    if members:
        left_out |= dict.fromkeys((place.name for place in contents.loose), "is beside folders of checkpoints")
        run = _in_order(members, str(folder.place), left_out)
        return run if contents.weights is None or contents.is_below else _with_final(run, folder, contents.weights)
    if contents.weights is not None:
        step = _step_of(folder) or 0
        return Run([Checkpoint(step, folder.place.address, files_beside(contents.weights, folder))], left_out)
    if contents.refusal is not None:
        raise QkovError(contents.refusal)
    if len(contents.loose) == 1:
        return Run([_lone_file(contents.loose[0], folder)], left_out)
    if contents.loose:
        loose = [_Candidate(place.name, place, files_beside(place, folder)) for place in contents.loose]
        return _in_order(loose, str(folder.place), left_out)
    if left_out:
        name, why = next(iter(left_out.items()))
        raise QkovError(f"{folder.place} holds no checkpoint that can be read: {name} {why}")
    raise CallError(no_checkpoint_in(folder))


def _members(run: Folder, contents: Contents) -> tuple[list[_Candidate], dict[str, str]]:
    """Return the folders that are checkpoints of a run, and why others that look like checkpoints are not."""
    members: list[_Candidate] = []
    left_out: dict[str, str] = {}
    for folder in run.subfolders:
        name = folder.place.name
        marked = marked_step(name) is not None
        if contents.weights is not None and not marked:
            # A model's own folder contains folders of other things, such as another format of the same weights.
            continue
        if name.startswith("tmp-"):
            left_out[name] = "is unfinished"
            continue
        inner = contents_of(folder)
        if inner.weights is not None or len(inner.loose) == 1:
            members.append(_Candidate(name, folder.place, files_beside(inner.weights or inner.loose[0], folder)))
        elif inner.loose:
            left_out[name] = f"holds {len(inner.loose)} files of weights, and nothing says which one counts"
        elif inner.refusal is not None:
            left_out[name] = f"cannot be read: {inner.refusal}"
        elif marked:
            left_out[name] = "holds no weights (yet)"
    return members, left_out


def _in_order(candidates: list[_Candidate], where: str, left_out: dict[str, str]) -> Run:
    by_step: dict[int, _Candidate] = {}
    steps = steps_of([candidate.name for candidate in candidates], where)
    for candidate, step in zip(candidates, steps, strict=True):
        if step is None:
            left_out[candidate.name] = "has no step in its name, unlike others"
        elif step in by_step:
            raise CallError(
                f"{by_step[step].name} and {candidate.name} in {where} are both of step {step}; keep one of them"
            )
        else:
            by_step[step] = candidate
    return Run([by_step[step].at(step) for step in sorted(by_step)], left_out)


def _with_final(run: Run, folder: Folder, weights: Place) -> Run:
    """Add the model in the run's own folder if its step is known and no other checkpoint has it."""
    step, checkpoints = _trainer_step(folder), run.checkpoints
    if step is None:
        return Run(checkpoints, run.left_out | {weights.name: f"has no {TRAINER_STATE} that says its step"})
    if step in {checkpoint.step for checkpoint in checkpoints}:
        return Run(checkpoints, run.left_out | {weights.name: f"is of step {step}, which has a folder of its own"})
    final = Checkpoint(step, folder.place.address, files_beside(weights, folder))
    return Run(sorted([*checkpoints, final], key=lambda checkpoint: checkpoint.step), run.left_out)


def _lone_file(file: Place, folder: Folder | None) -> Checkpoint:
    """Return the checkpoint of a single file; its own name says the step, or else its folder does."""
    step = marked_step(file.name)
    if step is None and folder is not None:
        step = _step_of(folder)
    if step is None:
        step = steps_of([file.name], file.address)[0] or 0
    return Checkpoint(step, file.address, files_beside(file, folder))


def _step_of(folder: Folder) -> int | None:
    """Return the step of the model in a folder, from the folder's name or else from the trainer's state."""
    marked = marked_step(folder.place.name)
    return marked if marked is not None else _trainer_step(folder)


def _trainer_step(folder: Folder) -> int | None:
    state = folder.file(TRAINER_STATE)
    return None if state is None else global_step(read_config(state))
