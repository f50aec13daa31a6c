"""Relevant-token attention against hand-computed cases and plain loops."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from qkov.analyses.attention import Batch, Counting, HeadRelevance, Relevance, readout_rows, relevance_of, rollout
from qkov.analyses.attention.models.alternatives import label_probability
from qkov.analyses.tasks import Example
from qkov.circuits import CallError, QkovError

from .toy_attention import VOCABULARY, ToyAttention, kept_maps


def row(*weights):
    return torch.tensor(weights, dtype=torch.float64)


def example(*masks, tokens=4, **more):
    relevant = tuple(tuple(bool(mark) for mark in mask) for mask in masks)
    return Example(tokens=tuple(range(1, tokens + 1)), relevant=relevant, **more)


def one(given, weights, readout=3, causal=True, settings=None):
    found = relevance_of([given], [weights], [readout], causal=causal, settings=settings or Counting())
    return found.table.iloc[0]


def test_the_mass_on_the_marked_tokens_with_and_without_the_readout():
    found = one(example([1, 0, 0, 0]), row(0.2, 0.2, 0.1, 0.5))
    assert found["attention"] == pytest.approx(0.2, rel=1e-15)
    assert found["chance"] == 0.25
    assert found["readout"] == pytest.approx(0.5, rel=1e-15)
    assert found["attention_elsewhere"] == pytest.approx(0.4, rel=1e-15)
    assert found["chance_elsewhere"] == pytest.approx(1 / 3, rel=1e-15)
    assert (found["tokens"], found["relevant"]) == (4, 1.0)


def test_a_token_weighs_by_the_share_of_annotators_who_marked_it():
    found = one(example([1, 1, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]), row(0.2, 0.4, 0.3, 0.1))
    # The third marked nothing: weights 1/2 and 1.
    assert found["attention"] == pytest.approx(0.5, rel=1e-15)
    assert found["chance"] == pytest.approx(1.5 / 4, rel=1e-15)


def test_weights_that_do_not_sum_to_one_count_as_shares():
    assert one(example([1, 0, 0, 0]), row(2.0, 1.0, 1.0, 4.0))["attention"] == 0.25


def test_chance_is_over_the_tokens_that_attention_can_go_to():
    given, weights = example([1, 0, 0, 1]), row(0.5, 0.5, 0.0, 0.0)
    assert one(given, weights, readout=1)[["chance", "tokens"]].tolist() == [0.5, 2]
    assert one(given, weights, readout=1, causal=False)[["chance", "tokens"]].tolist() == [0.5, 4]
    uniform = row(0.25, 0.25, 0.25, 0.25)
    found = one(example([1, 0, 1, 0]), uniform)
    assert found["attention"] == found["chance"]
    assert found["attention_elsewhere"] == pytest.approx(found["chance_elsewhere"], rel=1e-15)


def test_special_tokens_count_unless_told_otherwise():
    given = example([0, 1, 0, 0], special=(True, False, False, True))
    weights = row(0.25, 0.125, 0.125, 0.5)
    counted = one(given, weights)
    assert (counted["attention"], counted["chance"], counted["readout"]) == (0.125, 0.25, 0.5)
    others = one(given, weights, settings=Counting(count_special=False))
    assert (others["attention"], others["chance"], others["tokens"], others["readout"]) == (0.5, 0.5, 2, 0.0)


def test_nothing_is_known_elsewhere_where_only_the_readout_is_relevant_or_attended_to():
    relevant_there = one(example([0, 0, 0, 1]), row(0.2, 0.2, 0.1, 0.5))
    assert relevant_there["attention"] == 0.5
    assert math.isnan(relevant_there["attention_elsewhere"])
    assert math.isnan(relevant_there["chance_elsewhere"])
    attended_there = one(example([1, 0, 0, 0]), row(0.0, 0.0, 0.0, 1.0))
    assert attended_there["attention"] == 0.0
    assert math.isnan(attended_there["attention_elsewhere"])


def test_examples_without_relevant_tokens_are_left_out_and_counted_by_reason():
    examples = [
        example([0, 0, 0, 0]),
        example([1, 0, 0, 0], id="kept"),
        example(),
        example(cut=2),
        example([0, 0, 0, 1], special=(False, False, False, True)),
    ]
    rows = [row(0.25, 0.25, 0.25, 0.25)] * 5
    found = relevance_of(examples, rows, [3, 3, 3, 3, 2], causal=True)
    assert found.table["example"].tolist() == [1]
    assert found.table["id"].tolist() == ["kept"]
    assert found.left_out == (
        ("without a relevant token", 2),
        ("whose relevant tokens were cut off", 1),
        ("whose relevant tokens are out of reach of the attention that is read", 1),
    )
    sink = example([0, 1, 0, 0], special=(True, False, False, False))
    found = relevance_of(
        [sink, sink],
        [row(1, 0, 0, 0), row(0.5, 0.5, 0, 0)],
        [3, 3],
        causal=True,
        settings=Counting(count_special=False),
    )
    assert found.left_out == (("that attend to no token that counts", 1),)
    assert found.table["attention"].tolist() == [1.0]


def test_the_paper_counts_posts_with_an_empty_rationale_as_attention_zero():
    examples = [example([1, 0, 0, 0]), example([0, 0, 0, 0])]
    rows = [row(0.6, 0.2, 0.1, 0.1)] * 2
    right = relevance_of(examples, rows, [3, 3], causal=True)
    assert right.table["attention"].tolist() == [pytest.approx(0.6)]
    assert right.left_out == (("without a relevant token", 1),)
    paper = relevance_of(examples, rows, [3, 3], causal=True, settings=Counting(convention="paper"))
    assert paper.table["attention"].tolist() == [pytest.approx(0.6), 0.0]
    assert paper.table["chance"].tolist() == [0.25, 0.0]
    assert paper.left_out == ()


def test_the_paper_takes_weights_as_they_are():
    weights = row(0.9, 0.8, 0.1, 0.2)
    given = example([1, 1, 0, 0])
    assert one(given, weights)["attention"] == pytest.approx(0.85, rel=1e-15)
    assert one(given, weights, settings=Counting(convention="paper"))["attention"] == pytest.approx(1.7, rel=1e-15)


def examples_of(count, seed=0):
    """Examples of many lengths, a fifth of them without a relevant token."""
    generator = np.random.default_rng(seed)
    made = []
    for number in range(count):
        tokens = generator.integers(1, VOCABULARY, generator.integers(2, 9))
        mask = generator.random(len(tokens)) < 0.4
        mask[0] |= number % 5 > 0
        mask &= number % 5 > 0
        made.append(Example(tuple(tokens.tolist()), label=int(number % 3), relevant=(tuple(mask.tolist()),)))
    return made


@pytest.mark.parametrize("causal", [True, False])
def test_batches_in_any_order_give_what_one_pass_and_a_plain_loop_give(causal):
    model, examples = ToyAttention(causal=causal), examples_of(31)
    probabilities = np.random.default_rng(1).random(31)
    relevance = Relevance(causal)
    order = np.random.default_rng(2).permutation(31)
    for numbers in np.array_split(order, 5):
        batch = Batch.of([examples[number] for number in numbers], pad=0)
        relevance.update(
            batch,
            rollout(model, batch),
            model.reading_positions(batch),
            probabilities=probabilities[numbers],
            numbers=numbers.tolist(),
        )
    found = relevance.compute()
    alone = [Batch.of([given], pad=0) for given in examples]
    rows = [rollout(model, batch)[0] for batch in alone]
    readouts = [int(model.reading_positions(batch)[0]) for batch in alone]
    at_once = relevance_of(examples, rows, readouts, causal=causal, probabilities=probabilities)
    pd.testing.assert_frame_equal(found.table, at_once.table, rtol=1e-9)
    assert found.left_out == at_once.left_out == (("without a relevant token", 7),)
    for record in found.table.to_dict("records"):
        number = record["example"]
        marked = [place for place, mark in enumerate(examples[number].relevant[0]) if mark]
        assert record["attention"] == pytest.approx(sum(float(rows[number][place]) for place in marked), rel=1e-9)
        reach = readouts[number] + 1 if causal else len(rows[number])
        assert record["chance"] == pytest.approx(len(marked) / reach, rel=1e-12)
        assert record["probability"] == probabilities[number]


def test_examples_are_numbered_as_they_come():
    relevance = Relevance(causal=True)
    for _ in range(2):
        batch = Batch.of([example([0, 0, 0, 0]), example([1, 0, 0, 0])], pad=0)
        relevance.update(batch, torch.full((2, 4), 0.25, dtype=torch.float64), torch.tensor([3, 3]))
    assert relevance.compute().table["example"].tolist() == [1, 3]
    assert relevance.compute().table["probability"].isna().all()


def test_every_head_against_a_plain_loop_over_the_maps():
    model, examples = ToyAttention(), examples_of(23)
    relevance = HeadRelevance(causal=True)
    for start in range(0, 23, 6):
        batch = Batch.of(examples[start : start + 6], pad=0)
        relevance.update(batch, readout_rows(model, batch), model.reading_positions(batch))
    found = relevance.compute()
    attention = np.zeros((3, 4))
    elsewhere = np.zeros((3, 4))
    with_relevant, with_others, chances = 0, 0, []
    for given in examples:
        mask = np.array(given.relevant[0])
        if not mask.any():
            continue
        last = len(mask) - 1
        rows = np.stack([one_map[0, :, last].numpy() for one_map in kept_maps(model, Batch.of([given], pad=0))])
        with_relevant += 1
        attention += rows[..., mask].sum(axis=-1)
        chances.append(mask.mean())
        if mask[:last].any():
            with_others += 1
            elsewhere += rows[..., :last][..., mask[:last]].sum(axis=-1) / rows[..., :last].sum(axis=-1)
    assert found[["layer", "head"]].to_numpy().tolist() == [[layer, head] for layer in range(3) for head in range(4)]
    np.testing.assert_allclose(found["attention"], attention.flatten() / with_relevant, rtol=1e-12)
    np.testing.assert_allclose(found["attention_elsewhere"], elsewhere.flatten() / with_others, rtol=1e-12)
    np.testing.assert_allclose(found["chance"], np.mean(chances), rtol=1e-12)
    assert (found["low"] < found["attention"]).all()
    assert (found["attention"] < found["high"]).all()
    assert set(found["examples"]) == {with_relevant}
    others = [mask[:-1] for given in examples if any((mask := given.relevant[0])[:-1])]
    assert len(others) == with_others
    np.testing.assert_allclose(found["chance_elsewhere"], np.mean([np.mean(mask) for mask in others]), rtol=1e-12)
    assert relevance.left_out == (("without a relevant token", 23 - with_relevant),)


def test_heads_without_an_example_that_takes_part_are_refused():
    relevance = HeadRelevance(causal=True)
    with pytest.raises(CallError, match=r"no example takes part in the attention of heads .*: none was given"):
        relevance.compute()
    batch = Batch.of([example([0, 0, 0, 0])] * 2, pad=0)
    relevance.update(batch, torch.full((2, 3, 2, 4), 0.25, dtype=torch.float64), torch.tensor([3, 3]))
    with pytest.raises(CallError, match=r"no example takes part .*: 2 without a relevant token"):
        relevance.compute()


def test_probabilities_of_labels():
    logs = torch.tensor([0.2, 0.3], dtype=torch.float64).log()
    assert label_probability(Example((1,), label=1), 0, logs) == pytest.approx(0.3)
    assert label_probability(Example((1,), label=1), 0, logs, among_alternatives=True) == pytest.approx(0.6)
    assert math.isnan(label_probability(Example((1,)), 0, logs))
    with pytest.raises(CallError, match=r"example 4 has the label 2; expected one of its 2 alternatives, from 0"):
        label_probability(Example((1,), label=2), 4, logs)


def test_what_cannot_be_measured_is_refused():
    given, weights = example([1, 0, 0, 0]), row(0.25, 0.25, 0.25, 0.25)
    with pytest.raises(
        CallError, match="the row of attention for example 0 has 3 weights; expected one for each of its 4 tokens"
    ):
        one(given, weights[:3])
    with pytest.raises(CallError, match="is negative; expected attention: for signed attributions pass the magnitude"):
        one(given, row(0.5, -0.5, 0.5, 0.5))
    with pytest.raises(QkovError, match="a weight of attention for example 0 is not finite"):
        one(given, row(0.5, math.nan, 0.5, 0.0))
    with pytest.raises(
        CallError,
        match=r"readout position 4 of example 0 in the batch is not that of a token: the example has 4 tokens",
    ):
        one(given, weights, readout=4)
    with pytest.raises(
        CallError, match="no example takes part in relevant-token attention: 1 without a relevant token"
    ):
        one(example([0, 0, 0, 0]), weights)
    with pytest.raises(CallError, match="2 readout positions were given for 1 examples"):
        relevance_of([given], [weights], [3, 3], causal=True)
    with pytest.raises(CallError, match=r"no example takes part .*: none was given"):
        relevance_of([], [], [], causal=True)
    batch = Batch.of([given, example([1, 0], tokens=2)], pad=0)
    relevance = Relevance(causal=True)
    with pytest.raises(QkovError, match="a weight of example 0 in the batch is not finite"):
        relevance.update(batch, row(0.5, math.nan, 0.5, 0.0).expand(2, 4), torch.tensor([3, 1]))
    with pytest.raises(CallError, match="example 1 in the batch has attention on padding"):
        relevance.update(batch, weights.expand(2, 4), torch.tensor([3, 1]))
    with pytest.raises(CallError, match=r"rows have shape \[2, 3\]; expected 2 examples first and 4 positions last"):
        relevance.update(batch, torch.ones(2, 3, dtype=torch.float64), torch.tensor([3, 1]))
    with pytest.raises(CallError, match="probabilities has 1 entries for a batch of 2 examples"):
        relevance.update(batch, weights.expand(2, 4), torch.tensor([3, 1]), probabilities=np.ones(1))
    with pytest.raises(CallError, match="numbers has 3 entries for a batch of 2 examples"):
        relevance.update(batch, weights.expand(2, 4), torch.tensor([3, 1]), numbers=[1, 2, 3])
    twice = Relevance(causal=True)
    twice.update(Batch.of([given, given], pad=0), weights.expand(2, 4), torch.tensor([3, 3]), numbers=[5, 5])
    with pytest.raises(CallError, match="example 5 was given twice"):
        twice.compute()
