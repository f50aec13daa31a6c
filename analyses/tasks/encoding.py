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
    """The tokens of one text or of a pair of texts; `types` is empty if the tokenizer gives no token types."""

    tokens: list[int]
    spans: list[Span]
    special: list[bool]
    in_pair: list[bool]
    types: list[int]

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
            id becomes the label, and the continuations are dropped.
        token_types: whether to keep the token types that the tokenizer gives; False for a model that takes none.

    Returns:
        An `Example` for each text, in the same order.

    Raises:
        CallError: the tokenizer is slow or has no mask token; the context leaves no room; or an example has no tokens,
            has no label although its next token is to be predicted, or has a continuation that does not begin at a
            token boundary.
    """
    tokenized = []
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
    return collected(replace(task, examples=()), items)


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
        texts = _tokenized(tokenizer, [(example.text, example.pair) for example in chunk], token_types)
        joined = _tokenized(
            tokenizer,
            [_followed(example, following) for example in chunk for following in example.continuations],
            token_types,
        )
        for example in chunk:
            text = next(texts)
            continuations = [_after(text, longer) for longer in islice(joined, len(example.continuations))]
            yield _example(example, text, continuations, context, cut_from, mask, next_token)


def _followed(example: TextExample, continuation: str) -> tuple[str, str | None]:
    if example.pair is None:
        return example.text + continuation, None
    return example.text, example.pair + continuation


def _tokenized(tokenizer: Any, texts: list[tuple[str, str | None]], token_types: bool) -> Iterator[_Encoded]:
    alone = _batch(tokenizer, [(text,) for text, pair in texts if pair is None], token_types)
    pairs = _batch(tokenizer, [(text, pair) for text, pair in texts if pair is not None], token_types)
    for _, pair in texts:
        yield next(alone if pair is None else pairs)


def _batch(tokenizer: Any, texts: Sequence[tuple[str, ...]], token_types: bool) -> Iterator[_Encoded]:
    """Yield the tokens of texts, or of pairs of texts."""
    if not texts:
        return
    batch = tokenizer(
        *(list(column) for column in zip(*texts, strict=True)),
        padding=False,
        truncation=False,
        return_offsets_mapping=True,
        return_special_tokens_mask=True,
        verbose=False,
    )
    types = batch.get("token_type_ids") if token_types else None
    for number, (tokens, spans, special) in enumerate(
        zip(batch["input_ids"], batch["offset_mapping"], batch["special_tokens_mask"], strict=True)
    ):
        yield _Encoded(
            tokens,
            [(start, end) for start, end in spans],
            [bool(flag) for flag in special],
            [which == 1 for which in batch.sequence_ids(number)] if len(texts[number]) > 1 else [],
            [] if types is None else types[number],
        )


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
        text = _with_mask(text, mask, len(example.text if example.pair is None else example.pair))
    if not text.tokens or all(text.special):
        return LeftOut("without tokens")
    masks = _masks(example, text)
    following = max((len(continuation) for continuation in continuations), default=1) - 1
    side = cut_from or ("left" if example.continuations else "right")
    kept = _kept(text, None if context is None else context - following, side)
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
    )
    return whole if len(kept) == len(text.tokens) else whole.keep(kept)


def _with_mask(text: _Encoded, mask: int, end: int) -> _Encoded:
    """Put a mask token behind the last token of the text, before the special tokens that follow it."""
    position = max((number + 1 for number, special in enumerate(text.special) if not special), default=0)
    before = max(position - 1, 0)
    return _Encoded(
        [*text.tokens[:position], mask, *text.tokens[position:]],
        [*text.spans[:position], (end, end), *text.spans[position:]],
        [*text.special[:position], True, *text.special[position:]],
        [*text.in_pair[:position], True, *text.in_pair[position:]] if text.in_pair else [],
        [*text.types[:position], text.types[before], *text.types[position:]] if text.types else [],
    )


def _masks(example: TextExample, text: _Encoded) -> list[np.ndarray]:
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


def _kept(text: _Encoded, context: int | None, side: Side) -> list[int]:
    """Return the positions kept within the context: every special token, and as many others as there is room for."""
    if context is None or len(text.special) <= context:
        return list(range(len(text.special)))
    own = [position for position, is_special in enumerate(text.special) if is_special]
    in_pair = text.in_pair or [False] * len(text.special)
    first, second = (
        [position for position, special in enumerate(text.special) if not special and in_pair[position] == wanted]
        for wanted in (False, True)
    )
    room = context - len(own)
    if room < 1:
        raise CallError(
            f"a context with room for {context} tokens has no room for text beside {len(own)} special tokens; "
            f"expected room for at least {len(own) + 1}"
        )
    # The longer of two texts is cut first, and both to the same length if that is not enough.
    shorter = min(len(first), len(second), room // 2)
    sizes = (shorter, room - shorter) if len(first) <= len(second) else (room - shorter, shorter)
    kept = [
        position
        for positions, size in zip((first, second), sizes, strict=True)
        for position in (positions[:size] if side == "right" else positions[max(len(positions) - size, 0) :])
    ]
    return sorted(own + kept)
