"""The relevant tokens of a batch, among those to which attention could go, and the attention that they receive."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from ....circuits.algebra.products import upcast
from ....circuits.errors import CallError, QkovError
from ..measures.checks import one_hot
from ..models.model import Batch
from ..paper_convention import Convention, demand_convention


@dataclass(frozen=True)
class Counting:
    """Which tokens and examples count in relevant-token attention.

    Attributes:
        count_special: whether attention on tokens that the tokenizer added counts; otherwise results are shares of the
            attention on the other tokens.
        convention: "standard" leaves out examples without a relevant token and takes shares of the attention; "paper"
            counts such examples as attention 0 and takes weights as they are, whatever their sum.

    Raises:
        CallError: The convention is unknown.
    """

    count_special: bool = True
    convention: Convention = "standard"

    def __post_init__(self) -> None:
        """Refuse an unknown convention."""
        demand_convention(self.convention)


#: All real tokens count, and examples without a relevant token take no part.
STANDARD = Counting()


@dataclass(frozen=True, eq=False)
class RelevantTokens:
    """The relevance of each example's tokens, and which of them attention could reach.

    Attributes:
        batch: the examples.
        relevance: relevance of each token, from 0 to 1; 0 where attention could not go.
        among: true where attention could go: at the real tokens that count, up to the readout position in a causal
            model.
        settings: which tokens and examples count.
    """

    batch: Batch
    relevance: Float64[Tensor, "batch position"]
    among: Bool[Tensor, "batch position"]
    settings: Counting

    @classmethod
    def of(
        cls, batch: Batch, readout: Int[Tensor, " batch"], *, causal: bool, settings: Counting = STANDARD
    ) -> "RelevantTokens":
        """Return the relevant tokens of a batch.

        Args:
            batch: examples; the positions at which its token mask is true took part in the attention.
            readout: readout position of each example.
            causal: whether the model is causal, so that a token attends only to itself and to those before it.
            settings: which tokens and examples count.

        Raises:
            CallError: A readout position is not that of a token.
        """
        one_hot(readout, batch.mask)
        relevance = torch.zeros(batch.mask.shape, dtype=torch.float64)
        among = batch.mask.cpu().clone()
        for row, example in enumerate(batch.examples):
            if example.relevance is not None:
                relevance[row, : len(example.tokens)] = example.relevance
            if not settings.count_special:
                among[row, : len(example.tokens)] &= ~torch.tensor(example.is_special)
        if causal:
            among &= torch.arange(among.shape[1]) <= readout.cpu()[:, None]
        return cls(batch, relevance * among, among, settings)

    def without(self, positions: Int[Tensor, " batch"]) -> "RelevantTokens":
        """Return a copy in which one token of each example is neither relevant nor among those that count."""
        among = self.among & (torch.arange(self.among.shape[1]) != positions.cpu()[:, None])
        return replace(self, relevance=self.relevance * among, among=among)

    def alone(self, positions: Int[Tensor, " batch"]) -> "RelevantTokens":
        """Return a copy in which one token of each example is the only relevant one."""
        return replace(self, relevance=one_hot(positions, self.batch.mask) * self.among)

    @property
    def reached(self) -> Float64[Tensor, " batch"]:
        """The sum of the relevance of each example's tokens."""
        return self.relevance.sum(dim=1)

    @property
    def chance(self) -> Float64[Tensor, " batch"]:
        """The attention on relevant tokens if it were uniform; NaN if there is no token to attend to."""
        return self.reached / self.among.sum(dim=1)

    def attention(self, rows: Float[Tensor, "batch *kind position"]) -> Float64[Tensor, "batch *kind"]:
        """Return the attention on the relevant tokens, sum_j a_j rho_j / sum_j a_j.

        a_j is the weight of token j in a row and rho_j its relevance; the sums run over the tokens that count. The
        result is NaN if no token that counts receives attention. In the paper's convention it is sum_j a_j rho_j.

        Args:
            rows: weights of tokens, for each example and, for instance, each layer and head.

        Raises:
            CallError: The rows do not fit the batch, or a weight is negative or on padding.
            QkovError: A weight is not finite.
        """
        rows = upcast(rows.detach()).cpu()
        if len(rows) != len(self.among) or rows.shape[-1] != self.among.shape[1]:
            raise CallError(
                f"rows have shape {list(rows.shape)}; expected {len(self.among)} examples first and "
                f"{self.among.shape[1]} positions last"
            )
        if not rows.isfinite().all():
            raise QkovError(f"a weight of example {_first(~rows.isfinite())} in the batch is not finite")
        if (rows < 0).any():
            raise CallError(
                f"a weight of example {_first(rows < 0)} in the batch is negative; expected attention: for signed "
                f"attributions pass the magnitude"
            )
        between = (slice(None), *(None,) * (rows.ndim - 2))
        on_padding = (rows > 0) & ~self.batch.mask.cpu()[between]
        if on_padding.any():
            raise CallError(f"example {_first(on_padding)} in the batch has attention on padding; expected none there")
        on_relevant = (rows * self.relevance[between]).sum(dim=-1)
        if self.settings.convention == "paper":
            return on_relevant
        return on_relevant / (rows * self.among[between]).sum(dim=-1)

    def reasons_against(self, attention: Float64[Tensor, "batch *kind"]) -> list[str | None]:
        """Return for each example why it takes no part, as words that follow a number; None if it takes part.

        Args:
            attention: the result of `attention`.
        """
        undefined = attention.isnan().flatten(1).any(dim=1) if attention.ndim > 1 else attention.isnan()
        return [
            self._reason(row, bool(nowhere), float(reached))
            for row, (nowhere, reached) in enumerate(zip(undefined, self.reached, strict=True))
        ]

    def _reason(self, row: int, nowhere: bool, reached: float) -> str | None:
        example = self.batch.examples[row]
        if self.settings.convention == "paper":
            return None
        if example.relevance is None:
            return "whose relevant tokens were cut off" if example.cut else "without a relevant token"
        if reached == 0:
            return "whose relevant tokens are out of reach of the attention that is read"
        return "that attend to no token that counts" if nowhere else None


def _first(where: Bool[Tensor, "batch *rest"]) -> int:
    return int(where.nonzero()[0, 0])
