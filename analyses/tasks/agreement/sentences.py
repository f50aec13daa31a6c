"""Generated sentences whose verb agrees with its subject across nouns of the other number."""

from collections.abc import Iterator, Sequence
from math import perm
from typing import Literal, NamedTuple

import numpy as np

from ....circuits.errors import CallError
from ..collecting import collected
from ..example import Task, TextExample
from ..words import text_of_words


class Forms(NamedTuple):
    """The singular and the plural form of a word."""

    singular: str
    plural: str


def _regular(words: str) -> tuple[Forms, ...]:
    return tuple(Forms(word, f"{word}s") for word in words.split())


#: Nouns for people, who can be the subject of a relative clause.
PEOPLE = (
    *_regular("teacher doctor farmer driver writer singer player lawyer guard judge king student friend boy girl"),
    *_regular("manager soldier artist pilot worker"),
    Forms("man", "men"),
    Forms("woman", "women"),
    Forms("child", "children"),
)
#: Nouns for things.
THINGS = (
    *_regular("key table car boat book picture door window garden house tree letter bottle clock chair road"),
    *_regular("bridge tower wall lamp"),
    Forms("box", "boxes"),
    Forms("knife", "knives"),
)
PREPOSITIONS = ("near", "behind", "beside", "by", "above", "below")
#: Verbs of the main clause, in the present tense.
VERBS = (
    Forms("is", "are"),
    Forms("has", "have"),
    Forms("does", "do"),
    Forms("seems", "seem"),
    Forms("looks", "look"),
    Forms("remains", "remain"),
    Forms("stays", "stay"),
    Forms("appears", "appear"),
)
#: Verbs of relative clauses.
CLAUSE_VERBS = (
    Forms("likes", "like"),
    Forms("knows", "know"),
    Forms("sees", "see"),
    Forms("wants", "want"),
    Forms("loves", "love"),
    Forms("finds", "find"),
    Forms("remembers", "remember"),
)

#: Edges of the DTAP table for this task in "Faster Query-Key Learning Sharpens Attention".
AGREEMENT_BINS = (0.0, 0.1, 0.5, 1.0)
NUMBERS = ("singular", "plural")
_SIZE = 1000
_NOUNS = (*PEOPLE, *THINGS)

Phrase = Literal["prepositional", "relative", "both"]


def agreement_task(verb_in_input: bool, relevant: str | None = None) -> Task:
    """Return the task without examples.

    Args:
        verb_in_input: whether the verb is part of the text and its number is the class, as in "Faster Query-Key
            Learning Sharpens Attention". Otherwise the verb's right form is to be chosen.
        relevant: description of the relevant tokens; None for the usual one.
    """
    return Task(
        name="agreement",
        examples=(),
        relevant=relevant or ("the subject and the verb" if verb_in_input else "the subject"),
        classes=NUMBERS if verb_in_input else (),
        attention_bins=AGREEMENT_BINS,
        probability_bins=AGREEMENT_BINS,
    )


def agreement_example(
    words: Sequence[str],
    verb: Forms,
    plural: bool,
    subject: int | None,
    verb_in_input: bool,
    name: str,
    group: str,
) -> TextExample:
    """Return the words before a verb, with the verb's two forms as continuations or with the verb's number as label.

    Args:
        words: the words before the verb.
        verb: the verb's two forms.
        plural: whether the plural is right.
        subject: position of the subject among the words; None if it is not known.
        verb_in_input: whether the right form of the verb is part of the text and its number is the label.
        name: id of the example.
        group: number of attractors.
    """
    right, wrong = verb[::-1] if plural else verb
    text, spans = text_of_words((*words, right) if verb_in_input else words)
    relevant = () if subject is None else ((spans[subject], spans[-1]) if verb_in_input else (spans[subject],),)
    return TextExample(
        text=text,
        label=int(plural) if verb_in_input else 0,
        relevant=relevant,
        continuations=() if verb_in_input else (f" {right}", f" {wrong}"),
        id=name,
        group=group,
    )


def agreement_sentences(
    limit: int | None = None,
    seed: int = 0,
    *,
    attractors: Sequence[int] = (0, 1, 2, 3, 4),
    phrase: Phrase = "both",
    verb_in_input: bool = False,
) -> Task:
    """Return different beginnings of sentences, such as `The key near the tables` with ` is` and ` are`.

    Every noun between subject and verb is an attractor: its number differs from the subject's. k attractors occur in k
    prepositional phrases (`The key near the tables by the doors`), or in one relative clause that contains k - 1
    prepositional phrases (`The key that the guards by the doors like`). Half of the subjects are plural. The numbers of
    attractors alternate, and the example's group is that number. No noun occurs twice in a sentence. The right form is
    the first continuation, with label 0.

    Args:
        limit: number of sentences; None gives 1,000.
        seed: seed of the draw.
        attractors: the numbers of attractors, each from 0 to 4.
        phrase: the phrases that contain the attractors: `prepositional`, `relative`, or `both`, which draws one of the
            two for each sentence.
        verb_in_input: whether the text ends with the right form of the verb, which is then relevant too. The label is
            then the verb's number, singular (0) or plural (1).

    Raises:
        CallError: a number of attractors is not from 0 to 4, the phrase is unknown, or there are fewer different
            sentences than requested.
    """
    if not attractors or not set(attractors) <= set(range(5)):
        raise CallError(f"attractors must be numbers from 0 to 4; got {list(attractors)}")
    if phrase not in ("prepositional", "relative", "both"):
        raise CallError(f'phrase must be "prepositional", "relative" or "both"; got {phrase!r}')
    size = _SIZE if limit is None else max(limit, 0)
    # The numbers of attractors alternate, so each is needed for a known number of sentences.
    for number in sorted(set(attractors)):
        wanted = sum(attractors[turn % len(attractors)] == number for turn in range(size))
        possible = _possible(number, phrase)
        if wanted > possible:
            raise CallError(
                f"{wanted} sentences with {number} attractors were requested, but only {possible} different ones "
                "exist; use a smaller limit, or more numbers of attractors"
            )
    task = agreement_task(verb_in_input)
    sentences = _sentences(size, np.random.default_rng(seed), attractors, phrase, verb_in_input)
    return collected(task, sentences, limit)


def _possible(attractors: int, phrase: Phrase) -> int:
    """Return the number of different sentences with a number of attractors."""
    frames = len(NUMBERS) * len(VERBS)
    prepositional = frames * perm(len(_NOUNS), attractors + 1) * len(PREPOSITIONS) ** attractors
    if attractors == 0:
        return prepositional
    clauses = len(PEOPLE) * len(CLAUSE_VERBS)
    relative = frames * clauses * perm(len(_NOUNS) - 1, attractors) * len(PREPOSITIONS) ** (attractors - 1)
    return {"prepositional": prepositional, "relative": relative, "both": prepositional + relative}[phrase]


def _sentences(
    size: int, generator: np.random.Generator, attractors: Sequence[int], phrase: Phrase, verb_in_input: bool
) -> Iterator[TextExample]:
    seen: set[tuple[str, ...]] = set()
    count = 0
    while count < size:
        number = attractors[count % len(attractors)]
        plural = bool(count // len(attractors) % 2)
        words = _beginning(generator, number, phrase, plural)
        verb = VERBS[generator.integers(len(VERBS))]
        if (*words, verb.singular) in seen:
            continue
        seen.add((*words, verb.singular))
        yield agreement_example(words, verb, plural, 1, verb_in_input, f"agreement-{count}", str(number))
        count += 1


def _beginning(generator: np.random.Generator, attractors: int, phrase: Phrase, plural: bool) -> tuple[str, ...]:
    """Return the words of a sentence before its verb; the second one is the subject."""
    form, other = int(plural), int(not plural)
    kind = generator.choice(["prepositional", "relative"]) if phrase == "both" else phrase
    clause = kind == "relative" and attractors > 0
    clause_subject = generator.integers(len(PEOPLE), size=int(clause)).tolist()
    free = [number for number in range(len(_NOUNS)) if number not in clause_subject]
    subject, *rest = generator.choice(free, size=1 + attractors - len(clause_subject), replace=False)
    words = ["The", _NOUNS[subject][form]]
    if clause:
        words += ["that", "the", PEOPLE[clause_subject[0]][other]]
    for noun in rest:
        words += [str(generator.choice(PREPOSITIONS)), "the", _NOUNS[noun][other]]
    if clause:
        words.append(CLAUSE_VERBS[generator.integers(len(CLAUSE_VERBS))][other])
    return tuple(words)
