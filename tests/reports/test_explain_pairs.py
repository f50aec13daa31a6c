"""`qkov explain` with pairs of texts: what it prints, writes and shows."""

import json
import re
from pathlib import Path

import pandas as pd
import pytest
import torch
from qkov.reports.commands.main import run

from ..analyses.pairs import bert_tokenizer, classifier_of_pairs

RECORDS = [
    {"text": "who sat ?", "pair": "the cats sat .", "pair_relevant": [[4, 8]], "label": "True", "id": "pair"},
    {"text": "a dog .", "relevant": [[2, 5]], "label": "False", "id": "alone"},
]
QUERIES = [
    {"annotation_id": "1", "query": "who sat ?", "classification": "True", "docids": ["story"]},
    {"annotation_id": "2", "query": "who was grey ?", "classification": "False", "docids": ["story"]},
]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("pairs")
    bert_tokenizer(place / "bert").save_pretrained(place / "bert")
    classifier_of_pairs().save_pretrained(place / "bert")
    (place / "pairs.jsonl").write_text("\n".join(map(json.dumps, RECORDS)))
    (place / "eraser" / "docs").mkdir(parents=True)
    (place / "eraser" / "docs" / "story").write_text("the cat sat .\nthe dog was grey .")
    evidence = {"docid": "story", "start_token": 1, "end_token": 3, "text": "cat sat"}
    rows = [row | {"evidences": [[evidence]] if row["annotation_id"] == "1" else []} for row in QUERIES]
    (place / "eraser" / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return place


def test_pairs_in_lines(place, capsys, monkeypatch):
    monkeypatch.chdir(place)
    assert run(["explain", "bert", "lines", "--data", "pairs.jsonl", "--methods", "rollout", "--out", "out"]) == 0
    assert "1 of 2 examples are pairs of texts; relevant: the tokens that the data mark" in capsys.readouterr().out
    examples = pd.read_parquet("out/examples.parquet").set_index("id")
    assert examples["pair"].to_dict() == {"pair": "the cats sat .", "alone": None}
    tokenizer, model = bert_tokenizer(place / "other"), classifier_of_pairs()
    for record in RECORDS:
        with torch.no_grad():
            logits = model(**tokenizer(record["text"], record.get("pair"), return_tensors="pt")).logits
        label = ["False", "True"].index(record["label"])
        assert examples["right"][record["id"]] == pytest.approx(float(logits.softmax(-1)[0, label]), abs=1e-6)
    shown = Path("out/report.html").read_text()
    assert re.search(r"\[SEP\]</span><br>(<[^>]*>)?the", shown)
    assert run(["report", "out", "--out", "again.html"]) == 0


@pytest.mark.parametrize(("query", "first"), [(None, "query"), ("second", "document"), ("none", None)])
def test_queries_in_the_layout_of_eraser(query, first, place, capsys, monkeypatch):
    monkeypatch.chdir(place)
    options = [] if query is None else ["--option", f"query={query}"]
    arguments = ["explain", "bert", "eraser", "--data", "eraser", "--methods", "rollout", "--out", f"out-{query}"]
    assert run([*arguments, *options, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["pairs"] == (0 if first is None else 2)
    assert ("left out" if first is None else f"the first text is the {first}") in printed["relevant_tokens"]
    texts = pd.read_parquet(f"out-{query}/examples.parquet")["text"]
    assert (texts[0] == "who sat ?") == (first == "query")


def test_a_wrong_option_and_a_wrong_record_are_one_line(place, capsys, monkeypatch):
    monkeypatch.chdir(place)
    assert run(["explain", "bert", "eraser", "--data", "eraser", "--option", "query=third"]) == 2
    assert "query should be one of varying, first, second, none; got 'third'" in capsys.readouterr().err
    Path("wrong.jsonl").write_text('{"text": "a", "pair": ["b"]}')
    assert run(["explain", "bert", "lines", "--data", "wrong.jsonl"]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("qkov: record 1 of wrong.jsonl is not in the expected format: expected a text, got")
