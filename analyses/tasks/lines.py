"""Any examples with relevant tokens, as JSON lines."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...circuits.errors import CallError, QkovError, reason
from .collecting import Found, LeftOut, collected
from .example import Example, Span, Task, TextExample
from .records import data_place, field, files_in, hub_rows, read_records
from .words import marked_spans, text_of_words


def lines(data: Path | str, split: str | None = None, limit: int | None = None, seed: int = 0) -> Task:
    """Return the examples of records {tokens, relevant, label} or {text, relevant, label}.

    - `tokens`: words, which are joined with single spaces, or token ids of the model, which are taken as they are;
      `relevant`: 0 or 1 for each of them, or a list of such masks, one an annotator.
    - `text`; `relevant`: [start, end] in characters of each stretch that is marked, or a list of such lists.
    - `label`: a number, or the name of a class; the classes are the names in the order of the alphabet.
    - besides, if wanted, `continuations` (texts, or lists of ids where tokens are ids), `id` and `group`.

    Args:
        data: a file of JSON lines or of a JSON list, or a folder of such; or what `datasets` loads, such as a hub id.
        split: the folder's file of that name; as `datasets` names it where that reads it.
        limit: keep so many.
        seed: of the draw of those.

    Raises:
        CallError: there is no such file.
        QkovError: a record is not as said; the message names it.
    """
    place = data_place(data)
    if place is None or (place.is_folder() and any(file.suffix == ".parquet" for file in place.entries())):
        rows = list(hub_rows(data, split))
    else:
        rows = [row for file in files_in(place, (".jsonl", ".json"), split) for row in read_records(file)]
    names = tuple(sorted({row["label"] for row in rows if isinstance(row.get("label"), str)}))
    task = Task(name="lines", examples=(), relevant="the tokens that the data mark", classes=names)
    return collected(task, _examples(rows, names, data), limit, seed)


def _examples(rows: list[dict[str, Any]], classes: tuple[str, ...], data: Path | str) -> Iterator[Found]:
    for number, row in enumerate(rows, 1):
        try:
            yield _example(row, classes, data, str(row.get("id", number)))
        except (CallError, TypeError, ValueError, KeyError) as error:
            raise QkovError(f"record {number} of {data} cannot be understood: {reason(error)}") from error


def _example(row: dict[str, Any], classes: tuple[str, ...], data: Path | str, name: str) -> Found:
    label, marked = row.get("label"), row.get("relevant") or []
    if isinstance(label, str):
        label = classes.index(label)
    elif classes and label is not None:
        raise CallError(f"its label is {label!r}, those of other records are names; expected one kind")
    given: dict[str, Any] = {"label": label, "id": name, "group": str(row.get("group") or "")}
    continuations = row.get("continuations") or []
    if row.get("text") is not None:
        relevant = _as_masks(marked, depth=2)
        spans = tuple(tuple(_span(span) for span in of_one) for of_one in relevant)
        return TextExample(text=row["text"], relevant=spans, continuations=tuple(continuations), **given)
    tokens = field(row, "tokens", data)
    if not tokens:
        return LeftOut("without tokens")
    masks = _as_masks(marked, depth=1)
    if all(isinstance(token, int) for token in tokens):
        return Example(
            tokens=tuple(tokens),
            relevant=tuple(tuple(bool(entry) for entry in mask) for mask in masks),
            continuations=tuple(tuple(ids) for ids in continuations),
            **given,
        )
    text, words = text_of_words(tokens)
    relevant = tuple(marked_spans(words, mask) for mask in masks)
    return TextExample(text=text, relevant=relevant, continuations=tuple(continuations), **given)


def _as_masks(marked: list[Any], depth: int) -> list[Any]:
    """One annotator's mark, of lists nested so deep, becomes a list of it."""
    inner, nested = marked, 0
    while isinstance(inner, list):
        nested, inner = nested + 1, inner[0] if inner else None
    return [marked] if marked and nested == depth else marked


def _span(span: list[int]) -> Span:
    start, end = span
    return start, end
