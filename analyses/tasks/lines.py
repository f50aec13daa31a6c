"""Examples with relevant tokens from the user's own JSON records."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...circuits.errors import CallError, QkovError, reason
from .collecting import LeftOut, SourceItem, collected
from .example import Example, Span, Task, TextExample
from .records import data_place, field, files_in, hub_rows, of_data, read_records
from .words import marked_spans, text_of_words


@of_data("records {tokens or text, relevant, label}")
def lines(data: Path | str, split: str | None = None, limit: int | None = None, seed: int = 0) -> Task:
    """Return the examples of records {tokens, relevant, label} or {text, relevant, label}.

    - `tokens`: words, which are joined with single spaces, or the model's token ids, which are used unchanged.
      `relevant` is then 0 or 1 for each of them, or a list of such masks, one for each annotator.
    - `text`: a text. `relevant` is then a list of marked spans [start, end] in characters, or a list of such lists, one
      for each annotator.
    - `label`: a number, or the name of a class. The classes are these names in alphabetical order.
    - `continuations` (texts, or lists of ids if the tokens are ids), `id` and `group` are optional.

    Args:
        data: a file of JSON lines or of a JSON list, or a folder of such files; or data that `datasets` loads, such as
            a hub id.
        split: name of a file in the folder, without its ending; or the split's name in `datasets`. None for all.
        limit: maximum number of examples, sampled with `seed`; None for all.
        seed: seed of the sample.

    Raises:
        CallError: there is no such file.
        QkovError: a record is not in the expected format; the message names it.
    """
    place = data_place(data)
    if place is None or (place.is_folder() and any(file.suffix == ".parquet" for file in place.entries())):
        rows = list(hub_rows(data, split))
    else:
        rows = [row for file in files_in(place, (".jsonl", ".json"), split) for row in read_records(file)]
    names = tuple(sorted({row["label"] for row in rows if isinstance(row.get("label"), str)}))
    task = Task(name="lines", examples=(), relevant="the tokens that the data mark", classes=names)
    return collected(task, _examples(rows, names, data), limit, seed)


def _examples(rows: list[dict[str, Any]], classes: tuple[str, ...], data: Path | str) -> Iterator[SourceItem]:
    for number, row in enumerate(rows, 1):
        try:
            yield _example(row, classes, data, str(row.get("id", number)))
        except Exception as error:
            if isinstance(error, QkovError) and not isinstance(error, CallError):
                raise
            raise QkovError(f"record {number} of {data} is not in the expected format: {reason(error)}") from error


def _example(row: dict[str, Any], classes: tuple[str, ...], data: Path | str, name: str) -> SourceItem:
    label, marked = row.get("label"), row.get("relevant") or []
    if isinstance(label, str):
        label = classes.index(label)
    elif classes and label is not None:
        raise CallError(f"its label is {label!r}, but the labels of other records are names; use only one kind")
    facts: dict[str, Any] = {"label": label, "id": name, "group": str(row.get("group") or "")}
    continuations = row.get("continuations") or []
    if row.get("text") is not None:
        relevant = _as_masks(marked, depth=2)
        spans = tuple(tuple(_span(span) for span in annotator) for annotator in relevant)
        return TextExample(text=row["text"], relevant=spans, continuations=tuple(continuations), **facts)
    tokens = field(row, "tokens", data)
    if not tokens:
        return LeftOut("without tokens")
    masks = _as_masks(marked, depth=1)
    if all(isinstance(token, int) for token in tokens):
        return Example(
            tokens=tuple(tokens),
            relevant=tuple(tuple(bool(entry) for entry in mask) for mask in masks),
            continuations=tuple(tuple(ids) for ids in continuations),
            **facts,
        )
    text, words = text_of_words(tokens)
    relevant = tuple(marked_spans(words, mask) for mask in masks)
    return TextExample(text=text, relevant=relevant, continuations=tuple(continuations), **facts)


def _as_masks(marked: list[Any], depth: int) -> list[Any]:
    """Wrap the marks of a single annotator, which are lists nested to this depth, in a list."""
    inner, nested = marked, 0
    while isinstance(inner, list):
        nested, inner = nested + 1, inner[0] if inner else None
    return [marked] if marked and nested == depth else marked


def _span(span: list[int]) -> Span:
    start, end = span
    return start, end
