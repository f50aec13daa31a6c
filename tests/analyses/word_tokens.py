"""A tokeniser of whole words for tiny models, whose mask token is theirs."""

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from .tiny_models import MASK as MASK_ID
from .tiny_models import VOCABULARY

WORDS = (
    "the",
    "key",
    "keys",
    "near",
    "door",
    "doors",
    "are",
    "is",
    "by",
    "is_not",
    "<b>",
    "man",
    "men",
    "that",
    "like",
    "likes",
    "table",
    "tables",
    "friend",
    "friends",
    "good",
    "bad",
    "a",
)


def word_tokeniser() -> PreTrainedTokenizerFast:
    names = ["[PAD]", "[UNK]", *(f"[unused{number}]" for number in range(2, MASK_ID)), "[MASK]", *WORDS]
    names += [f"w{number}" for number in range(len(names), VOCABULARY)]
    tokenizer = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        mask_token="[MASK]",
        unk_token="[UNK]",
        pad_token="[PAD]",
        clean_up_tokenization_spaces=False,
    )
