"""What the released code of the paper does: right by default, and kept under its convention."""

import numpy as np
import torch
from qkov.analyses.attention import ERASER, PAPER, Perturbation, faithfulness
from qkov.analyses.tasks import Example

from .bag_of_words import BagOfWords


def test_the_share_is_taken_of_the_real_tokens_and_in_the_paper_of_the_padded_length():
    # Of 20 tokens 5% is 1; of 128 it is 6.
    assert ERASER.cut_size(0.05, 20, 0) == 1
    assert PAPER.cut_size(0.05, 20, 0) == 6
    assert PAPER.cut_size(0.05, 60, 0) == 6
    assert Perturbation(cuts=(0.05,), convention="paper", padded_length=64).cut_size(0.05, 60, 0) == 3


def test_kept_tokens_keep_their_order_and_in_the_paper_that_of_a_partial_sort():
    row = torch.from_numpy(np.random.default_rng(0).random(40))
    removable = tuple(range(40))
    highest = set(np.argsort(-row.numpy())[:6].tolist())
    right, scrambled = ERASER.first(row, removable, 6), PAPER.first(row, removable, 6)
    assert right == tuple(sorted(highest))
    assert set(scrambled) == highest
    padded = np.concatenate([row.numpy(), np.full(88, -np.inf)])
    assert scrambled == tuple(np.argpartition(padded, -6)[-6:])
    assert scrambled != right


def test_the_paper_never_takes_padding_or_a_special_token():
    row = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    assert set(PAPER.first(row, (1, 2, 4), 3)) == {1, 2, 4}
    assert PAPER.reason_against(6, 0) == "with no more tokens than the paper's cut takes"
    assert PAPER.reason_against(7, 0) is None
    assert PAPER.reason_against(6, 1) is None


def test_the_paper_makes_one_cut():
    assert PAPER.cuts == (0.05,)
    assert ERASER.cuts == (0.01, 0.05, 0.1, 0.2, 0.5)


def _seen(settings: Perturbation) -> list[tuple[int, ...]]:
    """The inputs that a sentence of 30 different tokens is perturbed to."""
    model = BagOfWords(np.linspace(-1, 1, 31).tolist())
    row = torch.from_numpy(np.random.default_rng(1).random(30))
    example = Example(tokens=tuple(range(1, 31)))
    settings = Perturbation((0.05,), "deletion", False, settings.convention)
    faithfulness(model, [example], {"any": [row]}, settings, draws=0)
    return [tokens for tokens in model.inputs if len(tokens) < 15]


def test_sufficiency_keeps_the_order_of_the_sentence_and_in_the_paper_does_not():
    right, paper = _seen(ERASER), _seen(PAPER)
    assert {len(tokens) for tokens in right} == {2}
    assert {len(tokens) for tokens in paper} == {6}
    assert all(tokens == tuple(sorted(tokens)) for tokens in right)
    assert any(tokens != tuple(sorted(tokens)) for tokens in paper)


def test_sentences_of_no_more_tokens_than_the_cut_are_left_out_and_counted():
    model = BagOfWords([0.1] * 9)
    examples = [Example(tokens=(1, 2, 3)), Example(tokens=(1, 2, 3, 4, 5, 6, 7, 8))]
    rows = {"any": [torch.zeros(3, dtype=torch.float64), torch.zeros(8, dtype=torch.float64)]}
    paper = faithfulness(model, examples, rows, PAPER)
    assert paper.left_out == (("with no more tokens than the paper's cut takes", 1),)
    assert set(paper.table["example"]) == {1}
    assert paper.settings.convention == "paper"
    right = faithfulness(model, examples, rows, Perturbation(keep_readout=False))
    assert right.left_out == ()
    assert set(right.table["example"]) == {0, 1}
