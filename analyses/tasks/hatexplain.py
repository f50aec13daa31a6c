"""HateXplain (Mathew et al. 2021): posts labelled by three annotators, who marked the words that justify the label."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...circuits.errors import CallError, QkovError
from ...circuits.storage.places import Place
from .collecting import LeftOut, SourceItem, collected
from .eraser import eraser
from .example import Task, TextExample
from .records import data_place, field, hub_rows, of_data, read_json
from .words import marked_spans, text_of_words

CLASSES = ("hatespeech", "normal", "offensive")
#: Edges of the DTAP table for HateXplain in "Faster Query-Key Learning Sharpens Attention".
HATEXPLAIN_BINS = (0.0, 0.33, 0.66, 1.0)
RELEVANT = "the words that annotators marked as their reason"

_POSTS = "dataset.json"
_DIVISIONS = "post_id_divisions.json"


@of_data("HateXplain")
def hatexplain(data: Path | str, split: str | None = None, limit: int | None = None, seed: int = 0) -> Task:
    """Return posts with the label that more than half of the annotators gave, and a mask for each rationale.

    Posts without a majority label, posts without words, and rationales whose length differs from their post's are left
    out and counted; the posts of such rationales stay. Posts without rationales stay, without relevant tokens. The
    query of the ERASER layout, which is the same for all posts, is left out.

    Args:
        data: `dataset.json`, or the folder with it and `post_id_divisions.json`; a folder in the ERASER layout; or
            data that `datasets` loads, such as a hub id.
        split: train, val or test, or the split's name in `datasets`; None for all posts.
        limit: maximum number of posts, sampled with `seed`; None for all.
        seed: seed of the sample.

    Raises:
        CallError: there are no such files, or the split is unknown.
        QkovError: a file cannot be read, or is not in the expected format.

    Source: Mathew et al. 2021.
    """
    task = Task(
        name="hatexplain",
        examples=(),
        relevant=RELEVANT,
        classes=CLASSES,
        attention_bins=HATEXPLAIN_BINS,
        probability_bins=HATEXPLAIN_BINS,
    )
    place = data_place(data)
    if place is None:
        rows = hub_rows(data, split)
    elif place.is_file():
        rows = _posts(place, place.parent, split)
    elif place.child(_POSTS).is_file():
        rows = _posts(place.child(_POSTS), place, split)
    elif place.child("docs").is_folder():
        return eraser(data, split, limit, seed, name="hatexplain", bins=HATEXPLAIN_BINS, query="none")
    elif place.is_folder():
        rows = hub_rows(data, split)
    else:
        raise CallError(
            f"{data} does not exist; expected {_POSTS}, a folder that contains it, a folder in the ERASER layout, or a "
            "hub id"
        )
    return collected(task, (item for row in rows for item in _examples(row, data)), limit, seed)


def _posts(posts: Place, folder: Place | None, split: str | None) -> Iterator[dict[str, Any]]:
    content = read_json(posts)
    if not isinstance(content, dict):
        raise QkovError(f"{posts} contains a {type(content).__name__}; expected an object with posts by their ids")
    if split is None:
        yield from content.values()
        return
    divisions = None if folder is None else folder.child(_DIVISIONS)
    if divisions is None or not divisions.is_file():
        raise CallError(f"split {split!r} needs {_DIVISIONS} beside {posts}; put it there, or leave the split out")
    ids = read_json(divisions)
    if split not in ids:
        raise CallError(f"{divisions} has no split {split!r}; it has {', '.join(ids)}")
    for post in ids[split]:
        yield content.get(post, {"post_id": post, "missing": True})


def _examples(row: dict[str, Any], data: Path | str) -> Iterator[SourceItem]:
    if row.get("missing"):
        yield LeftOut("of the split that are not among the posts")
        return
    words = [str(word) for word in field(row, "post_tokens", data)]
    label = _majority(_labels(field(row, "annotators", data)))
    if label is None:
        yield LeftOut("whose label is undecided")
        return
    if label not in CLASSES:
        raise QkovError(f"{data} has a post with label {label!r}; expected one of {', '.join(CLASSES)}")
    text, spans = text_of_words(words)
    if not text.strip():
        yield LeftOut("without words")
        return
    name = str(row.get("post_id", row.get("id", "")))
    relevant = []
    for mask in row.get("rationales") or []:
        if len(mask) != len(words):
            yield LeftOut("rationales whose length differs from their post's, which stays")
        elif not set(mask) <= {0, 1}:
            raise QkovError(f"post {name} of {data} has a rationale {str(mask)[:60]}; expected 0s and 1s")
        else:
            relevant.append(marked_spans(spans, mask))
    yield TextExample(text=text, label=CLASSES.index(label), relevant=tuple(relevant), id=name, group=label)


def _labels(annotators: Any) -> list[str]:
    """Return each annotator's label, from the file's objects or from the columns and label numbers of `datasets`."""
    labels = (
        annotators["label"]
        if isinstance(annotators, dict)
        else [field(annotator, "label", "annotators") for annotator in annotators]
    )
    return [CLASSES[label] if isinstance(label, int) and 0 <= label < len(CLASSES) else str(label) for label in labels]


def _majority(labels: list[str]) -> str | None:
    """Return the label that more than half of the annotators gave, or None."""
    label, votes = Counter(labels).most_common(1)[0] if labels else ("", 0)
    return label if 2 * votes > len(labels) else None
