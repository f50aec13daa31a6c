"""Encoding of texts with marked spans as tokens with relevance masks, by the offsets of a fast tokenizer."""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from ...circuits.errors import CallError
from .collecting import LeftOut, collected
from .example import Example, Span, Task, TextExample
from .tokenized import Side, Tokenized, tokenized

# The number of texts that are tokenized at once.
_AT_ONCE = 1000


def encode(
    examples: Sequence[TextExample],
    tokenizer: Any,
    *,
    context: int | None = None,
    cut_from: Side | None = None,
    mask_at_end: bool = False,
    next_token: bool = False,
    token_types: bool = True,
) -> list[Example]:
    """Return the examples as tokens, as the tokenizer encodes a text or a pair of texts.

    A token is relevant if one of its characters is marked; spaces count only if the token has no other characters. A
    marked character that is split into several tokens marks all of them. Nothing is decoded: only the offsets determine
    which characters belong to a token.

    Args:
        examples: texts with marked spans.
        tokenizer: a fast tokenizer of transformers; slow ones have no offsets.
        context: maximum length of a sequence, including special tokens; None for no limit. Longer texts are cut, and
            `Example.cut` counts the relevant tokens lost. Of a pair, the longer text is cut first, as transformers does
            with "longest_first". Room is left for continuations of several tokens.
        cut_from: the end at which long texts are cut. None stands for the left end if there are continuations, because
            they follow the right end, and for the right end otherwise.
        mask_at_end: whether to put the tokenizer's mask token behind the text, where a masked language model fills in
            the continuation. The continuation must then be a single token.
        next_token: whether the first token of the right continuation is to be predicted among the whole vocabulary. Its
            id becomes the label, and the continuations are dropped. Tokens of white space in front of it, which some
            tokenizers put apart, are put behind the text, so that the label has content; `Example.blanks` counts them.
        token_types: whether to keep the token types that the tokenizer gives; False for a model that takes none.

    Returns:
        An `Example` for each text, in the same order. A warning says in how many of them the space in front of the
        label was put behind the text.

    Raises:
        CallError: the tokenizer is slow or has no mask token; the context leaves no room; or an example has no tokens,
            has no label although its next token is to be predicted, or has a continuation that does not begin at a
            token boundary.
    """
    whole = []
    encoded = _encoded(
        examples,
        tokenizer,
        context=context,
        cut_from=cut_from,
        mask_at_end=mask_at_end,
        next_token=next_token,
        token_types=token_types,
    )
    for example, item in zip(examples, encoded, strict=True):
        if isinstance(item, LeftOut):
            raise CallError(f"example {example.id or repr(example.text[:60])} cannot be encoded: {item.reason}")
        whole.append(item)
    _warn_of_spaces(whole)
    return whole


def encode_task(
    task: Task,
    tokenizer: Any,
    *,
    context: int | None = None,
    cut_from: Side | None = None,
    mask_at_end: bool = False,
    next_token: bool = False,
    token_types: bool = True,
) -> Task:
    """Return the task with its texts encoded as tokens by `encode`.

    Examples that are tokens already are kept unchanged. Examples that cannot be encoded are left out and counted.

    Args:
        task: the task.
        tokenizer: a fast tokenizer of transformers.
        context: maximum length of a sequence, as in `encode`.
        cut_from: the end at which long texts are cut, as in `encode`.
        mask_at_end: whether to put the mask token behind the text, as in `encode`.
        next_token: whether the next token is to be predicted among the whole vocabulary, as in `encode`.
        token_types: whether to keep the tokenizer's token types, as in `encode`.

    Raises:
        CallError: the tokenizer is slow or has no mask token, the context leaves no room, or no example is left.
    """
    texts = [example for example in task.examples if isinstance(example, TextExample)]
    encoded = _encoded(
        texts,
        tokenizer,
        context=context,
        cut_from=cut_from,
        mask_at_end=mask_at_end,
        next_token=next_token,
        token_types=token_types,
    )
    items = (next(encoded) if isinstance(example, TextExample) else example for example in task.examples)
    whole = collected(replace(task, examples=()), items)
    _warn_of_spaces([example for example in whole.examples if isinstance(example, Example)])
    return whole


def _warn_of_spaces(examples: Sequence[Example]) -> None:
    spaced = sum(example.blanks > 0 for example in examples)
    if spaced:
        warnings.warn(
            f"{spaced} of {len(examples)} next tokens would be only white space, because the tokenizer puts the space "
            f"in front of a word apart; it was put behind the text, and the first token with content is predicted",
            stacklevel=3,
        )


def _encoded(
    examples: Sequence[TextExample],
    tokenizer: Any,
    *,
    context: int | None,
    cut_from: Side | None,
    mask_at_end: bool,
    next_token: bool,
    token_types: bool,
) -> Iterator[Example | LeftOut]:
    if not getattr(tokenizer, "is_fast", False):
        raise CallError(
            f"{type(tokenizer).__name__} gives no character offsets, so marked text cannot be found among its tokens; "
            "use a fast tokenizer, loaded with AutoTokenizer.from_pretrained(..., use_fast=True)"
        )
    mask = tokenizer.mask_token_id if mask_at_end else None
    if mask_at_end and mask is None:
        raise CallError(
            f"{type(tokenizer).__name__} has no mask token to put behind the text; use the tokenizer of a masked "
            "language model"
        )
    rest = iter(examples)
    while chunk := list(islice(rest, _AT_ONCE)):
        texts = tokenized(tokenizer, [(example.text, example.pair) for example in chunk], token_types=token_types)
        joined = tokenized(
            tokenizer,
            [_followed(example, following) for example in chunk for following in example.continuations],
            token_types=token_types,
        )
        for example in chunk:
            text = next(texts)
            continuations = [
                _continuation(example, following, text, longer)
                for following, longer in zip(example.continuations, joined, strict=False)
            ]
            yield _example(example, text, continuations, context, cut_from, mask, next_token)


class _Continuation(NamedTuple):
    """The tokens of a continuation, and how many of the first stand for nothing but white space."""

    tokens: tuple[int, ...]
    blanks: int


def _continuation(example: TextExample, following: str, text: Tokenized, longer: Tokenized) -> _Continuation:
    """Return the tokens that a continuation adds to its text; none if the text is then tokenized differently."""
    whole = (example.text if example.pair is None else example.pair) + following
    positions = text.continuation_in(longer)
    is_blank = [not whole[slice(*longer.spans[position])].strip() for position in positions]
    blanks = is_blank.index(False) if False in is_blank else len(is_blank)
    return _Continuation(tuple(longer.tokens[position] for position in positions), blanks)


def _followed(example: TextExample, continuation: str) -> tuple[str, str | None]:
    if example.pair is None:
        return example.text + continuation, None
    return example.text, example.pair + continuation


def _example(
    example: TextExample,
    text: Tokenized,
    following: list[_Continuation],
    context: int | None,
    cut_from: Side | None,
    mask: int | None,
    next_token: bool,
) -> Example | LeftOut:
    if not all(continuation.tokens for continuation in following):
        return LeftOut("whose continuation does not begin at a token boundary (it may lack a space in front)")
    label, blanks = example.label, ()
    continuations = [continuation.tokens for continuation in following]
    if next_token:
        if label is None or not following:
            return LeftOut("without a right continuation whose first token could be predicted")
        right = following[label]
        if right.blanks == len(right.tokens):
            return LeftOut("whose continuation is only white space")
        blanks, continuations = right.tokens[: right.blanks], [right.tokens[right.blanks :]]
    if mask is not None and any(len(continuation) > 1 for continuation in continuations):
        return LeftOut("whose continuation is several tokens, which one mask token cannot stand for")
    if next_token:
        label, continuations = continuations[0][0], []
    added = (*blanks, *([] if mask is None else [mask]))
    text = text.with_added(added, len(example.text if example.pair is None else example.pair))
    if not text.tokens or all(text.special):
        return LeftOut("without tokens")
    masks = _masks(example, text)
    room = max((len(continuation) for continuation in continuations), default=1) - 1
    side = cut_from or ("left" if example.continuations else "right")
    kept = text.kept(None if context is None else context - room, side)
    lost = np.delete(np.any(masks, axis=0), kept) if masks else np.zeros(0)
    whole = Example(
        tokens=tuple(text.tokens),
        label=label,
        relevant=tuple(tuple(bool(entry) for entry in mask) for mask in masks),
        continuations=tuple(continuations),
        special=tuple(text.special),
        text=example.text,
        spans=tuple(text.spans),
        id=example.id,
        group=example.group,
        cut=int(lost.sum()),
        pair=example.pair,
        in_pair=tuple(text.in_pair),
        token_types=tuple(text.types),
        blanks=len(blanks),
    )
    return whole if len(kept) == len(text.tokens) else whole.keep(kept)


def _masks(example: TextExample, text: Tokenized) -> list[np.ndarray]:
    """Return each annotator's mask over the tokens; each token is compared with the marks in its own text."""
    if example.pair is None:
        return [_relevant(example.text, marked, text.spans) for marked in example.relevant]
    in_pair = np.array(text.in_pair)
    first, second = (
        [span if of_pair == wanted else (0, 0) for span, of_pair in zip(text.spans, in_pair, strict=True)]
        for wanted in (False, True)
    )
    nothing = ((),) * example.annotators
    return [
        np.where(in_pair, _relevant(example.pair, in_second, second), _relevant(example.text, in_first, first))
        for in_first, in_second in zip(example.relevant or nothing, example.pair_relevant or nothing, strict=True)
    ]


def _relevant(text: str, marked: Sequence[Span], spans: Sequence[Span]) -> np.ndarray:
    """Return whether one of each token's characters is marked; spaces count only if it has no other characters."""
    space = np.fromiter((character.isspace() for character in text), dtype=bool, count=len(text))
    is_marked = np.zeros(len(text), dtype=bool)
    for start, end in marked:
        is_marked[start:end] = True
    starts, ends = np.array(spans, dtype=int).reshape(-1, 2).T

    def has(wanted: np.ndarray) -> np.ndarray:
        before = np.concatenate([[0], np.cumsum(wanted)])
        return before[ends] > before[starts]

    return np.where(has(~space), has(is_marked & ~space), has(is_marked))
