"""Token sequences as counts: attention without positions depends on nothing else."""

from dataclasses import dataclass
from functools import cached_property

from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Sequences:
    """A set of labelled sequences over one vocabulary.

    Softmax attention without positions depends on a sequence only through how often each token occurs in it: token v
    with score u_v receives the attention counts[v] e^{u_v} / sum_w counts[w] e^{u_w}.

    Attributes:
        counts: how often each vocabulary token occurs among the keys of each sequence.
        query: the vocabulary token at which the layer is read. It is among the keys only if `counts` includes it.
        label: the class to predict.
        relevant: relevance mask: the vocabulary tokens that are relevant in each sequence (the tokens of its class).
        embedding: the vector of each vocabulary token.
        classes: number of outputs.
    """

    counts: Float[Tensor, "sequence token"]
    query: Int[Tensor, " sequence"]
    label: Int[Tensor, " sequence"]
    relevant: Bool[Tensor, "sequence token"]
    embedding: Float[Tensor, "token d_model"]
    classes: int

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.label)

    @cached_property
    def log_counts(self) -> Float[Tensor, "sequence token"]:
        """Logarithm of the counts, -inf where a token does not occur. It is added to the token's score."""
        return self.counts.log()

    @cached_property
    def distinct_queries(self) -> tuple[Int[Tensor, " distinct"], Int[Tensor, " sequence"]]:
        """The vocabulary tokens that occur as queries, and the index of each sequence's own query among them."""
        tokens, index = self.query.unique(return_inverse=True)
        return tokens, index
