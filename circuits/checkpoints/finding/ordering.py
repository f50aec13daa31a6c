"""The steps of a run's checkpoints: from their names, and from what their files state where names do not tell."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...errors import CallError, QkovError
from ...storage.places import LocalPlace
from ..companions import peek
from ..files import CheckpointFiles
from ..sidecars import STEP, global_step, read_config
from ..steps.names import step_in, steps_in
from ..steps.stated import stated_step
from ..steps.step import Step


@dataclass(frozen=True)
class Candidate:
    """A checkpoint whose step is not known yet.

    Attributes:
        name: The name of its file, folder or revision.
        address: A path or an fsspec address of its file or folder.
        files: Its files, if they were looked for.
    """

    name: str
    address: str
    files: CheckpointFiles | None = None


@dataclass(frozen=True)
class Ordered:
    """Checkpoints in the order of their steps.

    Attributes:
        checkpoints: Each step with its checkpoint.
        left_out: Why others are not among them, by their names.
        notes: Where a name and the files state different steps, a sentence each.
    """

    checkpoints: list[tuple[Step, Candidate]]
    left_out: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def in_order(candidates: Sequence[Candidate], where: str) -> Ordered:
    """Find the step of each checkpoint of a run.

    Names with a word such as "step" decide. Where they have only a word such as "checkpoint" or "epoch", and the files
    of all these checkpoints state their steps, the files decide. Checkpoints whose names state no step are those of the
    step that their files state.

    Args:
        candidates: Several checkpoints.
        where: Where they were found, for messages.

    Raises:
        CallError: The names are those of several models, no step is known, or two checkpoints have the same step.
    """
    named = steps_in([candidate.name for candidate in candidates])
    if named.several:
        raise _unknown(candidates, where, f"{named.doubt}, which are not steps of one run")
    is_open = [step is None or not step.firm for step in named.steps]
    stated = [
        step_by_content(candidate.files, named.doubt is not None) if look else None
        for candidate, look in zip(candidates, is_open, strict=True)
    ]
    of_names = [(step, other) for step, other in zip(named.steps, stated, strict=True) if step is not None]
    are_stated = all(other is not None and other.unit == "step" for _, other in of_names)
    steps = [other if step is None or are_stated else step for step, other in zip(named.steps, stated, strict=True)]
    notes = [
        _disagreement(candidate.name, step, other, counts)
        for candidate, step, other, counts in zip(candidates, named.steps, stated, steps, strict=True)
        if step is not None and other is not None and counts is not None and _differ(step, other)
    ]
    # Where the names state no step at all, every checkpoint whose file does belongs to the run.
    firsts = [named.doubt is not None or step is not None for step in named.steps]
    units = {step.unit for step, first in zip(steps, firsts, strict=True) if first and step is not None}
    if not units:
        raise _unknown(candidates, where, f"{named.doubt}, and their files do not state it as far as they were opened")
    unit = "step" if "step" in units else "epoch"
    by_step: dict[int, tuple[Step, Candidate]] = {}
    left_out: dict[str, str] = {}
    for first in (True, False):
        for candidate, step, is_first in zip(candidates, steps, firsts, strict=True):
            if is_first is not first:
                continue
            if step is None or step.unit != unit:
                or_file = " or in its file" if _is_looked_at(candidate, named.doubt) else ""
                left_out[candidate.name] = f"has no {unit} in its name{or_file}, unlike others"
            elif step.number not in by_step:
                by_step[step.number] = step, candidate
            elif first:
                raise CallError(
                    f"{by_step[step.number][1].name} and {candidate.name} in {where} are both of {unit} {step.number}; "
                    f"keep one of them, or name those of one run with --step 'NAME_{{step}}.pt' (step=...)"
                )
            else:
                left_out[candidate.name] = f"is of {unit} {step.number}, as {by_step[step.number][1].name} is"
    return Ordered([by_step[number] for number in sorted(by_step)], left_out, notes)


def step_of_one(names: Sequence[str], files: CheckpointFiles | None) -> tuple[Step | None, str | None]:
    """Return the step of a single checkpoint, or None if it is not known, and how its name and files disagree.

    Args:
        names: The names that may state its step, the first first: that of its file, and that of its folder.
        files: Its files, if they were looked for.
    """
    name, step = next(((name, step) for name in names if (step := step_in(name)) is not None), ("", None))
    stated = step_by_content(files, far=step is None)
    if step is None or stated is None:
        return step or stated, None
    counts = stated if not step.firm and stated.unit == "step" else step
    return counts, _disagreement(name, step, stated, counts) if _differ(step, stated) else None


def step_by_content(files: CheckpointFiles | None, far: bool = False) -> Step | None:
    """Return the step that a checkpoint's files state, or None if none is stated or looking would take long.

    A file that cannot be read states none; opening it says what is wrong.

    Args:
        files: The files of the checkpoint, if they were looked for.
        far: Whether to look at files that are not on this machine, as far as a request or two tell.
    """
    if files is None or not (far or isinstance(files.weights, LocalPlace)):
        return None
    try:
        number = None if files.trainer_state is None else global_step(read_config(files.trainer_state))
        if number is not None and files.trainer_state is not None:
            return Step(number, f"{STEP} in {files.trainer_state.name}")
        opened = peek(files.weights)
    except QkovError:
        return None
    return None if opened is None else stated_step(opened)


def _differ(named: Step, stated: Step) -> bool:
    return named.unit == stated.unit and named.number != stated.number


def _disagreement(name: str, named: Step, stated: Step, counts: Step) -> str:
    return (
        f"{name}: its name says {named.unit} {named.number}, but {stated.origin} is {stated.number}; "
        f"{counts.number} counts"
    )


def _is_looked_at(candidate: Candidate, doubt: str | None) -> bool:
    return candidate.files is not None and (doubt is not None or isinstance(candidate.files.weights, LocalPlace))


def _unknown(candidates: Sequence[Candidate], where: str, why: str) -> CallError:
    two_models = "; if they are two models, qkov compare BASE TUNED compares them" if len(candidates) == 2 else ""
    return CallError(
        f"{where} holds {len(candidates)} checkpoints ({candidates[0].name}, {candidates[-1].name} ...), but it is not "
        f"known which step each is of: {why}; give one of them, or say where the step of one run is in its names with "
        f"--step, such as --step 'NAME_{{step}}.pt' (step=...){two_models}"
    )
