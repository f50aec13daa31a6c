"""HateXplain (Mathew et al. 2021): posts that three people judged, and the words for which they did."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...circuits.errors import CallError, QkovError
from ...circuits.storage.places import Place
from .collecting import Found, LeftOut, collected
from .eraser import eraser
from .example import Task, TextExample
from .records import data_place, field, hub_rows, read_json
from .words import marked_spans, text_of_words

CLASSES = ("hatespeech", "normal", "offensive")
#: Edges of its DTAP table in the paper.
HATEXPLAIN_BINS = (0.0, 0.33, 0.66, 1.0)
RELEVANT = "the words that annotators marked as their reason"

_POSTS = "dataset.json"
_DIVISIONS = "post_id_divisions.json"


def hatexplain(data: Path | str, split: str | None = None, limit: int | None = None, seed: int = 0) -> Task:
    """Return posts with the label that most annotators gave, and one mask for each annotator's rationale.

    Left out and counted: posts on whose label no majority agrees, posts without words, and rationales (not their
    posts) of another length than the post. Posts without rationale stay, without relevant tokens.

    Args:
        data: `dataset.json`, or the folder with it and `post_id_divisions.json`; a folder in the ERASER layout; or
            what `datasets` loads, such as a hub id.
        split: train, val or test; as `datasets` names it where that reads it; None for all posts.
        limit: keep so many posts.
        seed: of the draw of those.

    Raises:
        CallError: there are no such files, or the split is unknown.
        QkovError: a file cannot be read, or is not as said.
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
        return eraser(data, split, limit, seed, name="hatexplain", bins=HATEXPLAIN_BINS)
    elif place.is_folder():
        rows = hub_rows(data, split)
    else:
        raise CallError(
            f"{data} does not exist: expected {_POSTS}, a folder with it or in the ERASER layout, or a hub id"
        )
    return collected(task, (found for row in rows for found in _examples(row, data)), limit, seed)


def _posts(posts: Place, folder: Place | None, split: str | None) -> Iterator[dict[str, Any]]:
    known = read_json(posts)
    if not isinstance(known, dict):
        raise QkovError(f"{posts} holds a {type(known).__name__}; expected an object of posts by their ids")
    if split is None:
        yield from known.values()
        return
    divisions = None if folder is None else folder.child(_DIVISIONS)
    if divisions is None or not divisions.is_file():
        raise CallError(f"split {split!r} needs {_DIVISIONS} beside {posts}: put it there, or leave the split out")
    ids = read_json(divisions)
    if split not in ids:
        raise CallError(f"{divisions} has no split {split!r}; it has {', '.join(ids)}")
    for post in ids[split]:
        yield known.get(post, {"post_id": post, "missing": True})


def _examples(row: dict[str, Any], data: Path | str) -> Iterator[Found]:
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
            yield LeftOut("rationales of another length than their post, which stays")
        elif not set(mask) <= {0, 1}:
            raise QkovError(f"post {name} of {data} has a rationale {str(mask)[:60]}; expected 0 and 1")
        else:
            relevant.append(marked_spans(spans, mask))
    yield TextExample(text=text, label=CLASSES.index(label), relevant=tuple(relevant), id=name, group=label)


def _labels(annotators: Any) -> list[str]:
    """What each annotator said: objects in the file, columns where `datasets` read it, where labels are numbers."""
    labels = (
        annotators["label"]
        if isinstance(annotators, dict)
        else [field(one, "label", "annotators") for one in annotators]
    )
    return [CLASSES[label] if isinstance(label, int) and 0 <= label < len(CLASSES) else str(label) for label in labels]


def _majority(labels: list[str]) -> str | None:
    """The label that more than half gave."""
    label, votes = Counter(labels).most_common(1)[0] if labels else ("", 0)
    return label if 2 * votes > len(labels) else None
