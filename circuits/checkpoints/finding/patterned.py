"""The checkpoints of a run whose steps the caller tells by a pattern for the names."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from ...errors import CallError
from ..files import CheckpointFiles, files_beside
from ..folders import Folder, contents_of
from ..steps.pattern import Captured, StepPattern
from ..steps.step import Step
from ..tensor_file import SUFFIXES
from .ordering import Candidate, Ordered

_UNFIT = "does not fit the pattern for the step"


@dataclass(frozen=True)
class _Found:
    """A name that fits a pattern."""

    step: Step
    part: tuple[int, ...]
    candidate: Candidate


def ordered_by(patterns: Sequence[StepPattern], folder: Folder) -> Ordered:
    """Find the checkpoints in a folder whose names fit one of some patterns.

    Args:
        patterns: The patterns; the first that fits a name counts.
        folder: The folder of the run.

    Returns:
        The checkpoints in the order of their steps, and why others that look like checkpoints are not among them.

    Raises:
        CallError: No name fits, or two checkpoints have the same step.
        QkovError: A folder cannot be listed.
    """
    left_out: dict[str, str] = {}
    by_address: dict[str, _Found] = {}
    for pattern in patterns:
        for found in _fitting(pattern, folder, 0, {}, "", left_out):
            by_address.setdefault(found.candidate.address, found)
    if not by_address:
        raise CallError(_nothing_fits(patterns, list(folder.entries), str(folder.place)))
    tops = {found.candidate.name.split("/")[0] for found in by_address.values()}
    for name, entry in folder.entries.items():
        if name not in tops and name not in left_out and PurePath(name).suffix in SUFFIXES and entry.is_file():
            left_out[name] = _UNFIT
    return _by_step(list(by_address.values()), str(folder.place), left_out)


def ordered_by_names(patterns: Sequence[StepPattern], candidates: Sequence[Candidate], where: str) -> Ordered:
    """Find the checkpoints whose own names, such as those of revisions, fit one of some patterns.

    Args:
        patterns: The patterns; the first that fits a name counts.
        candidates: The checkpoints.
        where: Where they were found, for messages.

    Raises:
        CallError: No name fits, or two checkpoints have the same step.
    """
    found: list[_Found] = []
    left_out: dict[str, str] = {}
    for candidate in candidates:
        fitting = (each for each in patterns if each.depth == 1 and each.fit(0, candidate.name, {}) is not None)
        pattern = next(fitting, None)
        if pattern is None:
            left_out[candidate.name] = _UNFIT
            continue
        captured = pattern.fit(0, candidate.name, {}) or {}
        found.append(_Found(pattern.step(captured, candidate.name), pattern.part(captured), candidate))
    if not found:
        raise CallError(_nothing_fits(patterns, [candidate.name for candidate in candidates], where))
    return _by_step(found, where, left_out)


def _fitting(
    pattern: StepPattern, folder: Folder, level: int, above: Captured, path: str, left_out: dict[str, str]
) -> Iterator[_Found]:
    folders = {each.place.name: each for each in folder.subfolders}
    for name, entry in folder.entries.items():
        captured = pattern.fit(level, name, above)
        full = f"{path}{name}"
        if captured is None:
            continue
        if level + 1 < pattern.depth:
            if name in folders:
                yield from _fitting(pattern, folders[name], level + 1, captured, f"{full}/", left_out)
            continue
        step = pattern.step(captured, full)
        if name in folders:
            contents = contents_of(folders[name])
            if contents.weights is None and len(contents.loose) != 1:
                left_out[full] = contents.refusal or "holds no weights, or several files of weights"
                continue
            files = files_beside(contents.weights or contents.loose[0], folders[name], of_run=folder)
        else:
            files = files_beside(entry, folder, of_run=folder.parent if level else None)
        yield _Found(step, pattern.part(captured), Candidate(full, entry.address, files))


def _by_step(found: list[_Found], where: str, left_out: dict[str, str]) -> Ordered:
    by_step: dict[int, list[_Found]] = {}
    for each in found:
        by_step.setdefault(each.step.number, []).append(each)
    every_part = {each.part for each in found}
    checkpoints = []
    for number in sorted(by_step):
        members = sorted(by_step[number], key=lambda each: each.part)
        parts = [each.part for each in members]
        if len(set(parts)) < len(parts):
            twice = next(each for position, each in enumerate(members) if each.part in parts[:position])
            first = next(each for each in members if each.part == twice.part)
            raise CallError(
                f"{first.candidate.name} and {twice.candidate.name} in {where} are both of step {number}; "
                f"say with the pattern which of them are the run"
            )
        missing = sorted(every_part - set(parts))
        if missing:
            why = f"is of step {number}, which has no file for part {'.'.join(map(str, missing[0]))}"
            left_out |= {each.candidate.name: why for each in members}
            continue
        checkpoints.append((members[0].step, _joined(members)))
    if not checkpoints:
        name, why = next(iter(left_out.items()))
        raise CallError(f"{where} holds no step that is complete: {name} {why}")
    return Ordered(checkpoints, left_out)


def _joined(members: list[_Found]) -> Candidate:
    first = members[0].candidate
    if not members[0].part or first.files is None:
        return first
    parts = tuple(
        (".".join(map(str, each.part)), each.candidate.files.weights)
        for each in members
        if each.candidate.files is not None
    )
    files = CheckpointFiles(first.files.weights, first.files.config, first.files.trainer_state, parts)
    return Candidate(f"{first.name} and {len(parts) - 1} more", first.address, files)


def _nothing_fits(patterns: Sequence[StepPattern], names: list[str], where: str) -> str:
    shown = ", ".join(names[:6]) + ", ..." * (len(names) > 6)
    written = " or ".join(repr(pattern.text) for pattern in patterns)
    return (
        f"no name in {where} fits the pattern {written}; a pattern covers a whole name with its ending, and the names "
        f"are {shown}"
    )
