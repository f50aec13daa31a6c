"""Repeated random tokens, whose next token an induction head finds behind the earlier occurrence of the current one."""

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
    """Return a block of random tokens that is repeated, cut off at a random place of its last repeat.

    Relevant are the tokens behind earlier occurrences of the last token. Each is the token to predict, which is the
    label, among the whole vocabulary. Within a block no token occurs twice, so that nothing else tells the next one.

    Args:
        limit: number of sequences; 200 by default.
        seed: of the draw.
        vocabulary: the ids to draw from, or the size of the vocabulary, whose special tokens are then drawn as well.
        length: tokens in the block.
        repeats: how often it comes, the last time cut off; at least 2.
        first: an id to put in front, such as that of a model's beginning-of-text token; it counts as special.

    Raises:
        CallError: a number is too small, or the vocabulary has fewer than `length` ids.
    """
    ids = np.arange(vocabulary) if isinstance(vocabulary, int) else np.unique(np.array(vocabulary, dtype=int))
    if length < 2 or repeats < 2:
        raise CallError(f"length and repeats must be at least 2; got length {length}, repeats {repeats}")
    if len(ids) < length:
        raise CallError(
            f"a block of {length} tokens, no two the same, needs as many ids; the vocabulary has {len(ids)}"
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
        # At the end of the block the token that follows is the first of the next one.
        after = {current + 1 + length * earlier for earlier in range(repeats - 1)}
        relevant = (False,) * len(in_front) + tuple(place in after for place in range(len(tokens)))
        yield Example(
            tokens=(*in_front, *tokens),
            label=block[(current + 1) % length],
            relevant=(relevant,),
            special=(True,) * len(in_front) + (False,) * len(tokens),
        )
