"""The paper's single-layer attention model, with each circuit collapsed or factorized independently."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ...circuits.algebra.circuit import Circuit
from .sequences import Sequences
from .setting import Parameterization


class SingleLayerAttention(nn.Module):
    """One attention layer read at the query token, without residual stream, positions or biases.

        u_j = score_scale x_j' W_QK x_T      a = softmax(u)      z = W_OV sum_j a_j x_j      (summed over heads)

    x_j are the key tokens, x_T is the query token, and z holds one logit per class. W_QK [d_model, d_model] has the key
    side in its rows and the query side in its columns; W_OV [classes, d_model] has the write side in its rows and the
    read side in its columns. A collapsed circuit is one parameter (`W_QK` or `W_OV`). A factorized circuit is two,
    `W_Q` and `W_K` [d_model, d_head] with W_QK = W_K W_Q', or `W_V` [d_model, d_head] and `W_O` [d_head, classes] with
    W_OV = W_O' W_V', in TransformerLens' orientation. Several runs train as one batched computation, so every
    parameter has the leading dimensions [run, head].

    Source: section 2 of "Faster Query-Key Learning Sharpens Attention". Several heads and runs were added for this
        project.
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
        """Create the model with all weights zero; the functions in `starts` set its start.

        Args:
            d_model: dimension of the token vectors.
            classes: number of outputs.
            parameterization: which circuits are factorized.
            d_head: inner dimension of a factorized circuit; None uses d_model.
            heads: number of heads, whose outputs are summed.
            runs: number of runs that train side by side.
            score_scale: factor of the scores, which is 1/sqrt(d_head) in a transformer.
            dtype: dtype of the weights; use float64 to test the theory.
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
        """Return the dense W_QK and W_OV; gradients flow through them to the factors."""
        qk, ov = (
            factors[0] if len(factors) == 1 else factors[0] @ factors[1]
            for factors in (self._qk_factors(), self._ov_factors())
        )
        return qk, ov

    def attention(
        self, sequences: Sequences, qk: Float[Tensor, "run head d_model d_model"]
    ) -> Float[Tensor, "run head sequence token"]:
        """Return the attention that each vocabulary token receives in each sequence, summed over its occurrences.

        Args:
            sequences: the sequences to attend over.
            qk: the dense W_QK, from `products`.
        """
        embedding = sequences.embedding.to(qk.dtype)
        queries, index = sequences.distinct_queries
        scores = self.score_scale * (embedding @ qk @ embedding[queries].T)
        return torch.softmax(scores.mT[..., index, :] + sequences.log_counts.to(qk.dtype), dim=-1)

    def logits(
        self,
        attention: Float[Tensor, "run head sequence token"],
        sequences: Sequences,
        ov: Float[Tensor, "run head classes d_model"],
    ) -> Float[Tensor, "run sequence classes"]:
        """Return the logits z = sum over heads of W_OV sum_j a_j x_j.

        Args:
            attention: attention on each vocabulary token, from `attention`.
            sequences: the sequences attended over.
            ov: the dense W_OV, from `products`.
        """
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
    """Return the attention alpha on the relevant tokens, averaged over heads and sequences.

    Args:
        attention: attention on each vocabulary token, from `SingleLayerAttention.attention`.
        sequences: the sequences attended over, whose `relevant` mask selects the tokens.

    Returns:
        alpha of each run, between 0 and 1.
    """
    return (attention * sequences.relevant).sum(dim=-1).mean(dim=(1, 2))
