"""The tokens of a text or of a pair of texts, as a fast tokenizer gives them."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from ...circuits.errors import CallError
from .example import Span

Side = Literal["left", "right"]


class Tokenized(NamedTuple):
    """The tokens of one text or of a pair of texts.

    Attributes:
        tokens: token ids.
        spans: span of each token in its text.
        special: whether the tokenizer added the token.
        in_pair: whether the token is of the second text; empty if there is only one.
        types: token types; empty if the tokenizer gives none.
    """

    tokens: list[int]
    spans: list[Span]
    special: list[bool]
    in_pair: list[bool]
    types: list[int]

    @property
    def _body(self) -> list[int]:
        """The positions of the tokens that are not special."""
        return [position for position, special in enumerate(self.special) if not special]

    def continuation_in(self, longer: "Tokenized") -> list[int]:
        """Return the positions in a longer text of the tokens that it adds to this one.

        The list is empty if the longer text tokenizes its beginning differently.
        """
        own, positions = [self.tokens[position] for position in self._body], longer._body
        begins_alike = [longer.tokens[position] for position in positions[: len(own)]] == own
        return positions[len(own) :] if begins_alike else []

    def with_added(self, tokens: Sequence[int], end: int) -> "Tokenized":
        """Return the text with special tokens behind its last token, before the special tokens that follow it.

        Args:
            tokens: the tokens to add.
            end: number of characters of the text; the tokens stand for none of them.
        """
        at, count = max((position + 1 for position in self._body), default=0), len(tokens)

        def put(entries: list[Any], added: list[Any]) -> list[Any]:
            return [*entries[:at], *added, *entries[at:]]

        return Tokenized(
            put(self.tokens, list(tokens)),
            put(self.spans, [(end, end)] * count),
            put(self.special, [True] * count),
            put(self.in_pair, [True] * count) if self.in_pair else [],
            put(self.types, [self.types[max(at - 1, 0)]] * count) if self.types else [],
        )

    def kept(self, context: int | None, side: Side) -> list[int]:
        """Return the positions kept within a context: every special token, and as many others as there is room for.

        The longer of two texts is cut first, and both to the same length if that is not enough.

        Args:
            context: maximum number of tokens; None for no limit.
            side: the end at which each text is cut.

        Raises:
            CallError: there is no room for any token of the text.
        """
        if context is None or len(self.tokens) <= context:
            return list(range(len(self.tokens)))
        own = [position for position, is_special in enumerate(self.special) if is_special]
        in_pair = self.in_pair or [False] * len(self.tokens)
        first, second = (
            [position for position in self._body if in_pair[position] == wanted] for wanted in (False, True)
        )
        room = context - len(own)
        if room < 1:
            raise CallError(
                f"a context with room for {context} tokens has no room for text beside {len(own)} special tokens; "
                f"expected room for at least {len(own) + 1}"
            )
        shorter = min(len(first), len(second), room // 2)
        sizes = (shorter, room - shorter) if len(first) <= len(second) else (room - shorter, shorter)
        kept = [
            position
            for positions, size in zip((first, second), sizes, strict=True)
            for position in (positions[:size] if side == "right" else positions[max(len(positions) - size, 0) :])
        ]
        return sorted(own + kept)


def tokenized(tokenizer: Any, texts: Sequence[tuple[str, str | None]], *, token_types: bool) -> Iterator[Tokenized]:
    """Yield the tokens of texts and of pairs of texts, in order.

    Args:
        tokenizer: a fast tokenizer of transformers.
        texts: each text, and the second text of a pair or None.
        token_types: whether to keep the token types that the tokenizer gives.
    """
    alone = _batch(tokenizer, [(text,) for text, pair in texts if pair is None], token_types)
    pairs = _batch(tokenizer, [(text, pair) for text, pair in texts if pair is not None], token_types)
    for _, pair in texts:
        yield next(alone if pair is None else pairs)


def _batch(tokenizer: Any, texts: Sequence[tuple[str, ...]], token_types: bool) -> Iterator[Tokenized]:
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
        yield Tokenized(
            tokens,
            [(start, end) for start, end in spans],
            [bool(flag) for flag in special],
            [which == 1 for which in batch.sequence_ids(number)] if len(texts[number]) > 1 else [],
            [] if types is None else types[number],
        )
