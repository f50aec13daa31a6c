"""The checkpoints of a run that are all in one file: a list of state dicts, or a dictionary keyed by step or epoch."""

import re
from dataclasses import dataclass, replace
from typing import Any

from ...errors import CallError
from ..series import Series, series_in
from ..steps.names import step_in
from ..steps.numbers import whole_number
from ..steps.stated import UNITS, number_of_step
from ..steps.step import Step, Unit
from ..tensor_file import TensorFile
from .ordering import Candidate, Ordered

#: Words in the name of a list or dictionary whose numbers, or whose keys, are steps or epochs.
_STEPS = re.compile(r"(?<![a-z])(?:steps?|iters?|iterations?|updates?)(?![a-z])", re.IGNORECASE)
_EPOCHS = re.compile(r"(?<![a-z])epochs?(?![a-z])", re.IGNORECASE)
_WORDS: tuple[tuple[re.Pattern[str], Unit], ...] = ((_STEPS, "step"), (_EPOCHS, "epoch"))
_OF_OPTIMIZERS = re.compile(r"optim", re.IGNORECASE)


@dataclass(frozen=True)
class SeriesNames:
    """What the caller says about the checkpoints in one file.

    Attributes:
        name: The list or dictionary of the checkpoints, such as `state_dicts`; empty if it is the whole file. None if
            the caller reads one model of the file, which is then no run.
        steps: The list of their steps in the file, such as `epochs`; None if the caller does not name one.
    """

    name: str | None
    steps: str | None = None


def split_prefix(prefix: str) -> tuple[str | None, str]:
    """Return the series that a prefix such as `state_dicts.{step}.model` names, and the prefix within its members.

    Raises:
        CallError: `{step}` is not one whole part of the prefix.
    """
    parts = prefix.split(".") if prefix else []
    if "{step}" not in parts:
        if "{step}" in prefix:
            raise CallError(
                f"the prefix {prefix!r} has {{step}} within a name; expected it between dots, as in 'a.{{step}}'"
            )
        return None, prefix
    place = parts.index("{step}")
    return ".".join(parts[:place]), ".".join(parts[place + 1 :])


def run_in_file(candidate: Candidate, file: TensorFile, names: SeriesNames | None = None) -> Ordered | None:
    """Return the checkpoints in an open file in the order of their steps, or None if it does not hold several.

    Args:
        candidate: The file.
        file: The same, open.
        names: What the caller says about them; None if nothing.

    Raises:
        CallError: The file holds no such series, holds several, or does not state the steps of the checkpoints.
    """
    if names is not None and names.name is None:
        return None
    found = [each for each in series_in(file) if len(each.keys) > 1]
    if names is not None:
        chosen = [each for each in found if each.name == names.name]
        if not chosen:
            held = ", ".join(repr(each.name) for each in found) or "none"
            raise CallError(
                f"{candidate.address} holds no list or dictionary of state dicts called {names.name!r}; it holds {held}"
            )
    else:
        chosen = [each for each in found if each.is_named]
    if not chosen:
        return None
    steps = {each.name: _steps(each, file, names.steps if names is not None else None) for each in chosen}
    known = [each for each in chosen if steps[each.name] is not None]
    if len(known) > 1:
        raise CallError(
            f"{candidate.address} holds several series of checkpoints ({', '.join(each.name for each in known)}); "
            f"choose one with --prefix '{known[0].name}.{{step}}', or with the same prefix in a mapping"
        )
    left_out = {
        each.name: f"holds {len(each.keys)} state dicts whose steps are not stated; name the list of their steps in a "
        f'mapping, with prefix = "{_under(each.name, "{step}")}" and steps = "NAME"'
        for each in chosen
        if each not in known
    }
    if not known:
        rest = _beside(file, chosen)
        if names is None and rest:
            return Ordered([], left_out)
        name, why = next(iter(left_out.items()))
        raise CallError(f"{candidate.address}: {name or 'the file'} {why}")
    (series,) = known
    return _ordered(candidate, series, steps[series.name] or [], left_out | _rest(file, series))


def _ordered(candidate: Candidate, series: Series, steps: list[Step], left_out: dict[str, str]) -> Ordered:
    by_step: dict[int, tuple[Step, Candidate]] = {}
    for step, prefix in zip(steps, series.prefixes, strict=True):
        if step.number in by_step:
            raise CallError(
                f"{by_step[step.number][1].name} and {prefix} in {candidate.address} are both of {step.unit} "
                f"{step.number}"
            )
        files = None if candidate.files is None else replace(candidate.files, element=prefix)
        by_step[step.number] = step, Candidate(prefix, candidate.address, files)
    return Ordered([by_step[number] for number in sorted(by_step)], left_out)


def _steps(series: Series, file: TensorFile, told: str | None) -> list[Step] | None:
    """Return the step of each member of a series, or None if the file does not state them."""
    if told is not None:
        values = series.beside.get(told, file.lists.get(told))
        if values is None and told in file.shapes and len(file.shapes[told]) == 1:
            values = tuple(file.read([told])[told].tolist())
        if values is None or len(values) != len(series.keys):
            count = "no list" if values is None else f"a list of {len(values)}"
            raise CallError(
                f"{file.address} holds {count} called {told!r}; expected the steps of {len(series.keys)} state dicts"
            )
        unit: Unit = "epoch" if _EPOCHS.search(told) else "step"
        steps = _numbers(values, f"{told} in the file", unit)
        if steps is None:
            raise CallError(f"{told} in {file.address} holds something else than whole numbers, so it states no steps")
        return steps
    for names, unit in UNITS:
        for name in names:
            steps = _numbers(series.values.get(name, ()), f"{name} in the file", unit)
            if steps is not None:
                return steps
    for pattern, unit in _WORDS:
        for name in series.beside:
            steps = _numbers(series.beside[name], f"{name} in the file", unit) if pattern.search(name) else None
            if steps is not None:
                return steps
    return _steps_of_keys(series)


def _steps_of_keys(series: Series) -> list[Step] | None:
    origin = f"the keys of {series.name or 'the file'}"
    named = [step_in(key) if isinstance(key, str) else None for key in series.keys]
    stated = [step for step in named if step is not None]
    if len(stated) == len(named) and len({step.unit for step in stated}) == 1:
        return [replace(step, origin=origin) for step in stated]
    if list(series.keys) == list(range(len(series.keys))) and not (
        _STEPS.search(series.name) or _EPOCHS.search(series.name)
    ):
        # These may be the positions in a list, which are not steps.
        return None
    unit: Unit = "epoch" if _EPOCHS.search(series.name) else "step"
    return _numbers(series.keys, origin, unit)


def _numbers(values: tuple[Any, ...], origin: str, unit: Unit) -> list[Step] | None:
    """Return values as steps if all of them are whole numbers and no two are equal."""
    numbers = [whole_number(value) if isinstance(value, str) else number_of_step(value) for value in values]
    known = [number for number in numbers if number is not None]
    if not known or len(known) < len(numbers) or len(set(known)) < len(known):
        return None
    return [Step(number, origin, unit) for number in known]


def _rest(file: TensorFile, series: Series) -> dict[str, str]:
    """Return the models beside the series in its file, which are not of the run."""
    return {
        name: f"is beside {series.name} in the file, and is read alone with --prefix {name}"
        for name in _beside(file, [series])
    }


def _beside(file: TensorFile, series: list[Series]) -> list[str]:
    """Return the names of what holds matrices in a file and is not one of the series."""
    if any(not each.name for each in series):
        return []
    inner = tuple(f"{each.name}." for each in series)
    names = [name for name, shape in file.shapes.items() if len(shape) > 1 and not name.startswith(inner)]
    return sorted({first for name in names if not _OF_OPTIMIZERS.search(first := name.partition(".")[0])})


def _under(name: str, member: str) -> str:
    return f"{name}.{member}" if name else member
