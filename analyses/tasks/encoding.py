"""Texts with marked spans as tokens with masks, by the offsets of a fast tokeniser."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Literal, NamedTuple

import numpy as np

from ...circuits.errors import CallError
from .collecting import LeftOut, collected
from .example import Example, Span, Task, TextExample

#: How many texts are tokenised at once.
_AT_ONCE = 1000

Side = Literal["left", "right"]


class _Encoded(NamedTuple):
    """What a tokeniser makes of one text."""

    tokens: list[int]
    spans: list[Span]
    special: list[bool]

    @property
    def body(self) -> list[int]:
        """Ids of the tokens of the text itself."""
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
    """Return the examples in tokens.

    A token is relevant when one of its characters is marked; the spaces around a word in its token do not count. A
    character that makes several tokens marks them all. Nothing is decoded: characters are told by offsets alone.

    Args:
        examples: texts with marked spans.
        tokenizer: one of transformers', fast, for the slow ones have no offsets.
        context: the longest sequence that the model takes, with the tokeniser's own tokens; longer texts are cut, and
            `Example.cut` counts the relevant tokens lost. Room is left for continuations of several tokens.
        cut_from: which end of a long text goes. By default the left one where there are continuations, for they follow
            the right one; else the right one.
        mask_at_end: put the tokeniser's mask token behind the text, where a masked language model fills in the
            continuation, which has to be a single token.
        next_token: predict the first token of the right continuation among the whole vocabulary: its id becomes the
            label, and the continuations go.

    Raises:
        CallError: the tokeniser is slow or has no mask token, the context leaves no room, or an example has no tokens,
            no label where its next token is to be predicted, or a continuation that does not begin at a token's border.
    """
    made = []
    encoded = _encoded(
        examples, tokenizer, context=context, cut_from=cut_from, mask_at_end=mask_at_end, next_token=next_token
    )
    for example, one in zip(examples, encoded, strict=True):
        if isinstance(one, LeftOut):
            raise CallError(f"example {example.id or repr(example.text[:60])} cannot be encoded: {one.reason}")
        made.append(one)
    return made


def encode_task(
    task: Task,
    tokenizer: Any,
    *,
    context: int | None = None,
    cut_from: Side | None = None,
    mask_at_end: bool = False,
    next_token: bool = False,
) -> Task:
    """Return the task with its texts in tokens, as `encode` does; examples that cannot be encoded are counted.

    Examples that are tokens already stay as they are.

    Raises:
        CallError: the tokeniser is slow or has no mask token, the context leaves no room, or no example is left.
    """
    texts = [example for example in task.examples if isinstance(example, TextExample)]
    encoded = _encoded(
        texts, tokenizer, context=context, cut_from=cut_from, mask_at_end=mask_at_end, next_token=next_token
    )
    found = (next(encoded) if isinstance(example, TextExample) else example for example in task.examples)
    return collected(replace(task, examples=()), found)


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
            f"{type(tokenizer).__name__} gives no character offsets, so that marked text cannot be found among its "
            f"tokens; expected a fast tokeniser: load it with AutoTokenizer.from_pretrained(..., use_fast=True)"
        )
    mask = tokenizer.mask_token_id if mask_at_end else None
    if mask_at_end and mask is None:
        raise CallError(f"{type(tokenizer).__name__} has no mask token to put behind the text; use a masked model's")
    rest = iter(examples)
    while chunk := list(islice(rest, _AT_ONCE)):
        texts = iter(_tokenised(tokenizer, [example.text for example in chunk]))
        joined = iter(
            _tokenised(
                tokenizer, [example.text + following for example in chunk for following in example.continuations]
            )
        )
        for example in chunk:
            text = next(texts)
            continuations = [_after(text, longer) for longer in islice(joined, len(example.continuations))]
            yield _example(example, text, continuations, context, cut_from, mask, next_token)


def _tokenised(tokenizer: Any, texts: list[str]) -> Iterator[_Encoded]:
    if not texts:
        return
    made = tokenizer(
        texts,
        padding=False,
        truncation=False,
        return_offsets_mapping=True,
        return_special_tokens_mask=True,
        verbose=False,
    )
    for tokens, spans, special in zip(
        made["input_ids"], made["offset_mapping"], made["special_tokens_mask"], strict=True
    ):
        yield _Encoded(tokens, [(start, end) for start, end in spans], [bool(one) for one in special])


def _after(text: _Encoded, longer: _Encoded) -> tuple[int, ...]:
    """Tokens of a longer text beyond those of its beginning; none where the beginning's own tokens changed."""
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
        return LeftOut("whose continuation does not begin at a token's border (does it lack a space in front?)")
    if mask is not None and any(len(continuation) > 1 for continuation in continuations):
        return LeftOut("whose continuation is several tokens, which one mask cannot stand for")
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
        relevant=tuple(tuple(bool(one) for one in mask) for mask in masks),
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
    """Put a mask token behind the last token of the text, before the tokeniser's own tokens that follow it."""
    place = max((number + 1 for number, special in enumerate(text.special) if not special), default=0)
    return _Encoded(
        [*text.tokens[:place], mask, *text.tokens[place:]],
        [*text.spans[:place], (end, end), *text.spans[place:]],
        [*text.special[:place], True, *text.special[place:]],
    )


def _relevant(text: str, marked: Sequence[Span], spans: Sequence[Span]) -> np.ndarray:
    """For every token, whether one of its characters is marked: other than spaces, if it has others."""
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
    """Positions that fit into the context: every special token, and as many others as there is room for."""
    if context is None or len(special) <= context:
        return list(range(len(special)))
    own = [place for place, is_special in enumerate(special) if is_special]
    others = [place for place, is_special in enumerate(special) if not is_special]
    room = context - len(own)
    if room < 1:
        raise CallError(
            f"a context with room for {context} tokens holds no text beside {len(own)} special tokens; "
            f"expected at least {len(own) + 1}"
        )
    return sorted(own + (others[:room] if side == "right" else others[-room:]))
