"""How much each token counts for a prediction: captum's attributions and others to compare with, behind one call."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from ....circuits.errors import CallError, QkovError
from ...tasks.example import Example
from ..measures.gradient_rollout import gradient_rollout
from ..measures.registry import MEASURES
from ..models.alternatives import Target, demand_target, label_of
from ..models.model import AttentionModel, Batch, MapSink, length_buckets
from ..models.predictions import continued, demand_fitting, each_prediction


@dataclass(frozen=True)
class Attributions:
    """One method's figures.

    Attributes:
        method: its name.
        rows: for each example a figure of each of its tokens. Signed, for gradients and ablation: what speaks for the
            target is positive, and the ranking of tokens is from high to low.
        targets: for each example the alternative that was explained.
        deltas: of integrated gradients, for each example the sum of the row less the change of the log-probability from
            the baseline to the example, which is zero for exact integration; None for other methods.
    """

    method: str
    rows: list[Float64[Tensor, "_position"]]
    targets: list[int]
    deltas: list[float] | None = None


def attribute(
    model: AttentionModel,
    examples: Sequence[Example],
    method: str,
    *,
    target: Target = "predicted",
    baseline: str | int = "zero",
    magnitude: bool = False,
    steps: int = 64,
    seed: int = 0,
    batch_tokens: int = 4096,
    progress: Callable[[int, int], None] | None = None,
) -> Attributions:
    """Attribute a prediction to the tokens of its input.

    What is explained is the target's log-probability: of a class, or of a continuation given the tokens, in the whole
    vocabulary. Special tokens, and those of the continuation, stay as they are in the baseline and in ablation.

    Args:
        model: that predicts.
        examples: of any length.
        method: a name in `METHODS`.
        target: `label`, the example's, or `predicted`, what the model thinks most probable.
        baseline: embedding of a token that is away: `zero`, that of the `mask` token or of the padding, `pad`, or of an
            id.
        magnitude: whether to drop the sign, so that what speaks against the target counts as much.
        steps: of integrated gradients, at Gauss-Legendre points.
        seed: of the method `random`.
        batch_tokens: at most so many tokens at once, where one example is not more.
        progress: called with how many examples are done, of how many.

    Raises:
        CallError: there is no such method, target or baseline, or an example does not fit the model.
        QkovError: a figure is not finite.
    """
    if method not in METHODS:
        raise CallError(f"there is no attribution {method!r}; expected one of {', '.join(METHODS)}")
    demand_target(target)
    for number, example in enumerate(examples):
        demand_fitting(model, example, number)
    targets = _targets(model, examples, target, batch_tokens)
    questions = [_question(model, example, chosen) for example, chosen in zip(examples, targets, strict=True)]
    rows: list[Tensor] = [torch.empty(0)] * len(examples)
    deltas = [0.0] * len(examples)
    has_delta = False
    done = 0
    for bucket in length_buckets([len(question.run.tokens) for question in questions], batch_tokens):
        given = _Inputs.of(model, [questions[index] for index in bucket], baseline)
        options = _Options(steps, batch_tokens, seed, bucket)
        figures, delta = METHODS[method](model, given, options)
        for place, index in enumerate(bucket):
            row = figures[place, : len(examples[index].tokens)].detach().double().cpu()
            if not bool(row.isfinite().all()):
                raise QkovError(
                    f"{method} of example {examples[index].id or index} is not finite with the baseline {baseline!r}; "
                    f"give another baseline"
                )
            rows[index] = row.abs() if magnitude else row
            if delta is not None:
                has_delta, deltas[index] = True, float(delta[place])
        done += len(bucket)
        if progress is not None:
            progress(done, len(examples))
    return Attributions(method, rows, targets, deltas if has_delta else None)


def _targets(model: AttentionModel, examples: Sequence[Example], target: Target, batch_tokens: int) -> list[int]:
    if target == "predicted":
        return [int(found.argmax()) for found in each_prediction(model, examples, batch_tokens=batch_tokens)]
    return [
        label_of(example, number, None if model.classifies else len(example.continuations) or None)
        for number, example in enumerate(examples)
    ]


@dataclass(frozen=True)
class _Question:
    """An example, and which outputs are wanted for it: a class, or the tokens of a continuation one after the other."""

    example: Example
    wanted: tuple[int, ...]

    @property
    def run(self) -> Example:
        """The example with the wanted tokens behind it but for the last: each is predicted from those before."""
        return continued(self.example, self.wanted[:-1])


def _question(model: AttentionModel, example: Example, target: int) -> _Question:
    example = replace(example, label=target)
    if model.classifies or not example.continuations:
        return _Question(example, (target,))
    return _Question(example, example.continuations[target])


@dataclass(frozen=True)
class _Inputs:
    """A batch as captum takes it: every tensor begins with the batch, so that it may be repeated and cut.

    Attributes:
        tokens, mask: of the batch.
        embedded: the token embeddings.
        baseline: the same with the tokens that can be away replaced.
        places: at which the outputs are read.
        wanted: which output there; log-probabilities are summed over the places.
        counted: false where an example has fewer places than others.
        examples: without the tokens of their continuations; the label is the alternative that is explained.
    """

    tokens: Int[Tensor, "batch position"]
    mask: Bool[Tensor, "batch position"]
    embedded: Float[Tensor, "batch position d_model"]
    baseline: Float[Tensor, "batch position d_model"]
    places: Int[Tensor, "batch place"]
    wanted: Int[Tensor, "batch place"]
    counted: Bool[Tensor, "batch place"]
    examples: tuple[Example, ...]

    @classmethod
    def of(cls, model: AttentionModel, questions: list[_Question], baseline: str | int) -> "_Inputs":
        batch = Batch.of([question.run for question in questions], model.pad)
        with torch.no_grad():
            embedded = model.embed(batch.tokens)
            away = _away(model, baseline, embedded)
        removable = batch.mask.clone()
        most = max(len(question.wanted) for question in questions)
        places = torch.zeros(len(questions), most, dtype=torch.long)
        wanted, counted = torch.zeros_like(places), torch.zeros_like(places, dtype=torch.bool)
        for row, question in enumerate(questions):
            length, count = len(question.example.tokens), len(question.wanted)
            removable[row, :length] &= ~torch.tensor(question.example.is_special)
            removable[row, length:] = False
            wanted[row, :count] = torch.tensor(question.wanted)
            counted[row, :count] = True
            places[row, :count] = torch.arange(length - 1, length - 1 + count)
        if not model.classifies and not model.causal:
            places = model.reading_positions(batch)[:, None]
        device = embedded.device
        return cls(
            tokens=batch.tokens.to(device),
            mask=batch.mask.to(device),
            embedded=embedded,
            baseline=torch.where(removable[..., None].to(device), away, embedded),
            places=places.to(device),
            wanted=wanted.to(device),
            counted=counted.to(device),
            examples=tuple(question.example for question in questions),
        )

    @property
    def others(self) -> tuple[Tensor, ...]:
        """What `_log_probability` takes besides the embeddings."""
        return self.tokens, self.mask, self.places, self.wanted, self.counted


def _away(model: AttentionModel, baseline: str | int, embedded: Tensor) -> Tensor:
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


def _log_probability(model: AttentionModel, maps: MapSink | None = None) -> Callable[..., Float[Tensor, " batch"]]:
    """The target's log-probability as a function of the embeddings, and of tensors that go with them."""

    def of(embedded: Tensor, tokens: Tensor, mask: Tensor, places: Tensor, wanted: Tensor, counted: Tensor) -> Tensor:
        if model.classifies:
            outputs = model.logits(tokens, mask, maps=maps, embedded=embedded)[:, None]
        else:
            outputs = model.logits_at(tokens, mask, places, maps=maps, embedded=embedded)
        if int(wanted.max()) >= outputs.shape[-1]:
            raise CallError(f"{model.name} has {outputs.shape[-1]} outputs, and number {int(wanted.max())} was wanted")
        chosen = outputs.log_softmax(dim=-1).gather(-1, wanted[..., None]).squeeze(-1)
        return (chosen * counted).sum(dim=-1)

    return of


@dataclass(frozen=True)
class _Options:
    """Of the call, and the numbers of a batch's examples."""

    steps: int
    batch_tokens: int
    seed: int
    numbers: list[int]


#: Figures [batch, position], and the convergence delta of each example where there is one.
_Found = tuple[Tensor, Tensor | None]


def _integrated_gradients(model: AttentionModel, given: _Inputs, options: _Options) -> _Found:
    from captum.attr import IntegratedGradients

    at_once = max(1, options.batch_tokens // given.tokens.numel())
    figures, delta = IntegratedGradients(_log_probability(model)).attribute(
        given.embedded,
        given.baseline,
        additional_forward_args=given.others,
        n_steps=options.steps,
        internal_batch_size=len(given.tokens) * at_once,
        return_convergence_delta=True,
    )
    return figures.sum(dim=-1), delta


def _input_x_gradient(model: AttentionModel, given: _Inputs, _options: _Options) -> _Found:
    from captum.attr import InputXGradient

    embedded = given.embedded.clone().requires_grad_()
    figures = InputXGradient(_log_probability(model)).attribute(embedded, additional_forward_args=given.others)
    return figures.sum(dim=-1), None


def _ablation(model: AttentionModel, given: _Inputs, options: _Options) -> _Found:
    from captum.attr import FeatureAblation

    positions = torch.arange(given.tokens.shape[1], device=given.tokens.device)
    with torch.no_grad():
        figures = FeatureAblation(_log_probability(model)).attribute(
            given.embedded,
            given.baseline,
            additional_forward_args=given.others,
            feature_mask=positions[None, :, None].expand(1, -1, given.embedded.shape[-1]),
            perturbations_per_eval=max(1, options.batch_tokens // given.tokens.numel()),
        )
    # Every element of the embedding carries the change that all of them made together.
    return figures[..., 0], None


def _attention_x_gradient(model: AttentionModel, given: _Inputs, _options: _Options) -> _Found:
    """Sum over layers, heads and queries of A dlog p/dA: to first order, the loss if nothing attended to the token."""
    total = torch.zeros(given.tokens.shape, dtype=torch.float64, device=given.tokens.device)

    def hook(_layer: int, attention: Tensor) -> None:
        weights = attention.detach()

        def add(gradient: Tensor) -> None:
            total.add_((weights * gradient).sum(dim=(1, 2)))

        attention.register_hook(add)

    embedded = given.embedded.clone().requires_grad_()
    with torch.enable_grad():
        torch.autograd.grad(_log_probability(model, hook)(embedded, *given.others).sum(), embedded)
    return total, None


def _random(_model: AttentionModel, given: _Inputs, options: _Options) -> _Found:
    rows = torch.zeros(given.tokens.shape, dtype=torch.float64)
    for row, number in enumerate(options.numbers):
        length = len(given.examples[row].tokens)
        # Each example draws for itself, so that its figures do not depend on what it is batched with.
        generator = torch.Generator().manual_seed(options.seed * 1_000_003 + number)
        rows[row, :length] = torch.rand(length, dtype=torch.float64, generator=generator)
    return rows, None


def _measure(name: str) -> "_Method":
    def of(model: AttentionModel, given: _Inputs, _options: _Options) -> _Found:
        batch = Batch.of(given.examples, model.pad)
        if name == "gradient rollout":
            return gradient_rollout(model, batch, "label"), None
        return MEASURES[name](model, batch), None

    return of


_Method = Callable[[AttentionModel, _Inputs, _Options], _Found]
#: The attributions by name: to the tokens themselves, by where attention goes, and by chance.
METHODS: dict[str, _Method] = {
    "integrated gradients": _integrated_gradients,
    "input x gradient": _input_x_gradient,
    "ablation": _ablation,
    "attention x gradient": _attention_x_gradient,
    **{name: _measure(name) for name in MEASURES},
    "random": _random,
}
