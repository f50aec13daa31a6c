"""Rationale data in the layout of the ERASER benchmark (DeYoung et al. 2020)."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ...circuits.errors import CallError, QkovError
from ...circuits.storage.places import Place
from .collecting import LeftOut, SourceItem, collected
from .example import Span, Task, TextExample
from .records import data_place, field, files_in, of_data, read_records, read_text
from .words import text_of_words


@of_data("the layout of ERASER")
def eraser(
    data: Path | str,
    split: str | None = None,
    limit: int | None = None,
    seed: int = 0,
    *,
    name: str = "eraser",
    bins: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0),
) -> Task:
    """Return documents with their class; one relevance mask marks the tokens of all evidences together.

    The words of a document are the parts of the lines of `docs/ID` that the space character separates; the text joins
    them with single spaces. Annotations of several documents, and those whose evidence lies outside its document or
    states another text than stands there, are left out and counted. A query, if there is one, is not part of the text.

    Args:
        data: a folder with docs/ and {train,val,test}.jsonl.
        split: train, val or test; None for all.
        limit: maximum number of documents, sampled with `seed`; None for all.
        seed: seed of the sample.
        name: name of the task.
        bins: edges of the DTAP table.

    Raises:
        CallError: there is no such folder or split.
        QkovError: a file cannot be read, or lacks a field.

    Source: DeYoung et al. 2020.
    """
    place = data_place(data)
    if place is None or not place.child("docs").is_folder():
        raise CallError(
            f"{data} is not in the ERASER layout; expected a folder with docs/ and {{train,val,test}}.jsonl"
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


def _examples(rows: list[dict[str, Any]], folder: Place, classes: tuple[str, ...]) -> Iterator[SourceItem]:
    for row in rows:
        name = str(field(row, "annotation_id", folder))
        evidences = [evidence for group in field(row, "evidences", folder) or [] for evidence in group]
        documents = {field(evidence, "docid", folder) for evidence in evidences} or set(row.get("docids") or [name])
        if len(documents) > 1:
            yield LeftOut("with several documents")
            continue
        tokens = _tokens(_document(folder, str(documents.pop())))
        text, words = text_of_words(tokens)
        ranges = [(field(span, "start_token", folder), field(span, "end_token", folder)) for span in evidences]
        spans = _marked(words, ranges)
        if not words:
            yield LeftOut("without words")
        elif spans is None:
            yield LeftOut("whose evidence lies outside its document")
        elif not all(_says_its_text(span, tokens) for span in evidences):
            yield LeftOut("whose evidence has another text than its document at that place")
        else:
            label = str(row["classification"])
            relevant = (spans,) if spans else ()
            yield TextExample(text=text, label=classes.index(label), relevant=relevant, id=name, group=label)


def _tokens(document: str) -> list[str]:
    """Return the tokens that evidences are counted in: what the space character separates in each line."""
    lines = re.split(r"\r\n|\n|\r", document)
    return [token for line in lines for token in line.strip().split(" ") if token.strip()]


def _says_its_text(evidence: dict[str, Any], tokens: Sequence[str]) -> bool:
    """Return whether an evidence's own text, if it states one, is that of its tokens; spaces are not compared."""
    stated = evidence.get("text")
    marked = tokens[evidence["start_token"] : evidence["end_token"]]
    return not isinstance(stated, str) or "".join(stated.split()) == "".join("".join(marked).split())


def _marked(words: tuple[Span, ...], evidences: list[Span]) -> tuple[Span, ...] | None:
    """Return the spans of the words of all evidences, in order; None if an evidence lies outside the document."""
    marked: set[int] = set()
    for start, end in evidences:
        if not 0 <= start < end <= len(words):
            return None
        marked.update(range(start, end))
    return tuple(words[position] for position in sorted(marked))


def _document(folder: Place, name: str) -> str:
    parts = Path(name).parts
    # The names come from the file and must not lead out of docs/.
    if name.startswith("/") or ".." in parts or not parts:
        raise QkovError(f"{folder} names a document {name!r}; expected a file in docs/")
    place = folder.child("docs")
    for part in parts:
        place = place.child(part)
    if not place.is_file():
        raise QkovError(f"{place} does not exist, although an annotation names it; check whether docs/ is complete")
    return read_text(place)
