import json

import pytest
from qkov.analyses.tasks import encode_task, load_task
from qkov.circuits import CallError, QkovError

from .task_texts import label, marked, texts


def people(*labels):
    return [{"label": label, "annotator_id": number, "target": ["None"]} for number, label in enumerate(labels)]


def post(name, labels, rationales, tokens):
    return {"post_id": name, "annotators": people(*labels), "rationales": rationales, "post_tokens": tokens}


POSTS = [
    # Two of three; the annotators mark different words, one of them none.
    post(
        "1_gab",
        ("hatespeech", "hatespeech", "offensive"),
        [[0, 1, 0, 1], [0, 1, 1, 0], [0, 0, 0, 0]],
        ["a", "grey", "cat's", "<b>nap</b>"],
    ),
    post("2_gab", ("normal", "normal", "normal"), [], ["good", "day", "🙂"]),
    post("3_twitter", ("hatespeech", "normal", "offensive"), [[1, 0], [0, 1]], ["who", "knows"]),
    post("4_twitter", ("offensive", "offensive", "normal"), [[1], [1]], ["rain"]),
    post("5_twitter", ("offensive", "offensive", "offensive"), [[1, 0, 0], [0, 1], [0, 1]], ["wet", "road"]),
    post("6_twitter", ("normal", "normal", "offensive"), [], []),
    post("7_gab", ("offensive", "offensive", "normal"), [[1], [0, 1, 1]], ["salt", "sea"]),
]
DIVISIONS = {"train": ["1_gab", "2_gab", "3_twitter"], "val": ["4_twitter"], "test": ["5_twitter", "9_gone", "1_gab"]}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "dataset.json").write_text(json.dumps({one["post_id"]: one for one in POSTS}))
    (tmp_path / "post_id_divisions.json").write_text(json.dumps(DIVISIONS))
    return tmp_path


def test_posts_have_the_label_of_the_majority_and_a_mask_an_annotator(folder):
    task = load_task("hatexplain", folder)
    assert task.classes == ("hatespeech", "normal", "offensive")
    assert [(example.id, task.classes[label(example)], example.text, marked(example)) for example in texts(task)] == [
        ("1_gab", "hatespeech", "a grey cat's <b>nap</b>", [["grey", "<b>nap</b>"], ["grey", "cat's"], []]),
        ("2_gab", "normal", "good day 🙂", []),
        ("4_twitter", "offensive", "rain", [["rain"], ["rain"]]),
        ("5_twitter", "offensive", "wet road", [["road"], ["road"]]),
        ("7_gab", "offensive", "salt sea", []),
    ]
    assert dict(task.left_out) == {
        "whose label is undecided": 1,
        "without words": 1,
        "rationales whose length differs from their post's, which stays": 3,
    }
    assert task.attention_bins == (0.0, 0.33, 0.66, 1.0)


def test_half_of_the_annotators_are_no_majority(tmp_path):
    posts = [post("1_gab", ("normal", "offensive"), [], ["a"]), post("2_gab", ("normal", "normal"), [], ["b"])]
    (tmp_path / "dataset.json").write_text(json.dumps({one["post_id"]: one for one in posts}))
    task = load_task("hatexplain", tmp_path)
    assert [example.id for example in texts(task)] == ["2_gab"]
    assert dict(task.left_out) == {"whose label is undecided": 1}


def test_splits_are_those_of_the_divisions(folder):
    assert [example.id for example in load_task("hatexplain", folder, split="train").examples] == ["1_gab", "2_gab"]
    test = load_task("hatexplain", folder / "dataset.json", split="test")
    assert [example.id for example in test.examples] == ["5_twitter", "1_gab"]
    assert dict(test.left_out)["of the split that are not among the posts"] == 1
    with pytest.raises(CallError, match="no split 'dev'; it has train, val, test"):
        load_task("hatexplain", folder, split="dev")
    (folder / "post_id_divisions.json").unlink()
    with pytest.raises(CallError, match=r"'test' needs post_id_divisions.json beside"):
        load_task("hatexplain", folder, split="test")


def test_rationales_average_over_annotators_who_marked_something(folder):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    task = encode_task(load_task("hatexplain", folder), PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    relevance = {}
    for example in task.in_tokens:
        relevance[example.id] = None if example.relevance is None else example.relevance.tolist()
    assert relevance == {
        "1_gab": [0.0, 1.0, 0.5, 0.5],
        "2_gab": None,
        "4_twitter": [1.0],
        "5_twitter": [0.0, 1.0],
        "7_gab": None,
    }


def as_rows():
    """What `datasets` gives: numbers for labels, and columns where the file has a list of objects."""
    numbers = {"hatespeech": 0, "normal": 1, "offensive": 2}
    for one in POSTS:
        annotators = one["annotators"]
        yield {
            "id": one["post_id"],
            "annotators": {
                "label": [numbers[annotator["label"]] for annotator in annotators],
                "annotator_id": [annotator["annotator_id"] for annotator in annotators],
            },
            "rationales": one["rationales"],
            "post_tokens": one["post_tokens"],
        }


def test_rows_that_datasets_reads_give_the_same(folder, tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    rows = tmp_path / "rows"
    rows.mkdir()
    datasets.Dataset.from_list(list(as_rows())).to_parquet(str(rows / "train.parquet"))
    expected = load_task("hatexplain", folder)
    assert load_task("hatexplain", rows, split="train") == expected
    assert load_task("hatexplain", rows) == expected
    with pytest.raises(QkovError, match=r'cannot load .*rows .*Unknown split "test"'):
        load_task("hatexplain", rows, split="test")


def test_a_hub_id_without_the_hub_is_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        QkovError, match="some/hatexplain@main is not an existing path, and datasets cannot load it"
    ) as caught:
        load_task("hatexplain", "some/hatexplain@main", split="train")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("data", ["missing.json", "./missing", "here/missing"])
def test_a_mistyped_path_is_not_taken_for_a_hub_id(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    with pytest.raises(CallError, match="does not exist"):
        load_task("hatexplain", data)


def test_files_that_are_not_as_said_are_refused(tmp_path):
    path = tmp_path / "dataset.json"
    for content, match in (
        ("[1]", "contains a list"),
        ('{"a": {"post_tokens": ["x"]}}', "no field 'annotators'"),
        (json.dumps({"a": post("a", ("good",) * 3, [], ["x"])}), "label 'good'; expected one of hatespeech"),
        (json.dumps({"a": post("a", ("normal",) * 3, [[2]], ["x"])}), r"post a of .* rationale \[2\]"),
        ('{"a": ', "cannot be read as JSON"),
    ):
        path.write_text(content)
        with pytest.raises(QkovError, match=match):
            load_task("hatexplain", tmp_path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(QkovError, match="cannot be read as UTF-8 text"):
        load_task("hatexplain", tmp_path)


def evidence(document, start, end):
    return {"docid": document, "start_token": start, "end_token": end, "start_sentence": -1, "end_sentence": -1}


ANNOTATIONS = [
    {
        "annotation_id": "1_gab",
        "classification": "toxic",
        "evidences": [[evidence("1_gab", 1, 2)], [evidence("1_gab", 3, 5), evidence("1_gab", 1, 2)]],
    },
    {"annotation_id": "2_gab", "classification": "normal", "evidences": [], "docids": None},
    {"annotation_id": "3_gab", "classification": "toxic", "evidences": [[evidence("2_gab", 0, 1)]]},
    {"annotation_id": "4_gab", "classification": "toxic", "evidences": [[evidence("2_gab", 2, 9)]]},
    {
        "annotation_id": "5_gab",
        "classification": "toxic",
        "evidences": [[evidence("1_gab", 0, 1), evidence("2_gab", 0, 1)]],
    },
]


@pytest.fixture
def eraser_folder(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "1_gab").write_text("a grey  cat\nnaps here .\n")
    (tmp_path / "docs" / "2_gab").write_text("good day 🙂")
    (tmp_path / "test.jsonl").write_text("\n".join(json.dumps(one) for one in ANNOTATIONS))
    (tmp_path / "val.jsonl").write_text(json.dumps(ANNOTATIONS[1]) + "\n")
    return tmp_path


@pytest.mark.parametrize("name", ["hatexplain", "eraser"])
def test_the_eraser_layout(name, eraser_folder):
    task = load_task(name, eraser_folder, split="test")
    assert task.name == name
    assert task.classes == ("normal", "toxic")
    assert [(example.id, example.label, example.text, marked(example)) for example in texts(task)] == [
        ("1_gab", 1, "a grey cat naps here .", [["grey", "naps", "here"]]),
        ("2_gab", 0, "good day 🙂", []),
        ("3_gab", 1, "good day 🙂", [["good"]]),
    ]
    assert dict(task.left_out) == {"whose evidence lies outside its document": 1, "with several documents": 1}
    assert (task.attention_bins == (0.0, 0.33, 0.66, 1.0)) == (name == "hatexplain")
    assert len(load_task(name, eraser_folder).examples) == 4


@pytest.mark.parametrize(("start", "end", "marked"), [(0, 2, "one two"), (1, 3, "two three"), (0, 3, "one two three")])
def test_evidence_may_reach_both_ends_of_its_document(start, end, marked, tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a").write_text("one  two\nthree")
    record = {"annotation_id": "a", "classification": "x", "evidences": [[evidence("a", start, end)]]}
    (tmp_path / "test.jsonl").write_text(json.dumps(record))
    (example,) = texts(load_task("eraser", tmp_path))
    (spans,) = example.relevant
    assert " ".join(example.text[first:last] for first, last in spans) == marked


@pytest.mark.parametrize(("start", "end"), [(-1, 2), (2, 4), (1, 1)])
def test_evidence_outside_its_document_is_left_out(start, end, tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a").write_text("one two three")
    record = {"annotation_id": "a", "classification": "x", "evidences": [[evidence("a", start, end)]]}
    (tmp_path / "test.jsonl").write_text(json.dumps(record))
    with pytest.raises(CallError, match="left out: 1 whose evidence lies outside its document"):
        load_task("eraser", tmp_path)


def test_documents_of_the_eraser_layout_stay_in_their_folder(eraser_folder):
    for name in ("../test.jsonl", "/etc/hostname", "3_gab"):
        (eraser_folder / "test.jsonl").write_text(
            json.dumps({"annotation_id": name, "classification": "x", "evidences": []})
        )
        with pytest.raises(
            QkovError, match=r"expected a file in docs/|does not exist, although an annotation names it"
        ):
            load_task("eraser", eraser_folder, split="test")


def test_a_folder_of_another_layout_is_refused(tmp_path):
    with pytest.raises(CallError, match="not in the ERASER layout"):
        load_task("eraser", tmp_path)
    (tmp_path / "docs").mkdir()
    with pytest.raises(CallError, match=r"no file ending in .jsonl; it has these: none"):
        load_task("eraser", tmp_path)
