import json

import pytest
from qkov.analyses.tasks import Example, TextExample, load_task
from qkov.circuits import QkovError


@pytest.fixture
def written(tmp_path):
    def write(*records, name="mine.jsonl"):
        path = tmp_path / name
        path.write_text("\n".join(json.dumps(record) for record in records), encoding="utf-8")
        return path

    return write


def test_words_and_masks(written):
    path = written(
        {"tokens": ["do", "n't", "go"], "relevant": [0, 1, 0], "label": "stop", "id": "x", "group": "g"},
        {"tokens": ["go"], "relevant": [[1], [0]], "label": "drive"},
        {"tokens": ["go"], "label": "drive"},
        {"tokens": [], "label": "drive"},
    )
    task = load_task("lines", path)
    assert task.classes == ("drive", "stop")
    assert task.examples == (
        TextExample(text="do n't go", label=1, relevant=(((3, 6),),), id="x", group="g"),
        TextExample(text="go", label=0, relevant=(((0, 2),), ()), id="2"),
        TextExample(text="go", label=0, id="3"),
    )
    assert task.left_out == (("without tokens", 1),)


def test_token_ids_are_taken_as_they_are(written):
    path = written({"tokens": [5, 6], "relevant": [True, False], "label": 1, "continuations": [[7], [8, 9]]})
    (example,) = load_task("lines", path).examples
    assert example == Example(tokens=(5, 6), label=1, relevant=((True, False),), continuations=((7,), (8, 9)), id="1")


def test_texts_and_spans(written):
    path = written(
        {"text": "the key is", "relevant": [[4, 7], [8, 10]], "label": 0, "continuations": [" here"]},
        {"text": "the key is", "relevant": [[[4, 7], [8, 10]], [[0, 3]], []]},
        {"text": "the\u2028key", "relevant": []},
    )
    task = load_task("lines", path)
    assert task.classes == ()
    assert task.examples == (
        TextExample(text="the key is", label=0, relevant=(((4, 7), (8, 10)),), continuations=(" here",), id="1"),
        TextExample(text="the key is", relevant=(((4, 7), (8, 10)), ((0, 3),), ()), id="2"),
        TextExample(text="the\u2028key", id="3"),
    )


def test_the_folder_and_its_splits(written, tmp_path):
    written({"text": "a"}, name="train.jsonl")
    written({"text": "b"}, name="test.jsonl")
    assert [example.text for example in load_task("lines", tmp_path, split="test").examples] == ["b"]
    assert [example.text for example in load_task("lines", tmp_path).examples] == ["b", "a"]


def test_an_address_of_fsspec():
    import fsspec

    fsspec.filesystem("memory").pipe("/lines.jsonl", b'{"text": "a"}\n')
    assert load_task("lines", "memory://lines.jsonl").examples == (TextExample(text="a", id="1"),)


def test_rows_that_datasets_reads(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "rows").mkdir()
    rows = [{"tokens": ["a", "b"], "relevant": [0, 1], "label": "x"}, {"tokens": ["c"], "relevant": [1], "label": "y"}]
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "rows" / "test.parquet"))
    task = load_task("lines", tmp_path / "rows", split="test")
    assert task.examples == (
        TextExample(text="a b", label=0, relevant=(((2, 3),),), id="1"),
        TextExample(text="c", label=1, relevant=(((0, 1),),), id="2"),
    )


@pytest.mark.parametrize(
    ("record", "match"),
    [
        ({"tokens": ["a"], "relevant": [1, 0]}, "record 2 of .* the 1 words; got 2 entries"),
        ({"tokens": [1], "relevant": [1, 0]}, "record 2 of .* length 2"),
        ({"text": "a", "relevant": [[0, 2]]}, "record 2 of .* 1 characters"),
        ({"text": "a", "relevant": [[0, 1, 2]]}, "record 2 of "),
        ({"text": "a", "relevant": [0, 1]}, "record 2 of "),
        ({"text": 3}, "record 2 of "),
        ({"tokens": ["a", 1]}, "record 2 of "),
        ({"words": ["a"]}, "no field 'tokens'; its fields are words"),
        ({"text": "a", "label": 0}, "its label is 0, but the labels of other records are names"),
        ([1], "line 2 of .* expected a JSON object"),
    ],
)
def test_records_that_are_not_as_said_are_named(written, record, match):
    with pytest.raises(QkovError, match=match):
        load_task("lines", written({"text": "a", "label": "x"}, record))


def test_a_line_that_is_cut_short_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n\n{"text": ')
    with pytest.raises(QkovError, match=r"line 3 of .*a.jsonl cannot be read as JSON"):
        load_task("lines", tmp_path / "a.jsonl")
