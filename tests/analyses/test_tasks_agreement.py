import gzip
import json
from collections import Counter
from pathlib import Path
from typing import get_args

import pytest
from qkov.analyses.tasks import load_task
from qkov.analyses.tasks.agreement.sentences import (
    CLAUSE_VERBS,
    PEOPLE,
    PREPOSITIONS,
    THINGS,
    VERBS,
    Phrase,
    agreement_sentences,
)
from qkov.analyses.tasks.agreement.verb_forms import plural_of, singular_of
from qkov.circuits import CallError, QkovError

from .task_texts import label, marked, texts

NUMBER_OF = {form: number for noun in (*PEOPLE, *THINGS) for number, form in enumerate(noun)}
CLAUSE_NUMBER_OF = {form: number for verb in CLAUSE_VERBS for number, form in enumerate(verb)}


def parsed(text):
    """Subject, nouns between, verbs of clauses: read back from the sentence, by the words alone."""
    words = text.split(" ")
    assert words[0] == "The"
    nouns = [word for word in words if word in NUMBER_OF]
    verbs = [word for word in words if word in CLAUSE_NUMBER_OF]
    others = {"The", "the", "that", *PREPOSITIONS}
    assert len(nouns) + len(verbs) + sum(word in others for word in words) == len(words)
    return nouns[0], nouns[1:], verbs


@pytest.mark.parametrize("phrase", get_args(Phrase))
def test_every_noun_between_subject_and_verb_is_of_the_other_number(phrase):
    task = agreement_sentences(500, seed=1, phrase=phrase)
    assert len({(example.text, example.continuations) for example in texts(task)}) == 500
    for example in texts(task):
        subject, between, clause_verbs = parsed(example.text)
        number = NUMBER_OF[subject]
        assert marked(example) == [[subject]]
        assert all(NUMBER_OF[noun] != number for noun in between)
        assert all(CLAUSE_NUMBER_OF[verb] != number for verb in clause_verbs)
        assert len(between) == int(example.group)
        assert len(set(between) | {subject}) == 1 + len(between)
        right, wrong = (continuation.removeprefix(" ") for continuation in example.continuations)
        assert any(right == verb[number] and wrong == verb[1 - number] for verb in VERBS)
        assert example.label == 0
        if phrase != "both" and between:
            assert len(clause_verbs) == (phrase == "relative")


def test_numbers_of_attractors_and_of_the_subject_take_turns():
    for attractors in ((0, 1, 2, 3, 4), (1, 3)):
        task = agreement_sentences(200 * len(attractors), attractors=attractors)
        groups = [str(number) for number in attractors]
        assert Counter(example.group for example in texts(task)) == dict.fromkeys(groups, 200)
        plural = Counter(example.group for example in texts(task) if NUMBER_OF[parsed(example.text)[0]])
        assert plural == dict.fromkeys(groups, 100)


def test_the_seed_makes_the_sentences():
    assert agreement_sentences(50, seed=3) == agreement_sentences(50, seed=3)
    assert agreement_sentences(50, seed=3) != agreement_sentences(50, seed=4)


def test_the_verb_in_the_input_is_relevant_and_its_number_is_told():
    task = agreement_sentences(100, verb_in_input=True)
    assert task.classes == ("singular", "plural")
    for example in texts(task):
        subject, verb = marked(example)[0]
        assert example.text.endswith(f" {verb}")
        assert example.label == NUMBER_OF[subject]
        assert verb in [forms[label(example)] for forms in VERBS]
        assert example.continuations == ()


def test_all_different_sentences_can_be_had_and_no_more():
    possible = 2 * len(VERBS) * (len(PEOPLE) + len(THINGS))
    assert len(agreement_sentences(possible, attractors=(0,)).examples) == possible
    with pytest.raises(CallError, match=f"{possible + 1} sentences with 0 attractors.*{possible} different"):
        agreement_sentences(possible + 1, attractors=(0,))


def test_the_number_of_different_sentences_is_that_of_all_draws():
    # One attractor: pairs of different nouns and a preposition; or a person who does something.
    nouns, people, frames = len(PEOPLE) + len(THINGS), len(PEOPLE), 2 * len(VERBS)
    prepositional = frames * nouns * (nouns - 1) * len(PREPOSITIONS)
    relative = frames * people * (nouns - 1) * len(CLAUSE_VERBS)
    with pytest.raises(CallError, match=f"only {prepositional} different"):
        agreement_sentences(prepositional + 1, attractors=(1,), phrase="prepositional")
    with pytest.raises(CallError, match=f"only {relative} different"):
        agreement_sentences(relative + 1, attractors=(1,), phrase="relative")
    with pytest.raises(CallError, match=f"only {prepositional + relative} different"):
        agreement_sentences(prepositional + relative + 1, attractors=(1,))


@pytest.mark.parametrize("attractors", [(5,), (), (-1,)])
def test_numbers_of_attractors_are_checked(attractors):
    with pytest.raises(CallError, match="from 0 to 4"):
        agreement_sentences(attractors=attractors)


def test_words_have_two_forms_and_stand_in_one_list():
    nouns = [form for noun in (*PEOPLE, *THINGS) for form in noun]
    assert len(set(nouns)) == len(nouns)
    assert all(singular_of(verb.plural) == verb.singular for verb in (*VERBS, *CLAUSE_VERBS))
    assert not set(NUMBER_OF) & set(CLAUSE_NUMBER_OF)


PAIRS = [
    ("The uncles near the dog", "The uncle near the dog", " do", " does", "plural_singular"),
    ("The uncle near the dog", "The uncles near the dog", " does", " do", "singular_singular"),
    ("The uncles near the dog", "The uncle near the dog", " do", " does", "plural_singular"),
    ("The poet that the cooks", "The poet that the cook", " like", " likes", "singular_plural"),
    ("The uncles near the dog", "The uncle near a dog", " do", " does", "two words"),
    ("The uncle", "The uncle dog", " do", " does", "lengths"),
    ("The uncle", "The uncle", " do", " does", "none"),
]
FIELDS = ("clean_prefix", "patch_prefix", "clean_answer", "patch_answer", "case")


def test_of_a_pair_the_word_that_differs_is_relevant(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(json.dumps(dict(zip(FIELDS, pair, strict=True))) for pair in PAIRS))
    task = load_task("agreement", path)
    assert [marked(example) for example in texts(task)] == [[["uncles"]], [["uncle"]], [["cooks"]]]
    assert [example.continuations for example in texts(task)] == [
        (" do", " does"),
        (" does", " do"),
        (" like", " likes"),
    ]
    assert [example.group for example in texts(task)] == ["plural_singular", "singular_singular", "singular_plural"]
    assert dict(task.left_out) == {
        "that repeat an earlier one": 1,
        "whose two beginnings do not differ in exactly one word": 3,
    }
    as_list = tmp_path / "pairs.json"
    as_list.write_text(json.dumps([dict(zip(FIELDS, pair, strict=True)) for pair in PAIRS]))
    assert [example.text for example in load_task("agreement", as_list).examples] == [
        example.text for example in texts(task)
    ]


def test_a_record_without_a_field_is_named(tmp_path):
    (tmp_path / "pairs.json").write_text('{"clean_prefix": "The uncle"}')
    with pytest.raises(QkovError, match="no field 'patch_prefix'; its fields are clean_prefix"):
        load_task("agreement", tmp_path / "pairs.json")


def test_real_pairs_agree_with_the_number_of_the_word_that_differs(shared_data):
    task = load_task("agreement", shared_data / "sva_pairs")
    assert sum(number for _, number in task.left_out) + len(task.examples) == 5400
    singular = {" is", " has", " does", " goes"}
    for example in texts(task):
        ((subject,),) = marked(example)
        is_plural = subject.endswith("s") or subject in ("men", "women", "people", "children")
        assert is_plural == (example.continuations[0] not in singular)
    within = load_task("agreement", shared_data / "sva_pairs", split="within_rc_test")
    assert all(example.text.endswith(marked(example)[0][0]) for example in texts(within))


TSV_HEADER = (
    "sentence\torig_sentence\tpos_sentence\tsubj\tverb\tsubj_pos\tverb_pos\tsubj_index\tverb_index\tn_diff_intervening"
)
ROWS = [
    ("the key to the old cabinets is here .", "DT NN TO DT JJ NNS VBZ RB .", "key", "is", "NN", "VBZ", 2, 7, 1),
    ('the keys " the " need it', "DT NNS '' DT '' VBP PRP", "keys", "need", "NNS", "VBP", 2, 6, 0),
    ("the man causes it to pass", "DT NN VBZ PRP TO VB", "man", "causes", "NN", "VBZ", 2, 3, 0),
    ("the man passes it", "DT NN VBZ PRP", "man", "passes", "NN", "VBZ", 2, 3, 0),
    ("the man is", "DT NN VBZ", "man", "is", "NN", "VBZ", 1, 3, 0),
    ("the man was", "DT NN VBD", "man", "was", "NN", "VBD", 2, 3, 0),
    ("is the man", "VBZ DT NN", "man", "is", "NN", "VBZ", 3, 1, 0),
]


def table(rows):
    lines = ["\t".join([row[0].upper(), *map(str, row)]) for row in rows]
    return "\n".join([TSV_HEADER, *lines]) + "\n"


@pytest.fixture
def tsv(tmp_path):
    path = tmp_path / "agreement.tsv"
    path.write_text(table(ROWS))
    return path


def test_the_table_gives_sentences_up_to_their_verb(tsv):
    task = load_task("agreement", tsv)
    assert [(example.text, example.continuations, marked(example), example.group) for example in texts(task)] == [
        ("the key to the old cabinets", (" is", " are"), [["key"]], "1"),
        ('the keys " the "', (" need", " needs"), [["keys"]], "0"),
        # The table tags "pass" as a verb, and neither "cause" nor "caus".
        ("the man", (" passes", " pass"), [["man"]], "0"),
    ]
    assert dict(task.left_out) == {
        "whose verb's other form is not certain": 1,
        "whose subject or verb is not where the table says": 2,
        "whose verb is neither singular nor plural": 1,
    }
    assert task.attention_bins == (0.0, 0.1, 0.5, 1.0)


def test_the_table_with_the_verb_in_the_input(tsv):
    task = load_task("agreement", tsv, verb_in_input=True)
    assert [(example.text, example.label, marked(example)) for example in texts(task)] == [
        ("the key to the old cabinets is", 0, [["key", "is"]]),
        ('the keys " the " need', 1, [["keys", "need"]]),
        ("the man passes", 0, [["man", "passes"]]),
    ]


def test_the_table_may_be_compressed_or_elsewhere(tsv, tmp_path):
    expected = load_task("agreement", tsv).examples
    with gzip.open(tmp_path / "packed.tsv.gz", "wt") as file:
        file.write(table(ROWS))
    packed = load_task("agreement", tmp_path / "packed.tsv.gz").examples
    assert [example.text for example in packed] == [example.text for example in expected]
    import fsspec

    fsspec.filesystem("memory").pipe("/agreement.tsv", tsv.read_bytes())
    assert load_task("agreement", "memory://agreement.tsv").examples == expected


def test_a_table_without_its_columns_is_refused(tmp_path):
    (tmp_path / "a.tsv").write_text("sentence\tverb\nx\ty\n")
    with pytest.raises(QkovError, match=r"no column orig_sentence, subj, verb_pos.*names sentence, verb"):
        load_task("agreement", tmp_path / "a.tsv")


def test_a_drawn_part_of_a_table_is_fair_and_in_order(tmp_path):
    path = tmp_path / "many.tsv"
    path.write_text(table([(f"a{i} key is", "DT NN VBZ", "key", "is", "NN", "VBZ", 2, 3, 0) for i in range(40)]))
    drawn = Counter()
    for seed in range(300):
        task = load_task("agreement", path, limit=10, seed=seed)
        numbers = [int(example.text.split()[0][1:]) for example in texts(task)]
        assert numbers == sorted(set(numbers))
        assert len(numbers) == 10
        assert task.left_out == (("not drawn under the limit", 30),)
        drawn.update(numbers)
    # 300 draws with probability 1/4 have a standard deviation of 7.5.
    assert all(abs(drawn[number] - 75) < 5 * 7.5 for number in range(40))


def lines_files(folder: Path, text, gold, name="a"):
    (folder / f"{name}.text").write_text(text)
    (folder / f"{name}.gold").write_text(gold)
    return folder


TEXT = """the key to the doors is here . <eos>
all families are odd <eos>
the man lies <eos>
is it <eos>
the x lie <eos>
"""
GOLD = "5\tis\tare\t1\n2\tAre\tIs\t0\n2\tlie\tlies\t0\n0\tis\tare\t0\n2\tlie\tlie\t0\n"


def test_lines_give_sentences_up_to_their_verb_and_no_subject(tmp_path):
    task = load_task("agreement", lines_files(tmp_path, TEXT, GOLD))
    assert [(example.text, example.continuations, example.group) for example in texts(task)] == [
        ("the key to the doors", (" is", " are"), "1"),
        ("all families", (" are", " is"), "0"),
    ]
    assert all(example.relevant == () for example in texts(task))
    assert dict(task.left_out) == {
        "whose verb is not where the gold file says": 2,
        "whose two verb forms are the same": 1,
    }
    assert load_task("agreement", tmp_path / "a.gold").examples == task.examples


def test_a_file_may_say_where_the_subjects_are(tmp_path):
    lines_files(tmp_path, TEXT, GOLD)
    (tmp_path / "a.subjects").write_text("1\n\n1\n0\n1\n")
    task = load_task("agreement", tmp_path / "a.text", subjects=tmp_path / "a.subjects")
    assert [marked(example) for example in texts(task)] == [[["key"]], []]
    (tmp_path / "a.subjects").write_text("5\n1\n1\n0\n1\n")
    task = load_task("agreement", tmp_path / "a.text", subjects=tmp_path / "a.subjects")
    assert dict(task.left_out)["whose subject is not before its verb"] == 1
    (tmp_path / "a.subjects").write_text("5\n")
    with pytest.raises(QkovError, match=r"1 lines and .*5; expected equal numbers"):
        load_task("agreement", tmp_path / "a.text", subjects=tmp_path / "a.subjects")


def test_lines_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(QkovError, match=r"line 2 of .*a.gold is 'x'"):
        load_task("agreement", lines_files(tmp_path, "the key is\nthe key is\n", "2\tis\tare\t0\nx\n"))
    with pytest.raises(QkovError, match=r"1 lines and .*2; expected equal numbers"):
        load_task("agreement", lines_files(tmp_path, "the key is\nthe key is\n", "2\tis\tare\t0\n"))
    lines_files(tmp_path, TEXT, GOLD, "b")
    with pytest.raises(CallError, match="choose one of a, b as the split"):
        load_task("agreement", tmp_path)
    assert len(load_task("agreement", tmp_path, split="b").examples) == 2
    (tmp_path / "b.gold").unlink()
    with pytest.raises(CallError, match=r"b.gold does not exist"):
        load_task("agreement", tmp_path, split="b")


def test_real_lines_put_the_right_form_where_the_sentence_has_it(shared_data):
    folder = shared_data / "sva_linzen"
    task = load_task("agreement", folder)
    sentences = (folder / "subj_agr_filtered.text").read_text().split("\n")
    positions = [int(line) for line in (folder / "subj_agr_filtered.eval").read_text().split()]
    assert dict(task.left_out) == {"whose two verb forms are the same": 4}
    assert len(task.examples) == 7489 - 4
    for example in texts(task):
        line = int(example.id.rpartition(":")[2]) - 1
        assert sentences[line].startswith(example.text + example.continuations[0] + " ")
        assert len(example.text.split(" ")) == positions[line]


def test_forms_of_real_verbs_are_those_that_the_gold_file_gives(shared_data):
    pairs = set()
    for line in (shared_data / "sva_linzen" / "subj_agr_filtered.gold").read_text().lower().splitlines():
        _, right, wrong, _ = line.split("\t")
        # The plural is the shorter one but for two.
        irregular = {"are": "is", "have": "has"}
        plural, singular = sorted((right, wrong), key=lambda form: (form not in irregular, len(form)))
        if right != wrong:
            pairs.add((plural, singular))
    assert len(pairs) > 300
    verbs = {plural for plural, _ in pairs}
    for plural, singular in pairs:
        assert singular_of(plural) == singular
        assert plural_of(singular, verbs) == plural
        assert plural_of(singular, frozenset()) in (plural, None)


@pytest.mark.parametrize(
    ("plural", "singular"),
    [
        *[("try", "tries"), ("play", "plays"), ("pass", "passes"), ("buzz", "buzzes"), ("reach", "reaches")],
        *[("push", "pushes"), ("veto", "vetoes"), ("go", "goes"), ("do", "does"), ("have", "has"), ("are", "is")],
    ],
)
def test_forms_of_verbs(plural, singular):
    assert singular_of(plural) == singular
    assert plural_of(singular, {plural}) == plural


def test_a_plural_that_is_not_certain_is_none():
    assert plural_of("lies", frozenset()) is None
    assert plural_of("lies", {"lie"}) == "lie"
    assert plural_of("uses", {"us", "use"}) is None
    assert plural_of("writes", frozenset()) == "write"
    assert plural_of("walked", {"walk"}) is None


def test_data_in_no_known_format_are_refused(tmp_path):
    (tmp_path / "a.csv").write_text("x")
    for data in (tmp_path, tmp_path / "a.csv", "some/where"):
        with pytest.raises(CallError, match=r"expected files that end in one of \.tsv"):
            load_task("agreement", data)
    with pytest.raises(CallError, match="no split 'dev'"):
        load_task("agreement", split="dev")
