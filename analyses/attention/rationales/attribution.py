"""How much each token counts for a prediction: all attribution methods and attention measures behind one call."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from jaxtyping import Float64
from torch import Tensor

from ....circuits.errors import CallError, QkovError
from ...tasks.example import Example
from ..measures.registry import MEASURES, Measure, MeasureSettings
from ..measures.rollout import ABNAR_ZUIDEMA, Rollout
from ..models.alternatives import Target, demand_target, label_of
from ..models.model import AttentionModel, Batch, length_buckets
from ..models.predictions import demand_fitting, each_prediction
from .attribution_inputs import AttributionInputs, question_of
from .attribution_methods import ATTRIBUTION_METHODS, AttributedValues, AttributionMethod, AttributionOptions
from .faithfulness import RANDOM


class Methods(Mapping[str, AttributionMethod | Measure]):
    """Every method of `attribute` by name: attribution methods first, then attention measures.

    The mapping reflects both registries as they are at the time of the call.
    """

    def __getitem__(self, name: str) -> AttributionMethod | Measure:
        """Return a method.

        Raises:
            CallError: There is no such method; the message lists the known ones.
        """
        if name not in self:
            raise CallError(f"there is no method {name!r}; expected one of {', '.join(self)}")
        return ATTRIBUTION_METHODS[name] if name in ATTRIBUTION_METHODS else MEASURES[name]

    def __contains__(self, name: object) -> bool:
        """Return whether there is such a method."""
        return name in ATTRIBUTION_METHODS or name in MEASURES

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        yield from ATTRIBUTION_METHODS
        yield from MEASURES

    def __len__(self) -> int:
        """Return the number of methods."""
        return len(ATTRIBUTION_METHODS) + len(MEASURES)


#: Every method of `attribute` by name.
METHODS = Methods()


def quick_methods() -> tuple[str, ...]:
    """Return the names of the methods that take no more than a few runs of the model, attention measures first."""
    registries = (MEASURES, ATTRIBUTION_METHODS)
    return tuple(name for registry in registries for name, method in registry.items() if method.quick)


def all_methods() -> tuple[str, ...]:
    """Return the names of all methods: the quick ones, the others, and the random ranking last."""
    quick = quick_methods()
    names = (*quick, *(name for name in METHODS if name not in quick))
    return (*(name for name in names if name != RANDOM), RANDOM)


@dataclass(frozen=True)
class Attributions:
    """The results of one attribution method.

    Attributes:
        method: name of the method.
        rows: for each example one value for each of its tokens. The values of gradients and ablation are signed: what
            supports the target is positive. Tokens are ranked from high to low values.
        targets: for each example the number of the alternative that was explained.
        deltas: for integrated gradients, each example's sum of the row minus the change of the log-probability from the
            baseline to the example, which is zero for exact integration; None for other methods.
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
    rollout: Rollout = ABNAR_ZUIDEMA,
    batch_tokens: int = 4096,
    progress: Callable[[int, int], None] | None = None,
) -> Attributions:
    """Attribute a prediction to the tokens of its input.

    Gradients, ablation and integrated gradients explain the target's log-probability: that of a class, or that of a
    continuation given the tokens, in the whole vocabulary. Special tokens and the tokens of the continuation are the
    same in the baseline and in ablation as in the input.

    Args:
        model: the model that predicts.
        examples: examples of any length.
        method: a name in `METHODS`.
        target: the alternative to explain: "label", the example's label, or "predicted", what the model finds most
            probable.
        baseline: embedding that stands for an absent token: "zero", that of the "mask" token, that of the padding
            token, "pad", or that of a token id.
        magnitude: whether to drop the sign, so that evidence against the target counts as much as evidence for it.
        steps: number of steps of integrated gradients, at Gauss-Legendre points.
        seed: seed of the method "random".
        rollout: settings of attention measures: how heads are fused, how much of the identity is mixed in, and which
            layers take part.
        batch_tokens: largest number of tokens in one run of the model, unless a single example is longer.
        progress: called with the number of examples that are done and the number of all.

    Returns:
        The values of every token of every example.

    Raises:
        CallError: The method, target or baseline is unknown, an example does not fit the model, or the settings do not
            fit the model.
        QkovError: A value is not finite.
    """
    chosen_method = METHODS[method]
    demand_target(target)
    for number, example in enumerate(examples):
        demand_fitting(model, example, number)
    targets = _targets(model, examples, target, batch_tokens)
    questions = [question_of(model, example, chosen) for example, chosen in zip(examples, targets, strict=True)]
    rows: dict[int, Tensor] = {}
    deltas: dict[int, float] = {}
    for bucket in length_buckets([len(question.run.tokens) for question in questions], batch_tokens):
        inputs = AttributionInputs.of(model, [questions[index] for index in bucket], baseline)
        options = AttributionOptions(steps, batch_tokens, seed, bucket)
        values, delta = _values(model, chosen_method, inputs, options, rollout)
        for row, index in enumerate(bucket):
            own = values[row, : len(examples[index].tokens)].detach().double().cpu()
            if not bool(own.isfinite().all()):
                raise QkovError(
                    f"{method} of example {examples[index].id or index} is not finite with the baseline {baseline!r}; "
                    f"give another baseline"
                )
            rows[index] = own.abs() if magnitude else own
            if delta is not None:
                deltas[index] = float(delta[row])
        if progress is not None:
            progress(len(rows), len(examples))
    in_order = range(len(examples))
    return Attributions(
        method,
        [rows[index] for index in in_order],
        targets,
        [deltas[index] for index in in_order] if deltas else None,
    )


def _targets(model: AttentionModel, examples: Sequence[Example], target: Target, batch_tokens: int) -> list[int]:
    if target == "predicted":
        answers = each_prediction(model, examples, batch_tokens=batch_tokens)
        return [int(log_probabilities.argmax()) for log_probabilities in answers]
    return [
        label_of(example, number, None if model.classifies else len(example.continuations) or None)
        for number, example in enumerate(examples)
    ]


def _values(
    model: AttentionModel,
    method: AttributionMethod | Measure,
    inputs: AttributionInputs,
    options: AttributionOptions,
    rollout: Rollout,
) -> AttributedValues:
    """Return a method's values [batch, position], and the convergence deltas of integrated gradients."""
    if isinstance(method, AttributionMethod):
        return method.attribute(model, inputs, options)
    # The label of each of these examples is the alternative that is explained.
    batch = Batch.of(inputs.examples, model.pad)
    return method(model, batch, MeasureSettings(rollout, target="label")), None
