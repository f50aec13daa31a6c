"""Rationale data in the layout of the ERASER benchmark (DeYoung et al. 2020)."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...circuits.errors import CallError, QkovError
from ...circuits.storage.places import Place
from .collecting import LeftOut, SourceItem, collected
from .example import Span, Task, TextExample
from .records import data_place, field, files_in, of_data, read_records, read_text
from .words import text_of_words

#: Where the query of an annotation goes: in front of its document, behind it, or nowhere. "varying" puts it in front if
#: the annotations have different queries, and leaves out a query that all of them share.
_QUERIES = ("varying", "first", "second", "none")


@of_data("the layout of ERASER")
def eraser(
    data: Path | str,
    split: str | None = None,
    limit: int | None = None,
    seed: int = 0,
    *,
    name: str = "eraser",
    bins: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0),
    query: str = "varying",
) -> Task:
    """Return documents with their class; one relevance mask marks the tokens of all evidences together.

    The words of a document are the parts of the lines of `docs/ID` that the space character separates; the text joins
    them with single spaces. A query and its document are a pair of texts; so are two documents, in the order of
    `docids`, or the premise and the hypothesis if their names end so. Annotations of more texts, and those whose
    evidence lies outside its document or states another text than stands there, are left out and counted.

    Args:
        data: a folder with docs/ and {train,val,test}.jsonl.
        split: train, val or test; None for all.
        limit: maximum number of annotations, sampled with `seed`; None for all.
        seed: seed of the sample.
        name: name of the task.
        bins: edges of the DTAP table.
        query: where queries go: "first" (in front of the document, as in ERASER's own models), "second", "none", or
            "varying", which is "first" unless all annotations of the split have the same query, and "none" if they do.

    Raises:
        CallError: there is no such folder or split, or `query` is none of these.
        QkovError: a file cannot be read, or lacks a field.

    Source: DeYoung et al. 2020.
    """
    if query not in _QUERIES:
        raise CallError(f"query should be one of {', '.join(_QUERIES)}; got {query!r}")
    place = data_place(data)
    if place is None or not place.child("docs").is_folder():
        raise CallError(
            f"{data} is not in the ERASER layout; expected a folder with docs/ and {{train,val,test}}.jsonl"
        )
    rows = [row for file in files_in(place, (".jsonl",), split) for row in read_records(file)]
    classes = tuple(sorted({str(field(row, "classification", data)) for row in rows}))
    queries = [_query(row, place) for row in rows]
    if query == "varying":
        is_shared = len(rows) > 1 and len(set(queries)) == 1 and queries[0] is not None
        query = "none" if is_shared else "first"
    task = Task(
        name=name,
        examples=(),
        relevant=f"the tokens of the evidences{_in_words({text for text in queries if text}, query)}",
        classes=classes,
        attention_bins=bins,
        probability_bins=bins,
    )
    return collected(task, _examples(rows, queries, place, classes, query), limit, seed)


def _query(row: dict[str, Any], folder: Place) -> str | None:
    """Return the query of an annotation; None if it has none."""
    query = row.get("query")
    if query is not None and not isinstance(query, str):
        raise QkovError(f"an annotation of {folder} has the query {str(query)[:60]!r}; expected a text or null")
    return query if query and query.strip() else None


def _in_words(queries: set[str], query: str) -> str:
    """Return what was done with the queries, as words behind "the tokens of the evidences"."""
    if not queries:
        return ""
    if query == "none":
        shared = f" {next(iter(queries))!r}, the same in all annotations," if len(queries) == 1 else ""
        return f" (the query{shared} is left out)"
    first, second = ("query", "document") if query == "first" else ("document", "query")
    return f" in the document (the first text is the {first}, the second the {second})"


@dataclass(frozen=True)
class _Document:
    """A text of a pair, and the spans of its evidences."""

    text: str
    spans: tuple[Span, ...] = ()


def _examples(
    rows: list[dict[str, Any]], queries: list[str | None], folder: Place, classes: tuple[str, ...], query: str
) -> Iterator[SourceItem]:
    for row, text_of_query in zip(rows, queries, strict=True):
        name = str(field(row, "annotation_id", folder))
        evidences = [evidence for group in field(row, "evidences", folder) or [] for evidence in group]
        asked = None if query == "none" else text_of_query
        names = _document_names(row, evidences, name, folder)
        if names is None or len(names) + (asked is not None) > 2:
            yield LeftOut("with several documents" if asked is None else "with a query and several documents")
            continue
        texts: list[_Document | LeftOut] = []
        for document in names:
            of_document = [evidence for evidence in evidences if str(evidence["docid"]) == document]
            texts.append(_marked_document(document, of_document, folder))
        left_out = next((text for text in texts if isinstance(text, LeftOut)), None)
        if left_out is not None:
            yield left_out
            continue
        if asked is not None:
            texts.insert(0 if query == "first" else 1, _Document(asked))
        first, second = [text for text in texts if isinstance(text, _Document)] + [None] * (2 - len(texts))
        assert first is not None
        label = str(row["classification"])
        marked = bool(evidences)
        yield TextExample(
            text=first.text,
            label=classes.index(label),
            relevant=(first.spans,) if marked else (),
            id=name,
            group=label,
            pair=None if second is None else second.text,
            pair_relevant=(second.spans,) if marked and second is not None else (),
        )


def _document_names(row: dict[str, Any], evidences: list[dict[str, Any]], name: str, folder: Place) -> list[str] | None:
    """Return the documents of an annotation in their order; None if there are several and nothing states the order."""
    listed = list(dict.fromkeys(str(document) for document in row.get("docids") or ()))
    of_evidences = {str(field(evidence, "docid", folder)) for evidence in evidences}
    names = listed if of_evidences <= set(listed) else sorted(of_evidences | set(listed))
    by_role = sorted(names, key=lambda document: document.endswith("hypothesis"))
    if len(names) == 2 and by_role[0].endswith("premise") and by_role[1].endswith("hypothesis"):
        return by_role
    return (names or [name]) if len(names) < 2 or names == listed else None


def _marked_document(document: str, evidences: list[dict[str, Any]], folder: Place) -> _Document | LeftOut:
    tokens = _tokens(_content(folder, document))
    text, words = text_of_words(tokens)
    ranges = [(field(span, "start_token", folder), field(span, "end_token", folder)) for span in evidences]
    spans = _marked(words, ranges)
    if not words:
        return LeftOut("without words")
    if spans is None:
        return LeftOut("whose evidence lies outside its document")
    if not all(_says_its_text(span, tokens) for span in evidences):
        return LeftOut("whose evidence has another text than its document at that place")
    return _Document(text, spans)


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


def _content(folder: Place, name: str) -> str:
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
