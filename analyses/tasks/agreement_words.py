"""The words of the agreement sentences: common ones, that most vocabularies hold whole, each singular and plural."""

from typing import NamedTuple


class Forms(NamedTuple):
    """A word's two forms."""

    singular: str
    plural: str


def _regular(words: str) -> tuple[Forms, ...]:
    return tuple(Forms(word, f"{word}s") for word in words.split())


#: Nouns for people, who do something in a relative clause.
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
#: What the subject does, in the present tense.
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
#: What others do to it in a relative clause.
CLAUSE_VERBS = (
    Forms("likes", "like"),
    Forms("knows", "know"),
    Forms("sees", "see"),
    Forms("wants", "want"),
    Forms("loves", "love"),
    Forms("finds", "find"),
    Forms("remembers", "remember"),
)
