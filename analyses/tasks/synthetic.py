"""The paper's synthetic tasks as examples: tokens of a small vocabulary, with the query token last."""

from collections.abc import Iterator

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ..dynamics.fifty_token_task import CLASSES, FiftyTokenTask
from ..dynamics.populations import exact_population, sample_population
from ..dynamics.sequences import Sequences
from ..dynamics.setting import Query, Setting
from .collecting import collected
from .example import Example, Task

_SIZE = 1000


def fifty_token(limit: int | None = None, seed: int = 0, *, context_length: int = 62) -> Task:
    """Return sequences of the paper's 50-token task.

    The relevant tokens are the distinct tokens of the class in the context. The last token is the query, which names
    the class by itself. It is not relevant, and it is special: the prediction is read there, so it cannot be removed.

    Args:
        limit: number of sequences; None gives 1,000.
        seed: seed of the draw.
        context_length: number of sampled tokens before the query; 62 in the paper.

    Raises:
        CallError: a number is below 1.

    Source: the 50-token experiments of "Faster Query-Key Learning Sharpens Attention".
    """
    task = Task(
        name="fifty-token",
        examples=(),
        relevant="the distinct tokens of the class in the context",
        classes=tuple(f"class {number}" for number in range(CLASSES)),
    )
    source = FiftyTokenTask(context_length=context_length)
    tokens, label = source.sample(_SIZE if limit is None else max(limit, 0), np.random.default_rng(seed))
    relevant = source.sequences(tokens).relevant
    return collected(task, _examples(tokens, relevant, label), limit)


def population(
    limit: int | None = None,
    seed: int = 0,
    *,
    M: int = 4,
    b: int = 4,
    m: int = 1,
    n: int = 4,
    query: Query = "token",
    sampled: bool = False,
) -> Task:
    """Return the sequences of the paper's exact population, or sequences drawn from the same distribution.

    The relevant tokens are the m tokens of the class in the context. The last token is the query, which is not among
    the keys in the paper. It is not relevant, and it is special.

    Args:
        limit: number of sequences; None gives all of the exact population, or 1,000 drawn sequences.
        seed: seed of the draw.
        M: number of classes.
        b: number of class tokens per class.
        m: number of tokens of the class in a sequence.
        n: number of background tokens in a sequence.
        query: "token" or "class", as in `Setting`.
        sampled: whether to draw sequences instead of using the exact population.

    Raises:
        CallError: `Setting` refuses the numbers, or n is odd.

    Source: the setting of "Faster Query-Key Learning Sharpens Attention"; see docs/theory, model and data.
    """
    setting = Setting(M=M, b=b, m=m, n=n, query=query)
    task = Task(
        name="population",
        examples=(),
        relevant="the tokens of the class in the context",
        classes=tuple(f"class {number}" for number in range(M)),
    )
    if sampled:
        size = _SIZE if limit is None else max(limit, 0)
        sequences = sample_population(setting, size, torch.Generator().manual_seed(seed))
    else:
        sequences = exact_population(setting)
    return collected(task, _spelled_out(sequences), limit, seed)


def _spelled_out(sequences: Sequences) -> Iterator[Example]:
    """Yield sequences of counts as tokens in the order of the vocabulary, followed by the query."""
    for counts, query, label, relevant in zip(
        sequences.counts, sequences.query, sequences.label, sequences.relevant, strict=True
    ):
        context = torch.arange(len(counts)).repeat_interleave(counts.long())
        yield from _examples(torch.cat([context, query[None]])[None], relevant[None], label[None])


def _examples(
    tokens: Int[Tensor, "sequence position"],
    relevant: Bool[Tensor, "sequence token"],
    label: Int[Tensor, " sequence"],
) -> Iterator[Example]:
    is_relevant = relevant.gather(1, tokens)
    is_relevant[:, -1] = False
    special = (False,) * (tokens.shape[1] - 1) + (True,)
    for row, mask, right in zip(tokens.tolist(), is_relevant.tolist(), label.tolist(), strict=True):
        yield Example(tokens=tuple(row), label=right, relevant=(tuple(mask),), special=special)
