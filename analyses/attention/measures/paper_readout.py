"""Attention as the paper's released code reads it: of padded sequences, at places of its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float64, Int
from torch import Tensor

from ....circuits.errors import CallError
from ...tasks.example import Example
from ..models.model import AttentionModel, Batch
from ..paper_convention import PADDED_LENGTH
from .readout_rows import ReadoutRows
from .rollout import FusedMaps, Rollout

#: `rollout`: heads averaged, as in the paper's table. `head 0`: that head alone, as in some of its figures. `layer
#: maximum`: the largest of all layers' attention, token by token, heads averaged: its mass can pass 1.
Figure = Literal["rollout", "head 0", "layer maximum"]


@dataclass(frozen=True)
class PaperReading:
    """How a task's attention is read.

    Attributes:
        pad_mask: whether padding is masked; else it takes part in the attention as tokens do.
        figure: how heads and layers become one row.
        residual: share of the identity in the rollout: 0 in the paper's HateXplain and agreement, 0.5 in its SQuAD.
        padded_length: of all sequences.

    Raises:
        CallError: a setting is out of its range.
    """

    pad_mask: bool
    figure: Figure = "rollout"
    residual: float = 0.0
    padded_length: int = PADDED_LENGTH

    def __post_init__(self) -> None:
        """Refuse settings out of their range; the residual is checked as the rollout's."""
        if self.figure not in get_args(Figure):
            raise CallError(f"figure should be one of {', '.join(get_args(Figure))}; got {self.figure!r}")
        if self.padded_length < 1:
            raise CallError(f"padded_length should be at least 1; got {self.padded_length}")
        Rollout(self.residual)

    def batch(self, examples: Sequence[Example], pad: int) -> Batch:
        """Return examples padded to that length, and cut to it where they are longer.

        Raises:
            CallError: there is none.
        """
        cut = [example.keep(range(min(len(example.tokens), self.padded_length))) for example in examples]
        batch = Batch.of(cut, pad)
        missing = self.padded_length - batch.tokens.shape[1]
        tokens = torch.nn.functional.pad(batch.tokens, (0, missing), value=pad)
        mask = torch.nn.functional.pad(batch.mask, (0, missing), value=False)
        return Batch(tokens, mask if self.pad_mask else torch.ones_like(mask), batch.examples)

    def readout(self, batch: Batch) -> Int[Tensor, " batch"]:
        """Return where attention is read in such a batch.

        At the last position, be it padding. Where padding is masked, at the last token, but at position 0 of a sequence
        that has no padding.
        """
        positions = batch.mask.shape[1]
        if not self.pad_mask:
            return torch.full((len(batch.examples),), positions - 1)
        lengths = batch.lengths.cpu()
        return torch.where(lengths == positions, 0, lengths - 1)

    def rows(self, model: AttentionModel, batch: Batch) -> Float64[Tensor, "batch position"]:
        """Return a row of weights for each example of such a batch, read at `readout`.

        Raises:
            CallError: the sequences are longer than the model's context.
        """
        if self.figure == "layer maximum":
            rows = ReadoutRows(batch.mask, self.readout(batch))
            model.watch(batch, rows)
            return rows.rows().mean(dim=2).amax(dim=1)
        head_0 = tuple(float(head == 0) for head in range(model.heads))
        maps = FusedMaps(batch.mask, Rollout(self.residual, head_0 if self.figure == "head 0" else "mean"))
        model.watch(batch, maps)
        return maps.row(self.readout(batch))


#: Of the paper's two tasks whose sequences are padded.
HATEXPLAIN_READING = PaperReading(pad_mask=False)
AGREEMENT_READING = PaperReading(pad_mask=True)
