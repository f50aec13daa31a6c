"""Tasks made ready for models: whose kind they are of, within their context."""

from dataclasses import replace

import pytest
from qkov.analyses.attention import fit_task
from qkov.analyses.tasks import Example, Task, TextExample
from qkov.circuits import CallError

from .tiny_models import CAUSAL, CLASSIFIERS, MASKED
from .word_tokens import MASK_ID, word_tokeniser

PAIR = TextExample("the keys near the door", 0, (((4, 8),),), (" are", " is"))


def task_of(*examples, **changes):
    return Task(name="t", examples=examples, relevant="r", **changes)


def test_tokens_stay_as_they_are():
    task = task_of(Example((1, 2), label=0))
    # The names of the classes are those of the model's config.
    assert fit_task(task, CLASSIFIERS[0].adapted()) == replace(task, classes=("LABEL_0", "LABEL_1"))


def test_a_language_model_goes_on_at_the_end_of_the_text():
    tokeniser = word_tokeniser()
    (example,) = fit_task(task_of(PAIR), CAUSAL[0].adapted(), tokeniser).in_tokens
    assert tokeniser.convert_ids_to_tokens(list(example.tokens)) == ["the", "keys", "near", "the", "door"]
    assert [tokeniser.convert_ids_to_tokens(list(ids)) for ids in example.continuations] == [["are"], ["is"]]
    assert example.relevant == ((False, True, False, False, False),)


def test_a_masked_model_gets_its_mask_token():
    (example,) = fit_task(task_of(PAIR), MASKED[0].adapted(), word_tokeniser()).in_tokens
    assert example.tokens[-1] == MASK_ID
    assert example.special[-1]


def test_one_continuation_alone_is_judged_by_its_first_token_among_all():
    tokeniser = word_tokeniser()
    answer = TextExample("the keys", 0, (), (" near the door",))
    (example,) = fit_task(task_of(answer), CAUSAL[0].adapted(), tokeniser).in_tokens
    assert example.continuations == ()
    assert example.label == tokeniser.convert_tokens_to_ids("near")


def test_long_texts_are_cut_to_the_context():
    long = TextExample(" ".join(["the"] * 60), 0, (((0, 3),),), (" are", " is"))
    (example,) = fit_task(task_of(long), CAUSAL[0].adapted(), word_tokeniser()).in_tokens
    assert len(example.tokens) == 32
    assert example.cut == 1


def test_models_of_another_kind_are_refused():
    with pytest.raises(CallError, match="classifies whole sequences, and t asks how a text continues"):
        fit_task(task_of(PAIR), CLASSIFIERS[0].adapted(), word_tokeniser())
    with pytest.raises(CallError, match="predicts tokens, and t has classes \\(a, b\\)"):
        fit_task(task_of(Example((1,), label=0), classes=("a", "b")), CAUSAL[0].adapted())
    with pytest.raises(CallError, match="t has texts, which need the tokenizer"):
        fit_task(task_of(PAIR), CAUSAL[0].adapted())
