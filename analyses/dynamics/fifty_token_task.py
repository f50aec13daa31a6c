"""The paper's 50-token task: the query token names a class, and the context contains that class's distinct tokens."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...circuits.errors import CallError
from .sequences import Sequences

CLASSES = 4
VOCABULARY = 50
COMMON = 10
_DISTINCT = 10
_FIRST_QUERY = 5


@dataclass(frozen=True)
class FiftyTokenTask:
    """Sequences of common and distinct one-hot tokens whose class determines the next token.

    Ids 0-9 are common tokens with weight 1 each. Class c = 0..3 has ten distinct tokens 10(c+1)..10(c+1)+9 with weights
    .1, .2, ..., 1. A context is drawn from the common tokens and those of one class, so P(distinct) = 5.5 / 15.5. The
    query token 5+c follows, and then the next token 1+c, which is to be predicted; both are common ids. The label is c:
    the outputs are the four possible next tokens, and the 46 other tokens, which never come next, have no output. (With
    an output for each of the 50 tokens, the factorized loss of `fixed_attention` at alpha = .8 comes out 4% below the
    published value; with four outputs it agrees.)

    Two draws whose generators have the same seed give the same sequences on the same machine.

    Attributes:
        context_length: number of sampled tokens; 62 gives the paper's sequence of 64 tokens.
        query_among_keys: whether the query token is one of the keys, as in the paper. Because it names the class,
            attending to it alone also solves the task; without it only the distinct tokens solve the task.

    Raises:
        CallError: context_length is below 1.

    Source: the 50-token experiments of "Faster Query-Key Learning Sharpens Attention".
    """

    context_length: int = 62
    query_among_keys: bool = True

    def __post_init__(self) -> None:
        """Refuse an empty context."""
        if self.context_length < 1:
            raise CallError(f"context_length must be at least 1; got {self.context_length}")

    def probabilities(self) -> Float[Tensor, "class token"]:
        """Return the distribution of a context token for each class."""
        table = torch.zeros(CLASSES, VOCABULARY, dtype=torch.float64)
        own = _tokens_of(torch.arange(CLASSES))
        return table.scatter_(1, own, torch.from_numpy(_own_probabilities()).expand(CLASSES, -1))

    def sample(
        self, batch: int, generator: np.random.Generator
    ) -> tuple[Int[Tensor, "batch position"], Int[Tensor, " batch"]]:
        """Draw sequences of equally likely classes.

        Args:
            batch: number of sequences.
            generator: generator of the draws.

        Returns:
            The tokens, with the context first and the query last, and the labels.
        """
        own_probabilities = _own_probabilities()
        label = torch.from_numpy(generator.integers(CLASSES, size=batch))
        drawn = generator.choice(len(own_probabilities), size=(batch, self.context_length), p=own_probabilities)
        context = _tokens_of(label).gather(1, torch.from_numpy(drawn))
        return torch.cat([context, label[:, None] + _FIRST_QUERY], dim=1), label

    def sequences(self, tokens: Int[Tensor, "batch position"]) -> Sequences:
        """Return drawn tokens as counts.

        Raises:
            CallError: a row does not consist of context_length tokens and a query token.
        """
        query = tokens[:, -1]
        label = query - _FIRST_QUERY
        if tokens.shape[1] != self.context_length + 1 or bool(((label < 0) | (label >= CLASSES)).any()):
            raise CallError(
                f"expected {self.context_length} context tokens and then a query token with an id from {_FIRST_QUERY} "
                f"to {_FIRST_QUERY + CLASSES - 1} in each row; got shape {tuple(tokens.shape)} with a last column from "
                f"{query.min()} to {query.max()}"
            )
        context = tokens[:, :-1]
        counts = torch.zeros(len(tokens), VOCABULARY, dtype=torch.float64)
        counts.scatter_add_(1, context, torch.ones(context.shape, dtype=torch.float64))
        return self._labelled(label, counts)

    def sample_sequences(self, batch: int, generator: np.random.Generator) -> Sequences:
        """Draw sequences as counts, from the same distribution as `sequences(sample(...))` but many times faster.

        Args:
            batch: number of sequences.
            generator: generator of the draws.
        """
        label = torch.from_numpy(generator.integers(CLASSES, size=batch))
        drawn = generator.multinomial(self.context_length, _own_probabilities(), size=batch)
        counts = torch.zeros(batch, VOCABULARY, dtype=torch.float64)
        counts.scatter_(1, _tokens_of(label), torch.from_numpy(drawn).to(torch.float64))
        return self._labelled(label, counts)

    def _labelled(self, label: Tensor, counts: Tensor) -> Sequences:
        query = label + _FIRST_QUERY
        if self.query_among_keys:
            counts[torch.arange(len(label)), query] += 1
        distinct = torch.arange(VOCABULARY) // _DISTINCT - COMMON // _DISTINCT
        return Sequences(
            counts=counts,
            query=query,
            label=label,
            relevant=distinct == label[:, None],
            embedding=torch.eye(VOCABULARY, dtype=torch.float64),
            classes=CLASSES,
        )


def _own_probabilities() -> np.ndarray:
    """Return the probabilities of the tokens that a class draws from: the common ones, then its distinct ones."""
    weights = np.concatenate([np.ones(COMMON), np.arange(1, _DISTINCT + 1) / 10])
    return weights / weights.sum()


def _tokens_of(label: Tensor) -> Tensor:
    """Return the ids of the tokens that each class draws from, in the order of `_own_probabilities`."""
    common = torch.arange(COMMON).expand(len(label), -1)
    return torch.cat([common, COMMON + _DISTINCT * label[:, None] + torch.arange(_DISTINCT)], dim=1)
