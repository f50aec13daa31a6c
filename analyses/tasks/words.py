"""Words and masks over them as a text and spans of its characters."""

from collections.abc import Sequence

from ...circuits.errors import CallError
from .example import Span


def text_of_words(words: Sequence[str]) -> tuple[str, tuple[Span, ...]]:
    """Join words with single spaces; return the text, and where in it each word stands."""
    spans, start = [], 0
    for word in words:
        spans.append((start, start + len(word)))
        start += len(word) + 1
    return " ".join(words), tuple(spans)


def marked_spans(spans: Sequence[Span], mask: Sequence[int | bool]) -> tuple[Span, ...]:
    """Return the spans of the words that a mask marks with 1.

    Raises:
        CallError: the mask is not as long as the words, or holds something other than 0 and 1.
    """
    if len(mask) != len(spans):
        raise CallError(f"expected a mask with one entry for each of {len(spans)} words; got {len(mask)} entries")
    if not all(entry in (0, 1) for entry in mask):
        raise CallError(f"expected a mask of 0 and 1; got {next(entry for entry in mask if entry not in (0, 1))!r}")
    return tuple(span for span, entry in zip(spans, mask, strict=True) if entry)
