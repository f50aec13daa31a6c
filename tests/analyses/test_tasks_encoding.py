import numpy as np
import pytest
from qkov.analyses.tasks import Example, Task, TextExample, encode, encode_task
from qkov.analyses.tasks.words import marked_spans, text_of_words
from qkov.circuits import CallError
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, CanineTokenizer, PreTrainedTokenizerFast

CORPUS = ["the keys to the cabinets are near the door", "I don't like the café", "a key is by the doors and the keys"]
AWKWARD = (
    "I don't  like the keys",
    "hi 👩‍👩‍👧 there 🙂x",
    "cafe\u0301 naïve Café",
    "日本語 の テスト",
    "<b>keys</b> &amp; the <br/>door",
    "  two in front\n\tand  behind  ",
)


@pytest.fixture(scope="module")
def byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture(scope="module")
def word_piece():
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "key", "##s", "don", "'", "t", "cafe", "日", "本"]
    words += ["are", "is", "near", "door", "like", "i", "<", ">", "b", "/"]
    tokenizer = Tokenizer(models.WordPiece({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, mask_token="[MASK]", cls_token="[CLS]", sep_token="[SEP]", unk_token="[UNK]"
    )


@pytest.fixture(scope="module")
def unigram():
    pieces = ["<unk>", "▁the", "▁key", "s", "▁", "▁are", "▁is", "▁caf", "é", "fi", "▁fi", "ne"]
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


@pytest.fixture(scope="module")
def published_word_pieces(minilm):
    return AutoTokenizer.from_pretrained(minilm)


@pytest.fixture(scope="module")
def published_bytes(smollm2_tokeniser):
    return AutoTokenizer.from_pretrained(smollm2_tokeniser)


def marked(text, *parts):
    return TextExample(text=text, relevant=(tuple((text.index(part), text.index(part) + len(part)) for part in parts),))


def relevant_tokens(example, tokenizer):
    mask = example.relevant[0]
    names = tokenizer.convert_ids_to_tokens(list(example.tokens))
    return [name for name, is_relevant in zip(names, mask, strict=True) if is_relevant]


def by_bytes(tokenizer, example, spans):
    """Byte-level tokens stand for the text's bytes one after another: which hold a marked character, spaces aside."""
    owner = [place for place, character in enumerate(example.text) for _ in character.encode()]
    inside = {place for start, end in spans for place in range(start, end)}
    expected, at = [], 0
    for token in tokenizer.convert_ids_to_tokens(list(example.tokens)):
        held = owner[at : at + len(token)]
        at += len(token)
        solid = [place for place in held if not example.text[place].isspace()]
        expected.append(any(place in inside for place in solid or held))
    assert at == len(owner)
    return tuple(expected)


def random_spans(text, generator):
    ends = np.sort(generator.integers(len(text) + 1, size=4)).tolist()
    return (ends[0], ends[1]), (ends[2], ends[3])


def test_byte_level_tokens_are_relevant_as_their_bytes_are(byte_level):
    generator = np.random.default_rng(0)
    for text in AWKWARD:
        for _ in range(20):
            spans = random_spans(text, generator)
            (example,) = encode([TextExample(text=text, relevant=(spans,))], byte_level)
            assert example.relevant[0] == by_bytes(byte_level, example, spans)


def test_real_byte_level_tokens_are_relevant_as_their_bytes_are(published_bytes):
    generator = np.random.default_rng(1)
    for text in AWKWARD:
        for _ in range(20):
            spans = random_spans(text, generator)
            (example,) = encode([TextExample(text=text, relevant=(spans,))], published_bytes)
            assert example.relevant[0] == by_bytes(published_bytes, example, spans)


def test_one_emoji_of_several_tokens_is_relevant_in_all_of_them(byte_level):
    (example,) = encode([marked("hi 🙂x", "🙂")], byte_level)
    assert sum(example.relevant[0]) == 4
    assert "".join(relevant_tokens(example, byte_level)) == "ðŁĻĤ"


def test_a_marked_space_does_not_make_the_next_word_relevant(byte_level):
    text = "the keys to the cabinets"
    for span in ((0, 4), (0, 3)):
        (example,) = encode([TextExample(text=text, relevant=((span,),))], byte_level)
        assert "".join(relevant_tokens(example, byte_level)) == "the"


def test_word_pieces_follow_their_word_through_lower_case_and_accents(word_piece):
    text = "The KEYS don't  like Café cafe\u0301 日本 <b>"
    for part, expected in (
        ("KEYS", ["key", "##s"]),
        ("don't", ["don", "'", "t"]),
        ("'", ["'"]),
        ("Café", ["cafe"]),
        ("cafe\u0301", ["cafe"]),
        ("本", ["本"]),
        ("<b>", ["<", "b", ">"]),
    ):
        (example,) = encode([marked(text, part)], word_piece)
        assert relevant_tokens(example, word_piece) == expected


def test_pieces_of_a_unigram_model_follow_their_characters(unigram):
    for text, part, expected in (
        ("the keys are", "keys", ["▁key", "s"]),
        ("the  keys", "keys", ["▁key", "s"]),
        ("the café", "é", ["é"]),
        # One character that becomes two.
        ("the ﬁne", "ﬁne", ["▁fi", "ne"]),
    ):
        (example,) = encode([marked(text, part)], unigram)
        assert relevant_tokens(example, unigram) == expected


@pytest.mark.parametrize("fixture", ["published_word_pieces", "published_bytes"])
def test_real_tokens_are_relevant_as_transformers_gives_them_to_words(fixture, request):
    tokenizer = request.getfixturevalue(fixture)
    sentence = "I do n't think that the Café 's owner 🙂 likes naïve <b>tags</b> or 日本語 unbelievably much"
    words = sentence.split()
    generator = np.random.default_rng(2)
    for _ in range(20):
        mask = generator.integers(2, size=len(words)).tolist()
        text, spans = text_of_words(words)
        (example,) = encode([TextExample(text=text, relevant=(marked_spans(spans, mask),))], tokenizer)
        # Byte-level tokens of a word alone have no space in front, which the model would see.
        split = words if fixture == "published_word_pieces" else [words[0], *(f" {word}" for word in words[1:])]
        reference = tokenizer(split, is_split_into_words=True)
        assert list(example.tokens) == reference["input_ids"]
        expected = [word is not None and bool(mask[word]) for word in reference.word_ids()]
        assert list(example.relevant[0]) == expected


class Dictated:
    """A tokeniser that gives the spans it was told."""

    is_fast = True

    def __init__(self, spans):
        self.spans = spans

    def __call__(self, texts, **_):
        return {
            "input_ids": [list(range(len(self.spans)))] * len(texts),
            "offset_mapping": [self.spans] * len(texts),
            "special_tokens_mask": [[0] * len(self.spans)] * len(texts),
        }


def test_tokens_without_width_are_never_relevant_and_spaces_only_where_they_are_marked():
    spans = [(0, 0), (0, 1), (1, 1), (1, 2), (2, 4), (4, 4)]
    (example,) = encode([TextExample(text="a  b", relevant=(((0, 4),), ((0, 1), (3, 4)), ((1, 2),)))], Dictated(spans))
    assert example.relevant == (
        (False, True, False, True, True, False),
        (False, True, False, False, True, False),
        (False, False, False, True, False, False),
    )


def test_words_are_joined_exactly():
    words = ["do", "n't", "", "🙂", "e\u0301"]
    text, spans = text_of_words(words)
    assert text == " ".join(words)
    assert [text[start:end] for start, end in spans] == words
    assert [text[start:end] for start, end in marked_spans(spans, [0, 1, 0, 1, 0])] == ["n't", "🙂"]


def test_masks_over_words_must_fit():
    with pytest.raises(CallError, match="the 2 words; got 3"):
        marked_spans([(0, 1), (2, 3)], [1, 0, 0])
    with pytest.raises(CallError, match="0s and 1s; got 2"):
        marked_spans([(0, 1)], [2])


def test_the_example_keeps_what_the_text_had(word_piece):
    text = TextExample(text="the key", label=3, relevant=(((0, 3),), ()), id="seven", group="two")
    (example,) = encode([text], word_piece)
    assert example.tokens == (2, 5, 6, 3)
    assert example.special == (True, False, False, True)
    assert example.relevant == ((False, True, False, False), (False,) * 4)
    assert (example.label, example.id, example.group, example.text) == (3, "seven", "two", "the key")
    assert example.spans == ((0, 0), (0, 3), (4, 7), (0, 0))
    assert example.cut == 0


def test_a_token_of_the_text_that_looks_special_is_none(word_piece):
    (example,) = encode([TextExample(text="the [SEP] key")], word_piece)
    assert example.tokens == (2, 5, 3, 6, 3)
    assert example.special == (True, False, False, False, True)


@pytest.mark.parametrize(
    ("side", "tokens", "cut"), [("right", (2, 5, 6, 3), 2), ("left", (2, 7, 19, 3), 1), (None, (2, 5, 6, 3), 2)]
)
def test_truncation_through_a_rationale_counts_what_is_lost(word_piece, side, tokens, cut):
    # Of the tokens the, key, ##s and i all but the first are relevant, to one annotator or the other.
    text = TextExample(text="the keys i", relevant=(((4, 8),), ((9, 10), (4, 8))))
    assert encode([text], word_piece)[0].tokens == (2, 5, 6, 7, 19, 3)
    (example,) = encode([text], word_piece, context=4, cut_from=side)
    assert example.tokens == tokens
    assert example.special == (True, False, False, True)
    assert example.cut == cut


def test_a_prompt_is_cut_from_the_left_and_leaves_room_for_its_continuation(byte_level):
    text = TextExample(text="x" * 50 + " the key", label=0, continuations=(" qqq",))
    (whole,) = encode([text], byte_level)
    (cut,) = encode([text], byte_level, context=20)
    assert cut.continuations == whole.continuations
    length = len(cut.continuations[0])
    assert length > 1
    assert cut.tokens == whole.tokens[-(20 - (length - 1)) :]
    assert encode([text], byte_level, context=20, cut_from="right")[0].tokens == whole.tokens[: 20 - (length - 1)]


def test_a_context_without_room_is_refused(word_piece):
    with pytest.raises(CallError, match="expected room for at least 3"):
        encode([TextExample(text="the key")], word_piece, context=2)


@pytest.mark.parametrize("fixture", ["byte_level", "word_piece", "unigram", "published_bytes", "published_word_pieces"])
def test_text_and_continuation_together_are_the_tokens_of_the_joined_text(fixture, request):
    tokenizer = request.getfixturevalue(fixture)
    text = TextExample(text="the keys", label=0, continuations=(" are", " is"))
    (example,) = encode([text], tokenizer)
    body = [token for token, special in zip(example.tokens, example.special, strict=True) if not special]
    for written, continuation in zip(text.continuations, example.continuations, strict=True):
        joined = tokenizer(text.text + written, add_special_tokens=False)["input_ids"]
        assert body + list(continuation) == joined
        assert continuation


def test_a_continuation_inside_a_token_is_refused(word_piece, unigram):
    text = TextExample(text="the key", label=0, continuations=("s",), id="k")
    # Word pieces allow it, for "key ##s" begins with "key".
    assert encode([text], word_piece)[0].continuations == ((7,),)
    inside = TextExample(text="the k", label=0, continuations=("ey",), id="k")
    # More tokens than the text has, whose last one is no longer there.
    longer = TextExample(text="the k", label=0, continuations=("ey are",))
    with pytest.raises(CallError, match="does not begin at a token boundary"):
        encode([longer], word_piece)
    with pytest.raises(CallError, match="example k cannot be encoded"):
        encode([inside], unigram)
    task = encode_task(Task(name="t", examples=(inside, text), relevant="none"), unigram)
    assert [example.id for example in task.examples] == ["k"]
    assert [number for _, number in task.left_out] == [1]


def test_the_mask_token_stands_behind_the_text_and_is_special(word_piece):
    text = TextExample(text="the keys", label=0, continuations=(" are", " is"), relevant=(((4, 8),),))
    (example,) = encode([text], word_piece, mask_at_end=True)
    assert example.tokens == (2, 5, 6, 7, 4, 3)
    assert example.special == (True, False, False, False, True, True)
    assert example.relevant == ((False, False, True, True, False, False),)
    assert example.continuations == ((14,), (15,))
    cut = encode([text], word_piece, mask_at_end=True, context=4)[0]
    assert cut.tokens == (2, 7, 4, 3)
    assert cut.cut == 1
    with pytest.raises(CallError, match="several tokens"):
        encode([TextExample(text="the", continuations=(" keys",))], word_piece, mask_at_end=True)


def test_mask_at_end_needs_a_mask_token(byte_level):
    with pytest.raises(CallError, match="no mask token"):
        encode([TextExample(text="the")], byte_level, mask_at_end=True)


def test_the_next_token_is_the_first_one_of_the_right_continuation(byte_level):
    text = TextExample(text="the keys", label=1, continuations=(" are", " near"))
    (whole,) = encode([text], byte_level)
    (example,) = encode([text], byte_level, next_token=True)
    assert example.label == whole.continuations[1][0]
    assert example.tokens == whole.tokens
    assert example.continuations == ()
    with pytest.raises(CallError, match="without a right continuation"):
        encode([TextExample(text="the keys")], byte_level, next_token=True)


def test_a_slow_tokeniser_is_refused():
    with pytest.raises(CallError, match=r"CanineTokenizer gives no character offsets.*fast"):
        encode([TextExample(text="the")], CanineTokenizer())


def test_texts_without_tokens_are_left_out_and_counted(word_piece):
    task = Task(name="t", examples=(TextExample(text=" "), TextExample(text="the")), relevant="none", classes=("a",))
    made = encode_task(task, word_piece)
    assert [example.tokens for example in made.in_tokens] == [(2, 5, 3)]
    with pytest.raises(CallError, match="2 of 2 examples of t are texts; expected tokens"):
        _ = task.in_tokens
    assert made.left_out == (("without tokens", 1),)
    assert made.classes == ("a",)
    with pytest.raises(CallError, match="no examples; left out: 1 without tokens"):
        encode_task(Task(name="t", examples=task.examples[:1], relevant="none"), word_piece)


def test_examples_of_tokens_need_no_tokeniser():
    task = Task(name="t", examples=(Example(tokens=(1, 2)),), relevant="none", left_out=(("x", 3),))
    assert encode_task(task, None).examples == task.examples
    assert encode_task(task, None).left_out == (("x", 3),)


def test_many_texts_at_once_keep_their_order_and_continuations(word_piece):
    words = ("the key", "door near the", "is")
    texts = [TextExample(text=words[i % 3], label=0, continuations=(" are",) * (i % 4), id=str(i)) for i in range(2345)]
    made = encode(texts, word_piece)
    for i in (0, 1, 2, 999, 1000, 1001, 2344):
        assert made[i] == encode([texts[i]], word_piece)[0]
    assert [example.id for example in made] == [str(i) for i in range(2345)]


def test_spans_outside_the_text_are_refused():
    for span in ((0, 4), (-1, 2), (2, 1)):
        with pytest.raises(CallError, match="3 characters"):
            TextExample(text="abc", relevant=((span,),))
