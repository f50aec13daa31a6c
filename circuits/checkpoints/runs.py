"""Find the checkpoints of a training run, and put them in order."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from ..errors import CallError, QkovError
from ..storage.address import place_of
from ..storage.hub import revisions_of
from ..storage.places import Place
from .folders import Contents, contents_of, nothing_in
from .opening import weights_at
from .sharded_file import read_index
from .sidecars import TRAINER_STATE, global_step, read_config, sidecars_of
from .step_names import marked_step, steps_of


@dataclass(frozen=True)
class Checkpoint:
    """The weights of a training run at a step; nothing of them is read yet.

    Attributes:
        step: of training.
        address: a path or an fsspec address, of a file or a folder.
    """

    step: int
    address: str

    @property
    def name(self) -> str:
        """The last part of the address."""
        return place_of(self.address).name

    def fingerprint(self) -> str:
        """Return a hash that changes when one of its files does: weights, config, state of the trainer.

        Raises:
            QkovError: a file is missing or cannot be read.
        """
        weights = weights_at(place_of(self.address))
        places, folder = [weights], weights.parent
        if folder is not None:
            if weights.name.endswith(".index.json"):
                places += [folder.child(shard) for shard in sorted(set(read_index(weights).values()))]
            places += sidecars_of(folder, weights.name).places
        return hashlib.blake2b(json.dumps([place.stamp() for place in places]).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Run:
    """The checkpoints of a training run in the order of their steps, and what of it is no checkpoint.

    Attributes:
        checkpoints: at least one.
        left_out: why, by the name of the file or folder.
    """

    checkpoints: list[Checkpoint]
    left_out: dict[str, str]


def find_checkpoints(run: Path | str, revisions: str | None = None) -> list[Checkpoint]:
    """Return the checkpoints of a run in the order of their steps; `find_run` says what was left out as well."""
    return find_run(run, revisions).checkpoints


def find_run(run: Path | str, revisions: str | None = None) -> Run:
    """Find the checkpoints of a run: one file, the folder of a model, a folder of files or of folders, or revisions.

    Args:
        run: a path, an fsspec address, or a hub id `organisation/model@revision`.
        revisions: which revisions of a model on the hub are the checkpoints, such as `step*`.

    Raises:
        CallError: there is no such run, it holds no checkpoint, the names do not tell the steps, or two have the same
            one.
        QkovError: what it holds cannot be read as it is, or its place cannot be reached.
    """
    if revisions is not None:
        return _in_order(revisions_of(str(run), revisions), str(run), {})
    place = place_of(run)
    if place.is_folder():
        return _run_of_folder(place)
    if place.is_file():
        return Run([Checkpoint(_step_of_file(place), place.address)], {})
    raise CallError(f"{place} does not exist; expected a folder of checkpoints, or one checkpoint")


def _run_of_folder(folder: Place) -> Run:
    contents = contents_of(folder)
    members, left_out = _members(contents)
    if members:
        left_out |= dict.fromkeys((place.name for place in contents.loose), "lies beside folders of checkpoints")
        run = _in_order([(member.name, member) for member in members], str(folder), left_out)
        return run if contents.weights is None else _with_final(run, folder, contents.weights.name)
    if contents.weights is not None:
        return Run([Checkpoint(_step_of(folder) or 0, folder.address)], left_out)
    if contents.refusal is not None:
        raise QkovError(contents.refusal)
    if len(contents.loose) == 1:
        return Run([Checkpoint(_step_of_file(contents.loose[0]), contents.loose[0].address)], left_out)
    if contents.loose:
        return _in_order([(place.name, place) for place in contents.loose], str(folder), left_out)
    if left_out:
        name, why = next(iter(left_out.items()))
        raise QkovError(f"{folder} holds no checkpoint that can be read: {name} {why}")
    raise CallError(nothing_in(folder, contents))


def _members(contents: Contents) -> tuple[list[Place], dict[str, str]]:
    """The folders that are checkpoints of a run, and why others are none that look as if they were."""
    found: list[Place] = []
    left_out: dict[str, str] = {}
    for folder in contents.folders:
        marked = marked_step(folder.name) is not None
        if contents.weights is not None and not marked:
            # A model's own folder has folders of other things, such as another format of the same weights.
            continue
        if folder.name.startswith("tmp-"):
            left_out[folder.name] = "is unfinished"
            continue
        inner = contents_of(folder)
        if inner.weights is not None or len(inner.loose) == 1:
            found.append(folder)
        elif inner.loose:
            left_out[folder.name] = f"holds {len(inner.loose)} files of weights, and nothing says which counts"
        elif inner.refusal is not None:
            left_out[folder.name] = f"cannot be read: {inner.refusal}"
        elif marked:
            left_out[folder.name] = "holds no weights (yet)"
    return found, left_out


def _in_order(named: list[tuple[str, Place]], where: str, left_out: dict[str, str]) -> Run:
    by_step: dict[int, tuple[str, Place]] = {}
    steps = steps_of([name for name, _ in named], where)
    for (name, place), step in zip(named, steps, strict=True):
        if step is None:
            left_out[name] = "has no step in its name, and others have"
        elif step in by_step:
            raise CallError(f"{by_step[step][0]} and {name} in {where} are both of step {step}; keep one of them")
        else:
            by_step[step] = name, place
    return Run([Checkpoint(step, by_step[step][1].address) for step in sorted(by_step)], left_out)


def _with_final(run: Run, folder: Place, weights: str) -> Run:
    """The model above its checkpoints is the last one, if its step is known and is none of theirs."""
    step, checkpoints = _trainer_step(folder), run.checkpoints
    if step is None:
        return Run(checkpoints, run.left_out | {weights: f"no {TRAINER_STATE} says of which step it is"})
    if step in {checkpoint.step for checkpoint in checkpoints}:
        return Run(checkpoints, run.left_out | {weights: f"is of step {step}, which has a folder of its own"})
    return Run(sorted([*checkpoints, Checkpoint(step, folder.address)], key=lambda each: each.step), run.left_out)


def _step_of(folder: Place) -> int | None:
    """The step of the model of a folder: by the folder's name, else by its trainer's state."""
    marked = marked_step(folder.name)
    return marked if marked is not None else _trainer_step(folder)


def _step_of_file(file: Place) -> int:
    """The step of a file that is alone: by its own name where that has a word for it, else by its folder."""
    step = marked_step(file.name)
    if step is None and file.parent is not None:
        step = _step_of(file.parent)
    return steps_of([file.name], file.address)[0] or 0 if step is None else step


def _trainer_step(folder: Place) -> int | None:
    state = folder.child(TRAINER_STATE)
    return global_step(read_config(state)) if state.is_file() else None
