import json
from typing import Any

import pytest
from qkov.analyses.tasks import encode_task, load_task
from qkov.circuits import CallError, QkovError
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from .task_texts import marked, texts

CONTEXT = "The café {question} opened in 1990, in Paris. It moved in 1990."
FIRST_ANSWERS = [
    {"text": "in 1990", "answer_start": CONTEXT.index("in 1990")},
    {"text": "1990", "answer_start": CONTEXT.index("1990")},
    {"text": "1990", "answer_start": CONTEXT.rindex("1990")},
]
QUESTIONS: list[dict[str, Any]] = [
    {"id": "a", "question": "When did {context} open?", "answers": FIRST_ANSWERS},
    {"id": "b", "question": "Who?", "answers": [], "is_impossible": True, "plausible_answers": [{"text": "It"}]},
    {"id": "c", "question": "Where?", "answers": [{"text": "Paris", "answer_start": 0}], "is_impossible": False},
    {
        "id": "d",
        "question": "Where?",
        "answers": [{"text": "paris", "answer_start": -1}, {"text": "Paris", "answer_start": CONTEXT.index("Paris")}],
    },
]
ARTICLES = {"version": "v2.0", "data": [{"title": "t", "paragraphs": [{"context": CONTEXT, "qas": QUESTIONS}]}]}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "dev-v2.0.json").write_text(json.dumps(ARTICLES))
    (tmp_path / "train-v1.1.json").write_text(json.dumps({"data": []}))
    return tmp_path


def test_every_answer_is_a_mask_and_the_commonest_one_follows(folder):
    task = load_task("squad", folder, split="dev")
    first, second = texts(task)
    assert first.text == f"Q: When did {{context}} open? C: {CONTEXT} A:"
    assert marked(first) == [["in 1990"], ["1990"], ["1990"]]
    starts = [spans[0][0] - len("Q: When did {context} open? C: ") for spans in first.relevant]
    assert starts == [answer["answer_start"] for answer in FIRST_ANSWERS]
    assert (first.continuations, first.label, first.id) == ((" 1990",), 0, "a")
    assert marked(second) == [["Paris"]]
    assert second.continuations == (" Paris",)
    assert dict(task.left_out) == {
        "that cannot be answered": 1,
        "answers that are not at their offset": 2,
        "without an answer at its offset": 1,
    }
    assert task.attention_bins == (0.0, 0.05, 0.1, 0.5, 1.0)


def test_the_prompt_may_be_another(folder):
    task = load_task("squad", folder / "dev-v2.0.json", prompt="{context}\n{question}\n")
    assert task.examples[0].text == f"{CONTEXT}\nWhen did {{context}} open?\n"
    assert marked(texts(task)[0]) == [["in 1990"], ["1990"], ["1990"]]
    with pytest.raises(CallError, match=r"\{question\} and \{context\} once each; got 'Q: "):
        load_task("squad", folder, prompt="Q: {question}")


def test_the_first_token_of_the_answer_is_the_next_token(folder):
    words = ["?", "in", "1990", "Paris", "A"]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    task = encode_task(load_task("squad", folder, split="dev"), fast, next_token=True)
    assert [example.label for example in task.in_tokens] == [2, 3]
    # in, 1990, three times: marked by one annotator of three, by two, and by one.
    weights = task.in_tokens[0].relevance
    assert weights is not None
    assert [round(weight * 3) for weight in weights.tolist() if weight] == [1, 2, 1]


def test_rows_that_datasets_reads_give_the_same(folder, tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [
        {
            "id": question["id"],
            "title": "t",
            "context": CONTEXT,
            "question": question["question"],
            "answers": {
                "text": [answer["text"] for answer in question["answers"]],
                "answer_start": [answer["answer_start"] for answer in question["answers"]],
            },
        }
        for question in QUESTIONS
    ]
    (tmp_path / "rows").mkdir()
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "rows" / "validation.parquet"))
    assert load_task("squad", tmp_path / "rows", split="validation") == load_task("squad", folder, split="dev")


def test_files_that_are_not_as_said_are_refused(folder):
    (folder / "dev-v2.0.json").write_text('{"data": [{"paragraphs": [{"qas": [{}]}]}]}')
    with pytest.raises(QkovError, match="cannot be read as SQuAD"):
        load_task("squad", folder, split="dev")
    with pytest.raises(CallError, match=r"no file test with ending in .json; it has these: dev-v2.0.json, train"):
        load_task("squad", folder, split="test")
    with pytest.raises(CallError, match="squad has no examples"):
        load_task("squad", folder, split="train")
    with pytest.raises(CallError, match="single file, so split 'dev' cannot be selected"):
        load_task("squad", folder / "dev-v2.0.json", split="dev")


@pytest.mark.parametrize(("split", "questions", "answers"), [("dev", 810, 2438), ("train", 269, 269)])
def test_real_answers_are_at_their_offsets(shared_data, split, questions, answers):
    task = load_task("squad", shared_data / "squad", split=split)
    assert (len(task.examples), task.left_out) == (questions, ())
    assert sum(len(example.relevant) for example in task.examples) == answers
    data = json.loads((shared_data / "squad" / f"{split}-v1.1.json").read_text())["data"]
    answer_texts = {
        question["id"]: [answer["text"] for answer in question["answers"]]
        for article in data
        for paragraph in article["paragraphs"]
        for question in paragraph["qas"]
    }
    for example in texts(task):
        assert [spans[0] for spans in marked(example)] == answer_texts[example.id]
        assert example.continuations[0].removeprefix(" ") in answer_texts[example.id]
