"""Words and masks over words, as a text and character spans in it."""

from collections.abc import Sequence

from ...circuits.errors import CallError
from .example import Span


def text_of_words(words: Sequence[str]) -> tuple[str, tuple[Span, ...]]:
    """Join words with single spaces; return the text and the character span of each word."""
    spans, start = [], 0
    for word in words:
        spans.append((start, start + len(word)))
        start += len(word) + 1
    return " ".join(words), tuple(spans)


def marked_spans(spans: Sequence[Span], mask: Sequence[int | bool]) -> tuple[Span, ...]:
    """Return the spans of the words that a relevance mask marks with 1.

    Args:
        spans: the span of each word.
        mask: 0 or 1 for each word.

    Raises:
        CallError: the mask does not have one entry for each word, or contains a value other than 0 and 1.
    """
    if len(mask) != len(spans):
        raise CallError(f"expected a mask with one entry for each of the {len(spans)} words; got {len(mask)} entries")
    if not all(entry in (0, 1) for entry in mask):
        raise CallError(f"expected a mask of 0s and 1s; got {next(entry for entry in mask if entry not in (0, 1))!r}")
    return tuple(span for span, entry in zip(spans, mask, strict=True) if entry)
