import pytest
import torch
from qkov.analyses.attention import ERASER, Perturbation
from qkov.analyses.attention.rationales.perturbation import ERASER_CUTS, keeping, kept_positions, merged
from qkov.analyses.tasks import Example
from qkov.circuits import CallError

from .bag_of_words import BagOfWords
from .toy_attention import ToyAttention

EXAMPLE = Example(
    tokens=(5, 6, 7, 8),
    label=1,
    relevant=((True, False, False, True),),
    continuations=((1,), (2,)),
    special=(True, False, False, False),
    text="of",
    spans=((0, 0), (0, 1), (1, 2), (2, 2)),
    id="four",
    group="g",
)


@pytest.mark.parametrize(
    ("removable", "expected"),
    [
        (1, (1, 1, 1, 1, 1)),
        (7, (1, 1, 1, 2, 4)),
        (10, (1, 1, 1, 2, 5)),
        (20, (1, 1, 2, 4, 10)),
        (300, (3, 15, 30, 60, 150)),
    ],
)
def test_a_cut_takes_its_share_of_the_real_tokens_rounded_up(removable, expected):
    assert tuple(ERASER.cut_size(cut, removable, 1) for cut in ERASER_CUTS) == expected


def test_a_share_that_floats_cannot_hold_is_not_rounded_up():
    assert 0.07 * 100 > 7
    assert Perturbation(cuts=(0.07,)).cut_size(0.07, 100, 1) == 7


def test_something_is_left_to_the_model_and_something_is_taken():
    assert ERASER.cut_size(1.0, 5, 0) == 4
    assert ERASER.cut_size(1.0, 5, 2) == 5
    assert ERASER.cut_size(0.01, 2, 0) == 1
    assert ERASER.cut_size(0.0, 5, 0) == 0


@pytest.mark.parametrize("removal", ["deletion", "mask token", "attention mask"])
def test_how_many_are_taken_does_not_depend_on_what_becomes_of_them(removal):
    settings = Perturbation(removal=removal)
    assert [settings.cut_size(cut, 3, 0) for cut in (0.01, 0.5, 1.0)] == [1, 2, 2]
    assert settings.reason_against(1, 0) == "with a single token, without which nothing is left"
    assert settings.reason_against(0, 2) == "without a token that can be removed"
    assert settings.reason_against(1, 1) is None


def test_the_empty_cut_keeps_nothing_where_nothing_else_is_kept():
    cuts = (0.0, 0.5)
    assert Perturbation(cuts=cuts).reason_against(4, 0) == "with no token left for sufficiency at a cut of 0"
    assert Perturbation(cuts=cuts).reason_against(4, 1) is None
    assert Perturbation(cuts=cuts, removal="mask token").reason_against(4, 0) is None


def test_the_highest_go_first_and_of_equal_ones_the_earlier():
    row = torch.tensor([0.9, 0.1, 0.3, 0.3, 0.3, 0.2], dtype=torch.float64)
    removable = (1, 2, 3, 4, 5)
    assert ERASER.first(row, removable, 2) == (2, 3)
    assert ERASER.first(row, removable, 4) == (2, 3, 4, 5)
    assert ERASER.first(-row, removable, 2) == (1, 5)
    assert ERASER.first(row, removable, 0) == ()
    rising = torch.arange(6, dtype=torch.float64)
    assert ERASER.first(rising, removable, 3) == (3, 4, 5)


def test_deletion_closes_the_gap():
    made, hidden = keeping(EXAMPLE, (0, 2, 3), "deletion", None)
    assert (made.tokens, made.is_special, hidden) == ((5, 7, 8), (True, False, False), ())
    assert (made.label, made.continuations, made.id, made.relevant) == (1, ((1,), (2,)), "four", ())


def test_the_mask_token_stands_in_the_place():
    made, hidden = keeping(EXAMPLE, (0, 2), "mask token", 9)
    assert (made.tokens, made.is_special, hidden) == ((5, 9, 7, 9), EXAMPLE.special, ())
    with pytest.raises(CallError, match="needs a mask token"):
        keeping(EXAMPLE, (0, 2), "mask token", None)


def test_the_attention_mask_hides_and_moves_nothing():
    made, hidden = keeping(EXAMPLE, (0, 2), "attention mask", None)
    assert (made.tokens, made.is_special, hidden) == (EXAMPLE.tokens, EXAMPLE.special, (1, 3))


def test_what_is_never_removed_stays_in_its_place():
    assert merged((2, 5), frozenset({0, 6})) == (0, 2, 5, 6)
    assert merged((5, 1, 3), frozenset({0, 2, 6})) == (0, 5, 2, 1, 3, 6)
    assert merged((), frozenset({4, 0})) == (0, 4)


def test_special_tokens_and_the_readout_are_kept():
    examples = [EXAMPLE, Example(tokens=(1, 2))]
    assert kept_positions(ToyAttention(causal=True), examples, ERASER) == [{0, 3}, {1}]
    assert kept_positions(ToyAttention(causal=True), examples, Perturbation(keep_readout=False)) == [{0}, frozenset()]
    assert kept_positions(ToyAttention(causal=False), examples, ERASER) == [{0}, {0}]


def test_a_model_that_reads_nowhere_keeps_special_tokens_alone():
    model = BagOfWords([0.0] * 10)
    with pytest.raises(CallError, match=r"reads all 4 positions; keep_readout=True needs .* set keep_readout=False"):
        kept_positions(model, [EXAMPLE], ERASER)
    assert kept_positions(model, [EXAMPLE], Perturbation(keep_readout=False)) == [{0}]


def test_a_masked_language_model_keeps_its_mask_token_in_any_case():
    model = ToyAttention(causal=False)
    model.classifies = False
    assert kept_positions(model, [EXAMPLE], Perturbation(keep_readout=False)) == [{0}]


@pytest.mark.parametrize(
    "wrong",
    [
        {"cuts": ()},
        {"cuts": (0.1, 0.1)},
        {"cuts": (5.0,)},
        {"cuts": (-0.1,)},
        {"padded_length": 0},
        {"convention": "paper", "removal": "mask token"},
    ],
)
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(CallError):
        Perturbation(**wrong)


def test_without_a_mask_token_the_error_says_what_to_do():
    with pytest.raises(
        CallError, match=r"bag of words has no mask token .* use removal='deletion' or 'attention mask'"
    ):
        Perturbation(removal="mask token").demand_fit(BagOfWords([0.0]))
    Perturbation(removal="mask token").demand_fit(BagOfWords([0.0], mask_token=0))


def test_settings_at_the_ends_of_their_ranges_are_taken():
    assert Perturbation(cuts=(0.0, 1.0)).cuts == (0.0, 1.0)
    assert Perturbation(padded_length=1).padded_length == 1
