"""An example's text as a page shows it: tokens are shaded by their weight, relevant tokens are underlined."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

#: The least weight that is not printed as 0.
_LEAST = 0.0005


@dataclass(frozen=True)
class Piece:
    """A stretch of text.

    Attributes:
        text: The text.
        weight: The sum of its tokens' weights; None if it holds no token.
        shade: The strength of its shade, from 0 to 1.
        relevant: Whether one of its tokens is relevant.
        special: Whether it stands for a token that is not in the text.
        readout: Whether it holds the readout position.
        begins_pair: Whether it is the first piece of the second text of a pair.
    """

    text: str
    weight: float | None = None
    shade: float = 0.0
    relevant: bool = False
    special: bool = False
    readout: bool = False
    begins_pair: bool = False


def marked_text(text: str, tokens: pd.DataFrame, method: str, pair: str | None = None) -> list[Piece]:
    """Return an example's text in pieces, one for each token or group of tokens that share a character.

    Args:
        text: The text of the example, or the first of two; empty if it has none, and then its tokens are shown by
            themselves.
        tokens: The rows of the example in an explanation's table of tokens, in order.
        method: The method whose weights are shown. The highest weight has the strongest shade, negative weights have
            none.
        pair: The second text, which follows the first; None if there is only one.
    """
    highest = float(tokens[method].max())
    if pair is not None:
        # Tokens between the texts, such as separators, are shown behind the first.
        second = tokens["in_pair"].cumsum() > 0
        pieces = list(_of_text(text, tokens[~second], method))
        begin, *others = [*_of_text(pair, tokens[second], method)] or [Piece("")]
        pieces += [replace(begin, begins_pair=True), *others]
    else:
        pieces = list(_of_text(text, tokens, method) if text else _of_tokens(tokens, method))
    return [
        piece
        if piece.weight is None or highest <= 0
        else replace(piece, shade=min(max(piece.weight / highest, 0.0), 1.0))
        for piece in pieces
    ]


def most_attended(pieces: list[Piece], count: int = 3) -> list[tuple[Piece, float]]:
    """Return the pieces with the highest weights, highest first, without those whose weight is printed as 0.

    Args:
        pieces: The pieces of a text.
        count: The maximum number of pieces to return.
    """
    weighted = [(piece, piece.weight) for piece in pieces if piece.weight is not None and piece.weight >= _LEAST]
    return sorted(weighted, key=lambda pair: -pair[1])[:count]


def _of_tokens(tokens: pd.DataFrame, method: str) -> Iterator[Piece]:
    for number, row in enumerate(tokens.to_dict("records")):
        if number:
            yield Piece(" ")
        yield Piece(
            row["written"],
            weight=float(row[method]),
            relevant=row["relevance"] > 0,
            special=row["special"],
            readout=row["readout"],
        )


def _of_text(text: str, tokens: pd.DataFrame, method: str) -> Iterator[Piece]:
    at = 0
    begun = False
    for group in _sharing_characters(tokens):
        first = group.iloc[0]
        weight, readout = float(group[method].sum()), bool(group["readout"].any())
        if first["start"] == first["end"]:
            yield Piece(first["written"], weight=weight, special=True, readout=readout)
            continue
        start, end = int(group["start"].min()), int(group["end"].max())
        # The space in front of a word is often part of its token.
        start += len(text[start:end]) - len(text[start:end].lstrip() or text[start:end])
        if start > at:
            # The beginning of a long text is cut off for a model that continues the text.
            yield Piece(text[at:start] if begun or not text[at:start].strip() else "… ")
        yield Piece(text[start:end], weight=weight, relevant=bool((group["relevance"] > 0).any()), readout=readout)
        at, begun = end, True
    if text[at:].strip():
        yield Piece(" …")


def _sharing_characters(tokens: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """Yield groups of tokens that share a character: its bytes can be separate tokens with one span in the text."""
    starts, ends = tokens["start"].to_numpy(), tokens["end"].to_numpy()
    follows = np.zeros(len(tokens), dtype=bool)
    follows[1:] = (starts[1:] < ends[:-1]) & (ends[1:] > starts[1:]) & (starts[1:] >= starts[:-1])
    for _, group in tokens.groupby(np.cumsum(~follows)):
        yield group
