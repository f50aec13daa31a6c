"""Relevant-token attention of every head of every layer, read where the prediction is read."""

from collections import Counter
from dataclasses import dataclass, field

import pandas as pd
import torch
from jaxtyping import Float64, Int
from torch import Tensor

from ....circuits.errors import CallError
from ..intervals import DEFAULT, Bootstrap, mean_intervals
from ..models.model import Batch
from .relevant_tokens import STANDARD, Counting, RelevantTokens


@dataclass(eq=False)
class HeadRelevance:
    """An accumulator of each head's attention on relevant tokens, updated batch by batch.

    It takes the rows that `readout_rows` returns.

    Attributes:
        causal: whether the model is causal, so that a token attends only to itself and to those before it.
        settings: which tokens and examples count.
    """

    causal: bool
    settings: Counting = STANDARD
    _attention: list[Float64[Tensor, "example layer head"]] = field(default_factory=list, init=False)
    _elsewhere: list[Float64[Tensor, "example layer head"]] = field(default_factory=list, init=False)
    _chance: list[Float64[Tensor, "example kind"]] = field(default_factory=list, init=False)
    _left_out: Counter[str] = field(default_factory=Counter, init=False)

    @property
    def left_out(self) -> tuple[tuple[str, int], ...]:
        """The number of examples that took no part, by reason."""
        return tuple(self._left_out.items())

    def update(
        self, batch: Batch, rows: Float64[Tensor, "batch layer head position"], readout: Int[Tensor, " batch"]
    ) -> None:
        """Add a batch; only each head's attention on relevant tokens is kept.

        Args:
            batch: examples.
            rows: row of every head of every layer at the readout position.
            readout: readout position of each example.

        Raises:
            CallError: The rows do not fit the batch.
            QkovError: A weight is not finite.
        """
        tokens = RelevantTokens.of(batch, readout, causal=self.causal, settings=self.settings)
        attention = tokens.attention(rows)
        elsewhere = tokens.without(readout)
        has_relevant = elsewhere.reached > 0
        reasons = tokens.reasons_against(attention)
        self._left_out.update(reason for reason in reasons if reason)
        taken = torch.tensor([reason is None for reason in reasons])
        self._attention.append(attention[taken])
        chance_elsewhere = torch.where(has_relevant, elsewhere.chance, torch.nan)
        self._elsewhere.append(torch.where(has_relevant[:, None, None], elsewhere.attention(rows), torch.nan)[taken])
        self._chance.append(torch.stack([tokens.chance, chance_elsewhere], dim=1)[taken])

    def compute(self, settings: Bootstrap = DEFAULT) -> pd.DataFrame:
        """Return the mean attention of each head on relevant tokens.

        Args:
            settings: how the intervals are drawn.

        Returns:
            One row for each head, with the columns layer, head, attention, low and high (its interval over examples),
            chance, attention_elsewhere and chance_elsewhere (without the token at which attention is read; over the
            examples in which the head attends to another token), and examples.

        Raises:
            CallError: No example takes part.
        """
        if not any(map(len, self._attention)):
            why = ", ".join(f"{count} {reason}" for reason, count in self._left_out.items()) or "none was given"
            raise CallError(f"no example takes part in the attention of heads on relevant tokens: {why}")
        attention = torch.cat(self._attention)
        examples, layers, heads = attention.shape
        means = mean_intervals(attention.flatten(1).T[:, None].numpy(), settings)
        chance = torch.cat(self._chance).nanmean(dim=0)
        return pd.DataFrame(
            {
                "layer": torch.arange(layers).repeat_interleave(heads).numpy(),
                "head": torch.arange(heads).repeat(layers).numpy(),
                "attention": means["value"],
                "low": means["low"],
                "high": means["high"],
                "chance": float(chance[0]),
                "attention_elsewhere": torch.cat(self._elsewhere).nanmean(dim=0).flatten().numpy(),
                "chance_elsewhere": float(chance[1]),
                "examples": examples,
            }
        )
