import numpy as np
import pytest
import torch
from qkov.analyses.dynamics.fifty_token_task import FiftyTokenTask
from qkov.circuits import CallError
from scipy import stats

SIZE = 4000


@pytest.fixture(scope="module")
def drawn():
    return FiftyTokenTask().sample(SIZE, np.random.default_rng(0))


def test_a_class_has_ten_distinct_tokens_of_weights_a_tenth_to_one():
    table = FiftyTokenTask().probabilities()
    for c in range(4):
        expected = torch.zeros(50, dtype=torch.float64)
        expected[:10] = 1 / 15.5
        expected[10 * (c + 1) : 10 * (c + 2)] = torch.arange(1, 11) / 155
        torch.testing.assert_close(table[c], expected, rtol=0, atol=1e-8)


def test_classes_are_equally_likely(drawn):
    _, label = drawn
    assert stats.chisquare(label.bincount(minlength=4).numpy()).pvalue > 1e-3


def test_distinct_tokens_come_with_their_probability(drawn):
    tokens, _ = drawn
    context = tokens[:, :-1]
    distinct = int((context >= 10).sum())
    assert stats.binomtest(distinct, context.numel(), 5.5 / 15.5).pvalue > 1e-3


@pytest.mark.parametrize("c", range(4))
def test_tokens_of_a_class_follow_their_weights(drawn, c):
    tokens, label = drawn
    observed = tokens[label == c, :-1].flatten().bincount(minlength=50).numpy()
    expected = FiftyTokenTask().probabilities()[c].numpy() * observed.sum()
    assert (observed[expected == 0] == 0).all()
    possible = expected > 0
    assert stats.chisquare(observed[possible], expected[possible]).pvalue > 1e-3


def test_counts_drawn_directly_follow_the_same_distribution():
    sequences = FiftyTokenTask(query_among_keys=False).sample_sequences(SIZE, np.random.default_rng(1))
    assert (sequences.counts.sum(dim=1) == 62).all()
    for c in range(4):
        observed = sequences.counts[sequences.label == c].sum(dim=0).numpy()
        expected = FiftyTokenTask().probabilities()[c].numpy() * observed.sum()
        assert (observed[expected == 0] == 0).all()
        possible = expected > 0
        assert stats.chisquare(observed[possible], expected[possible]).pvalue > 1e-3
    # Counts of one sequence vary as sums of 62 independent draws, not merely in the mean.
    distinct = (sequences.counts * sequences.relevant).sum(dim=1).long().bincount(minlength=63).numpy()
    expected = stats.binom.pmf(np.arange(63), 62, 5.5 / 15.5) * SIZE
    middle = expected > 5
    statistic = ((distinct - expected) ** 2 / expected)[middle].sum()
    assert stats.chi2.sf(statistic, middle.sum()) > 1e-3


def test_each_class_has_one_query_and_one_label(drawn):
    tokens, label = drawn
    assert tokens.shape == (SIZE, 63)
    assert torch.equal(tokens[:, -1], 5 + label)
    sequences = FiftyTokenTask().sequences(tokens)
    assert torch.equal(sequences.label, label)
    assert torch.equal(sequences.query, 5 + label)
    assert sequences.classes == 4
    assert torch.equal(sequences.embedding, torch.eye(50, dtype=torch.float64))


@pytest.mark.parametrize("query_among_keys", [True, False])
def test_counts_are_those_of_the_tokens(drawn, query_among_keys):
    tokens, _ = drawn
    sequences = FiftyTokenTask(query_among_keys=query_among_keys).sequences(tokens)
    keys = tokens if query_among_keys else tokens[:, :-1]
    for row, counts in zip(keys[:50].numpy(), sequences.counts[:50].numpy(), strict=True):
        np.testing.assert_array_equal(counts, np.bincount(row, minlength=50))


def test_relevant_are_the_distinct_tokens_of_the_class_whether_or_not_they_occur(drawn):
    tokens, label = drawn
    relevant = FiftyTokenTask().sequences(tokens).relevant
    for row, c in zip(relevant[:50], label[:50].tolist(), strict=True):
        assert row.nonzero().flatten().tolist() == list(range(10 * (c + 1), 10 * (c + 2)))


@pytest.mark.parametrize("query_among_keys", [True, False])
def test_counts_drawn_directly_hold_the_query_only_where_it_is_a_key(query_among_keys):
    task = FiftyTokenTask(context_length=20, query_among_keys=query_among_keys)
    sequences = task.sample_sequences(500, np.random.default_rng(2))
    assert (sequences.counts.sum(dim=1) == 20 + query_among_keys).all()
    if query_among_keys:
        assert (sequences.counts[torch.arange(500), sequences.query] >= 1).all()


def test_a_seed_gives_the_same_sequences_and_another_seed_others():
    task = FiftyTokenTask()
    once, again, other = (task.sample(20, np.random.default_rng(seed))[0] for seed in (3, 3, 4))
    assert torch.equal(once, again)
    assert not torch.equal(once, other)
    once, again, other = (task.sample_sequences(20, np.random.default_rng(seed)).counts for seed in (3, 3, 4))
    assert torch.equal(once, again)
    assert not torch.equal(once, other)


def test_an_empty_context_is_refused():
    with pytest.raises(CallError, match="context_length must be at least 1; got 0"):
        FiftyTokenTask(context_length=0)


def test_tokens_of_another_length_or_without_a_query_are_refused(drawn):
    tokens, _ = drawn
    with pytest.raises(CallError, match="expected 30 context tokens"):
        FiftyTokenTask(context_length=30).sequences(tokens)
    with pytest.raises(CallError, match="query token with an id from 5 to 8"):
        FiftyTokenTask().sequences(tokens.flip(1).clamp(min=9))


def test_a_context_of_one_token_and_each_query_are_in_range():
    task = FiftyTokenTask(context_length=1)
    for query in (5, 8):
        assert task.sequences(torch.tensor([[20, query]])).label.tolist() == [query - 5]
    for query in (4, 9):
        with pytest.raises(CallError, match="query token with an id from 5 to 8"):
            task.sequences(torch.tensor([[20, query]]))
