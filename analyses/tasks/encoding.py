"""Encoding of texts with marked spans as tokens with relevance masks, by the offsets of a fast tokenizer."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Literal, NamedTuple

import numpy as np

from ...circuits.errors import CallError
from .collecting import LeftOut, collected
from .example import Example, Span, Task, TextExample

# The number of texts that are tokenized at once.
_AT_ONCE = 1000

Side = Literal["left", "right"]


class _Encoded(NamedTuple):
    """The tokens of one text."""

    tokens: list[int]
    spans: list[Span]
    special: list[bool]

    @property
    def body(self) -> list[int]:
        """The ids of the tokens that are not special."""
        return [token for token, special in zip(self.tokens, self.special, strict=True) if not special]


def encode(
    examples: Sequence[TextExample],
    tokenizer: Any,
    *,
    context: int | None = None,
    cut_from: Side | None = None,
    mask_at_end: bool = False,
    next_token: bool = False,
) -> list[Example]:
    """Return the examples as tokens.

    A token is relevant if one of its characters is marked; spaces count only if the token has no other characters. A
    marked character that is split into several tokens marks all of them. Nothing is decoded: only the offsets determine
    which characters belong to a token.

    Args:
        examples: texts with marked spans.
        tokenizer: a fast tokenizer of transformers; slow ones have no offsets.
        context: maximum length of a sequence, including special tokens; None for no limit. Longer texts are cut, and
            `Example.cut` counts the relevant tokens lost. Room is left for continuations of several tokens.
        cut_from: the end at which long texts are cut. None stands for the left end if there are continuations, because
            they follow the right end, and for the right end otherwise.
        mask_at_end: whether to put the tokenizer's mask token behind the text, where a masked language model fills in
            the continuation. The continuation must then be a single token.
        next_token: whether the first token of the right continuation is to be predicted among the whole vocabulary. Its
            id becomes the label, and the continuations are dropped.

    Returns:
        An `Example` for each text, in the same order.

    Raises:
        CallError: the tokenizer is slow or has no mask token; the context leaves no room; or an example has no tokens,
            has no label although its next token is to be predicted, or has a continuation that does not begin at a
            token boundary.
    """
    tokenized = []
    encoded = _encoded(
        examples, tokenizer, context=context, cut_from=cut_from, mask_at_end=mask_at_end, next_token=next_token
    )
    for example, item in zip(examples, encoded, strict=True):
        if isinstance(item, LeftOut):
            raise CallError(f"example {example.id or repr(example.text[:60])} cannot be encoded: {item.reason}")
        tokenized.append(item)
    return tokenized


def encode_task(
    task: Task,
    tokenizer: Any,
    *,
    context: int | None = None,
    cut_from: Side | None = None,
    mask_at_end: bool = False,
    next_token: bool = False,
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

    Raises:
        CallError: the tokenizer is slow or has no mask token, the context leaves no room, or no example is left.
    """
    texts = [example for example in task.examples if isinstance(example, TextExample)]
    encoded = _encoded(
        texts, tokenizer, context=context, cut_from=cut_from, mask_at_end=mask_at_end, next_token=next_token
    )
    items = (next(encoded) if isinstance(example, TextExample) else example for example in task.examples)
    return collected(replace(task, examples=()), items)


def _encoded(
    examples: Sequence[TextExample],
    tokenizer: Any,
    *,
    context: int | None,
    cut_from: Side | None,
    mask_at_end: bool,
    next_token: bool,
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
        texts = iter(_tokenized(tokenizer, [example.text for example in chunk]))
        joined = iter(
            _tokenized(
                tokenizer, [example.text + following for example in chunk for following in example.continuations]
            )
        )
        for example in chunk:
            text = next(texts)
            continuations = [_after(text, longer) for longer in islice(joined, len(example.continuations))]
            yield _example(example, text, continuations, context, cut_from, mask, next_token)


def _tokenized(tokenizer: Any, texts: list[str]) -> Iterator[_Encoded]:
    if not texts:
        return
    batch = tokenizer(
        texts,
        padding=False,
        truncation=False,
        return_offsets_mapping=True,
        return_special_tokens_mask=True,
        verbose=False,
    )
    for tokens, spans, special in zip(
        batch["input_ids"], batch["offset_mapping"], batch["special_tokens_mask"], strict=True
    ):
        yield _Encoded(tokens, [(start, end) for start, end in spans], [bool(flag) for flag in special])


def _after(text: _Encoded, longer: _Encoded) -> tuple[int, ...]:
    """Return the tokens that a longer text adds to its beginning; none if it tokenizes the beginning differently."""
    body, whole = text.body, longer.body
    return tuple(whole[len(body) :]) if whole[: len(body)] == body else ()


def _example(
    example: TextExample,
    text: _Encoded,
    continuations: list[tuple[int, ...]],
    context: int | None,
    cut_from: Side | None,
    mask: int | None,
    next_token: bool,
) -> Example | LeftOut:
    if not all(continuations):
        return LeftOut("whose continuation does not begin at a token boundary (it may lack a space in front)")
    if mask is not None and any(len(continuation) > 1 for continuation in continuations):
        return LeftOut("whose continuation is several tokens, which one mask token cannot stand for")
    label = example.label
    if next_token:
        if label is None or not continuations:
            return LeftOut("without a right continuation whose first token could be predicted")
        label, continuations = continuations[label][0], []
    if mask is not None:
        text = _with_mask(text, mask, len(example.text))
    if not text.tokens or all(text.special):
        return LeftOut("without tokens")
    masks = [_relevant(example.text, spans, text.spans) for spans in example.relevant]
    following = max((len(continuation) for continuation in continuations), default=1) - 1
    side = cut_from or ("left" if example.continuations else "right")
    kept = _kept(text.special, None if context is None else context - following, side)
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
    )
    return whole if len(kept) == len(text.tokens) else whole.keep(kept)


def _with_mask(text: _Encoded, mask: int, end: int) -> _Encoded:
    """Put a mask token behind the last token of the text, before the special tokens that follow it."""
    position = max((number + 1 for number, special in enumerate(text.special) if not special), default=0)
    return _Encoded(
        [*text.tokens[:position], mask, *text.tokens[position:]],
        [*text.spans[:position], (end, end), *text.spans[position:]],
        [*text.special[:position], True, *text.special[position:]],
    )


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


def _kept(special: list[bool], context: int | None, side: Side) -> list[int]:
    """Return the positions kept within the context: every special token, and as many others as there is room for."""
    if context is None or len(special) <= context:
        return list(range(len(special)))
    own = [position for position, is_special in enumerate(special) if is_special]
    others = [position for position, is_special in enumerate(special) if not is_special]
    room = context - len(own)
    if room < 1:
        raise CallError(
            f"a context with room for {context} tokens has no room for text beside {len(own)} special tokens; "
            f"expected room for at least {len(own) + 1}"
        )
    return sorted(own + (others[:room] if side == "right" else others[-room:]))
