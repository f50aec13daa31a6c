"""What attribution methods take: batches of embeddings and baselines, and the log-probability that they explain."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ....circuits.errors import CallError
from ...tasks.example import Example
from ..models.model import AttentionModel, Batch, MapSink
from ..models.predictions import continued


@dataclass(frozen=True)
class Question:
    """An example and the outputs whose log-probability is explained.

    Attributes:
        example: the example; its label is the alternative that is explained.
        wanted: the class, or the tokens of a continuation in order.
    """

    example: Example
    wanted: tuple[int, ...]

    @property
    def run(self) -> Example:
        """The example followed by all wanted tokens but the last: each token is predicted from those before it."""
        return continued(self.example, self.wanted[:-1])


def question_of(model: AttentionModel, example: Example, target: int) -> Question:
    """Return the question whose answer explains one alternative of an example.

    Args:
        model: the model that predicts.
        example: the example.
        target: number of the alternative: a class, a continuation, or a token of the vocabulary.
    """
    example = replace(example, label=target)
    if model.classifies or not example.continuations:
        return Question(example, (target,))
    return Question(example, example.continuations[target])


@dataclass(frozen=True)
class AttributionInputs:
    """A batch in the form that captum takes: every tensor begins with the batch, so it can be repeated and split.

    Attributes:
        tokens: ids of the batch.
        mask: token mask of the batch.
        embedded: token embeddings.
        baseline: the same embeddings, with every token that can be absent replaced by the baseline.
        positions: positions at which outputs are read.
        wanted: which output is read at each position; their log-probabilities are summed.
        counted: false where an example has fewer positions than others in the batch.
        examples: the examples without the tokens of their continuations; the label is the alternative that is
            explained.
        token_types: token types of the batch; None if its examples state none.
    """

    tokens: Int[Tensor, "batch position"]
    mask: Bool[Tensor, "batch position"]
    embedded: Float[Tensor, "batch position d_model"]
    baseline: Float[Tensor, "batch position d_model"]
    positions: Int[Tensor, "batch read"]
    wanted: Int[Tensor, "batch read"]
    counted: Bool[Tensor, "batch read"]
    examples: tuple[Example, ...]
    token_types: Int[Tensor, "batch position"] | None = None

    @classmethod
    def of(cls, model: AttentionModel, questions: Sequence[Question], baseline: str | int) -> "AttributionInputs":
        """Build the inputs of a batch.

        Args:
            model: the model that predicts.
            questions: the examples and what is asked of each.
            baseline: "zero", "mask", "pad" or the id of a token, as in `attribute`.

        Raises:
            CallError: The baseline is unknown, or the model lacks the token.
        """
        batch = Batch.of([question.run for question in questions], model.pad)
        with torch.no_grad():
            embedded = model.embed(batch.tokens)
            absent = _baseline_embedding(model, baseline, embedded)
        removable = batch.mask.clone()
        most = max(len(question.wanted) for question in questions)
        positions = torch.zeros(len(questions), most, dtype=torch.long)
        wanted, counted = torch.zeros_like(positions), torch.zeros_like(positions, dtype=torch.bool)
        for row, question in enumerate(questions):
            length, count = len(question.example.tokens), len(question.wanted)
            removable[row, :length] &= ~torch.tensor(question.example.is_special)
            removable[row, length:] = False
            wanted[row, :count] = torch.tensor(question.wanted)
            counted[row, :count] = True
            positions[row, :count] = torch.arange(length - 1, length - 1 + count)
        if not model.classifies and not model.causal:
            positions = model.reading_positions(batch)[:, None]
        device = embedded.device
        return cls(
            tokens=batch.tokens.to(device),
            mask=batch.mask.to(device),
            embedded=embedded,
            baseline=torch.where(removable[..., None].to(device), absent, embedded),
            positions=positions.to(device),
            wanted=wanted.to(device),
            counted=counted.to(device),
            examples=tuple(question.example for question in questions),
            token_types=None if batch.token_types is None else batch.token_types.to(device),
        )

    @property
    def others(self) -> tuple[Tensor | None, ...]:
        """The arguments of `log_probability`'s function after the embeddings."""
        return self.tokens, self.mask, self.token_types, self.positions, self.wanted, self.counted


def _baseline_embedding(model: AttentionModel, baseline: str | int, embedded: Tensor) -> Tensor:
    """Return the embedding that stands for an absent token."""
    if baseline == "zero":
        return torch.zeros_like(embedded[:1, :1])
    if baseline == "mask":
        token = model.mask_token
        if token is None:
            raise CallError(f"{model.name} has no mask token; give another baseline: 'zero', 'pad' or a token's id")
    elif baseline == "pad":
        if not model.own_padding:
            raise CallError(f"{model.name} has no padding token; give another baseline: 'zero', 'mask' or a token's id")
        token = model.pad
    elif isinstance(baseline, int):
        token = baseline
    else:
        raise CallError(f"baseline should be 'zero', 'mask', 'pad' or a token's id, got {baseline!r}")
    return model.embed(torch.tensor([[token]]))


def log_probability(model: AttentionModel, maps: MapSink | None = None) -> Callable[..., Float[Tensor, " batch"]]:
    """Return the target's log-probability as a function of the embeddings and of the tensors that go with them.

    Args:
        model: the model that predicts.
        maps: receives each layer's attention map; None if none is needed.

    Returns:
        A function of the embeddings and `AttributionInputs.others`.
    """

    def of(
        embedded: Tensor,
        tokens: Tensor,
        mask: Tensor,
        token_types: Tensor | None,
        positions: Tensor,
        wanted: Tensor,
        counted: Tensor,
    ) -> Tensor:
        if model.classifies:
            outputs = model.logits(tokens, mask, maps=maps, embedded=embedded, token_types=token_types)[:, None]
        else:
            outputs = model.logits_at(tokens, mask, positions, maps=maps, embedded=embedded, token_types=token_types)
        if int(wanted.max()) >= outputs.shape[-1]:
            raise CallError(
                f"{model.name} has {outputs.shape[-1]} outputs, so there is no output {int(wanted.max())} to explain"
            )
        chosen = outputs.log_softmax(dim=-1).gather(-1, wanted[..., None]).squeeze(-1)
        return (chosen * counted).sum(dim=-1)

    return of
