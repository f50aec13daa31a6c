"""The draw of a limited number of examples from a source that is read once."""

from collections import Counter

import pytest
from qkov.analyses.tasks import Example, Task
from qkov.analyses.tasks.collecting import LeftOut, collected

EMPTY = Task(name="numbers", examples=(), relevant="none")


def drawn(limit, seed, size=5):
    task = collected(EMPTY, (Example(tokens=(number,)) for number in range(size)), limit, seed)
    return [example.tokens[0] for example in task.in_tokens]


def test_every_example_is_drawn_equally_often():
    counts = Counter(number for seed in range(4000) for number in drawn(2, seed))
    for number in range(5):
        # Two of five; the standard deviation of the share is 0.008.
        assert counts[number] / 4000 == pytest.approx(0.4, abs=0.03)


def test_pairs_are_drawn_equally_often_and_in_order():
    counts = Counter(tuple(drawn(2, seed, size=4)) for seed in range(3000))
    assert sorted(counts) == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    for count in counts.values():
        assert count / 3000 == pytest.approx(1 / 6, abs=0.03)


def test_what_is_left_out_is_counted_by_reason():
    items = [LeftOut("without words"), Example(tokens=(1,)), LeftOut("without words"), LeftOut("twice")]
    task = collected(EMPTY, [*items, Example(tokens=(2,)), Example(tokens=(3,))], limit=1)
    assert dict(task.left_out) == {"without words": 2, "twice": 1, "not drawn under the limit": 2}
    assert len(task.examples) == 1
