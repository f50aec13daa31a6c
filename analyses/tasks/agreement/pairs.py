"""Minimal pairs of subject-verb agreement: two beginnings of a sentence that differ in one word, each with its verb."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ....circuits.errors import CallError
from ....circuits.storage.places import Place
from ..collecting import LeftOut, SourceItem, collected
from ..example import Task, TextExample
from ..records import data_place, field, files_in, of_data, read_records
from .sentences import agreement_task

_NOT_ONE_WORD = "whose two beginnings do not differ in exactly one word"


@of_data("records with clean_prefix, patch_prefix, clean_answer and patch_answer")
def agreement_pairs(data: Path | str, split: str | None = None, limit: int | None = None, seed: int = 0) -> Task:
    """Return examples from JSON records with clean_prefix, patch_prefix, clean_answer, patch_answer and case.

    The one word in which the two beginnings differ is relevant, because the answer depends on it: it is the subject of
    the verb, in the main clause or in a relative clause. The group is the case. Repeated records, and pairs that do not
    differ in exactly one word, are left out and counted.

    Args:
        data: a file of JSON lines or of a JSON list, or a folder of such files, at a local path or an fsspec address.
        split: name of a file in the folder, without its ending; None for all.
        limit: maximum number of examples, sampled with `seed`; None for all.
        seed: seed of the sample.

    Raises:
        CallError: there is no such file.
        QkovError: a file cannot be read, or lacks a field.
    """
    place = data_place(data)
    if place is None:
        raise CallError(f"{data} does not exist; expected a file or a folder of pairs")
    files = files_in(place, (".json", ".jsonl"), split)
    task = agreement_task(verb_in_input=False)
    return collected(task, _examples(files), limit, seed)


def _examples(files: Sequence[Place]) -> Iterator[SourceItem]:
    seen: set[tuple[str, ...]] = set()
    for file in files:
        for number, record in enumerate(read_records(file)):
            item = _example(record, file, number)
            if isinstance(item, TextExample):
                if (item.text, *item.continuations) in seen:
                    yield LeftOut("that repeat an earlier one")
                    continue
                seen.add((item.text, *item.continuations))
            yield item


def _example(record: dict[str, Any], file: Place, number: int) -> SourceItem:
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
