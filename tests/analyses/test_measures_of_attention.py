"""What every measure of attention keeps to."""

import pytest
import torch
from qkov.analyses.attention import MEASURES

from .toy_attention import ToyAttention, batch_of


@pytest.mark.parametrize("name", MEASURES)
@pytest.mark.parametrize("causal", [True, False])
def test_rows_are_distributions_over_each_example_s_tokens_and_do_not_depend_on_its_neighbours(name, causal):
    model, batch = ToyAttention(causal=causal), batch_of(6, 3, 1)
    rows = MEASURES[name](model, batch)
    assert rows.shape == batch.mask.shape
    assert rows.dtype == torch.float64
    assert (rows >= 0).all()
    assert rows[~batch.mask].count_nonzero() == 0
    torch.testing.assert_close(rows.sum(dim=1), torch.ones(3, dtype=torch.float64), rtol=1e-12, atol=0)
    for row, example in zip(rows, batch.examples, strict=True):
        alone = MEASURES[name](model, type(batch).of([example], pad=0))[0]
        torch.testing.assert_close(row[: len(alone)], alone, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", MEASURES)
def test_a_language_model_is_read_as_a_classifier_is(name):
    model, batch = ToyAttention(), batch_of(6, 3)
    expected = MEASURES[name](model, batch)
    model.classifies = False
    assert torch.equal(MEASURES[name](model, batch), expected)


@pytest.mark.parametrize("name", MEASURES)
def test_attention_is_read_where_the_model_says_of_the_batch(name):
    class ReadAtTheSecond(ToyAttention):
        classifies = False

        def reading_positions(self, batch):
            return torch.ones(len(batch.tokens), dtype=torch.long)

    rows = MEASURES[name](ReadAtTheSecond(), batch_of(6, 3))
    assert rows[:, :2].sum(dim=1).tolist() == pytest.approx([1, 1], rel=1e-12)
