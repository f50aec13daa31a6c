"""Attributions against closed forms on a bag of embeddings, and against plain loops on transformers."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from qkov.analyses.attention import MEASURES, METHODS, AttentionModel, Batch, attribute, gradient_rollout, predictions
from qkov.analyses.attention.models.alternatives import demand_target
from qkov.analyses.attention.models.transformers import (
    TransformersCausalLM,
    TransformersClassifier,
    TransformersMaskedLM,
)
from qkov.analyses.tasks import Example
from qkov.circuits import CallError, QkovError

from .tiny_models import CAUSAL, CLASSIFIERS, MASK, MASKED, VOCABULARY

WIDTH = 5


class Bag(AttentionModel):
    """One attention layer whose log p of class 0 is sum_j a_j w'e_j - 1, with a = softmax(u'e).

    Embeddings and w have entries of opposite sign, so that p is below 1; class 1 has the rest.
    """

    name = "a bag"
    layers = heads = 1
    causal = False
    context = None
    pad = 0
    mask_token = None
    classifies = True

    def __init__(self, steepness: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(3)
        self.table = torch.rand(20, WIDTH, generator=generator, dtype=torch.float64)
        self.w = -torch.rand(WIDTH, generator=generator, dtype=torch.float64)
        self.u = steepness * torch.randn(WIDTH, generator=generator, dtype=torch.float64)

    def logits(self, tokens, mask, *, maps=None, inputs=None, embedded=None, token_types=None):
        self.demand_no_token_types(token_types)
        vectors = self.embed(tokens) if embedded is None else embedded
        attention = (vectors @ self.u).masked_fill(~mask, -torch.inf).softmax(dim=-1)
        whole = attention[:, None, None].expand(-1, 1, tokens.shape[1], -1).clone()
        if inputs is not None:
            inputs(0, vectors)
        if maps is not None:
            maps(0, whole)
        log_probability = (whole[:, 0, 0] * (vectors @ self.w)).sum(dim=-1) - 1
        return torch.stack([log_probability, torch.log1p(-log_probability.exp())], dim=-1)

    def embed(self, tokens):
        return self.table[tokens]

    def readout(self, mask):
        return torch.zeros(len(mask), dtype=torch.long)

    def attention_weights(self):
        raise NotImplementedError


EXAMPLES = [Example(tokens=tokens, label=0) for tokens in ((4, 9, 2, 17), (3,), (11, 12, 13, 14, 15, 16, 4))]


def explained(model: AttentionModel, method: str, examples: list[Example], **options: Any) -> list[torch.Tensor]:
    return attribute(model, examples, method, **({"target": "label"} | options)).rows


@pytest.mark.parametrize(
    ("baseline", "away"), [("zero", None), ("pad", 0), (6, 6)], ids=["zero", "padding", "another token"]
)
@pytest.mark.parametrize("method", ["integrated gradients", "ablation"])
def test_of_a_linear_model_both_are_the_weight_times_what_is_away(method, baseline, away):
    bag = Bag()
    for example, row in zip(EXAMPLES, explained(bag, method, EXAMPLES, baseline=baseline), strict=True):
        vectors = bag.table[list(example.tokens)]
        changed = vectors if away is None else vectors - bag.table[away]
        # captum weighs the steps of the integral in float32.
        torch.testing.assert_close(row, changed @ bag.w / len(example.tokens), rtol=1e-7, atol=1e-12)


def test_of_a_linear_model_input_x_gradient_is_the_weight_times_the_embedding():
    bag = Bag()
    for example, row in zip(EXAMPLES, explained(bag, "input x gradient", EXAMPLES), strict=True):
        expected = bag.table[list(example.tokens)] @ bag.w / len(example.tokens)
        torch.testing.assert_close(row, expected, rtol=1e-12, atol=1e-14)


def test_attention_x_gradient_is_the_attention_times_what_it_carries():
    bag = Bag(steepness=2.0)
    for example, row in zip(EXAMPLES, explained(bag, "attention x gradient", EXAMPLES), strict=True):
        vectors = bag.table[list(example.tokens)]
        attention = (vectors @ bag.u).softmax(dim=-1)
        torch.testing.assert_close(row, attention * (vectors @ bag.w), rtol=1e-12, atol=1e-14)


def test_magnitudes_drop_the_sign_and_the_other_class_is_against():
    bag = Bag()
    (row,) = explained(bag, "ablation", EXAMPLES[:1])
    (size,) = explained(bag, "ablation", EXAMPLES[:1], magnitude=True)
    assert (row < 0).all()
    assert torch.equal(size, row.abs())
    (other,) = explained(bag, "ablation", [replace(EXAMPLES[0], label=1)])
    assert (other > 0).all()


def test_what_is_predicted_is_explained_where_the_label_is_not_asked():
    bag = Bag()
    found = attribute(bag, EXAMPLES, "ablation")
    probable = [int(given.argmax()) for given in predictions(bag, EXAMPLES)]
    assert found.targets == probable
    assert attribute(bag, EXAMPLES, "ablation", target="label").targets == [0, 0, 0]
    assert found.deltas is None


def classifier() -> TransformersClassifier:
    return TransformersClassifier(CLASSIFIERS[0].build().double(), mask_token=MASK)


def sentence(length: int, seed: int, **changes: Any) -> Example:
    tokens = torch.randint(8, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    special = (True, *(False,) * (length - 2), True)
    return Example(tokens=tuple(tokens), label=1, special=special, **changes)


SENTENCES = [sentence(9, 0), sentence(4, 1), sentence(7, 2)]


def log_probability(model: Any, embedded: torch.Tensor) -> float:
    with torch.no_grad():
        return float(model(inputs_embeds=embedded[None]).logits[0].log_softmax(dim=-1)[1])


def test_integrated_gradients_add_up_to_the_change_and_say_by_how_much_they_do_not():
    adapted = classifier()
    coarse = attribute(adapted, SENTENCES, "integrated gradients", target="label", baseline="mask", steps=4)
    fine = attribute(adapted, SENTENCES, "integrated gradients", target="label", baseline="mask", steps=128)
    assert coarse.deltas is not None
    assert fine.deltas is not None
    for number, example in enumerate(SENTENCES):
        tokens = torch.tensor(example.tokens)
        embedded = adapted.embed(tokens[None])[0].detach()
        away = embedded.clone()
        away[1:-1] = adapted.embed(torch.tensor([[MASK]]))[0, 0].detach()
        change = log_probability(adapted._model, embedded) - log_probability(adapted._model, away)
        for found in (coarse, fine):
            assert float(found.rows[number].sum()) - change == pytest.approx(found.deltas[number], abs=1e-9)
            assert found.rows[number][[0, -1]].tolist() == [0, 0]
        assert abs(fine.deltas[number]) < 1e-4 < abs(coarse.deltas[number])


@pytest.mark.parametrize("method", METHODS)
def test_an_example_s_row_does_not_depend_on_what_it_is_batched_with(method):
    adapted = classifier()
    together = attribute(adapted, SENTENCES, method, target="label", steps=8)
    apart = attribute(adapted, SENTENCES, method, target="label", steps=8, batch_tokens=1)
    for example, one, other in zip(SENTENCES, together.rows, apart.rows, strict=True):
        assert len(one) == len(example.tokens)
        assert one.dtype == torch.float64
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("baseline", ["zero", "mask", "pad"])
def test_ablation_is_the_change_as_one_token_goes_after_the_other(baseline):
    adapted = classifier()
    model = adapted._model
    for example, row in zip(SENTENCES, explained(adapted, "ablation", SENTENCES, baseline=baseline), strict=True):
        embedded = adapted.embed(torch.tensor([example.tokens]))[0].detach()
        ids = {"mask": MASK, "pad": 0}
        away = torch.zeros(48).double() if baseline == "zero" else adapted.embed(torch.tensor([[ids[baseline]]]))[0, 0]
        whole = log_probability(model, embedded)
        for place in range(len(example.tokens)):
            changed = embedded.clone()
            if not example.is_special[place]:
                changed[place] = away.detach()
            assert float(row[place]) == pytest.approx(whole - log_probability(model, changed), abs=1e-9)


def test_continuations_of_several_tokens_are_explained_by_the_tokens_before_them():
    adapted = TransformersCausalLM(CAUSAL[0].build().double())
    examples = [
        Example(tokens=(9, 10, 11, 12), continuations=((20, 21, 22), (30,)), label=0),
        Example(tokens=(13, 14), continuations=((20,), (30,)), label=1),
    ]

    def asked(example: Example, tokens: tuple[int, ...]) -> float:
        (given,) = predictions(adapted, [replace(example, tokens=tokens)])
        return float(given[example.label])

    for example, row in zip(examples, explained(adapted, "ablation", examples, baseline=MASK), strict=True):
        assert len(row) == len(example.tokens)
        for place in range(len(row)):
            changed = tuple(MASK if at == place else token for at, token in enumerate(example.tokens))
            wanted = asked(example, example.tokens) - asked(example, changed)
            assert float(row[place]) == pytest.approx(wanted, abs=1e-9)


def test_the_next_token_of_the_whole_vocabulary_and_a_masked_one_are_explained():
    causal = TransformersCausalLM(CAUSAL[0].build().double())
    (found,) = explained(causal, "ablation", [Example(tokens=(9, 10, 11), label=33)], baseline=MASK)
    before, after = (predictions(causal, [Example(tokens=tokens)])[0][33] for tokens in ((9, 10, 11), (9, MASK, 11)))
    assert float(found[1]) == pytest.approx(float(before - after), abs=1e-9)
    masked = TransformersMaskedLM(MASKED[0].build().double(), mask_token=MASK)
    example = Example(
        tokens=(2, 9, MASK, 10), continuations=((33,), (34,)), special=(True, False, True, False), label=1
    )
    (found,) = explained(masked, "ablation", [example], baseline="pad")
    before, after = (
        predictions(masked, [replace(example, tokens=tokens)])[0][1] for tokens in ((2, 9, MASK, 10), (2, 0, MASK, 10))
    )
    assert float(found[1]) == pytest.approx(float(before - after), abs=1e-9)
    assert found[[0, 2]].tolist() == pytest.approx([0, 0], abs=1e-12)


def first_order(adapted: TransformersClassifier, example: Example) -> torch.Tensor:
    """A dlog p/dA by finite differences: every weight on a token scaled a little, and no row brought back to sum 1."""
    row = torch.zeros(len(example.tokens), dtype=torch.float64)
    step = 1e-5
    for place in range(len(row)):
        values = []
        for sign in (1, -1):
            with scaled_columns(adapted, place, 1 + sign * step):
                values.append(float(predictions(adapted, [example])[0][1]))
        row[place] = (values[0] - values[1]) / (2 * step)
    return row


class scaled_columns:  # noqa: N801 (a context)
    """Scale the attention on one token in every layer, where the model multiplies it with the values."""

    def __init__(self, adapted: TransformersClassifier, place: int, factor: float) -> None:
        self.modules = [layer.attention.self for layer in adapted._model.bert.encoder.layer]
        self.place, self.factor = place, factor

    def __enter__(self) -> None:
        def scale(_module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
            scaled = output.clone()
            scaled[:, self.place] *= self.factor
            return scaled

        # A token's values scaled is the attention on it scaled.
        self.handles = [module.value.register_forward_hook(scale) for module in self.modules]

    def __exit__(self, *_: Any) -> None:
        for handle in self.handles:
            handle.remove()


def test_attention_x_gradient_is_the_first_order_effect_of_less_attention_to_a_token():
    adapted = classifier()
    for example, row in zip(SENTENCES, explained(adapted, "attention x gradient", SENTENCES), strict=True):
        torch.testing.assert_close(row, first_order(adapted, example), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", MEASURES)
def test_measures_of_attention_are_among_the_methods(name):
    if name == "value norms":
        adapted: Any = TransformersClassifier(CLASSIFIERS[0].build())
    else:
        adapted = classifier()
    rows = attribute(adapted, SENTENCES, name, target="predicted").rows
    wanted = MEASURES[name](adapted, Batch.of(SENTENCES, adapted.pad))
    for number, row in enumerate(rows):
        torch.testing.assert_close(row, wanted[number, : len(row)], rtol=1e-6, atol=1e-8)


def test_gradient_rollout_explains_the_continuation_that_is_predicted_as_a_whole():
    adapted = TransformersCausalLM(CAUSAL[0].build())
    tokens = (11, 12, 13, 14)
    with torch.no_grad():
        first = adapted.logits(torch.tensor([tokens]), torch.ones(1, 4, dtype=torch.bool))[0, -1]
        likely, second = first.topk(2).indices.tolist()
        after = adapted.logits(torch.tensor([(*tokens, likely)]), torch.ones(1, 5, dtype=torch.bool))[0, -1]
    # It begins with the likeliest token and goes on with the unlikeliest.
    example = Example(tokens=tokens, label=0, continuations=((likely, int(after.argmin())), (second,)))
    found = attribute(adapted, [example], "gradient rollout")
    assert found.targets == [1]
    of_each = [gradient_rollout(adapted, Batch.of([replace(example, label=one)], 0), "label")[0] for one in (0, 1)]
    torch.testing.assert_close(found.rows[0], of_each[1], rtol=1e-9, atol=1e-12)
    assert not torch.allclose(of_each[0], of_each[1], rtol=1e-2)


def test_chance_is_the_seed_s_and_the_example_s_alone():
    bag = Bag()
    one, again, other = (attribute(bag, EXAMPLES, "random", seed=seed).rows for seed in (1, 1, 2))
    assert all(torch.equal(first, second) for first, second in zip(one, again, strict=True))
    assert not any(torch.equal(first, second) for first, second in zip(one, other, strict=True))
    assert all(((row >= 0) & (row < 1)).all() for row in one)


def broken_at_zero(bag: Bag) -> Callable[..., torch.Tensor]:
    own = bag.logits

    def logits(tokens: Any, mask: Any, *, embedded: Any = None, **given: Any) -> torch.Tensor:
        vectors = bag.embed(tokens) if embedded is None else embedded
        return own(tokens, mask, embedded=vectors / vectors.norm(dim=-1, keepdim=True), **given)

    return logits


def test_a_baseline_that_the_model_cannot_run_is_said_and_never_a_nan():
    bag = Bag()
    bag.logits = broken_at_zero(bag)
    example = replace(EXAMPLES[0], id="that one")
    with pytest.raises(QkovError, match="ablation of example that one is not finite with the baseline 'zero'"):
        attribute(bag, [example], "ablation")
    assert attribute(bag, [example], "ablation", baseline=6).rows[0].isfinite().all()


def test_baselines_that_a_vocabulary_lacks_are_refused():
    adapted = TransformersCausalLM(CAUSAL[0].build())
    examples = [Example(tokens=(9, 10, 11), continuations=((12,), (13,)))]
    for baseline, message in (
        ("pad", "has no padding token; give another baseline"),
        ("mask", "has no mask token; give another baseline"),
        ("mean", "baseline should be 'zero', 'mask', 'pad' or a token's id, got 'mean'"),
    ):
        with pytest.raises(CallError, match=message):
            attribute(adapted, examples, "integrated gradients", baseline=baseline)


def test_calls_that_mean_nothing_are_refused():
    bag = Bag()
    with pytest.raises(CallError, match=r"there is no method 'lime'; expected one of integrated gradients, .*random"):
        attribute(bag, EXAMPLES, "lime")
    with pytest.raises(CallError, match="target should be 'predicted' or 'label', got 'right'"):
        demand_target("right")
    with pytest.raises(CallError, match="example 0 has no label; use target='predicted'"):
        attribute(bag, [Example(tokens=(1, 2))], "ablation", target="label")
    for method in ("ablation", "input x gradient", "integrated gradients"):
        with pytest.raises(CallError, match="a bag has 2 outputs, so there is no output 2"):
            attribute(bag, [Example(tokens=(1, 2), label=2)], method, target="label")
    with pytest.raises(CallError, match="example 0 has the label -1; expected one of its alternatives, from 0"):
        attribute(bag, [Example(tokens=(1, 2), label=-1)], "ablation", target="label")
    choice = Example(tokens=(9, 10), label=2, continuations=((12,), (13,)))
    with pytest.raises(CallError, match="example 0 has the label 2; expected one of its 2 alternatives, from 0"):
        attribute(TransformersCausalLM(CAUSAL[0].build()), [choice], "ablation", target="label")


def test_progress_is_told():
    told: list[tuple[int, int]] = []
    attribute(Bag(), EXAMPLES, "random", batch_tokens=8, progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (3, 3)
    assert len(told) > 1


@pytest.mark.parametrize("batch_tokens", [1, 14, 30])
@pytest.mark.parametrize("method", ["integrated gradients", "ablation"])
def test_no_run_of_the_model_has_more_tokens_than_allowed_unless_an_example_has(method, batch_tokens):
    sizes = []

    class Watched(Bag):
        def logits(self, tokens, mask, **more):
            sizes.append(
                len(mask) * mask.shape[1] if more.get("embedded") is None else more["embedded"][..., 0].numel()
            )
            return super().logits(tokens, mask, **more)

    longest = max(len(example.tokens) for example in EXAMPLES)
    alike = explained(Bag(), method, EXAMPLES)
    found = explained(Watched(), method, EXAMPLES, batch_tokens=batch_tokens)
    assert longest <= max(sizes) <= max(batch_tokens, longest)
    for row, expected in zip(found, alike, strict=True):
        torch.testing.assert_close(row, expected, rtol=1e-6, atol=1e-12)
