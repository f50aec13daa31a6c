"""Relevant-token attention: how much of the attention of each example goes to the tokens that matter."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float64, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ....circuits.errors import CallError
from ...tasks.example import Example
from ..measures.checks import demand_rows
from ..models.model import Batch
from .relevant_tokens import RIGHT, Counting, RelevantTokens


@dataclass(frozen=True)
class RelevantAttention:
    """What `Relevance` found.

    Attributes:
        table: a row for each example, with the columns example (its number among those given), id, group; tokens (that
            attention could go to), relevant (sum of their relevance); attention (on the relevant ones) and chance (if
            attention were uniform over the same tokens); readout (attention on the token at which it is read);
            attention_elsewhere and chance_elsewhere (both without that token, as a share of the attention on the
            others; NaN where nothing else is relevant or attended to); probability (NaN where it is not known).
        settings: what counted.
        left_out: how many examples took no part, by reason.
    """

    table: pd.DataFrame
    settings: Counting
    left_out: tuple[tuple[str, int], ...]


@dataclass(eq=False)
class Relevance:
    """Takes rows of attention batch by batch, and gives the same whatever the batches.

    A query may name the class by itself and be among the keys, so that attention on it alone solves the task: that is
    why attention is also given without the token at which it is read.

    Attributes:
        causal: whether a token sees only those before it.
        settings: what counts.
    """

    causal: bool
    settings: Counting = RIGHT
    _parts: list[pd.DataFrame] = field(default_factory=list, init=False)
    _left_out: Counter[str] = field(default_factory=Counter, init=False)
    _seen: int = field(default=0, init=False)

    def update(
        self,
        batch: Batch,
        rows: Float64[Tensor, "batch position"],
        readout: Int[Tensor, " batch"],
        *,
        probabilities: Float64[np.ndarray, " _batch"] | None = None,
        numbers: Sequence[int] | None = None,
    ) -> None:
        """Take a batch.

        Args:
            batch: of examples.
            rows: weights of their tokens, from any measure.
            readout: position of each example at which attention was read.
            probabilities: of the right class, of each example; NaN where it is not known.
            numbers: of the examples in the data; by default they follow on those seen before.

        Raises:
            CallError: the rows, probabilities or numbers are not those of the batch, or a weight is negative.
            QkovError: a weight is not finite.
        """
        size = len(batch.examples)
        for name, given in (("probabilities", probabilities), ("numbers", numbers)):
            if given is not None and len(given) != size:
                raise CallError(f"{name} of {len(given)} examples came with a batch of {size}")
        found = RelevantTokens.of(batch, readout, causal=self.causal, settings=self.settings)
        attention = found.attention(rows)
        elsewhere = found.without(readout)
        anything = torch.where(elsewhere.reached > 0, 1.0, torch.nan)
        part = pd.DataFrame(
            {
                "example": np.arange(self._seen, self._seen + size) if numbers is None else np.array(numbers),
                "id": [example.id for example in batch.examples],
                "group": [example.group for example in batch.examples],
                "tokens": found.among.sum(dim=1).numpy(),
                "relevant": found.reached.numpy(),
                "attention": attention.numpy(),
                "chance": found.chance.numpy(),
                "readout": found.alone(readout).attention(rows).numpy(),
                "attention_elsewhere": (elsewhere.attention(rows) * anything).numpy(),
                "chance_elsewhere": (elsewhere.chance * anything).numpy(),
                "probability": np.full(size, np.nan) if probabilities is None else probabilities,
            }
        )
        reasons = found.reasons_against(attention)
        self._left_out.update(reason for reason in reasons if reason)
        self._parts.append(part[[reason is None for reason in reasons]])
        self._seen += size

    def compute(self) -> RelevantAttention:
        """Return the figures of all examples so far, by their numbers.

        Raises:
            CallError: none takes part.
        """
        table = pd.concat(self._parts) if self._parts else pd.DataFrame()
        if table.empty:
            why = ", ".join(f"{count} {reason}" for reason, count in self._left_out.items()) or "none was given"
            raise CallError(f"no example takes part in relevant-token attention: {why}")
        if table["example"].duplicated().any():
            raise CallError(f"example {table['example'][table['example'].duplicated()].iloc[0]} was given twice")
        return RelevantAttention(
            table.sort_values("example", ignore_index=True), self.settings, tuple(self._left_out.items())
        )


def relevance_of(
    examples: Sequence[Example],
    rows: Sequence[Float64[Tensor, " _token"]],
    readouts: Sequence[int],
    *,
    causal: bool,
    probabilities: Float64[np.ndarray, " _example"] | None = None,
    settings: Counting = RIGHT,
) -> RelevantAttention:
    """Return the relevant-token attention of examples whose rows are at hand; see `Relevance`.

    Args:
        examples: of any length.
        rows: for each example a weight of each of its tokens.
        readouts: for each example the position at which attention was read.
        causal: whether a token sees only those before it.
        probabilities: of the right class, of each example.
        settings: what counts.

    Raises:
        CallError: the rows are not those of the examples, a weight is negative, or no example takes part.
        QkovError: a weight is not finite.
    """
    demand_rows("attention", rows, examples)
    if len(readouts) != len(examples):
        raise CallError(f"{len(readouts)} readouts were given for {len(examples)} examples")
    relevance = Relevance(causal, settings)
    if examples:
        batch = Batch.of(examples, pad=0)
        padded = pad_sequence(list(rows), batch_first=True)
        relevance.update(batch, padded, torch.tensor(readouts), probabilities=probabilities)
    return relevance.compute()
