"""Pairs of texts in the data: their words, marks and evidences stay with their own text."""

import json
from typing import Any

import numpy as np
import pytest
import transformers
from qkov.analyses.tasks import Example, TextExample, encode, load_task
from qkov.analyses.tasks.words import marked_spans, text_of_words
from qkov.circuits import CallError, QkovError
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from .pairs import bert_tokenizer
from .task_texts import texts

FIRST = ["who", "is", "the", "grey", "cat", "?"]
SECOND = ["the", "dogs", "was", "not", "true", ".", "a", "cat", "sat", "on", "the", "mats", "."]


@pytest.fixture(scope="module")
def word_piece(tmp_path_factory):
    return bert_tokenizer(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def byte_level():
    """Pairs as RoBERTa has them: <s> a </s></s> b </s>, and no token types."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<s>", "</s>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, special_tokens=special)
    tokenizer.train_from_iterator([" ".join(FIRST), " ".join(SECOND)], trainer)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 1), ("<s>", 0), trim_offsets=True)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("fixture", ["word_piece", "byte_level"])
def test_marked_words_of_both_texts_are_those_of_the_tokenizer(fixture, request):
    tokenizer = request.getfixturevalue(fixture)
    generator = np.random.default_rng(0)
    for _ in range(20):
        masks = [generator.integers(2, size=len(words)).tolist() for words in (FIRST, SECOND)]
        parts = [text_of_words(words) for words in (FIRST, SECOND)]
        (text, spans), (pair, pair_spans) = parts
        example = TextExample(
            text,
            relevant=(marked_spans(spans, masks[0]),),
            pair=pair,
            pair_relevant=(marked_spans(pair_spans, masks[1]),),
        )
        (encoded,) = encode([example], tokenizer)
        # Byte-level tokens of a word alone have no space in front, which the model would see.
        split = [
            words if fixture == "word_piece" else [words[0], *(f" {word}" for word in words[1:])]
            for words in (FIRST, SECOND)
        ]
        reference = tokenizer(*split, is_split_into_words=True)
        assert list(encoded.tokens) == reference["input_ids"]
        assert list(encoded.token_types) == reference.get("token_type_ids", [])
        which, words = reference.sequence_ids(), reference.word_ids()
        wanted = [number is not None and bool(masks[text][number]) for text, number in zip(which, words, strict=True)]
        assert list(encoded.relevant[0]) == wanted
        assert list(encoded.in_pair) == [text == 1 for text in which]
        assert list(encoded.special) == [text is None for text in which]


@pytest.mark.parametrize("fixture", ["word_piece", "byte_level"])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(("first", "second"), [(FIRST, SECOND), (SECOND, FIRST), (FIRST, FIRST), (["cat"], SECOND)])
def test_long_pairs_are_cut_as_transformers_cuts_them(fixture, side, first, second, request):
    tokenizer = request.getfixturevalue(fixture)
    text, pair = " ".join(first), " ".join(second)
    tokenizer.truncation_side = side
    whole = len(tokenizer(text, pair)["input_ids"])
    for context in range(6, whole + 2):
        wanted = tokenizer(text, pair, truncation="longest_first", max_length=context)
        everywhere = (((0, len(text)),),)
        example = TextExample(text, relevant=everywhere, pair=pair, pair_relevant=(((0, len(pair)),),))
        (encoded,) = encode([example], tokenizer, context=context, cut_from=side)
        assert list(encoded.tokens) == wanted["input_ids"]
        assert list(encoded.token_types) == wanted.get("token_type_ids", [])
        assert encoded.cut == max(whole - context, 0)
        assert list(encoded.in_pair) == [which == 1 for which in wanted.sequence_ids()]
    tokenizer.truncation_side = "right"


def test_each_annotator_s_marks_in_the_two_texts_are_one_mask(word_piece):
    pair = "the dog"
    example = TextExample("a cat", relevant=(((0, 1),), ()), pair=pair, pair_relevant=(((4, 7),), ((0, 3),)))
    (encoded,) = encode([example], word_piece)
    assert encoded.relevant == (
        (False, True, False, False, False, True, False),
        (False, False, False, False, True, False, False),
    )
    (alone,) = encode([TextExample("a cat", pair=pair, pair_relevant=(((4, 7),),))], word_piece)
    assert alone.relevant == ((False,) * 5 + (True, False),)
    (first,) = encode([TextExample("a cat", relevant=(((2, 5),),), pair=pair)], word_piece)
    assert first.relevant == ((False, False, True) + (False,) * 4,)
    (empty,) = encode([TextExample("a cat", pair="", pair_relevant=((),))], word_piece)
    # In a call for one pair alone, transformers takes an empty second text for none.
    assert list(empty.tokens) == word_piece(["a cat"], [""])["input_ids"][0]
    assert list(empty.token_types) == word_piece(["a cat"], [""])["token_type_ids"][0]


def test_pairs_and_single_texts_keep_their_order(word_piece):
    examples = [
        TextExample("a cat"),
        TextExample("a dog", pair="the mat"),
        TextExample("the cat"),
        TextExample("a", pair=""),
    ]
    encoded = encode(examples, word_piece)
    assert [example.text for example in encoded] == ["a cat", "a dog", "the cat", "a"]
    assert [example.pair for example in encoded] == [None, "the mat", None, ""]
    for example, tokens in zip(examples, encoded, strict=True):
        own = word_piece([example.text], None if example.pair is None else [example.pair])
        assert list(tokens.tokens) == own["input_ids"][0]
    assert encode(examples[1:2], word_piece, token_types=False)[0].token_types == ()


def test_kept_tokens_keep_their_text_and_type(word_piece):
    (encoded,) = encode([TextExample("a cat", pair="the dog")], word_piece)
    kept = encoded.keep([0, 2, 4, 5])
    assert kept.token_types == (0, 0, 1, 1)
    assert kept.in_pair == (False, False, True, True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"relevant": (((0, 1),),), "pair": "b", "pair_relevant": ((), ())}, "of 1 annotators in its text and of 2"),
        ({"pair_relevant": (((0, 1),),)}, "marks in a second text and no second text"),
        (
            {"pair": "b", "pair_relevant": (((0, 2),),)},
            "span 0 to 2 of example x does not lie within its second text of 1",
        ),
        ({"pair": "b", "relevant": (((1, 9),),)}, "span 1 to 9 of example x does not lie within its text of 1"),
    ],
)
def test_marks_that_do_not_fit_the_texts_are_refused(options, message):
    with pytest.raises(CallError, match=message):
        TextExample("a", id="x", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"token_types": (0,)}, "token_types of example x has length 1; expected one entry for each of its 2 tokens"),
        ({"in_pair": (True,) * 3}, "in_pair of example x has length 3"),
        ({"token_types": (0, -1)}, "a token type of example x is -1; expected numbers from 0"),
    ],
)
def test_token_types_that_do_not_fit_the_tokens_are_refused(options, message):
    with pytest.raises(CallError, match=message):
        Example((1, 2), id="x", **options)


@pytest.fixture
def written(tmp_path):
    def write(*records: Any) -> Any:
        path = tmp_path / "mine.jsonl"
        path.write_text("\n".join(json.dumps(record) for record in records), encoding="utf-8")
        return path

    return write


def test_records_of_pairs(written):
    path = written(
        {"text": "who sat ?", "pair": "the cat sat .", "relevant": [[0, 3]], "pair_relevant": [[4, 7]], "label": "yes"},
        {"text": "who sat ?", "pair": "the cat .", "pair_relevant": [[[4, 7]], []], "label": "no"},
        {"tokens": ["who", "sat"], "pair": ["the", "cat"], "relevant": [1, 0], "pair_relevant": [0, 1], "label": "no"},
        {"tokens": ["who"], "pair": ["the", "cat"], "pair_relevant": [[0, 1], [1, 1]]},
        {"tokens": [5, 6, 7], "token_types": [0, 0, 1], "relevant": [0, 0, 1]},
        {"text": "alone", "pair": None, "pair_relevant": None},
    )
    assert load_task("lines", path).examples == (
        TextExample("who sat ?", 1, (((0, 3),),), id="1", pair="the cat sat .", pair_relevant=(((4, 7),),)),
        TextExample("who sat ?", 0, id="2", pair="the cat .", pair_relevant=(((4, 7),), ())),
        TextExample("who sat", 0, (((0, 3),),), id="3", pair="the cat", pair_relevant=(((4, 7),),)),
        TextExample("who", id="4", pair="the cat", pair_relevant=(((4, 7),), ((0, 3), (4, 7)))),
        Example((5, 6, 7), None, ((False, False, True),), id="5", token_types=(0, 0, 1)),
        TextExample("alone", id="6"),
    )


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "a", "pair": ["b"]}, r"expected a text, got .*'b'"),
        ({"tokens": ["a"], "pair": "b"}, "expected a list of words, got 'b'"),
        ({"tokens": [4, 5], "pair": [6]}, "its tokens are ids, which are the whole input"),
        ({"tokens": [4, 5], "pair_relevant": [1]}, "its tokens are ids, which are the whole input"),
        ({"tokens": [4, 5], "token_types": [0]}, "token_types of example 1 has length 1"),
        ({"tokens": [4, 5], "token_types": [0, -1]}, "a token type of example 1 is -1"),
        ({"text": "a", "token_types": [0]}, "it has token_types and a text"),
        ({"text": "a", "pair_relevant": [[0, 1]]}, "it has pair_relevant and no pair"),
        ({"text": "a", "pair": "b", "pair_relevant": [[0, 5]]}, "does not lie within its second text of 1"),
        ({"tokens": ["a"], "pair": ["b", "c"], "pair_relevant": [1]}, "one entry for each of the 2 words; got 1"),
    ],
)
def test_records_of_pairs_that_are_not_as_described_are_refused_by_their_number(record, message, written):
    with pytest.raises(QkovError, match=rf"record 1 of .*: .*{message}") as caught:
        load_task("lines", written(record))
    assert "\n" not in str(caught.value)


def evidence(document: str, start: int, end: int, **more: Any) -> dict[str, Any]:
    return {"docid": document, "start_token": start, "end_token": end, **more}


def layout(folder: Any, documents: dict[str, str], *rows: dict[str, Any]) -> Any:
    (folder / "docs").mkdir(exist_ok=True)
    for name, text in documents.items():
        (folder / "docs" / name).write_text(text, encoding="utf-8", newline="")
    lines = [
        json.dumps({"annotation_id": str(number), "classification": "True"} | row) for number, row in enumerate(rows)
    ]
    (folder / "test.jsonl").write_text("\n".join(lines))
    return folder


STORY = {"story": "the\u00a0cat sat on the mat .\nthe dog was grey ."}


def questions(folder: Any) -> Any:
    """Two questions about one passage, in the manner of MultiRC."""
    return layout(
        folder,
        STORY,
        {"query": "who sat ? || the cat", "evidences": [[evidence("story", 0, 2, text="the\u00a0cat sat")]]},
        {
            "query": "who is  grey ?",
            "classification": "False",
            "evidences": [[evidence("story", 7, 9, text="dog was")]],
        },
    )


def in_texts(example: TextExample) -> list[list[str]]:
    parts = ((example.text, example.relevant), (example.pair or "", example.pair_relevant))
    return [[text[start:end] for spans in annotators for start, end in spans] for text, annotators in parts]


@pytest.mark.parametrize(("query", "place"), [("varying", 0), ("first", 0), ("second", 1)])
def test_a_query_and_its_document_are_a_pair(query, place, tmp_path):
    task = load_task("eraser", questions(tmp_path), query=query)
    passage = "the\u00a0cat sat on the mat . the dog was grey ."
    for example, asked, marked in zip(
        texts(task), ("who sat ? || the cat", "who is  grey ?"), (["the\u00a0cat", "sat"], ["dog", "was"]), strict=True
    ):
        assert [example.text, example.pair] == ([asked, passage] if place == 0 else [passage, asked])
        assert in_texts(example) == ([[], marked] if place == 0 else [marked, []])
    assert [example.label for example in texts(task)] == [1, 0]
    first, second = ("query", "document") if place == 0 else ("document", "query")
    wanted = f"the tokens of the evidences in the document (the first text is the {first}, the second the {second})"
    assert task.relevant == wanted


def test_queries_can_be_left_out(tmp_path):
    task = load_task("eraser", questions(tmp_path), query="none")
    assert all(example.pair is None and not example.pair_relevant for example in texts(task))
    assert [in_texts(example)[0] for example in texts(task)] == [["the\u00a0cat", "sat"], ["dog", "was"]]
    assert task.relevant == "the tokens of the evidences (the query is left out)"


def test_a_query_that_all_annotations_share_is_left_out_and_said(tmp_path):
    rows = [{"query": "What is the class?", "evidences": [[evidence("story", 1, 2)]]} for _ in range(2)]
    folder = layout(tmp_path, STORY, *rows)
    task = load_task("eraser", folder)
    assert all(example.pair is None for example in texts(task))
    shared = "(the query 'What is the class?', the same in all annotations, is left out)"
    assert task.relevant == f"the tokens of the evidences {shared}"
    assert all(example.pair is None for example in texts(load_task("hatexplain", folder)))
    assert {example.text for example in texts(load_task("eraser", folder, query="first"))} == {"What is the class?"}
    (alone,) = texts(load_task("eraser", layout(tmp_path, STORY, rows[0])))
    assert alone.text == "What is the class?"
    some, other = texts(load_task("eraser", layout(tmp_path, STORY, rows[0], {"docids": ["story"], "evidences": []})))
    assert (some.text, other.pair) == ("What is the class?", None)


@pytest.mark.parametrize("listed", [["7_premise", "7_hypothesis"], ["7_hypothesis", "7_premise"], None])
def test_a_premise_and_a_hypothesis_are_a_pair_in_that_order(listed, tmp_path):
    documents = {"7_premise": "a cat sat on a mat .", "7_hypothesis": "the dog sat ."}
    marks = [evidence("7_hypothesis", 1, 2, text="dog"), evidence("7_premise", 1, 2, text="cat")]
    folder = layout(tmp_path, documents, {"docids": listed, "query": None, "evidences": [marks[:1], marks[1:]]})
    (example,) = texts(load_task("eraser", folder))
    assert (example.text, example.pair) == ("a cat sat on a mat .", "the dog sat .")
    assert in_texts(example) == [["cat"], ["dog"]]


def test_two_documents_are_in_the_order_that_the_annotation_lists(tmp_path):
    documents = {"claim": "the cat sat", "abstract": "a dog is a dog"}
    row = {"docids": ["claim", "abstract"], "evidences": [[evidence("abstract", 0, 2)]]}
    (example,) = texts(load_task("eraser", layout(tmp_path, documents, row)))
    assert (example.text, example.pair) == ("the cat sat", "a dog is a dog")
    assert in_texts(example) == [[], ["a", "dog"]]
    row["docids"] = ["abstract", "claim"]
    (example,) = texts(load_task("eraser", layout(tmp_path, documents, row)))
    assert in_texts(example) == [["a", "dog"], []]
    row["evidences"] = []
    (example,) = texts(load_task("eraser", layout(tmp_path, documents, row)))
    assert example.relevant == example.pair_relevant == ()


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"evidences": [[evidence("a", 0, 1), evidence("b", 0, 1)]]}, "with several documents"),
        ({"docids": ["a", "b", "c"], "evidences": []}, "with several documents"),
        ({"docids": ["a", "b"], "query": "who ?", "evidences": []}, "with a query and several documents"),
        ({"docids": ["a", "b"], "evidences": [[evidence("b", 0, 5)]]}, "whose evidence lies outside its document"),
        (
            {"query": "who ?", "evidences": [[evidence("a", 0, 1, text="dog")]]},
            "whose evidence has another text than its document at that place",
        ),
        ({"query": "who ?", "docids": ["empty"], "evidences": []}, "without words"),
    ],
)
def test_annotations_that_are_no_pair_are_left_out_and_counted(row, reason, tmp_path):
    documents = {"a": "cat", "b": "dog", "c": "mat", "empty": " \n"}
    folder = layout(tmp_path, documents, row, {"docids": ["a"], "evidences": [[evidence("a", 0, 1)]]})
    task = load_task("eraser", folder)
    assert len(task.examples) == 1
    assert task.left_out == ((reason, 1),)


def test_wrong_queries_are_refused_in_one_line(tmp_path):
    folder = questions(tmp_path)
    with pytest.raises(CallError, match="query should be one of varying, first, second, none; got 'third'"):
        load_task("eraser", folder, query="third")
    with pytest.raises(QkovError, match=r"an annotation of .* has the query '\[1, 2\]'; expected a text or null"):
        load_task("eraser", layout(tmp_path, STORY, {"query": [1, 2], "evidences": []}))
