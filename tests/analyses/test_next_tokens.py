"""A next token to predict has content, also where the tokenizer puts the space in front of it apart."""

import json
from typing import Any

import pandas as pd
import pytest
import torch
import transformers
from qkov.analyses.attention import explain, fit_task, load_model, predictions
from qkov.analyses.attention.explanation.settings import ExplanationSettings
from qkov.analyses.tasks import Example, Task, TextExample, encode, encode_task
from qkov.circuits import CallError
from qkov.reports.commands.main import run
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from .pairs import jolted
from .tiny_models import gpt2, small

WORDS = ["the", "answer", "is", ":"]


def byte_level() -> Any:
    """A byte-level tokenizer that has merged the words of the prompt with their spaces, and no others."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary, merges = {letter: number for number, letter in enumerate(alphabet)}, []
    for word in ["the", *(f"Ġ{word}" for word in WORDS[:3]), "yes"]:
        for end in range(2, len(word) + 1):
            vocabulary.setdefault(word[:end], len(vocabulary))
            if (word[: end - 1], word[end - 1]) not in merges and len(word[: end - 1]):
                merges.append((word[: end - 1], word[end - 1]))
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(" yes", "isolated"),
            pre_tokenizers.Split("yes", "isolated"),
            pre_tokenizers.ByteLevel(False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def unigram() -> Any:
    """A SentencePiece tokenizer: the space is a piece of its own in front of words that it has without one."""
    pieces = ["<unk>", "▁", *(f"▁{word}" for word in WORDS[:3]), ":", "yes", "no", "\n"]
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def replaced_spaces() -> Any:
    """A tokenizer as Llama 2 has it: spaces are replaced before the pieces are joined."""
    letters = sorted({*"theanswris:yno", "▁", "\n"})
    vocabulary = {piece: number for number, piece in enumerate(["<unk>", *letters])}
    merges = []
    for word in ("▁the", "▁answer", "▁is", "yes", "no"):
        for end in range(2, len(word) + 1):
            vocabulary.setdefault(word[:end], len(vocabulary))
            merges.append((word[: end - 1], word[end - 1]))
    tokenizer = Tokenizer(models.BPE(vocabulary, list(dict.fromkeys(merges)), unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


TOKENIZERS = {"byte level": byte_level, "unigram": unigram, "replaced spaces": replaced_spaces}
PROMPT = "the answer is:"


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request) -> Any:
    return TOKENIZERS[request.param]()


def language_model(size: int) -> Any:
    torch.manual_seed(0)
    return jolted(transformers.GPT2LMHeadModel(gpt2(vocab_size=size)))


def test_a_space_that_is_a_token_of_its_own_is_read_before_the_label(tokenizer):
    names = tokenizer.convert_ids_to_tokens(tokenizer(PROMPT + " yes")["input_ids"])
    assert names[-2] in ("▁", "Ġ")
    model = language_model(len(tokenizer))
    task = Task("answer", (TextExample(PROMPT, 0, (((4, 10),),), (" yes",), id="one"),), "the answer")
    with pytest.warns(UserWarning, match="1 of 1 next tokens would be only white space") as caught:
        fitted = fit_task(task, load_model(model), tokenizer)
    assert len(caught) == 1
    (example,) = fitted.in_tokens
    whole = tokenizer(PROMPT + " yes")["input_ids"]
    assert list(example.tokens) == whole[:-1]
    assert example.label == whole[-1]
    assert tokenizer.decode([example.label]).strip() == "yes"
    assert (example.blanks, example.special[-1], sum(example.special)) == (1, True, 1)
    with torch.no_grad():
        own = model(torch.tensor([whole])).logits[0, -2].double().log_softmax(-1)
    torch.testing.assert_close(predictions(load_model(model), [example])[0], own, rtol=0, atol=2e-6)
    # The space is neither relevant nor among what attention could go to.
    assert not example.relevant[0][-1]
    explanation = explain(
        load_model(model), fitted, ExplanationSettings(methods=("rollout",), draws=1), tokeniser=tokenizer
    )
    assert explanation.examples["right"][0] == pytest.approx(float(own[whole[-1]].exp()), abs=1e-6)
    described = explanation.description["task"]
    assert (described["spaced_labels"], described["blank_labels"]) == (1, 0)
    assert explanation.examples["right_answer"][0].strip() == "yes"


def test_labels_with_content_stay_as_they_are(tokenizer):
    task = Task("answer", (TextExample("the", 0, continuations=(" answer",)),), "none")
    (example,) = encode_task(task, tokenizer, next_token=True).in_tokens
    assert example.blanks == 0
    assert list(example.tokens) == tokenizer("the")["input_ids"]
    assert example.label == tokenizer("the answer")["input_ids"][len(example.tokens)]


@pytest.mark.parametrize("blank", [" ", "\n", "  "])
def test_continuations_without_content_are_left_out_and_counted(tokenizer, blank):
    texts = [TextExample(PROMPT, 0, continuations=(blank,)), TextExample("the", 0, continuations=(" answer",))]
    made = encode_task(Task("answer", tuple(texts), "none"), tokenizer, next_token=True)
    assert len(made.examples) == 1
    assert made.left_out == (("whose continuation is only white space", 1),)
    with pytest.raises(CallError, match="cannot be encoded: whose continuation is only white space"):
        encode(texts[:1], tokenizer, next_token=True)


def test_several_tokens_of_white_space_are_all_read_before_the_label():
    tokenizer = replaced_spaces()
    with pytest.warns(UserWarning, match="1 of 1 next tokens would be"):
        (example,) = encode([TextExample(PROMPT, 0, continuations=("\n yes",))], tokenizer, next_token=True)
    whole = tokenizer(PROMPT + "\n yes")["input_ids"]
    assert (list(example.tokens), example.label, example.blanks) == (whole[:-1], whole[-1], 2)


def test_the_space_and_the_label_fit_into_the_context(tokenizer):
    whole = tokenizer(PROMPT + " yes")["input_ids"]
    with pytest.warns(UserWarning, match="next tokens"):
        (example,) = encode([TextExample(PROMPT, 0, continuations=(" yes",))], tokenizer, context=3, next_token=True)
    assert list(example.tokens) == whole[-4:-1]
    assert example.label == whole[-1]


def test_a_mask_stands_behind_the_space():
    tokenizer = unigram()
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    example = TextExample(PROMPT, 0, continuations=(" yes",))
    with pytest.warns(UserWarning, match="1 of 1 next tokens"):
        (encoded,) = encode([example], tokenizer, mask_at_end=True, next_token=True)
    whole = tokenizer(PROMPT + " yes")["input_ids"]
    assert list(encoded.tokens) == [*whole[:-1], tokenizer.mask_token_id]
    assert encoded.label == whole[-1]
    several = TextExample(PROMPT, 0, continuations=(" yesno",))
    with pytest.raises(CallError, match="several tokens, which one mask token cannot stand for"):
        encode([several], tokenizer, mask_at_end=True, next_token=True)


def test_labels_in_tokens_that_are_only_white_space_are_counted_and_kept():
    tokenizer = unigram()
    model = load_model(language_model(len(tokenizer)))
    space, word = tokenizer.convert_tokens_to_ids(["▁", "▁is"])
    examples = tuple(Example((2, 3, 4), label, ((True, False, False),)) for label in (space, word, space, None))
    with pytest.warns(UserWarning, match="2 of 4 labels in tokens are only white space"):
        fitted = fit_task(Task("numbers", examples, "first"), model, tokenizer)
    assert fitted.examples == examples
    explanation = explain(model, fitted, ExplanationSettings(methods=("rollout",), draws=1), tokeniser=tokenizer)
    assert explanation.description["task"]["blank_labels"] == 2
    # Classes have numbers that are no tokens.
    torch.manual_seed(0)
    classifier: Any = transformers.BertForSequenceClassification(small("BertConfig", num_labels=5)).eval()
    assert fit_task(Task("numbers", examples[:3], "first"), load_model(classifier), tokenizer).examples == examples[:3]


def test_the_command_says_how_many_labels_were_changed_and_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tokenizer = unigram()
    language_model(len(tokenizer)).save_pretrained("model")
    tokenizer.save_pretrained("model")
    records = [
        {"text": PROMPT, "continuations": [end], "label": 0, "relevant": [[4, 10]]}
        for end in (" yes", " no", " ", " is")
    ]
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, records)))
    arguments = ["explain", "model", "lines", "--data", "mine.jsonl", "--methods", "rollout", "--out", "out"]
    assert run(arguments) == 0
    printed = capsys.readouterr()
    assert "2 of 3 labels were changed: the tokenizer puts the space in front of them apart" in printed.out
    assert "left out of task: 1 whose continuation is only white space" in printed.out
    assert "Warning" not in printed.err
    page = (tmp_path / "out" / "report.html").read_text()
    assert "2 of 3 labels were changed" in page
    assert "1 whose continuation is only white space" in page
    assert pd.read_parquet("out/examples.parquet")["right_answer"].str.strip().tolist() == ["yes", "no", "is"]
    ids = [{"tokens": [2, 3, 4], "label": 1}, {"tokens": [2, 3], "label": 4}]
    (tmp_path / "ids.jsonl").write_text("\n".join(map(json.dumps, ids)))
    assert run(["explain", "model", "lines", "--data", "ids.jsonl", "--methods", "rollout", "--out", "of-ids"]) == 0
    assert "warning: 1 of 2 labels are only white space" in capsys.readouterr().out
