"""Training steps in the names of files, folders and revisions."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from ..tensor_file import SUFFIXES
from .numbers import NUMBER, whole_number
from .step import Step, Unit


@dataclass(frozen=True)
class _Word:
    """A word that stands beside the number of a step.

    Attributes:
        name: The word, as messages quote it.
        pattern: Its spellings.
        unit: What the number counts.
        firm: Whether the number is certainly a step.
    """

    name: str
    pattern: str
    unit: Unit = "step"
    firm: bool = True

    @property
    def counts(self) -> bool:
        """Whether the word says what its number counts, unlike a word that only names the file."""
        return self.firm or self.unit == "epoch"


#: The most reliable first.
_WORDS = (
    _Word("step", r"(?:global|train|training)?steps?"),
    _Word("iteration", r"iterations?|iters?|itr|updates?"),
    _Word("checkpoint", r"checkpoints?|ckpts?|chkpt", firm=False),
    _Word("epoch", r"epochs?", unit="epoch", firm=False),
)
#: Words before a number that tells models, or the parts of a model, apart.
_APART = (
    *("seed", "fold", "trial", "run", "replicate", "rep", "member", "stage", "phase", "ingredient", "task", "subject"),
    *("rank", "layer", "head", "expert", "part", "shard"),
)
#: The number of a part and how many parts there are.
_PART = re.compile(r"(?<!\d)(\d+)[-_ ]of[-_ ]\d+(?!\d)", re.IGNORECASE)
#: What a number in front of these words counts is not steps.
_AMOUNT = re.compile(
    r"[-_ ]?(?:tokens?|samples?|sequences?|seqs?|examples?|params?|layers?|hours?|hrs?|minutes?|mins?|days?|gb|mb)"
    r"(?![A-Za-z])(?![-_=]?\d)",
    re.IGNORECASE,
)
#: A number of its own that follows directly; a decimal fraction, such as a loss, is not one.
_CONTINUED = re.compile(r"[-_ .,]?\d+(?!\d*\.\d)")
#: Days as 20240115, times in seconds since 1970, and days with the time of day.
_DATE = re.compile(r"(?:19|20)\d\d(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])(?:\d{4}|\d{6})?|1[4-9]\d{8}")
#: What a file is called that holds nothing but a model, so that a padded number behind it counts its saves.
_MODEL = re.compile(
    r"[^A-Za-z]*|(?:.*[^A-Za-z])?(?:model|net|network|weights|params|state|snapshot|save)[-_. ]?", re.IGNORECASE
)
#: The shortest number with leading zeros that counts as one: nobody pads the number of a seed as far.
_PADDED = 5


@dataclass(frozen=True)
class NamedSteps:
    """The steps that the names of one run state.

    Attributes:
        steps: The step in each name; None for a name that states none.
        doubt: Why the names do not state the steps, in words; None if they do.
        several: Whether the names are those of several models, or of the parts of one.
    """

    steps: list[Step | None]
    doubt: str | None = None
    several: bool = False


def step_in(name: str) -> Step | None:
    """Return the step that a single name states with a word such as "step", or None if it states none."""
    for word in _WORDS:
        numbers = _numbers(word, _stem(name))
        if numbers:
            return _step(word, numbers)
    return None


def steps_in(names: Sequence[str]) -> NamedSteps:
    """Return the step in each name of a run.

    The step is the number beside the word for a step that most names have, preferring "step"; names without that word
    state none. Without any such word, it is the number in which the names differ, if it is padded with zeros, as in
    model_000500.pt, and follows nothing but a word for a model.

    Args:
        names: The names of the files, folders or revisions of one run.
    """
    stems = [_stem(name) for name in names]
    by_word = [(word, [_numbers(word, stem) for stem in stems]) for word in _WORDS]
    word, numbers = max(by_word, key=lambda of_word: sum(map(bool, of_word[1])))
    stating = [stem for stem, of_name in zip(stems, numbers, strict=True) if of_name]
    none: list[Step | None] = [None] * len(names)
    apart = _told_apart(stating or stems) or (None if stating and word.counts else _parts(stems))
    if apart is not None:
        return NamedSteps(none, f"the names tell {apart} apart", several=True)
    if not stating:
        padded = _padded(stems)
        return NamedSteps(padded) if padded else NamedSteps(none, "the names have no word such as 'step'")
    steps = [_step(word, of_name) for of_name in numbers]
    for name, step, of_name in zip(names, steps, numbers, strict=True):
        if of_name and step is None:
            return NamedSteps(none, f"it is not clear which number in {name} is the step")
    return NamedSteps(steps)


def _numbers(word: _Word, stem: str) -> list[str]:
    """Return the numbers beside a word in a name, as they are written; what follows directly is part of a number."""
    spelled = rf"(?:(?<![A-Za-z])|(?<=[a-z])(?=[A-Z]))(?i:{word.pattern})"
    after = re.finditer(rf"{spelled}(?:[=:]|[-_. ]{{0,2}})(?P<number>{NUMBER})(?=(?P<rest>.*))", stem, re.DOTALL)
    before = re.finditer(
        rf"(?<![A-Za-z0-9])(?<!\d[-_,.])(?<!of[-_ ])(?P<number>{NUMBER}?)"
        rf"(?:(?i:{word.pattern})|[-_ ](?i:{word.pattern})(?<=[sS]))$",
        stem,
    )
    found = [
        match["number"] + (following[0] if (following := _CONTINUED.match(match["rest"])) else "")
        for match in after
        if not _AMOUNT.match(match["rest"])
    ]
    return found or [match["number"] for match in before]


def _step(word: _Word, numbers: list[str]) -> Step | None:
    """Return the step that the numbers beside a word state together, or None if it is not clear which number it is."""
    values = {whole_number(number) for number in numbers}
    value = values.pop() if len(values) == 1 else None
    if value is None:
        return None
    # A day, or the size of a model, may follow a word that only names the file.
    if not word.firm and any(_DATE.fullmatch(number) or number.endswith("M") for number in numbers):
        return None
    return Step(value, f"the number beside {word.name!r} in its name", word.unit, word.firm)


def _told_apart(stems: list[str]) -> str | None:
    """Return in words what different models, or parts of one, the names tell apart by numbers of their own."""
    for word in _APART:
        numbers = {match[1] for stem in stems for match in re.finditer(rf"(?i)(?<![a-z]){word}s?[-_=. ]?(\d+)", stem)}
        if len(numbers) > 1:
            return f"several {word}s"
    return None


def _parts(stems: list[str]) -> str | None:
    """Return in words that the names tell parts apart; 7 of 100 may also be what a word for a step counts."""
    return "several parts" if len({match[1] for stem in stems for match in _PART.finditer(stem)}) > 1 else None


def _padded(stems: list[str]) -> list[Step | None]:
    """Return the steps in names that differ in one number, which is padded with zeros; none in other names."""
    parts = [re.split(r"(\d+)", stem) for stem in stems]
    if len(stems) < 2 or len(set(map(len, parts))) != 1:
        return []
    differing = [place for place, column in enumerate(zip(*parts, strict=True)) if len(set(column)) > 1]
    if len(differing) != 1 or differing[0] % 2 == 0:
        return []
    place = differing[0]
    numbers = [of_name[place] for of_name in parts]
    before, after = "".join(parts[0][:place]), parts[0][place + 1]
    is_padded = len({*map(len, numbers)}) == 1 and len(numbers[0]) >= _PADDED and any(n[0] == "0" for n in numbers)
    if not is_padded or not _MODEL.fullmatch(before) or after[:1].isalpha():
        return []
    return [Step(int(number), "the number with leading zeros in its name", firm=False) for number in numbers]


def _stem(name: str) -> str:
    return name.removesuffix(PurePath(name).suffix) if PurePath(name).suffix in SUFFIXES else name
