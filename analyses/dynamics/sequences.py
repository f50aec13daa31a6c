"""Token sequences as counts, which is all that attention without positions can see of them."""

from dataclasses import dataclass
from functools import cached_property

from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Sequences:
    """A set of labelled sequences over one vocabulary.

    Softmax attention without positions depends on a sequence only through how often each token occurs in it:
    token v receives counts[v] e^{u_v} / sum_w counts[w] e^{u_w} of the attention.

    Attributes:
        counts: how often each vocabulary entry occurs among the keys of each sequence.
        query: the vocabulary entry at which the layer is read; it is among the keys only if counts says so.
        label: the class to predict.
        relevant: the vocabulary entries that are relevant in each sequence (the tokens of its class).
        embedding: the vector of each vocabulary entry.
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
        """ln of the counts, -inf where a token does not occur: what counting adds to its score."""
        return self.counts.log()

    @cached_property
    def distinct_queries(self) -> tuple[Int[Tensor, " distinct"], Int[Tensor, " sequence"]]:
        """The vocabulary entries that occur as queries, and for each sequence the position of its own among them."""
        entries, position = self.query.unique(return_inverse=True)
        return entries, position
