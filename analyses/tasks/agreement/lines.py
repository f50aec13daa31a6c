"""Subject-verb agreement in the line-aligned files NAME.text and NAME.gold of Gulordava et al. (2018)."""

from collections.abc import Iterator
from pathlib import Path

from ....circuits.errors import CallError, QkovError
from ....circuits.storage.places import Place
from ..collecting import LeftOut, SourceItem, collected
from ..example import Task
from ..records import data_place, files_in, read_text
from .sentences import Forms, agreement_example, agreement_task

_END = "<eos>"


def agreement_lines(
    data: Path | str,
    split: str | None = None,
    limit: int | None = None,
    seed: int = 0,
    *,
    subjects: Path | str | None = None,
) -> Task:
    """Return the sentences up to their verb, with the right and the wrong form as continuations.

    The files do not contain the position of the subject, so the examples have no relevant tokens unless a third file
    gives it. Nothing is guessed. The group is the number of attractors.

    Args:
        data: NAME.text (one sentence per line, with words separated by spaces) or NAME.gold (on each line the verb's
            position counted from 0, the right form, the wrong form and the number of attractors, separated by tabs),
            with the other file beside it; or the folder of both.
        split: NAME, if the folder contains several pairs of files.
        limit: maximum number of examples, sampled with `seed`; None for all.
        seed: seed of the sample.
        subjects: a file with the position of each sentence's subject, counted from 0, on one line per sentence; a line
            is empty if the position is not known.

    Raises:
        CallError: there are no such files.
        QkovError: the files have different numbers of lines, or a line is not in the expected format.

    Source: Gulordava et al. 2018.
    """
    place = data_place(data)
    if place is None:
        raise CallError(f"{data} does not exist; expected a .text or .gold file, or a folder with both")
    names = [file.name.rpartition(".")[0] for file in files_in(place, (".text", ".gold"), split)]
    folder = place if place.is_folder() else place.parent
    if len(set(names)) > 1 or folder is None:
        raise CallError(f"{place} has several such files; choose one of {', '.join(sorted(set(names)))} as the split")
    task = agreement_task(
        False, "the subject, where its position is given" if subjects else "not known: no subject is given"
    )
    items = _examples(folder.child(f"{names[0]}.text"), folder.child(f"{names[0]}.gold"), _subject_file(subjects))
    return collected(task, items, limit, seed)


def _subject_file(subjects: Path | str | None) -> Place | None:
    place = None if subjects is None else data_place(subjects)
    if subjects is not None and place is None:
        raise CallError(f"{subjects} does not exist; expected a file with one position per line")
    return place


def _examples(text: Place, gold: Place, subjects: Place | None) -> Iterator[SourceItem]:
    sentences, answers = _lines(text), _lines(gold)
    positions = [""] * len(sentences) if subjects is None else _lines(subjects)
    for place, lines in ((gold, answers), (subjects, positions)):
        if len(lines) != len(sentences):
            raise QkovError(f"{place} has {len(lines)} lines and {text} has {len(sentences)}; expected equal numbers")
    for number, (sentence, answer, position) in enumerate(zip(sentences, answers, positions, strict=True), 1):
        where = f"line {number} of {gold}"
        try:
            verb, right, wrong, attractors = answer.split("\t")
            at, subject = int(verb), int(position) if position.strip() else None
        except ValueError as error:
            raise QkovError(
                f"{where} is {answer!r} and its subject is {position!r}; expected position, right form, wrong form and "
                "attractors, separated by tabs, and the subject's position or nothing"
            ) from error
        yield _example(sentence, at, right, wrong, attractors, subject, f"{text.name}:{number}")


def _example(
    sentence: str, verb: int, right: str, wrong: str, attractors: str, subject: int | None, name: str
) -> SourceItem:
    words = sentence.removesuffix(_END).rstrip(" ").split(" ")
    if not 0 < verb < len(words) or words[verb].lower() != right.lower():
        return LeftOut("whose verb is not where the gold file says")
    if right.lower() == wrong.lower():
        return LeftOut("whose two verb forms are the same")
    if subject is not None and not 0 <= subject < verb:
        return LeftOut("whose subject is not before its verb")
    # A few forms are capitalized only in the gold file.
    if words[verb] != right:
        right, wrong = right.lower(), wrong.lower()
    forms = Forms(right, wrong)
    return agreement_example(words[:verb], forms, False, subject, False, name, attractors)


def _lines(place: Place) -> list[str]:
    if not place.is_file():
        raise CallError(f"{place} does not exist; .text and .gold files belong together")
    return read_text(place).removesuffix("\n").split("\n")
