"""Data sets of the tasks that are wrong: records, the layout of ERASER, HateXplain, SQuAD, tables and pairs."""

import gzip
import json
import random
from typing import Any

from .inputs import Input
from .mutations import as_json, mutated_bytes, mutated_table

_RECORDS = [
    {"tokens": ["a", "good", "film"], "relevant": [0, 1, 0], "label": "pos", "id": "1", "group": "x"},
    {"text": "a bad film", "relevant": [[2, 5]], "label": "neg", "continuations": [" yes", " no"]},
    {"tokens": [5, 6, 7], "relevant": [[0, 0, 1], [1, 0, 0]], "label": 1, "continuations": [[1], [2, 3]]},
]
_EVIDENCE = {"docid": "d1", "start_token": 0, "end_token": 2, "text": "a good"}
_ERASER = [
    {"annotation_id": "d1", "classification": "POS", "evidences": [[_EVIDENCE]], "docids": ["d1"], "query": "?"},
    {"annotation_id": "d2", "classification": "NEG", "evidences": [], "docids": None},
]
_HATEXPLAIN = {
    name: {
        "post_id": name,
        "post_tokens": ["you", "are", "nice"],
        "annotators": [{"label": label, "annotator_id": number, "target": []} for number in range(3)],
        "rationales": [[0, 1, 1], [0, 0, 1]],
    }
    for name, label in (("1_twitter", "normal"), ("2_gab", "offensive"))
}
_SQUAD = {
    "version": "v2.0",
    "data": [
        {
            "title": "A",
            "paragraphs": [
                {
                    "context": "Paris is the capital of France.",
                    "qas": [
                        {
                            "id": "1",
                            "question": "What is the capital?",
                            "is_impossible": False,
                            "answers": [{"text": "Paris", "answer_start": 0}, {"text": "France", "answer_start": 24}],
                        },
                        {"id": "2", "question": "Why?", "is_impossible": True, "answers": []},
                    ],
                }
            ],
        }
    ],
}
_PAIRS = [
    {
        "clean_prefix": "The key near the doors",
        "patch_prefix": "The keys near the doors",
        "clean_answer": " is",
        "patch_answer": " are",
        "case": "singular",
    }
]
_TABLE = [
    ["orig_sentence", "subj", "verb", "verb_pos", "subj_index", "verb_index", "n_diff_intervening", "pos_sentence"],
    ["the key is here", "key", "is", "VBZ", "2", "3", "0", "DT NN VBZ RB"],
    ["the keys near it are here", "keys", "are", "VBP", "2", "5", "1", "DT NNS IN PRP VBP RB"],
]


def whole_data_sets() -> list[Input]:
    """Return an undamaged data set of each task."""
    lines = [json.dumps(record).encode() for record in _RECORDS[:2]]
    eraser = b"\n".join(json.dumps(row).encode() for row in _ERASER)
    table = "\n".join("\t".join(line) for line in _TABLE).encode()
    return [
        Input("task lines", {"a.jsonl": b"\n".join(lines)}),
        Input("task eraser", {"train.jsonl": eraser, "docs/d1": b"a good film .", "docs/d2": b"a bad one"}),
        Input("task hatexplain", {"dataset.json": json.dumps(_HATEXPLAIN).encode()}),
        Input("task squad", {"dev-v2.0.json": json.dumps(_SQUAD).encode()}),
        Input("task agreement", {"pairs.jsonl": json.dumps(_PAIRS[0]).encode()}, "pairs.jsonl"),
        Input("task agreement", {"a.tsv.gz": gzip.compress(table)}, "a.tsv.gz"),
    ]


def data_set_input(order: random.Random) -> Input:
    """A data set of one of the tasks, wrong in a record, in its structure or in its bytes."""
    return order.choice((_lines, _eraser, _hatexplain, _squad, _pairs, _table))(order)


def _lines(order: random.Random) -> Input:
    records = mutated_table(_RECORDS[: order.choice((1, 2, 3))] if order.random() < 0.7 else _RECORDS, order)
    name = order.choice(("a.jsonl", "a.json"))
    content = _records(records, order) if name == "a.jsonl" else as_json(records, order)
    return Input("task lines", {name: content}, order.choice(("", name)))


def _eraser(order: random.Random) -> Input:
    rows = mutated_table(_ERASER, order)
    files = {"train.jsonl": _records(rows, order), "docs/d1": b"a good film .", "docs/d2": b"a bad one"}
    if order.random() < 0.2:
        name = order.choice(list(files))
        files[name] = mutated_bytes(files[name], order)
    return Input(order.choice(("task eraser", "task hatexplain")), files)


def _hatexplain(order: random.Random) -> Input:
    files = {"dataset.json": as_json(mutated_table(_HATEXPLAIN, order), order)}
    if order.random() < 0.2:
        divisions = mutated_table({"train": ["1_twitter"], "test": ["2_gab"]}, order)
        files["post_id_divisions.json"] = as_json(divisions, order)
    return Input("task hatexplain", files)


def _squad(order: random.Random) -> Input:
    return Input("task squad", {"dev-v2.0.json": as_json(mutated_table(_SQUAD, order), order)})


def _pairs(order: random.Random) -> Input:
    return Input("task agreement", {"pairs.jsonl": _records(mutated_table(_PAIRS, order), order)}, "pairs.jsonl")


def _table(order: random.Random) -> Input:
    rows = mutated_table(_TABLE, order)
    lines = rows if isinstance(rows, list) else [rows]
    text = "\n".join("\t".join(map(str, line)) if isinstance(line, list) else str(line) for line in lines)
    content = text.encode("utf-8", "surrogatepass")
    if order.random() < 0.1:
        content += b"\t" + b"x" * 200_000
    if order.random() < 0.4:
        content = mutated_bytes(content, order)
    name = order.choice(("a.tsv", "a.tsv.gz"))
    if name.endswith(".gz"):
        content = gzip.compress(content, mtime=0)
        if order.random() < 0.5:
            content = mutated_bytes(content, order)
    return Input("task agreement", {name: content}, name)


def _records(records: Any, order: random.Random) -> bytes:
    if not isinstance(records, list):
        return as_json(records, order)
    lines = [as_json(record, order) for record in records]
    if order.random() < 0.1:
        lines.insert(order.randrange(len(lines) + 1), json.dumps(records).encode())
    return order.choice((b"\n", b"\n", b"\r\n", b"\n\n", b" ")).join(lines)
