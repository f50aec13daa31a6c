"""Examples with relevant tokens from the user's own JSON records."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...circuits.errors import CallError, QkovError, reason
from .collecting import LeftOut, SourceItem, collected
from .example import Example, Span, Task, TextExample
from .records import data_place, field, files_in, hub_rows, of_data, read_records
from .words import marked_spans, text_of_words


@of_data("records {tokens or text, relevant, label}, or pairs {text, pair, relevant, pair_relevant, label}")
def lines(data: Path | str, split: str | None = None, limit: int | None = None, seed: int = 0) -> Task:
    """Return the examples of records {tokens, relevant, label} or {text, relevant, label}.

    - `tokens`: words, which are joined with single spaces, or the model's token ids, which are used unchanged.
      `relevant` is then 0 or 1 for each of them, or a list of such masks, one for each annotator.
    - `text`: a text. `relevant` is then a list of marked spans [start, end] in characters, or a list of such lists, one
      for each annotator.
    - `pair`: the second text of a pair (or its words, if `tokens` are words), which the model's tokenizer puts behind
      the first with its own separators and token types. `pair_relevant` marks it as `relevant` marks the first.
    - `token_types`: the type of each token, if `tokens` are ids.
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
    pair, types = row.get("pair"), row.get("token_types")
    if row.get("text") is None and not field(row, "tokens", data):
        return LeftOut("without tokens")
    if row.get("text") is None and all(isinstance(token, int) for token in row["tokens"]):
        if pair is not None or row.get("pair_relevant"):
            raise CallError("its tokens are ids, which are the whole input; leave out pair and give token_types")
        return Example(
            tokens=tuple(row["tokens"]),
            relevant=tuple(tuple(bool(entry) for entry in mask) for mask in _as_masks(marked, depth=1)),
            continuations=tuple(tuple(ids) for ids in continuations),
            token_types=tuple(types or ()),
            **facts,
        )
    if types is not None:
        raise CallError("it has token_types and a text, whose token types the tokenizer gives; leave them out")
    read = _marked_text if row.get("text") is not None else _marked_words
    text, relevant = read(row["text"] if row.get("text") is not None else row["tokens"], marked)
    second, second_relevant = (None, ()) if pair is None else read(pair, row.get("pair_relevant") or [])
    if pair is None and row.get("pair_relevant"):
        raise CallError("it has pair_relevant and no pair; give the second text as pair")
    return TextExample(
        text=text,
        relevant=relevant,
        continuations=tuple(continuations),
        pair=second,
        pair_relevant=second_relevant,
        **facts,
    )


def _marked_text(text: Any, marked: list[Any]) -> tuple[str, tuple[tuple[Span, ...], ...]]:
    """Return a text and each annotator's marked spans in it."""
    if not isinstance(text, str):
        raise CallError(f"expected a text, got {str(text)[:60]!r}; both texts of a pair are texts, or lists of words")
    spans = tuple(tuple(_span(span) for span in annotator) for annotator in _as_masks(marked, depth=2))
    return text, spans


def _marked_words(words: Any, marked: list[Any]) -> tuple[str, tuple[tuple[Span, ...], ...]]:
    """Return words as a text, and the spans of those that each annotator's mask marks."""
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise CallError(f"expected a list of words, got {str(words)[:60]!r}; both texts of a pair are of one kind")
    text, spans = text_of_words(words)
    return text, tuple(marked_spans(spans, mask) for mask in _as_masks(marked, depth=1))


def _as_masks(marked: list[Any], depth: int) -> list[Any]:
    """Wrap the marks of a single annotator, which are lists nested to this depth, in a list."""
    inner, nested = marked, 0
    while isinstance(inner, list):
        nested, inner = nested + 1, inner[0] if inner else None
    return [marked] if marked and nested == depth else marked


def _span(span: list[int]) -> Span:
    start, end = span
    return start, end
