"""Minimal pairs of agreement: two beginnings of a sentence that differ in one word, and the verb form of each."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ....circuits.errors import CallError
from ....circuits.storage.places import Place
from ..collecting import Found, LeftOut, collected
from ..example import Task, TextExample
from ..records import data_place, field, files_in, read_records
from .sentences import agreement_task

_NOT_ONE_WORD = "whose two beginnings do not differ in exactly one word"


def agreement_pairs(data: Path | str, split: str | None = None, limit: int | None = None, seed: int = 0) -> Task:
    """Return agreement examples from JSON records of clean_prefix, patch_prefix, clean_answer, patch_answer and case.

    Relevant is the one word in which the two beginnings differ, which is what the answer depends on: the subject of
    the verb, be it the sentence's or that of a relative clause. The group is the case. Records that come again are
    left out and counted, as are pairs that do not differ in one word.

    Args:
        data: a file of JSON lines or of a JSON list, or a folder of such files, here or at an address of fsspec.
        split: the file of the folder, without its ending; None for all.
        limit: keep so many examples.
        seed: of the draw of those.

    Raises:
        CallError: there is no such file.
        QkovError: a file cannot be read, or lacks a field.
    """
    place = data_place(data)
    if place is None:
        raise CallError(f"{data} does not exist: expected a file or a folder of pairs")
    files = files_in(place, (".json", ".jsonl"), split)
    task = agreement_task(verb_in_input=False)
    return collected(task, _examples(files), limit, seed)


def _examples(files: Sequence[Place]) -> Iterator[Found]:
    seen: set[tuple[str, ...]] = set()
    for file in files:
        for number, record in enumerate(read_records(file)):
            found = _example(record, file, number)
            if isinstance(found, TextExample):
                if (found.text, *found.continuations) in seen:
                    yield LeftOut("that came before")
                    continue
                seen.add((found.text, *found.continuations))
            yield found


def _example(record: dict[str, Any], file: Place, number: int) -> Found:
    clean, patch, right, wrong = (
        str(field(record, name, file)) for name in ("clean_prefix", "patch_prefix", "clean_answer", "patch_answer")
    )
    words, others = list(re.finditer(r"\S+", clean)), re.findall(r"\S+", patch)
    if len(words) != len(others):
        return LeftOut(_NOT_ONE_WORD)
    differing = [word.span() for word, other in zip(words, others, strict=True) if word.group() != other]
    if len(differing) != 1:
        return LeftOut(_NOT_ONE_WORD)
    return TextExample(
        text=clean,
        label=0,
        relevant=(tuple(differing),),
        continuations=(right, wrong),
        id=f"{file.name}:{number}",
        group=str(record.get("case", "")),
    )
