"""Texts with the weights of their tokens: every character stands there once, in order."""

import pandas as pd
import pytest
from qkov.reports.pages.marked_text import Piece, marked_text, most_attended


def tokens_of(*rows):
    columns = ["written", "start", "end", "weight", "relevance", "special", "readout"]
    return pd.DataFrame(rows, columns=columns)


def test_spaces_stay_and_belong_to_no_token():
    tokens = tokens_of(
        ("The", 0, 3, 0.1, 0.0, False, False),
        (" keys", 3, 8, 0.4, 1.0, False, False),
        ("are", 10, 13, 0.2, 0.0, False, True),
    )
    pieces = marked_text("The keys  are", tokens, "weight")
    assert "".join(piece.text for piece in pieces) == "The keys  are"
    assert pieces == [
        Piece("The", 0.1, 0.25),
        Piece(" "),
        Piece("keys", 0.4, 1.0, relevant=True),
        Piece("  "),
        Piece("are", 0.2, 0.5, readout=True),
    ]


def test_tokens_that_share_a_character_are_one_piece():
    tokens = tokens_of(
        ("hi", 0, 2, 0.1, 0.0, False, False),
        ("\ufffd", 2, 4, 0.1, 0.0, False, False),
        ("\ufffd", 3, 4, 0.3, 1.0, False, False),
        ("\ufffd", 3, 4, 0.1, 0.0, False, False),
        ("!", 4, 5, 0.0, 0.0, False, False),
    )
    pieces = marked_text("hi 🙂!", tokens, "weight")
    assert "".join(piece.text for piece in pieces) == "hi 🙂!"
    (smile,) = (piece for piece in pieces if piece.text == "🙂")
    assert smile.weight == pytest.approx(0.5)
    assert smile.relevant


def test_what_is_not_in_the_text_is_special_and_what_was_cut_is_dots():
    tokens = tokens_of(
        ("[CLS]", 0, 0, 0.5, 0.0, True, True),
        ("keys", 8, 12, 0.5, 0.0, False, False),
        ("[MASK]", 12, 12, 0.0, 0.0, True, False),
    )
    pieces = marked_text("The old keys", tokens, "weight")
    assert [piece.text for piece in pieces] == ["[CLS]", "… ", "keys", "[MASK]"]
    assert [piece.special for piece in pieces] == [True, False, False, True]
    pieces = marked_text("The old keys are", tokens[1:2], "weight")
    assert [piece.text for piece in pieces] == ["… ", "keys", " …"]


def test_without_a_text_tokens_stand_by_themselves():
    tokens = tokens_of(("17", -1, -1, 0.3, 1.0, False, False), ("3", -1, -1, -0.2, 0.0, True, True))
    pieces = marked_text("", tokens, "weight")
    assert pieces == [
        Piece("17", 0.3, 1.0, relevant=True),
        Piece(" "),
        Piece("3", -0.2, 0.0, special=True, readout=True),
    ]
    assert [piece.text for piece, _ in most_attended(pieces)] == ["17"]


def test_weights_below_zero_alone_have_no_shade():
    pieces = marked_text(
        "a b", tokens_of(("a", 0, 1, -1.0, 0.0, False, False), ("b", 2, 3, 0.0, 0, False, False)), "weight"
    )
    assert [piece.shade for piece in pieces] == [0, 0, 0]
    assert most_attended(pieces) == []


def test_the_second_text_of_a_pair_begins_a_line_behind_the_separator():
    tokens = tokens_of(
        ("[CLS]", 0, 0, 0.5, 0.0, True, True),
        ("cat", 2, 5, 0.1, 0.0, False, False),
        ("[SEP]", 0, 0, 0.1, 0.0, True, False),
        ("the", 0, 3, 0.1, 0.0, False, False),
        ("mat", 4, 7, 0.1, 1.0, False, False),
        ("[SEP]", 0, 0, 0.1, 0.0, True, False),
    ).assign(in_pair=[False, False, False, True, True, False])
    pieces = marked_text("a cat", tokens, "weight", "the mat.")
    assert [piece.text for piece in pieces] == ["[CLS]", "… ", "cat", "[SEP]", "the", " ", "mat", "[SEP]", " …"]
    assert [piece.text for piece in pieces if piece.begins_pair] == ["the"]
    assert [piece.text for piece in pieces if piece.relevant] == ["mat"]
    # A second text of which the context left nothing still has its line.
    pieces = marked_text("a cat", tokens.iloc[:3].assign(in_pair=False), "weight", "the mat")
    assert [(piece.text, piece.begins_pair) for piece in pieces[-2:]] == [("[SEP]", False), (" …", True)]
