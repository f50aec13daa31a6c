"""What the measures expect of a model: logits for tokens and a mask, and on request its attention maps."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ....circuits.errors import CallError
from ....circuits.weights.attention_weights import AttentionWeights
from ....circuits.weights.layer_keys import LayerKey
from ...tasks.example import Example


def length_buckets(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Return batches of indices from long to short sequences; one sequence longer than the limit is a batch of its own.

    Args:
        lengths: The length of each sequence in tokens.
        batch_tokens: The maximum number of tokens in a batch, padding included.

    Raises:
        CallError: `batch_tokens` is below 1.
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


#: Takes a layer's number and its map [batch, head, query, key] when the layer has run; a map that it does not keep is
#: freed.
MapSink = Callable[[int, Float[Tensor, "batch head query key"]], None]
#: Takes a layer's number and what its queries, keys and values read, [batch, position, d_model], after the norm.
InputSink = Callable[[int, Float[Tensor, "batch position d_model"]], None]


@dataclass(frozen=True)
class Batch:
    """Examples side by side, padded on the right.

    Attributes:
        tokens: Token ids; the model's padding id where the mask is false.
        mask: True where there is a token.
        examples: The examples that the batch was made of.
        token_types: The type of each token, 0 where the mask is false; None if the examples state none.
    """

    tokens: Int[Tensor, "batch position"]
    mask: Bool[Tensor, "batch position"]
    examples: tuple[Example, ...]
    token_types: Int[Tensor, "batch position"] | None = None

    @classmethod
    def of(cls, examples: Sequence[Example], pad: int) -> "Batch":
        """Put examples side by side.

        Args:
            examples: The examples, in tokens.
            pad: The id that fills the rows up.

        Raises:
            CallError: There are no examples, or only some of them state token types.
        """
        if not examples:
            raise CallError("a batch needs at least one example")
        typed = [bool(example.token_types) for example in examples]
        if len(set(typed)) > 1:
            one = examples[typed.index(False)]
            raise CallError(
                f"example {one.id or typed.index(False)} has no token types, and others of its batch have them; give "
                f"token types for all examples or for none"
            )
        longest = max(len(example.tokens) for example in examples)
        tokens = torch.full((len(examples), longest), pad, dtype=torch.long)
        mask = torch.zeros(len(examples), longest, dtype=torch.bool)
        types = torch.zeros(len(examples), longest, dtype=torch.long)
        for row, example in enumerate(examples):
            tokens[row, : len(example.tokens)] = torch.tensor(example.tokens)
            mask[row, : len(example.tokens)] = True
            types[row, : len(example.token_types)] = torch.tensor(example.token_types, dtype=torch.long)
        return cls(tokens, mask, tuple(examples), types if all(typed) else None)

    @property
    def lengths(self) -> Int[Tensor, " batch"]:
        """The number of tokens of each example."""
        return self.mask.sum(dim=1)


class AttentionModel(ABC):
    """A model as the measures use it; adapters exist for transformers, TransformerLens, torch and this project.

    Attributes:
        name: Its name in reports.
        layers: Number of attention layers whose maps can be read.
        layer_keys: The stack and the number that each of these layers has in the model.
        heads: Number of heads of each layer.
        causal: Whether a token sees only those before it.
        context: The longest sequence that it takes; None if there is no limit.
        pad: The id that fills up a batch; the mask hides it.
        residual_stream: Whether what a layer reads is carried past its attention, as rollout assumes.
        own_padding: Whether `pad` is the vocabulary's own padding token, and not some other id that serves as padding.
        mask_token: The id that stands for a removed token; None if the vocabulary has none.
        class_names: The names of the classes of a classifier, in its order; empty if they are not stated.
        classifies: Whether its outputs are classes of a sequence, read at one position; otherwise they are next tokens.
        chosen_checkpoint: Which checkpoint of a run was loaded, in words; None if the model was not chosen from a run.
        takes_token_types: Whether each token can have a type, such as the number of its text in a pair of texts.
    """

    name: str
    layers: int
    layer_keys: tuple[LayerKey, ...]
    heads: int
    causal: bool
    context: int | None
    pad: int
    mask_token: int | None
    classifies: bool
    class_names: tuple[str, ...] = ()
    residual_stream: bool = True
    own_padding: bool = True
    takes_token_types: bool = False
    chosen_checkpoint: str | None = None

    @property
    def vocabulary(self) -> int | None:
        """The number of tokens that it has embeddings of; None if that is not known."""
        return None

    @property
    def mode(self) -> str:
        """The mode that the model is run in, and what its dropout does, in words.

        A model object that is in training mode stays in it between calls.
        """
        modules = getattr(self, "_model", None)
        is_training = isinstance(modules, nn.Module) and any(module.training for module in modules.modules())
        ours = "evaluation, without dropout"
        return f"{ours}, although the model itself is in training mode" if is_training else ours

    @abstractmethod
    def logits(
        self,
        tokens: Int[Tensor, "batch position"],
        mask: Bool[Tensor, "batch position"],
        *,
        maps: MapSink | None = None,
        inputs: InputSink | None = None,
        embedded: Float[Tensor, "batch position d_model"] | None = None,
        token_types: Int[Tensor, "batch position"] | None = None,
    ) -> Float[Tensor, "batch *position output"]:
        """Run the model: [batch, class] for a classifier, [batch, position, vocabulary] for a language model.

        Args:
            tokens: Token ids, padded on the right.
            mask: True where there is a token.
            maps: Called with each layer's attention map, in order; maps carry gradients where gradients are on.
            inputs: Called with what each layer's attention reads.
            embedded: Used instead of the output of the token embedding, for gradients with respect to it.
            token_types: The type of each token, as the tokenizer gives it; None leaves it to the model.

        Raises:
            CallError: A sequence is longer than the context, there are token types and the model takes none, or maps
                were asked for and the model gives none; the message says how to get them.
        """

    @abstractmethod
    def embed(self, tokens: Int[Tensor, "batch position"]) -> Float[Tensor, "batch position d_model"]:
        """Return the token embeddings, which `logits` takes as `embedded`; positions are not added."""

    @abstractmethod
    def readout(self, mask: Bool[Tensor, "batch position"]) -> Int[Tensor, " batch"]:
        """Return the position at which the prediction for each example, and so its attention, is read.

        Where the position depends on the tokens, as for a masked language model, only `reading_positions` knows it.

        Raises:
            CallError: The mask alone does not determine the position.
        """

    def reading_positions(self, batch: Batch) -> Int[Tensor, " batch"]:
        """Return the position at which the prediction for each example is read, for any model.

        Raises:
            CallError: An example has no such position.
        """
        return self.readout(batch.mask)

    def logits_at(
        self,
        tokens: Int[Tensor, "batch position"],
        mask: Bool[Tensor, "batch position"],
        positions: Int[Tensor, "batch asked"],
        *,
        maps: MapSink | None = None,
        inputs: InputSink | None = None,
        embedded: Float[Tensor, "batch position d_model"] | None = None,
        token_types: Int[Tensor, "batch position"] | None = None,
    ) -> Float[Tensor, "batch asked vocabulary"]:
        """Return a language model's logits at some positions of each example.

        An adapter should leave the other positions out if it can, since a vocabulary is large.

        Args:
            tokens: As in `logits`.
            mask: As in `logits`.
            positions: The positions of each example whose logits are wanted.
            maps: As in `logits`.
            inputs: As in `logits`.
            embedded: As in `logits`.
            token_types: As in `logits`.
        """
        logits = self.logits(tokens, mask, maps=maps, inputs=inputs, embedded=embedded, token_types=token_types)
        return logits.gather(1, positions.to(logits.device)[..., None].expand(-1, -1, logits.shape[-1]))

    def watch(self, batch: Batch, maps: MapSink, inputs: InputSink | None = None) -> None:
        """Run the model without gradients, for its maps and, if wanted, what its attention reads.

        A language model computes logits at one position of each example if it can, since a vocabulary is large.

        Args:
            batch: The examples.
            maps: Called with each layer's attention map.
            inputs: Called with what each layer's attention reads.
        """
        with torch.no_grad():
            if self.classifies:
                self.logits(batch.tokens, batch.mask, maps=maps, inputs=inputs, token_types=batch.token_types)
            else:
                positions = self.reading_positions(batch)[:, None]
                self.logits_at(
                    batch.tokens, batch.mask, positions, maps=maps, inputs=inputs, token_types=batch.token_types
                )

    def demand_tokens(self, tokens: Int[Tensor, "batch position"]) -> None:
        """Refuse sequences that are longer than the model takes, or have ids that its vocabulary does not.

        Raises:
            CallError: They are longer, or have such ids.
        """
        if self.vocabulary is not None and tokens.numel():
            lowest, highest = int(tokens.min()), int(tokens.max())
            if lowest < 0 or highest >= self.vocabulary:
                raise CallError(
                    f"{self.name} has a vocabulary of {self.vocabulary} tokens, and a sequence has the id "
                    f"{lowest if lowest < 0 else highest}; use the tokenizer with which the model was trained"
                )
        if self.context is not None and tokens.shape[1] > self.context:
            raise CallError(
                f"{self.name} takes at most {self.context} tokens, got {tokens.shape[1]}; cut the text to its context"
            )

    def demand_no_token_types(self, token_types: Int[Tensor, "batch position"] | None) -> None:
        """Refuse token types, for a model that takes none.

        Raises:
            CallError: There are token types.
        """
        if token_types is not None:
            raise CallError(f"{self.name} takes no token types; leave them out of its examples")

    @abstractmethod
    def attention_weights(self) -> list[AttentionWeights]:
        """Return the raw weights of every layer, for measures that go through W_OV."""

    def log_probabilities(self, batch: Batch, logits: Float[Tensor, "batch *position output"]) -> list[Tensor]:
        """Return the log-probability of each alternative of each example.

        The alternatives of a classifier are its classes; those of a language model are the example's continuations if
        all are single tokens, and otherwise the whole vocabulary. Continuations of several tokens take more than one
        run: see `predictions`.

        Args:
            batch: The examples.
            logits: What `logits` returned for them.
        """
        if self.classifies:
            return list(logits.log_softmax(dim=-1))
        at = logits[torch.arange(len(logits), device=logits.device), self.reading_positions(batch).to(logits.device)]
        by_example = []
        for example, log_probability in zip(batch.examples, at.log_softmax(dim=-1), strict=True):
            first = [continuation[0] for continuation in example.continuations]
            by_example.append(log_probability[first] if first else log_probability)
        return by_example


def last_token(mask: Bool[Tensor, "batch position"]) -> Int[Tensor, " batch"]:
    """Return the last position of each row at which the mask is true."""
    return mask.shape[1] - 1 - mask.flip(1).long().argmax(dim=1)
