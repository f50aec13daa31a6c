"""What the measures ask of a model: logits for tokens and a mask, and on request its attention maps."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ....circuits.errors import CallError
from ....circuits.weights.attention_weights import AttentionWeights
from ...tasks.example import Example


def length_buckets(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Return batches of indices, from long to short, each of at most `batch_tokens` tokens with its padding.

    A sequence longer than that is a batch of its own.

    Raises:
        CallError: batch_tokens is below 1.
    """
    if batch_tokens < 1:
        raise CallError(f"batch_tokens should be at least 1, got {batch_tokens}")
    buckets: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if buckets and (len(buckets[-1]) + 1) * longest <= batch_tokens:
            buckets[-1].append(index)
        else:
            buckets.append([index])
            longest = lengths[index]
    return buckets


#: Takes a layer's number and its map [batch, head, query, key], when the layer is done; what it does not keep is gone.
MapSink = Callable[[int, Float[Tensor, "batch head query key"]], None]
#: Takes a layer's number and what its queries, keys and values read, [batch, position, d_model], after the norm.
InputSink = Callable[[int, Float[Tensor, "batch position d_model"]], None]


@dataclass(frozen=True)
class Batch:
    """Examples side by side, padded on the right.

    Attributes:
        tokens: ids, the model's padding where the mask is false.
        mask: true where there is a token.
        examples: of which it was made.
    """

    tokens: Int[Tensor, "batch position"]
    mask: Bool[Tensor, "batch position"]
    examples: tuple[Example, ...]

    @classmethod
    def of(cls, examples: Sequence[Example], pad: int) -> "Batch":
        """Put examples side by side.

        Raises:
            CallError: there is none.
        """
        if not examples:
            raise CallError("a batch needs at least one example")
        longest = max(len(example.tokens) for example in examples)
        tokens = torch.full((len(examples), longest), pad, dtype=torch.long)
        mask = torch.zeros(len(examples), longest, dtype=torch.bool)
        for row, example in enumerate(examples):
            tokens[row, : len(example.tokens)] = torch.tensor(example.tokens)
            mask[row, : len(example.tokens)] = True
        return cls(tokens, mask, tuple(examples))

    @property
    def lengths(self) -> Int[Tensor, " batch"]:
        """How many tokens each example has."""
        return self.mask.sum(dim=1)


class AttentionModel(ABC):
    """A model as the measures see it. Adapters make one of transformers', TransformerLens' and this project's models.

    Attributes:
        name: for reports.
        layers: number of attention layers whose maps can be had.
        heads: of each layer.
        causal: whether a token sees only those before it.
        context: the longest sequence that it takes; None without bound.
        pad: id that fills up a batch; never seen through the mask.
        residual_stream: whether what a layer reads is carried past its attention, as rollout assumes.
        own_padding: whether pad is the vocabulary's own padding token; false where some id has to serve.
        mask_token: id that stands for a removed token; None where the vocabulary has none.
        classifies: whether its outputs are classes of a sequence, read at one place; else they are next tokens.
    """

    name: str
    layers: int
    heads: int
    causal: bool
    context: int | None
    pad: int
    mask_token: int | None
    classifies: bool
    residual_stream: bool = True
    own_padding: bool = True

    @abstractmethod
    def logits(
        self,
        tokens: Int[Tensor, "batch position"],
        mask: Bool[Tensor, "batch position"],
        *,
        maps: MapSink | None = None,
        inputs: InputSink | None = None,
        embedded: Float[Tensor, "batch position d_model"] | None = None,
    ) -> Float[Tensor, "batch *position output"]:
        """Run the model: [batch, class] of a classifier, [batch, position, vocabulary] of a language model.

        Args:
            tokens: ids, padded on the right.
            mask: true where there is a token.
            maps: called with each layer's attention map, in order; maps carry gradients where gradients are on.
            inputs: called with what each layer's attention reads.
            embedded: in place of what the token embedding gives, for gradients with respect to it.

        Raises:
            CallError: a sequence is longer than the context, or maps were asked for and the model gives none; the
                message says how to have them.
        """

    @abstractmethod
    def embed(self, tokens: Int[Tensor, "batch position"]) -> Float[Tensor, "batch position d_model"]:
        """Return the token embeddings, which `logits` takes as `embedded`; without positions."""

    @abstractmethod
    def readout(self, mask: Bool[Tensor, "batch position"]) -> Int[Tensor, " batch"]:
        """Return the position at which each example's prediction is read, and so its attention.

        Where the tokens say it, as the mask token does for a masked language model, only `reading_positions` knows.

        Raises:
            CallError: the mask alone does not tell.
        """

    def reading_positions(self, batch: Batch) -> Int[Tensor, " batch"]:
        """Return the position at which each example's prediction is read, for any model.

        Raises:
            CallError: an example has no such place.
        """
        return self.readout(batch.mask)

    def logits_at(
        self,
        tokens: Int[Tensor, "batch position"],
        mask: Bool[Tensor, "batch position"],
        places: Int[Tensor, "batch place"],
        *,
        maps: MapSink | None = None,
        inputs: InputSink | None = None,
        embedded: Float[Tensor, "batch position d_model"] | None = None,
    ) -> Float[Tensor, "batch place vocabulary"]:
        """Return a language model's logits at some positions of each example.

        A model that can should leave out the others: a vocabulary is large.
        """
        logits = self.logits(tokens, mask, maps=maps, inputs=inputs, embedded=embedded)
        return logits.gather(1, places.to(logits.device)[..., None].expand(-1, -1, logits.shape[-1]))

    def watch(self, batch: Batch, maps: MapSink, inputs: InputSink | None = None) -> None:
        """Run the model without gradients, for its maps and, where asked, what its attention reads.

        Of a language model logits are computed at one place an example where that can be had: a vocabulary is large.
        """
        with torch.no_grad():
            if self.classifies:
                self.logits(batch.tokens, batch.mask, maps=maps, inputs=inputs)
            else:
                places = self.reading_positions(batch)[:, None]
                self.logits_at(batch.tokens, batch.mask, places, maps=maps, inputs=inputs)

    def demand_context(self, tokens: Int[Tensor, "batch position"]) -> None:
        """CallError for sequences longer than the model takes."""
        if self.context is not None and tokens.shape[1] > self.context:
            raise CallError(
                f"{self.name} takes at most {self.context} tokens, got {tokens.shape[1]}; cut the text to its context"
            )

    @abstractmethod
    def attention_weights(self) -> list[AttentionWeights]:
        """Return the weights of every layer, raw, for measures that go through W_OV."""

    def log_probabilities(self, batch: Batch, logits: Float[Tensor, "batch *position output"]) -> list[Tensor]:
        """Return for each example the log-probability of each of its alternatives, given what `logits` returned.

        Classes for a classifier; for a language model the example's continuations where all are single tokens, else the
        whole vocabulary. Continuations of several tokens take more than one run: see `predictions`.
        """
        if self.classifies:
            return list(logits.log_softmax(dim=-1))
        at = logits[torch.arange(len(logits), device=logits.device), self.reading_positions(batch).to(logits.device)]
        found = []
        for example, log_probability in zip(batch.examples, at.log_softmax(dim=-1), strict=True):
            first = [continuation[0] for continuation in example.continuations]
            found.append(log_probability[first] if first else log_probability)
        return found


def last_token(mask: Bool[Tensor, "batch position"]) -> Int[Tensor, " batch"]:
    """Return the last position at which the mask is true."""
    return mask.shape[1] - 1 - mask.flip(1).long().argmax(dim=1)
