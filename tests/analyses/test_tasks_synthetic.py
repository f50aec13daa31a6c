from collections import Counter

import numpy as np
import pytest
from qkov.analyses.dynamics import Setting
from qkov.analyses.dynamics.fifty_token_task import FiftyTokenTask
from qkov.analyses.tasks import TASKS, load_task
from qkov.circuits import CallError
from scipy import stats

from .task_texts import label


def test_distinct_tokens_of_the_class_are_relevant():
    task = load_task("fifty-token", limit=200, seed=1)
    tokens, labels = FiftyTokenTask().sample(200, np.random.default_rng(1))
    assert len(task.in_tokens) == 200
    for example, row, right in zip(task.in_tokens, tokens.tolist(), labels.tolist(), strict=True):
        assert list(example.tokens) == row
        assert example.label == right
        # Ids 10 (c + 1) to 10 (c + 1) + 9 are those of class c; the query, 5 + c, is common.
        assert list(example.relevant[0]) == [token // 10 - 1 == right for token in row]
        assert example.tokens[-1] == 5 + right
        assert list(example.special) == [False] * 62 + [True]
    assert task.attention_bins == (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    assert len(task.classes) == 4


def test_the_share_of_relevant_tokens_is_that_of_the_paper():
    task = load_task("fifty-token", limit=500, context_length=30)
    marked = sum(sum(example.relevant[0]) for example in task.in_tokens)
    assert stats.binomtest(marked, 500 * 30, 5.5 / 15.5).pvalue > 1e-3


@pytest.mark.parametrize("query", ["token", "class"])
def test_the_exact_population_is_spelled_out(query):
    M, b, m, n = 3, 4, 2, 6
    task = load_task("population", M=M, b=b, m=m, n=n, query=query)
    assert len(task.in_tokens) == M * b * (b if query == "token" else 1)
    assert len({example.tokens for example in task.in_tokens}) == len(task.in_tokens)
    background = list(range(b * M, b * M + n))
    for example in task.in_tokens:
        right = label(example)
        *context, asked = example.tokens
        own = [token for token in context if right * b <= token < (right + 1) * b]
        assert len(own) == m
        assert sorted(context) == sorted(own + background)
        assert asked in range(right * b, (right + 1) * b) if query == "token" else asked == b * M + n + right
        # The query may be a token of the class, and is not among the keys.
        assert list(example.relevant[0]) == [token in own for token in context] + [False]
        assert example.special[-1]
        assert sum(example.special) == 1
    assert Counter(example.label for example in task.in_tokens) == dict.fromkeys(range(M), len(task.in_tokens) // M)


def test_uniform_attention_on_the_population_is_that_of_the_setting():
    setting = Setting(M=3, b=4, m=2, n=6)
    for example in load_task("population", M=3, b=4, m=2, n=6).in_tokens:
        assert sum(example.relevant[0]) / (len(example.tokens) - 1) == setting.uniform_attention


def test_sequences_may_be_drawn_from_the_population():
    task = load_task("population", limit=300, seed=5, sampled=True)
    assert len(task.in_tokens) == 300
    assert task == load_task("population", limit=300, seed=5, sampled=True)
    for example in task.in_tokens:
        # Each of n/2 directions comes twice, each time with a sign of its own.
        assert len(example.tokens) == 1 + 4 + 1
        directions = Counter((token - 16) // 2 for token in example.tokens[:-1] if token >= 16)
        assert directions == {0: 2, 1: 2}
        assert sum(example.relevant[0]) == 1


def test_a_part_of_the_population_is_counted():
    task = load_task("population", limit=10)
    assert task.left_out == (("not drawn under the limit", 54),)


@pytest.mark.parametrize("repeats", [2, 3])
def test_the_token_after_an_earlier_occurrence_is_the_next_one(repeats):
    task = load_task("induction", limit=300, seed=2, vocabulary=range(100, 140), length=7, repeats=repeats, first=3)
    ends = Counter()
    for example in task.in_tokens:
        first, *tokens = example.tokens
        assert first == 3
        assert example.special == (True,) + (False,) * len(tokens)
        assert set(tokens) <= set(range(100, 140))
        block = tokens[:7]
        assert len(set(block)) == 7
        assert all(token == block[place % 7] for place, token in enumerate(tokens))
        # Looked for as an induction head would: where the last token came before, and what came next.
        earlier = [place for place, token in enumerate(tokens[:-1]) if token == tokens[-1]]
        assert len(earlier) == repeats - 1
        assert [place for place, one in enumerate(example.relevant[0]) if one] == [place + 2 for place in earlier]
        assert {tokens[place + 1] for place in earlier} == {example.label}
        ends[len(tokens)] += 1
    assert sorted(ends) == list(range(7 * (repeats - 1) + 1, 7 * repeats + 1))


def test_induction_is_the_same_for_a_seed_and_takes_the_size_of_a_vocabulary():
    one, other = (load_task("induction", limit=5, seed=seed, vocabulary=50) for seed in (1, 2))
    assert one == load_task("induction", limit=5, seed=1, vocabulary=50)
    assert one != other
    assert all(token < 50 for example in one.in_tokens for token in example.tokens)


def test_calls_that_make_no_sense_are_refused():
    for call, match in (
        (
            lambda: load_task("squat"),
            "no task 'squat'; the known tasks are fifty-token, population, induction, agreement",
        ),
        (lambda: load_task("fifty-token", data="x"), "takes neither data nor a split"),
        (lambda: load_task("fifty-token", split="x"), "takes neither data nor a split"),
        (lambda: load_task("fifty-token", limit=0), "limit must be at least 1"),
        (lambda: load_task("fifty-token", context_length=0), "at least 1"),
        (lambda: load_task("fifty-token", length=3), "no option length; its options here: context_length"),
        (lambda: load_task("induction"), "needs the option vocabulary"),
        (lambda: load_task("induction", vocabulary=10), "20 different tokens"),
        (lambda: load_task("induction", vocabulary=10, length=1), "at least 2"),
        (lambda: load_task("population", n=3), "n = 4"),
        (lambda: load_task("population", limit=0), "limit must be at least 1"),
        (lambda: load_task("agreement", limit=0), "limit must be at least 1"),
        (lambda: load_task("agreement", length=3), "no option length; its options here: attractors, phrase"),
        *((lambda name=name: load_task(name), f"task {name} needs data") for name in ("hatexplain", "squad", "lines")),
    ):
        with pytest.raises(CallError, match=match):
            call()


def test_every_task_has_a_docstring_that_names_its_options():
    assert all(source.__doc__ for source in TASKS.values())
