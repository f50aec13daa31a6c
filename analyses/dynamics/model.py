"""The single-layer attention model of the paper, its circuits collapsed or factorized independently."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ...circuits.algebra.circuit import Circuit
from .sequences import Sequences
from .setting import Parameterization


class SingleLayerAttention(nn.Module):
    """One attention layer read at the query token: no residual, no positions, no bias.

        u_j = scale x_j' W_QK x_T      a = softmax(u)      z = W_OV sum_j a_j x_j      (summed over heads)

    A collapsed circuit is one parameter (`W_QK` or `W_OV`), a factorized one is two (`W_Q`, `W_K` or `W_V`, `W_O`, in
    TransformerLens' orientation). Several runs train as one batched computation: `runs` of them, along the first
    dimension of every parameter.

    Source: section 2 of "Faster Query-Key Learning Sharpens Attention"; several heads and runs are this project's.
    """

    def __init__(
        self,
        d_model: int,
        classes: int,
        parameterization: Parameterization,
        *,
        d_head: int | None = None,
        heads: int = 1,
        runs: int = 1,
        score_scale: float = 1.0,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        """Make the model with all weights zero; the functions of `starts` give it its start.

        Args:
            d_model: width of the tokens.
            classes: number of outputs.
            parameterization: which circuits are factorized.
            d_head: inner width of a factorized circuit; d_model if not given.
            heads: number of heads, whose outputs are summed.
            runs: number of runs that train side by side.
            score_scale: factor of the scores, 1/sqrt(d_head) in a transformer.
            dtype: of the weights; float64 where the theory is tested.
        """
        super().__init__()
        d_head = d_model if d_head is None else d_head
        self.parameterization = parameterization
        self.score_scale = score_scale
        shapes = {
            "W_QK": (d_model, d_model),
            "W_Q": (d_model, d_head),
            "W_K": (d_model, d_head),
            "W_OV": (classes, d_model),
            "W_V": (d_model, d_head),
            "W_O": (d_head, classes),
        }
        for name in (*self.attention_names, *self.output_names):
            self.register_parameter(name, nn.Parameter(torch.zeros(runs, heads, *shapes[name], dtype=dtype)))

    @property
    def attention_names(self) -> tuple[str, ...]:
        """Names of the parameters that make up W_QK."""
        return ("W_Q", "W_K") if self.parameterization.factorized_attention else ("W_QK",)

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the parameters that make up W_OV."""
        return ("W_V", "W_O") if self.parameterization.factorized_output else ("W_OV",)

    @property
    def runs(self) -> int:
        """Number of runs that train side by side."""
        return self.get_parameter(self.attention_names[0]).shape[0]

    @property
    def heads(self) -> int:
        """Number of heads, whose outputs are summed."""
        return self.get_parameter(self.attention_names[0]).shape[1]

    def qk(self) -> Circuit:
        """Return W_QK = W_K W_Q', batched [run, head]; rows are the key side, columns the query side."""
        return Circuit(*self._qk_factors())

    def ov(self) -> Circuit:
        """Return W_OV = W_O W_V, batched [run, head]; rows are the write side, columns the read side."""
        return Circuit(*self._ov_factors())

    def products(
        self,
    ) -> tuple[Float[Tensor, "run head d_model d_model"], Float[Tensor, "run head classes d_model"]]:
        """Return the dense W_QK and W_OV, through which gradients flow to the factors."""
        qk, ov = (
            factors[0] if len(factors) == 1 else factors[0] @ factors[1]
            for factors in (self._qk_factors(), self._ov_factors())
        )
        return qk, ov

    def attention(
        self, sequences: Sequences, qk: Float[Tensor, "run head d_model d_model"]
    ) -> Float[Tensor, "run head sequence token"]:
        """Return the attention that each vocabulary entry receives in each sequence, all its occurrences together.

        Args:
            sequences: to attend over.
            qk: the dense W_QK, as `products` forms it.
        """
        embedding = sequences.embedding.to(qk.dtype)
        asked, position = sequences.distinct_queries
        scores = self.score_scale * (embedding @ qk @ embedding[asked].T)
        return torch.softmax(scores.mT[..., position, :] + sequences.log_counts.to(qk.dtype), dim=-1)

    def logits(
        self,
        attention: Float[Tensor, "run head sequence token"],
        sequences: Sequences,
        ov: Float[Tensor, "run head classes d_model"],
    ) -> Float[Tensor, "run sequence classes"]:
        """Return z = sum over heads of W_OV sum_j a_j x_j."""
        values = sequences.embedding.to(ov.dtype) @ ov.mT
        return (attention @ values).sum(dim=1)

    def forward(self, sequences: Sequences) -> Float[Tensor, "run sequence classes"]:
        """Return the logits of every run."""
        qk, ov = self.products()
        return self.logits(self.attention(sequences, qk), sequences, ov)

    def _qk_factors(self) -> tuple[Tensor, ...]:
        if self.parameterization.factorized_attention:
            return self.get_parameter("W_K"), self.get_parameter("W_Q").mT
        return (self.get_parameter("W_QK"),)

    def _ov_factors(self) -> tuple[Tensor, ...]:
        if self.parameterization.factorized_output:
            return self.get_parameter("W_O").mT, self.get_parameter("W_V").mT
        return (self.get_parameter("W_OV"),)


def relevant_attention(
    attention: Float[Tensor, "run head sequence token"], sequences: Sequences
) -> Float[Tensor, " run"]:
    """Return alpha: the attention on the relevant tokens, averaged over heads and sequences."""
    return (attention * sequences.relevant).sum(dim=-1).mean(dim=(1, 2))
