"""Where the paper's released code reads attention: standard by default, and kept under its convention."""

import numpy as np
import pytest
import torch
from qkov.analyses.attention import Batch, Counting, Relevance, Rollout, last_layer, readout_rows, rollout
from qkov.analyses.attention.measures.paper_readout import HATEXPLAIN_READOUT, SUBJECT_VERB_READOUT, PaperReadout
from qkov.analyses.attention.models.readout import queries_read
from qkov.analyses.tasks import Example
from qkov.circuits import CallError

from .toy_attention import PAD, ToyAttention, kept_maps

NO_RESIDUAL = Rollout(residual=0.0)


class Uniform(ToyAttention):
    """Attends alike to all that it sees."""

    def __init__(self, **settings):
        super().__init__(**settings)
        for block in self.blocks:
            block["W_Q"] = torch.zeros_like(block["W_Q"])


def example(length, *marked):
    return Example(tuple(range(1, length + 1)), relevant=(tuple(place in marked for place in range(length)),))


def test_padding_takes_no_part_and_attention_is_read_where_the_prediction_is():
    model, given = Uniform(layers=1), [example(5, 1), example(8, 0, 6)]
    batch = Batch.of(given, PAD)
    right = rollout(model, batch, NO_RESIDUAL)
    np.testing.assert_allclose(right[0], [0.2] * 5 + [0] * 3, rtol=1e-12)
    np.testing.assert_allclose(right[1], [1 / 8] * 8, rtol=1e-12)


def test_the_paper_s_hatexplain_reads_at_the_last_padded_position_and_attends_to_padding():
    model, given = Uniform(layers=1), [example(5, 1), example(8, 0, 6)]
    batch = HATEXPLAIN_READOUT.batch(given, PAD)
    assert batch.tokens.shape == (2, 128)
    assert HATEXPLAIN_READOUT.readout(batch).tolist() == [127, 127]
    rows = HATEXPLAIN_READOUT.rows(model, batch)
    np.testing.assert_allclose(rows, np.full((2, 128), 1 / 128), rtol=1e-12)
    relevance = Relevance(model.causal, Counting(convention="paper"))
    relevance.update(batch, rows, HATEXPLAIN_READOUT.readout(batch))
    table = relevance.compute().table
    np.testing.assert_allclose(table["attention"], [1 / 128, 2 / 128], rtol=1e-12)
    np.testing.assert_allclose(table["chance"], [1 / 128, 2 / 128], rtol=1e-15)


def test_the_paper_s_agreement_masks_padding_and_reads_at_position_zero_where_none_is_left():
    readout = PaperReadout(pad_mask=True, padded_length=8)
    assert (SUBJECT_VERB_READOUT.pad_mask, SUBJECT_VERB_READOUT.padded_length) == (True, 128)
    model, given = Uniform(layers=1), [example(5, 1), example(8, 0, 6)]
    batch = readout.batch(given, PAD)
    assert readout.readout(batch).tolist() == [4, 0]
    assert model.reading_positions(Batch.of(given, PAD)).tolist() == [4, 7]
    rows = readout.rows(model, batch)
    np.testing.assert_allclose(rows, [[0.2] * 5 + [0] * 3, [1] + [0] * 7], rtol=1e-12)


def test_sequences_longer_than_the_paper_s_are_cut():
    batch = PaperReadout(pad_mask=True, padded_length=3).batch([example(5, 1, 4), example(2, 0)], PAD)
    assert batch.tokens.tolist() == [[1, 2, 3], [1, 2, PAD]]
    assert batch.mask.tolist() == [[True] * 3, [True, True, False]]
    assert batch.examples[0].relevant == ((False, True, False),)


@pytest.mark.parametrize("pad_mask", [True, False])
def test_heads_are_averaged_and_in_some_figures_of_the_paper_head_0_stands_alone(pad_mask):
    model, given = ToyAttention(), [example(5, 1), example(7, 2)]
    readout = PaperReadout(pad_mask, "head 0", residual=0.5, padded_length=9)
    averaged = PaperReadout(pad_mask, residual=0.5, padded_length=9)
    batch = readout.batch(given, PAD)
    for number, length in enumerate((5, 7) if pad_mask else (9, 9)):
        maps = [one[number, :, :length, :length].numpy() for one in kept_maps(model, batch)]
        for asked, heads in ((readout, slice(1)), (averaged, slice(None))):
            product = np.eye(length)
            for one in maps:
                product = (0.5 * one[heads].mean(axis=0) + 0.5 * np.eye(length)) @ product
            np.testing.assert_allclose(asked.rows(model, batch)[number, :length], product[length - 1], rtol=1e-12)
    right = Batch.of(given, PAD)
    if pad_mask:
        np.testing.assert_allclose(averaged.rows(model, batch)[:, :7], rollout(model, right), rtol=1e-12)


def test_the_largest_of_the_layers_is_no_distribution_and_its_mass_passes_one():
    class FirstThenSecond(ToyAttention):
        """One layer attends to the first token alone, the next to the second."""

        def logits(self, tokens, mask, *, maps=None, **_):
            assert maps is not None
            for layer in range(2):
                attention = torch.zeros(len(tokens), 1, tokens.shape[1], tokens.shape[1], dtype=torch.float64)
                attention[..., layer] = 1.0
                maps(layer, attention)
            return torch.zeros(len(mask), 2)

    model, given = FirstThenSecond(layers=2, heads=1), [example(4, 0, 1)]
    readout = PaperReadout(pad_mask=True, measure="layer maximum", padded_length=5)
    batch = readout.batch(given, PAD)
    rows = readout.rows(model, batch)
    assert rows.tolist() == [[1, 1, 0, 0, 0]]
    masses = []
    for convention in ("standard", "paper"):
        relevance = Relevance(model.causal, Counting(convention=convention))
        relevance.update(batch, rows, readout.readout(batch))
        masses += relevance.compute().table["attention"].tolist()
    assert masses == [1.0, 2.0]
    plain = ToyAttention()
    batch = PaperReadout(pad_mask=True, padded_length=9).batch([example(5, 1)], PAD)
    expected = readout_rows(plain, batch).mean(dim=2).amax(dim=1)
    found = PaperReadout(pad_mask=True, measure="layer maximum", padded_length=9).rows(plain, batch)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert found.sum() > 1.0
    np.testing.assert_allclose(last_layer(plain, batch).sum(), 1.0, rtol=1e-12)


def test_wrong_settings_are_refused():
    with pytest.raises(CallError, match="padded_length should be at least 1; got 0"):
        PaperReadout(pad_mask=True, padded_length=0)
    with pytest.raises(CallError, match="residual is a share of the identity"):
        PaperReadout(pad_mask=True, residual=2.0)


def test_a_padded_length_of_one_keeps_the_first_token():
    batch = PaperReadout(pad_mask=True, padded_length=1).batch([example(5, 0), example(2, 1)], PAD)
    assert batch.tokens.tolist() == [[1], [1]]
    assert [one.relevant for one in batch.examples] == [((True,),), ((False,),)]


@pytest.mark.parametrize("read", [[0], [2], [1, 3]])
def test_the_queries_that_a_prediction_reads_are_those_with_a_gradient(read):
    class ReadsSome(ToyAttention):
        """One output, the sum of the largest of some rows of the last layer's map."""

        def embed(self, tokens):
            return torch.nn.functional.one_hot(tokens, 9).double()

        def logits(self, tokens, mask, *, maps=None, embedded=None, **_):
            assert maps is not None
            vectors = self.embed(tokens) if embedded is None else embedded
            scores = (vectors @ vectors.mT).masked_fill(~mask[:, None], -torch.inf)
            attention = [(scores * (layer + 1)).softmax(dim=-1)[:, None].expand(-1, 3, -1, -1) for layer in range(2)]
            for layer, given in enumerate(attention):
                maps(layer, given)
            return (attention[1][:, :, read].amax(dim=-1).sum(dim=(1, 2)) + attention[0][:, 0, 3, 0])[:, None]

    assert queries_read(ReadsSome(), torch.tensor([[1, 2, 3, 4]])) == read
