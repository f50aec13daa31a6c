"""The readout of the paper's released code: attention of padded sequences, read at positions of its own."""

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

#: How the released code makes one row out of heads and layers. `rollout`: heads averaged, as in the paper's table.
#: `head 0`: the rollout of that head alone, as in some of the paper's figures. `layer maximum`: for each token the
#: largest attention over the layers, heads averaged; such a row can sum to more than 1.
PaperMeasure = Literal["rollout", "head 0", "layer maximum"]


@dataclass(frozen=True)
class PaperReadout:
    """How the paper's released code reads the attention of a task.

    Attributes:
        pad_mask: whether padding is masked; otherwise it takes part in attention like any token.
        measure: how heads and layers become one row.
        residual: share of the identity in the rollout: 0 in the paper's HateXplain and subject-verb agreement tasks,
            0.5 in its SQuAD task.
        padded_length: length to which every sequence is padded or cut.

    Raises:
        CallError: A setting is out of its range.
    """

    pad_mask: bool
    measure: PaperMeasure = "rollout"
    residual: float = 0.0
    padded_length: int = PADDED_LENGTH

    def __post_init__(self) -> None:
        """Refuse settings that are out of range; `Rollout` checks the residual."""
        if self.measure not in get_args(PaperMeasure):
            raise CallError(f"measure should be one of {', '.join(get_args(PaperMeasure))}; got {self.measure!r}")
        if self.padded_length < 1:
            raise CallError(f"padded_length should be at least 1; got {self.padded_length}")
        Rollout(self.residual)

    def batch(self, examples: Sequence[Example], pad: int) -> Batch:
        """Return the examples padded to `padded_length`; longer ones are cut to it.

        Args:
            examples: at least one.
            pad: id of the padding token.

        Raises:
            CallError: There is no example.
        """
        cut = [example.keep(range(min(len(example.tokens), self.padded_length))) for example in examples]
        batch = Batch.of(cut, pad)
        missing = self.padded_length - batch.tokens.shape[1]
        tokens = torch.nn.functional.pad(batch.tokens, (0, missing), value=pad)
        mask = torch.nn.functional.pad(batch.mask, (0, missing), value=False)
        types = batch.token_types
        if types is not None:
            types = torch.nn.functional.pad(types, (0, missing))
        return Batch(tokens, mask if self.pad_mask else torch.ones_like(mask), batch.examples, types)

    def readout(self, batch: Batch) -> Int[Tensor, " batch"]:
        """Return the readout position of each example in such a batch.

        Without a padding mask it is the last position, even if that is padding. With one it is the last token, except
        for a sequence without any padding, where it is position 0.
        """
        positions = batch.mask.shape[1]
        if not self.pad_mask:
            return torch.full((len(batch.examples),), positions - 1)
        lengths = batch.lengths.cpu()
        return torch.where(lengths == positions, 0, lengths - 1)

    def rows(self, model: AttentionModel, batch: Batch) -> Float64[Tensor, "batch position"]:
        """Return a row of weights for each example of such a batch, read at `readout`.

        Args:
            model: the model whose attention is measured.
            batch: examples as `batch` pads them.

        Raises:
            CallError: The sequences are longer than the model's context.
        """
        if self.measure == "layer maximum":
            rows = ReadoutRows(batch.mask, self.readout(batch))
            model.watch(batch, rows)
            return rows.rows().mean(dim=2).amax(dim=1)
        head_0 = tuple(float(head == 0) for head in range(model.heads))
        maps = FusedMaps(batch.mask, Rollout(self.residual, head_0 if self.measure == "head 0" else "mean"))
        model.watch(batch, maps)
        return maps.row(self.readout(batch))


#: The readouts of the paper's two tasks with padded sequences: HateXplain and subject-verb agreement.
HATEXPLAIN_READOUT = PaperReadout(pad_mask=False)
SUBJECT_VERB_READOUT = PaperReadout(pad_mask=True)
