"""Find the checkpoints of a training run, and put them in order."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from ..errors import CallError, QkovError
from ..storage.address import place_of
from ..storage.hub import revisions_of
from ..storage.hub_answers import files_in
from ..storage.lens import LensModel, is_lens, lens_checkpoints, lens_model
from ..storage.places import LocalPlace, Place
from .companions import peek
from .files import TRAINER_STATE, CheckpointFiles, files_at, files_beside
from .finding.in_file import SeriesNames, run_in_file
from .finding.ordering import Candidate, Ordered, in_order, step_by_content, step_of_one
from .finding.patterned import ordered_by, ordered_by_names
from .folders import Contents, Folder, contents_of, no_checkpoint_in
from .parallel.distributed_file import METADATA, PIECES
from .sharded_file import read_index
from .steps.names import step_in
from .steps.pattern import StepPattern, step_patterns
from .steps.stated import stated_step
from .steps.step import Step, Unit
from .tensor_file import TensorFile


@dataclass(frozen=True)
class Checkpoint:
    """The weights of a training run at one step, located but not yet read.

    Attributes:
        step: The training step, or None if it is not known. All checkpoints of a run have one, unless there is only one
            checkpoint.
        address: A path or an fsspec address of a file or folder.
        known_files: The files of the checkpoint, if they were found already; `files` finds them otherwise.
        step_origin: How the step is known, in words; None if it was given by the caller, or is not known.
        unit: What the step counts: steps, or epochs where nothing better is known.
        lens: The name by which TransformerLens loads the checkpoint, if the run was named so.
    """

    step: int | None
    address: str
    known_files: CheckpointFiles | None = field(default=None, repr=False, compare=False)
    step_origin: str | None = field(default=None, compare=False)
    unit: Unit = "step"
    lens: LensModel | None = field(default=None, repr=False, compare=False)

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
        """Return the files of the weights, with the index that names them if there is one.

        Raises:
            QkovError: The index is damaged or cannot be read.
        """
        weights = self.files.weights
        if self.files.parts:
            return [place for _, place in self.files.parts]
        if weights.parent is not None and weights.name == METADATA:
            return [weights, *(entry for entry in weights.parent.entries() if entry.suffix == PIECES)]
        if weights.parent is None or not weights.name.endswith(".index.json"):
            return [weights]
        return [weights, *(weights.parent.child(shard) for shard in sorted(set(read_index(weights).values())))]

    def at(self, step: Step) -> "Checkpoint":
        """Return the same checkpoint at a step."""
        return replace(self, step=step.number, step_origin=step.origin, unit=step.unit)

    def stated_by(self, file: TensorFile) -> "Checkpoint":
        """Return the checkpoint at the step that its open file states, if its step is not known otherwise."""
        step = stated_step(file) if self.step is None else None
        return self if step is None else self.at(step)

    def disagreement(self, file: TensorFile) -> str | None:
        """Return a sentence that says so if the open file states another step than this; None if it does not."""
        stated = stated_step(file)
        if stated is None or self.step is None or stated.unit != self.unit or stated.number == self.step:
            return None
        return f"{self.name} is taken for {self.unit} {self.step}, but {stated.origin} is {stated.number}"

    def fingerprint(self) -> str:
        """Return a hash that changes when one of the checkpoint's files does: weights, config or trainer's state.

        Raises:
            QkovError: A file is missing or cannot be read.
        """
        places = [*self.weight_places(), *self.files.sidecars]
        stamps = [place.stamp() for place in places] + [self.files.element] * bool(self.files.element)
        return hashlib.blake2b(json.dumps(stamps).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Run:
    """The checkpoints of a training run in the order of their steps, and what was left out.

    Attributes:
        checkpoints: At least one checkpoint. Their steps are known if there are several.
        left_out: The reason for each file or folder that was left out, by its name.
        notes: Where the name of a checkpoint and its files state different steps, a sentence each.
    """

    checkpoints: list[Checkpoint]
    left_out: dict[str, str]
    notes: list[str] = field(default_factory=list)


def find_checkpoints(
    run: Path | str, revisions: str | None = None, step: str | Sequence[str] | None = None
) -> list[Checkpoint]:
    """Find the checkpoints of a training run, in the order of their steps.

    A run is a single file, a model's folder, a folder of files or of checkpoint folders, or a model on the hub with
    one revision for each step. A step is known from a word such as "step" in a name, or because the file or the
    trainer's state beside it states it; no other number counts as a step. The checkpoints of a model that
    TransformerLens names, `lens:NAME`, are those that TransformerLens lists.

    Args:
        run: A path, an fsspec address, a hub id `organisation/model@revision`, or `lens:NAME`.
        revisions: A pattern for the revisions of a model on the hub that are the checkpoints, such as `step*`.
        step: Where the step is in unusual names, such as `A_1_1_{step}.pt`; see `StepPattern`. Names that fit none of
            the patterns are left out.

    Returns:
        At least one checkpoint. Files and folders that are not checkpoints are left out. The step of a single
        checkpoint is None if it is not known.

    Raises:
        CallError: There is no such run, it holds no checkpoint, it is not known which step each is of, or two
            checkpoints have the same step.
        QkovError: The run cannot be read as it is, or its address cannot be reached.
    """
    return find_run(run, revisions, step).checkpoints


def find_run(
    run: Path | str,
    revisions: str | None = None,
    step: str | Sequence[str] | None = None,
    series: SeriesNames | None = None,
) -> Run:
    """Find the checkpoints of a run as `find_checkpoints` does, and say what was left out.

    Args:
        run: A path, an fsspec address, a hub id `organisation/model@revision`, or `lens:NAME`.
        revisions: A pattern for the revisions of a model on the hub that are the checkpoints, such as `step*`.
        step: Where the step is in unusual names, such as `A_1_1_{step}.pt`; see `StepPattern`. Names that fit none of
            the patterns are left out.
        series: What the caller says about several checkpoints in one file; None if nothing.

    Returns:
        The checkpoints in order, the reason for each file or folder that was left out, and where names and files
        disagree.

    Raises:
        CallError: There is no such run, it holds no checkpoint, it is not known which step each is of, or two
            checkpoints have the same step.
        QkovError: The run cannot be read as it is, or its address cannot be reached.
    """
    if is_lens(run):
        if revisions is not None or (step is not None and len(step) > 0):
            raise CallError(
                f"TransformerLens lists the checkpoints of {run} with their steps; leave out revisions and step"
            )
        return _listed(lens_model(str(run)))
    return _with_series(_find(run, revisions, step_patterns(step)), series)


def lens_checkpoint(address: str) -> Checkpoint:
    """Return a model that TransformerLens names as a checkpoint: as it was published last, or one that is listed.

    Args:
        address: `lens:NAME` or `lens:NAME@LABEL`.

    Raises:
        CallError: TransformerLens knows no such name, or does not list the checkpoint.
        QkovError: The hub does not answer, or has no such model.
    """
    model = lens_model(address)
    if model.label is not None:
        return _listed(model).checkpoints[0]
    return Checkpoint(None, model.hub_address(), lens=model)


def _listed(model: LensModel) -> Run:
    """Return the checkpoints of a model that TransformerLens lists, or the one of them that is named."""
    listed, counted = lens_checkpoints(model)
    files = files_in(model.official) if model.in_own_format else None
    unit: Unit = "token" if counted == "token" else "step"
    return Run(
        [Checkpoint(each.label, each.hub_address(files), None, "TransformerLens' list", unit, each) for each in listed],
        {},
    )


def _find(run: Path | str, revisions: str | None, patterns: tuple[StepPattern, ...]) -> Run:
    if revisions is not None:
        # The files of a revision are found when they are needed: there may be hundreds of revisions.
        candidates = [Candidate(name, place.address) for name, place in revisions_of(str(run), revisions)]
        if patterns:
            return _run_of(ordered_by_names(patterns, candidates, str(run)))
        return _in_order(candidates, str(run), {})
    place = place_of(run)
    if place.is_folder():
        in_folder = _run_of(ordered_by(patterns, Folder(place))) if patterns else _run_in(Folder(place))
        return replace(in_folder, left_out=in_folder.left_out | place.refused_names)
    if place.is_file() and patterns:
        folder = None if place.parent is None else Folder(place.parent)
        candidate = Candidate(place.name, place.address, files_beside(place, folder))
        return _run_of(ordered_by_names(patterns, [candidate], place.address))
    if place.is_file():
        return _lone(place, None if place.parent is None else Folder(place.parent), {})
    raise place.not_found("a folder of checkpoints, or one checkpoint")


def _run_in(folder: Folder) -> Run:
    contents = contents_of(folder)
    members, left_out = _members(folder, contents)
    if members:
        left_out |= dict.fromkeys((place.name for place in contents.loose), "is beside folders of checkpoints")
        run = _in_order(members, str(folder.place), left_out)
        return run if contents.weights is None or contents.is_below else _with_final(run, folder, contents.weights)
    left_out |= contents.others
    if contents.weights is not None:
        files = files_beside(contents.weights, folder)
        return _alone(Candidate(folder.place.name, folder.place.address, files), left_out)
    if contents.refusal is not None:
        raise QkovError(contents.refusal)
    if len(contents.loose) == 1:
        return _lone(contents.loose[0], folder, left_out)
    if contents.loose:
        loose = [Candidate(place.name, place.address, files_beside(place, folder)) for place in contents.loose]
        return _in_order(loose, str(folder.place), left_out)
    if left_out:
        name, why = next(iter(left_out.items()))
        raise QkovError(f"{folder.place} holds no checkpoint that can be read: {name} {why}")
    raise CallError(no_checkpoint_in(folder))


def _members(run: Folder, contents: Contents) -> tuple[list[Candidate], dict[str, str]]:
    """Return the folders that are checkpoints of a run, and why others that look like checkpoints are not."""
    members: list[Candidate] = []
    left_out: dict[str, str] = {}
    for folder in run.subfolders:
        name = folder.place.name
        marked = step_in(name) is not None
        if contents.weights is not None and not marked:
            # A model's own folder contains folders of other things, such as another format of the same weights.
            continue
        if name.startswith("tmp-"):
            left_out[name] = "is unfinished"
            continue
        inner = contents_of(folder)
        if inner.weights is not None or len(inner.loose) == 1:
            files = files_beside(inner.weights or inner.loose[0], folder)
            members.append(Candidate(name, folder.place.address, files))
        elif inner.loose:
            left_out[name] = f"holds {len(inner.loose)} files of weights, and nothing says which one counts"
        elif inner.refusal is not None:
            left_out[name] = f"cannot be read: {inner.refusal}"
        elif marked:
            left_out[name] = "holds no weights (yet)"
    return members, left_out


def _in_order(candidates: list[Candidate], where: str, left_out: dict[str, str]) -> Run:
    if len(candidates) == 1:
        return _alone(candidates[0], left_out)
    return _run_of(in_order(candidates, where), left_out)


def _run_of(ordered: Ordered, left_out: dict[str, str] | None = None) -> Run:
    checkpoints = [_checkpoint(candidate, step) for step, candidate in ordered.checkpoints]
    return Run(checkpoints, (left_out or {}) | ordered.left_out, ordered.notes)


def _with_final(run: Run, folder: Folder, weights: Place) -> Run:
    """Add the model in the run's own folder if its step is known and no other checkpoint has it."""
    files = files_beside(weights, folder)
    step, checkpoints = step_by_content(files, far=True), run.checkpoints
    unit = checkpoints[0].unit
    if step is None or step.unit != unit:
        return replace(run, left_out=run.left_out | {weights.name: f"has no {TRAINER_STATE} that says its {unit}"})
    if step.number in {checkpoint.step for checkpoint in checkpoints}:
        why = f"is of {unit} {step.number}, which has a folder of its own"
        return replace(run, left_out=run.left_out | {weights.name: why})
    final = _checkpoint(Candidate(folder.place.name, folder.place.address, files), step)
    return replace(run, checkpoints=sorted([*checkpoints, final], key=lambda checkpoint: checkpoint.step or 0))


def _lone(file: Place, folder: Folder | None, left_out: dict[str, str]) -> Run:
    """Return the run of a single file; its own name states the step, or else that of its folder."""
    candidate = Candidate(file.name, file.address, files_beside(file, folder))
    return _alone(candidate, left_out, above=None if folder is None else folder.place.name)


def _alone(candidate: Candidate, left_out: dict[str, str], above: str | None = None) -> Run:
    step, note = step_of_one([candidate.name] if above is None else [candidate.name, above], candidate.files)
    return Run([_checkpoint(candidate, step)], left_out, [] if note is None else [note])


def _with_series(run: Run, names: SeriesNames | None) -> Run:
    """Return the checkpoints that the file of a single checkpoint holds, if it holds a series of them."""
    files = run.checkpoints[0].known_files if len(run.checkpoints) == 1 else None
    if files is None or files.parts:
        return run
    if names is not None and names.name is not None and not isinstance(files.weights, LocalPlace):
        raise CallError(f"{files.weights} holds several checkpoints in one file; copy it to this machine first")
    try:
        opened = peek(files.weights)
    except QkovError:
        # Opening the checkpoint says what is wrong with it.
        return run
    found = None
    if opened is not None:
        found = run_in_file(Candidate(files.weights.name, files.weights.address, files), opened, names)
    if found is None:
        return run
    if not found.checkpoints:
        return replace(run, left_out=run.left_out | found.left_out)
    return replace(_run_of(found), left_out=run.left_out | found.left_out)


def _checkpoint(candidate: Candidate, step: Step | None) -> Checkpoint:
    checkpoint = Checkpoint(None, candidate.address, candidate.files)
    return checkpoint if step is None else checkpoint.at(step)
