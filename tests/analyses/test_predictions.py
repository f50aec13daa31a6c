"""Predictions in batches are those of a plain loop over examples, continuations and tokens."""

import math
from typing import Any

import pytest
import torch
from qkov.analyses.attention import predictions
from qkov.analyses.attention.models.alternatives import answers, are_compared, label_of
from qkov.analyses.attention.models.model import length_buckets
from qkov.analyses.attention.models.predictions import each_prediction
from qkov.analyses.attention.models.transformers import (
    TransformersCausalLM,
    TransformersClassifier,
    TransformersMaskedLM,
)
from qkov.analyses.tasks import Example, Task
from qkov.circuits import CallError

from .bag_of_words import BagOfWords
from .tiny_models import CAUSAL, CLASSIFIERS, MASK, MASKED, VOCABULARY


def causal() -> Any:
    return TransformersCausalLM(CAUSAL[0].build().double())


def random_tokens(count: int, length: int) -> tuple[int, ...]:
    return tuple(torch.randint(8, VOCABULARY, (length,), generator=torch.Generator().manual_seed(count)).tolist())


def step(model: Any, tokens: tuple[int, ...], at: int = -1, **given: Any) -> torch.Tensor:
    """Log-probabilities at one place, of one sequence run by itself."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens]), **given).logits[0, at].log_softmax(dim=-1)


def loop(model: Any, example: Example) -> torch.Tensor:
    """Each token of each continuation predicted in a run of its own."""
    found = []
    for continuation in example.continuations:
        total = torch.zeros((), dtype=torch.float64)
        for number, token in enumerate(continuation):
            total += step(model, example.tokens + continuation[:number])[token]
        found.append(total)
    return torch.stack(found)


EXAMPLES = [
    Example(tokens=random_tokens(1, 5), continuations=((11,), (12,)), id="short"),
    Example(tokens=random_tokens(2, 9), continuations=((11, 12, 13), (11, 12, 14), (11, 20), (9,))),
    Example(tokens=random_tokens(3, 1), continuations=((30, 31), (30, 31, 32))),
    Example(tokens=random_tokens(4, 7), continuations=((20, 21), (22, 23))),
]


@pytest.mark.parametrize("batch_tokens", [1, 30, 8192])
def test_continuations_are_products_of_conditional_probabilities(batch_tokens):
    adapted = causal()
    found = predictions(adapted, EXAMPLES, batch_tokens=batch_tokens)
    for example, given in zip(EXAMPLES, found, strict=True):
        torch.testing.assert_close(given, loop(adapted._model, example), rtol=1e-9, atol=1e-9)


def test_without_continuations_the_whole_vocabulary_is_given():
    adapted = causal()
    examples = [Example(tokens=random_tokens(1, 5)), Example(tokens=random_tokens(2, 3))]
    for example, given in zip(examples, predictions(adapted, examples), strict=True):
        torch.testing.assert_close(given, step(adapted._model, example.tokens), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("tiny", CLASSIFIERS, ids=lambda tiny: tiny.name)
def test_classes_are_those_of_the_example_by_itself(tiny):
    model = tiny.build().double()
    # The eager softmax of Llama is computed in float32 whatever the weights are, and padding moves its rounding.
    model.set_attn_implementation("eager")
    adapted = TransformersClassifier(model)
    examples = [Example(tokens=random_tokens(number, length)) for number, length in enumerate((4, 9, 1, 6))]
    for example, given in zip(examples, predictions(adapted, examples, batch_tokens=20), strict=True):
        with torch.no_grad():
            wanted = model(input_ids=torch.tensor([example.tokens])).logits[0].log_softmax(dim=-1)
        torch.testing.assert_close(given, wanted, rtol=1e-6, atol=1e-6)


def test_a_masked_language_model_is_asked_at_its_mask():
    model = MASKED[0].build().double()
    adapted = TransformersMaskedLM(model, mask_token=MASK)
    first = Example(tokens=(2, 9, MASK, 3), continuations=((11,), (12,)), special=(True, False, True, True))
    # The same tokens, of which another mask is the one that is asked.
    second = Example(tokens=(2, MASK, MASK, 3), continuations=((11,), (12,)), special=(True, True, False, True))
    third = Example(tokens=(2, MASK, MASK, 3), special=(True, False, True, True))
    found = predictions(adapted, [first, second, third])
    torch.testing.assert_close(found[0], step(model, first.tokens, 2)[[11, 12]], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found[1], step(model, second.tokens, 1)[[11, 12]], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found[2], step(model, third.tokens, 2), rtol=1e-9, atol=1e-9)


def test_hidden_tokens_are_not_seen():
    adapted = causal()
    example = Example(tokens=random_tokens(5, 6), continuations=((11, 12), (13,)))
    hidden = [(1, 3), (5,), ()]
    found = predictions(adapted, [example] * 3, hidden=hidden)
    for places, given in zip(hidden, found, strict=True):
        seen = torch.tensor([[int(place not in places) for place in range(7)]])
        last = 4 if 5 in places else 5
        first = step(adapted._model, example.tokens, last, attention_mask=seen[:, :6])
        second = step(adapted._model, (*example.tokens, 11), attention_mask=seen)
        wanted = torch.stack([first[11] + second[12], first[13]])
        torch.testing.assert_close(given, wanted, rtol=1e-9, atol=1e-9)


def test_inputs_that_are_alike_run_once_and_progress_is_told():
    adapted = causal()
    ran: list[int] = []
    adapted._model.transformer.wte.register_forward_pre_hook(lambda _module, args: ran.append(len(args[0])))
    example = EXAMPLES[1]
    told: list[tuple[int, int]] = []
    predictions(adapted, [example] * 50, progress=lambda done, total: told.append((done, total)), batch_tokens=20)
    # Beginnings (), (11,) and (11, 12) of its continuations.
    assert sum(ran) == 3
    assert told[-1] == (3, 3)
    assert [done for done, _ in told] == sorted(done for done, _ in told)


@pytest.mark.parametrize(
    ("example", "message"),
    [
        (Example(tokens=random_tokens(1, 33), id="long"), "example long has 33 tokens, and .* takes at most 32"),
        (
            Example(tokens=random_tokens(1, 31), continuations=((9,), (9, 9, 9)), id="longer"),
            "example longer has 33 tokens with its continuation",
        ),
        (Example(tokens=(9,), continuations=((9,), ())), "example 0 has a continuation without tokens"),
    ],
    ids=["tokens", "continuation", "empty"],
)
def test_examples_that_do_not_fit_are_named(example, message):
    with pytest.raises(CallError, match=message):
        predictions(causal(), [example])


def test_continuations_of_several_tokens_are_not_asked_of_one_mask():
    adapted = TransformersMaskedLM(MASKED[0].build(), mask_token=MASK)
    with pytest.raises(CallError, match=r"example 0 has a continuation of 2 tokens, and .* predicts one token"):
        predictions(adapted, [Example(tokens=(2, MASK, 3), continuations=((9, 10),))])


def test_hidden_positions_belong_to_the_examples_and_leave_something():
    with pytest.raises(CallError, match="expected hidden positions for 1 examples, got them for 2"):
        predictions(causal(), [Example(tokens=(9,))], hidden=[(), ()])
    with pytest.raises(CallError, match="all tokens of example 0 are hidden"):
        predictions(causal(), [Example(tokens=(9, 10))], hidden=[(0, 1)])


def test_buckets_hold_every_index_once_and_no_more_than_their_tokens():
    lengths = torch.randint(1, 60, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    buckets = length_buckets(lengths, 100)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(200))
    assert all(len(bucket) * max(lengths[index] for index in bucket) <= 100 for bucket in buckets)
    padded = sum(len(bucket) * max(lengths[index] for index in bucket) for bucket in buckets)
    assert padded < 1.15 * sum(lengths)
    assert length_buckets([500, 1], 100) == [[0], [1]]
    with pytest.raises(CallError, match="batch_tokens should be at least 1, got 0"):
        length_buckets([1], 0)


def test_predictions_some_at_a_time_are_those_of_all_and_name_examples_by_their_number():
    bag = BagOfWords([0.0, 0.3, -0.7, 1.1])
    examples = [Example(tokens=(1 + number % 3, 1 + number // 3 % 3)) for number in range(600)]
    found = list(each_prediction(bag, examples, batch_tokens=64))
    torch.testing.assert_close(torch.stack(found), torch.stack(predictions(bag, examples)), rtol=0, atol=0)
    bag.context = 2
    with pytest.raises(CallError, match="example 599 has 3 tokens, and bag of words takes at most 2"):
        list(each_prediction(bag, [*examples[:-1], Example(tokens=(1, 2, 3))]))


@pytest.mark.parametrize(("counts", "compared"), [((2, 3), True), ((2, 1), False), ((1,), False), ((0, 2), False)])
def test_probabilities_are_compared_if_every_example_has_a_choice(counts, compared):
    """A single continuation has nothing to be compared with."""
    examples = [Example(tokens=(1,), continuations=((11,), (12,), (13,))[:count]) for count in counts]
    assert are_compared(examples) is compared


def test_a_classifier_answers_a_task_with_as_many_classes():
    """Its probability of class 1 is the logistic function of the sum of the weights of the tokens."""
    bag = BagOfWords([0.0, 0.5, -2.0])
    examples = (Example(tokens=(1, 1), label=1), Example(tokens=(1, 2), label=1), Example(tokens=(2,)))
    done: list[tuple[int, int]] = []
    found = answers(
        bag,
        Task("moods", examples, "none", classes=("bad", "good")),
        among_alternatives=False,
        progress=lambda *counts: done.append(counts),
    )
    good = [1 / (1 + math.exp(-total)) for total in (1.0, -1.5, -2.0)]
    assert found.predicted.tolist() == [1, 0, 0]
    assert found.probability == pytest.approx([good[0], 1 - good[1], 1 - good[2]], rel=1e-12)
    assert found.right == pytest.approx([good[0], good[1], math.nan], rel=1e-12, nan_ok=True)
    assert done == [(1, 3), (2, 3), (3, 3)]
    for classes in (("good",), ("bad", "good", "neither")):
        with pytest.raises(CallError, match=f"bag of words has 2 classes, and moods has {len(classes)}"):
            answers(bag, Task("moods", examples, "none", classes=classes), among_alternatives=False)


def test_labels_are_numbers_of_alternatives():
    assert label_of(Example(tokens=(1,), label=0), 0, 1) == 0
    assert label_of(Example(tokens=(1,), label=7), 0) == 7
    for label, alternatives in ((1, 1), (-1, 2), (-1, None)):
        with pytest.raises(CallError, match=f"example 3 has the label {label}; expected one of its"):
            label_of(Example(tokens=(1,), label=label), 3, alternatives)
