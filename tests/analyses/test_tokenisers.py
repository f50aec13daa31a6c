"""Tokens as people read them, and tokenisers that are not there."""

import pytest
from qkov.analyses.attention import load_tokeniser
from qkov.analyses.attention.models.tokenisers import written
from qkov.circuits import QkovError

from .word_tokens import word_tokeniser


class Spaced:
    """A tokeniser whose tokens are characters, from the space on."""

    def decode(self, ids):
        return "".join(chr(32 + token) for token in ids)


def test_tokens_are_written_as_text_or_as_numbers():
    assert written(None)([3, 17]) == "3 17"
    assert written(Spaced())([0, 65, 66]) == " ab"
    assert written(Spaced())([0]) == "' '"


def test_a_tokeniser_beside_a_model_is_found(tmp_path):
    word_tokeniser().save_pretrained(tmp_path)
    assert load_tokeniser(tmp_path)("the keys")["input_ids"] == word_tokeniser()("the keys")["input_ids"]


@pytest.mark.parametrize("name", ["nowhere", "nowhere/model.gguf"])
def test_none_is_one_line(tmp_path, name):
    with pytest.raises(
        QkovError, match=r"cannot be read as a tokenizer of transformers .* give the address of the tokenizer"
    ):
        load_tokeniser(str(tmp_path / name))
