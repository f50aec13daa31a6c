"""Relevant-token attention: the share of each example's attention that goes to its relevant tokens."""

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
from .relevant_tokens import STANDARD, Counting, RelevantTokens


@dataclass(frozen=True)
class RelevantAttention:
    """The relevant-token attention of one model's examples.

    Attributes:
        table: one row for each example, with the columns example (its number), id and group; tokens (number of tokens
            to which attention could go) and relevant (sum of their relevance); attention (on the relevant tokens) and
            chance (if attention were uniform over the same tokens); readout (attention on the token at which it is
            read); attention_elsewhere and chance_elsewhere (both without that token, as a share of the attention on the
            others; NaN if no other token is relevant or attended to); and probability (NaN if it is unknown).
        settings: which tokens and examples counted.
        left_out: number of examples that took no part, by reason.
    """

    table: pd.DataFrame
    settings: Counting
    left_out: tuple[tuple[str, int], ...]


@dataclass(eq=False)
class Relevance:
    """An accumulator of relevant-token attention, updated batch by batch; the result does not depend on the batches.

    With a_j the weight of token j in a row and rho_j its relevance, from 0 to 1, relevant-token attention is

        sum_j a_j rho_j / sum_j a_j

    over the tokens that count. The query token may name the class and be among the keys, so that attention to it alone
    solves the task; therefore attention is also given without the token at which it is read.

    Attributes:
        causal: whether the model is causal, so that a token attends only to itself and to those before it.
        settings: which tokens and examples count.
    """

    causal: bool
    settings: Counting = STANDARD
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
        """Add a batch.

        Args:
            batch: examples.
            rows: weight of each token, from any attention measure.
            readout: readout position of each example.
            probabilities: each example's probability of the right class; NaN where it is unknown.
            numbers: number of each example in the data; by default the numbers continue those of earlier batches.

        Raises:
            CallError: The rows, probabilities or numbers do not fit the batch, or a weight is negative.
            QkovError: A weight is not finite.
        """
        size = len(batch.examples)
        for name, values in (("probabilities", probabilities), ("numbers", numbers)):
            if values is not None and len(values) != size:
                raise CallError(f"{name} has {len(values)} entries for a batch of {size} examples")
        relevant = RelevantTokens.of(batch, readout, causal=self.causal, settings=self.settings)
        attention = relevant.attention(rows)
        elsewhere = relevant.without(readout)
        has_relevant = elsewhere.reached > 0
        part = pd.DataFrame(
            {
                "example": np.arange(self._seen, self._seen + size) if numbers is None else np.array(numbers),
                "id": [example.id for example in batch.examples],
                "group": [example.group for example in batch.examples],
                "tokens": relevant.among.sum(dim=1).numpy(),
                "relevant": relevant.reached.numpy(),
                "attention": attention.numpy(),
                "chance": relevant.chance.numpy(),
                "readout": relevant.alone(readout).attention(rows).numpy(),
                "attention_elsewhere": torch.where(has_relevant, elsewhere.attention(rows), torch.nan).numpy(),
                "chance_elsewhere": torch.where(has_relevant, elsewhere.chance, torch.nan).numpy(),
                "probability": np.full(size, np.nan) if probabilities is None else probabilities,
            }
        )
        reasons = relevant.reasons_against(attention)
        self._left_out.update(reason for reason in reasons if reason)
        self._parts.append(part[[reason is None for reason in reasons]])
        self._seen += size

    def compute(self) -> RelevantAttention:
        """Return the relevant-token attention of all examples so far, in the order of their numbers.

        Raises:
            CallError: No example takes part, or two examples have the same number.
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
    settings: Counting = STANDARD,
) -> RelevantAttention:
    """Return the relevant-token attention of examples whose rows of weights are known; see `Relevance`.

        sum_j a_j rho_j / sum_j a_j,      a_j the weight of token j, rho_j its relevance

    Args:
        examples: examples of any length.
        rows: for each example the weight of each of its tokens.
        readouts: readout position of each example.
        causal: whether the model is causal, so that a token attends only to itself and to those before it.
        probabilities: each example's probability of the right class; NaN where it is unknown.
        settings: which tokens and examples count.

    Raises:
        CallError: The rows do not fit the examples, a weight is negative, or no example takes part.
        QkovError: A weight is not finite.
    """
    demand_rows("attention", rows, examples)
    if len(readouts) != len(examples):
        raise CallError(f"{len(readouts)} readout positions were given for {len(examples)} examples")
    relevance = Relevance(causal, settings)
    if examples:
        batch = Batch.of(examples, pad=0)
        padded = pad_sequence(list(rows), batch_first=True)
        relevance.update(batch, padded, torch.tensor(readouts), probabilities=probabilities)
    return relevance.compute()
