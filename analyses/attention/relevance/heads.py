"""Relevant-token attention of every head of every layer, where the prediction is read."""

from collections import Counter
from dataclasses import dataclass, field

import pandas as pd
import torch
from jaxtyping import Float64, Int
from torch import Tensor

from ....circuits.errors import CallError
from ..intervals import DEFAULT, Bootstrap, mean_intervals
from ..models.model import Batch
from .relevant_tokens import RIGHT, Counting, RelevantTokens


@dataclass(eq=False)
class HeadRelevance:
    """Takes the rows at the readout of all heads, as `readout_rows` gives them, batch by batch.

    Attributes:
        causal: whether a token sees only those before it.
        settings: what counts.
    """

    causal: bool
    settings: Counting = RIGHT
    _attention: list[Float64[Tensor, "example layer head"]] = field(default_factory=list, init=False)
    _elsewhere: list[Float64[Tensor, "example layer head"]] = field(default_factory=list, init=False)
    _chance: list[Float64[Tensor, "example kind"]] = field(default_factory=list, init=False)
    _left_out: Counter[str] = field(default_factory=Counter, init=False)

    @property
    def left_out(self) -> tuple[tuple[str, int], ...]:
        """How many examples took no part, by reason."""
        return tuple(self._left_out.items())

    def update(
        self, batch: Batch, rows: Float64[Tensor, "batch layer head position"], readout: Int[Tensor, " batch"]
    ) -> None:
        """Take a batch; of its rows only what goes to relevant tokens is kept.

        Raises:
            CallError: the rows are not those of the batch.
            QkovError: a weight is not finite.
        """
        found = RelevantTokens.of(batch, readout, causal=self.causal, settings=self.settings)
        attention = found.attention(rows)
        elsewhere = found.without(readout)
        anything = torch.where(elsewhere.reached > 0, 1.0, torch.nan)
        reasons = found.reasons_against(attention)
        self._left_out.update(reason for reason in reasons if reason)
        taken = torch.tensor([reason is None for reason in reasons])
        self._attention.append(attention[taken])
        self._elsewhere.append((elsewhere.attention(rows) * anything[:, None, None])[taken])
        self._chance.append(torch.stack([found.chance, elsewhere.chance * anything], dim=1)[taken])

    def compute(self, settings: Bootstrap = DEFAULT) -> pd.DataFrame:
        """Return the mean attention of each head on relevant tokens.

        Columns: layer, head, attention, low and high (its interval over examples), chance, attention_elsewhere and
        chance_elsewhere (without the token at which attention is read; over the examples in which that head attends to
        another), and examples.

        Raises:
            CallError: no example takes part.
        """
        attention = torch.cat(self._attention) if self._attention else torch.zeros(0, 0, 0)
        if not len(attention):
            why = ", ".join(f"{count} {reason}" for reason, count in self._left_out.items()) or "none was given"
            raise CallError(f"no example takes part in the attention of heads on relevant tokens: {why}")
        examples, layers, heads = attention.shape
        found = mean_intervals(attention.flatten(1).T[:, None].numpy(), settings)
        chance = torch.cat(self._chance).nanmean(dim=0)
        return pd.DataFrame(
            {
                "layer": torch.arange(layers).repeat_interleave(heads).numpy(),
                "head": torch.arange(heads).repeat(layers).numpy(),
                "attention": found["value"],
                "low": found["low"],
                "high": found["high"],
                "chance": float(chance[0]),
                "attention_elsewhere": torch.cat(self._elsewhere).nanmean(dim=0).flatten().numpy(),
                "chance_elsewhere": float(chance[1]),
                "examples": examples,
            }
        )
