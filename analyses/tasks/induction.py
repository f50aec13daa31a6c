"""Repeated random tokens: an induction head finds the next token behind an earlier occurrence of the current one."""

from collections.abc import Iterator, Sequence

import numpy as np

from ...circuits.errors import CallError
from .collecting import collected
from .example import Example, Task

_SIZE = 200


def induction(
    limit: int | None = None,
    seed: int = 0,
    *,
    vocabulary: int | Sequence[int],
    length: int = 20,
    repeats: int = 2,
    first: int | None = None,
) -> Task:
    """Return sequences in which a block of random tokens is repeated and cut off within its last repeat.

    The relevant tokens are those that follow earlier occurrences of the last token. They equal the label, the next
    token, which is to be predicted among the whole vocabulary. Within a block no token occurs twice, so that nothing
    else determines the next token.

    Args:
        limit: number of sequences; None gives 200.
        seed: seed of the draw.
        vocabulary: the ids to draw from, or the size of the vocabulary, in which case special tokens are drawn too.
        length: number of tokens in the block.
        repeats: number of times that the block occurs, including the last, incomplete time; at least 2.
        first: an id to put in front, such as that of the model's beginning-of-text token. It is special.

    Raises:
        CallError: a number is too small, or the vocabulary has fewer than `length` ids.
    """
    ids = np.arange(vocabulary) if isinstance(vocabulary, int) else np.unique(np.array(vocabulary, dtype=int))
    if length < 2 or repeats < 2:
        raise CallError(f"length and repeats must be at least 2; got length {length}, repeats {repeats}")
    if len(ids) < length:
        raise CallError(
            f"a block of {length} different tokens needs at least as many ids; the vocabulary has {len(ids)}"
        )
    task = Task(
        name="induction", examples=(), relevant="the tokens that followed earlier occurrences of the current token"
    )
    size = _SIZE if limit is None else max(limit, 0)
    return collected(task, _examples(size, np.random.default_rng(seed), ids, length, repeats, first), limit)


def _examples(
    size: int, generator: np.random.Generator, ids: np.ndarray, length: int, repeats: int, first: int | None
) -> Iterator[Example]:
    in_front = () if first is None else (first,)
    for _ in range(size):
        block = generator.choice(ids, size=length, replace=False).tolist()
        current = int(generator.integers(length))
        tokens = (block * repeats)[: length * (repeats - 1) + current + 1]
        # At the end of a block, the following token is the first one of the next block.
        after = {current + 1 + length * earlier for earlier in range(repeats - 1)}
        relevant = (False,) * len(in_front) + tuple(position in after for position in range(len(tokens)))
        yield Example(
            tokens=(*in_front, *tokens),
            label=block[(current + 1) % length],
            relevant=(relevant,),
            special=(True,) * len(in_front) + (False,) * len(tokens),
        )
