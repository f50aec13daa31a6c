"""A text as a page shows it: shaded by the weight of its tokens, the relevant stretches underlined."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

#: Of weights that are printed.
_LEAST = 0.0005


@dataclass(frozen=True)
class Piece:
    """A stretch of text.

    Attributes:
        text: as it stands there.
        weight: of its tokens together; None where there is no token.
        shade: of the strongest shade, from 0 to 1.
        relevant: whether one of its tokens is.
        special: whether it stands for a token that is not in the text.
        readout: whether attention is read at it.
    """

    text: str
    weight: float | None = None
    shade: float = 0.0
    relevant: bool = False
    special: bool = False
    readout: bool = False


def marked_text(text: str, tokens: pd.DataFrame, method: str) -> list[Piece]:
    """Return an example's text in pieces, one for each token or for tokens that share a character.

    Args:
        text: of the example; empty where it has none, and its tokens stand by themselves.
        tokens: the rows of the example in an explanation's table of tokens, in order.
        method: whose weights are shown; the strongest shade is that of the highest, negative ones have none.
    """
    highest = float(tokens[method].max())
    pieces = _of_text(text, tokens, method) if text else _of_tokens(tokens, method)
    return [
        piece
        if piece.weight is None or highest <= 0
        else replace(piece, shade=min(max(piece.weight / highest, 0.0), 1.0))
        for piece in pieces
    ]


def most_attended(pieces: list[Piece], count: int = 3) -> list[tuple[Piece, float]]:
    """Return the pieces with the highest weights, highest first; none that is printed as 0."""
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
        # The space in front of a word is often in its token.
        start += len(text[start:end]) - len(text[start:end].lstrip() or text[start:end])
        if start > at:
            # The beginning of a long text is cut for a model that goes on at its end.
            yield Piece(text[at:start] if begun or not text[at:start].strip() else "… ")
        yield Piece(text[start:end], weight=weight, relevant=bool((group["relevance"] > 0).any()), readout=readout)
        at, begun = end, True
    if text[at:].strip():
        yield Piece(" …")


def _sharing_characters(tokens: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """Tokens that are bytes of one character have the same span, and are told apart by nothing on the page."""
    starts, ends = tokens["start"].to_numpy(), tokens["end"].to_numpy()
    follows = np.zeros(len(tokens), dtype=bool)
    follows[1:] = (starts[1:] < ends[:-1]) & (ends[1:] > starts[1:]) & (starts[1:] >= starts[:-1])
    for _, group in tokens.groupby(np.cumsum(~follows)):
        yield group
