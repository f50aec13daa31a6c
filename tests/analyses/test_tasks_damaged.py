"""Data sets that are damaged, nested without end, or made to stand for more than they hold, are one line."""

import csv
import gzip
import json
import os

import pytest
from qkov.analyses.attention import load_model
from qkov.analyses.tasks import load_task
from qkov.circuits import QkovError

NESTED = "[" * 5000 + "]" * 5000


def refused(task: str, path, message: str) -> None:
    with pytest.raises(QkovError, match=message) as caught:
        load_task(task, path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("task", "name", "content"),
    [
        ("lines", "a.jsonl", f'{{"text": {NESTED}}}'),
        ("lines", "a.json", f"[{NESTED}]"),
        ("hatexplain", "dataset.json", f'{{"a": {NESTED}}}'),
        ("squad", "dev.json", f'{{"data": {NESTED}}}'),
        ("agreement", "a.jsonl", '{"clean_prefix":' * 5000 + "1" + "}" * 5000),
    ],
    ids=["lines", "list", "hatexplain", "squad", "pairs"],
)
def test_five_thousand_levels_of_json(tmp_path, task, name, content):
    (tmp_path / name).write_text(content)
    refused(task, tmp_path / name, "cannot be read as JSON")


@pytest.mark.parametrize(
    ("task", "name", "content"),
    [
        ("lines", "a.json", [{"text": 3, "relevant": [[0, 1]]}]),
        ("lines", "a.json", [{"tokens": [None, 2], "relevant": {"a": 1}}]),
        ("lines", "a.json", [{"tokens": ["a"], "relevant": [[[1]]], "continuations": 5}]),
        ("lines", "a.json", [{"text": "a", "relevant": [["x", 1]]}]),
        ("hatexplain", "dataset.json", {"a": [1]}),
        ("hatexplain", "dataset.json", {"a": {"post_tokens": 3, "annotators": []}}),
        ("hatexplain", "dataset.json", {"a": {"post_tokens": ["a"], "annotators": [{"label": {}}]}}),
        ("squad", "dev.json", {"data": [{"paragraphs": [{"context": "a", "qas": [{"answers": [3]}]}]}]}),
        ("squad", "dev.json", {"data": [{"paragraphs": [{"context": 1, "qas": ["a"]}]}]}),
        (
            "squad",
            "dev.json",
            {"data": [{"paragraphs": [{"context": "a", "qas": [{"question": "q", "answers": {"text": 3}}]}]}]},
        ),
    ],
)
def test_records_of_other_types(tmp_path, task, name, content):
    (tmp_path / name).write_text(json.dumps(content))
    refused(task, tmp_path / name, name.replace(".", r"\."))


def test_evidence_of_other_types(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "d").write_text("a b")
    for evidences in (5, [5], [[5]], [[{"docid": ["d"], "start_token": 0, "end_token": 1}]], [[{"docid": "../x"}]]):
        row = {"annotation_id": "d", "classification": "POS", "evidences": evidences}
        (tmp_path / "train.jsonl").write_text(json.dumps(row))
        refused("eraser", tmp_path, r"\S")


COLUMNS = ("orig_sentence", "subj", "verb", "verb_pos", "subj_index", "verb_index", "n_diff_intervening")


def test_tables_with_a_field_or_a_line_without_end(tmp_path):
    head = "\t".join(COLUMNS) + "\n"
    (tmp_path / "field.tsv").write_text(head + "x" * (csv.field_size_limit() + 1))
    refused("agreement", tmp_path / "field.tsv", "field larger than field limit")
    with gzip.open(tmp_path / "line.tsv.gz", "wt") as file:
        file.write(head + "x " * 10**7)
    assert (tmp_path / "line.tsv.gz").stat().st_size < 50_000
    refused("agreement", tmp_path / "line.tsv.gz", "a line of more than 1048576 characters")
    (tmp_path / "cut.tsv.gz").write_bytes((tmp_path / "line.tsv.gz").read_bytes()[:100])
    refused("agreement", tmp_path / "cut.tsv.gz", "cannot be read as a table in UTF-8")
    (tmp_path / "zero.tsv").write_text(head + "a\x00b\t\x00")
    refused("agreement", tmp_path / "zero.tsv", r"zero\.tsv")


def test_transformers_does_not_wait_for_a_pipe(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(QkovError, match=r"model\.safetensors is a pipe"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        "[" * 5000,
        '{"model_type": 5}',
        '{"model_type": "gpt2", "n_head": "x", "architectures": ["GPT2LMHeadModel"]}',
        '{"model_type": "llama", "rope_scaling": 3, "architectures": ["LlamaForCausalLM"]}',
        '{"model_type": "llama", "hidden_size": null, "architectures": ["LlamaForCausalLM"]}',
    ],
    ids=["nested", "type", "heads", "scaling", "width"],
)
def test_configs_that_transformers_cannot_use(tmp_path, config):
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(QkovError, match="cannot be read as a model of transformers") as caught:
        load_model(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
