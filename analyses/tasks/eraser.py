"""Rationale data in the layout of the ERASER benchmark (DeYoung et al. 2020)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...circuits.errors import CallError, QkovError
from ...circuits.storage.places import Place
from .collecting import Found, LeftOut, collected
from .example import Span, Task, TextExample
from .records import data_place, field, files_in, read_records, read_text
from .words import text_of_words


def eraser(
    data: Path | str,
    split: str | None = None,
    limit: int | None = None,
    seed: int = 0,
    *,
    name: str = "eraser",
    bins: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0),
) -> Task:
    """Return documents with their class; relevant are the tokens of all evidences together, in one mask.

    A document's words are what white space keeps apart in `docs/ID`, joined with single spaces. Annotations of several
    documents are left out and counted, as are those whose evidence lies outside its document. A query, where there is
    one, is not part of the text.

    Args:
        data: a folder with docs/ and {train,val,test}.jsonl.
        split: which of those; None for all.
        limit: keep so many.
        seed: of the draw of those.
        name: of the task.
        bins: edges of the DTAP table.

    Raises:
        CallError: there is no such folder or split.
        QkovError: a file cannot be read, or lacks a field.
    """
    place = data_place(data)
    if place is None or not place.child("docs").is_folder():
        raise CallError(
            f"{data} is not in the ERASER layout: expected a folder with docs/ and {{train,val,test}}.jsonl"
        )
    rows = [row for file in files_in(place, (".jsonl",), split) for row in read_records(file)]
    classes = tuple(sorted({str(field(row, "classification", data)) for row in rows}))
    task = Task(
        name=name,
        examples=(),
        relevant="the tokens of the evidences",
        classes=classes,
        attention_bins=bins,
        probability_bins=bins,
    )
    return collected(task, _examples(rows, place, classes), limit, seed)


def _examples(rows: list[dict[str, Any]], folder: Place, classes: tuple[str, ...]) -> Iterator[Found]:
    for row in rows:
        name = str(field(row, "annotation_id", folder))
        evidences = [evidence for group in field(row, "evidences", folder) or [] for evidence in group]
        documents = {field(evidence, "docid", folder) for evidence in evidences} or set(row.get("docids") or [name])
        if len(documents) > 1:
            yield LeftOut("with several documents")
            continue
        text, words = text_of_words(_document(folder, str(documents.pop())).split())
        places = [(field(one, "start_token", folder), field(one, "end_token", folder)) for one in evidences]
        spans = _marked(words, places)
        if not words:
            yield LeftOut("without words")
        elif spans is None:
            yield LeftOut("whose evidence lies outside its document")
        else:
            label = str(row["classification"])
            relevant = (spans,) if spans else ()
            yield TextExample(text=text, label=classes.index(label), relevant=relevant, id=name, group=label)


def _marked(words: tuple[Span, ...], evidences: list[Span]) -> tuple[Span, ...] | None:
    """Spans of the words of all evidences, in order; None where one lies outside."""
    marked: set[int] = set()
    for start, end in evidences:
        if not 0 <= start < end <= len(words):
            return None
        marked.update(range(start, end))
    return tuple(words[place] for place in sorted(marked))


def _document(folder: Place, name: str) -> str:
    parts = Path(name).parts
    # The names come from the file, and must not lead elsewhere.
    if name.startswith("/") or ".." in parts or not parts:
        raise QkovError(f"{folder} names a document {name!r}; expected a file of docs/")
    place = folder.child("docs")
    for part in parts:
        place = place.child(part)
    if not place.is_file():
        raise QkovError(f"{place} does not exist, though an annotation names it: is docs/ complete?")
    return read_text(place)
