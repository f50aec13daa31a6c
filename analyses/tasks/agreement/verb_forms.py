"""The other present-tense form of an English verb: third person singular, or plural."""

import re
from collections.abc import Set

_IRREGULAR = {"are": "is", "have": "has", "do": "does", "go": "goes"}
_PLURAL = {singular: plural for plural, singular in _IRREGULAR.items()}


def singular_of(plural: str) -> str:
    """Return the third person singular of a plural form: `are` is, `try` tries, `pass` passes, `go` goes, else -s."""
    if plural in _IRREGULAR:
        return _IRREGULAR[plural]
    if re.search(r"[^aeiou]y$", plural):
        return f"{plural[:-1]}ies"
    return f"{plural}es" if re.search(r"(s|x|z|ch|sh|[^aeiou]o)$", plural) else f"{plural}s"


def plural_of(singular: str, verbs: Set[str]) -> str | None:
    """Return the plural form of a third person singular, or None where that is not certain.

    Forms whose singular it would be are few: `lies` may come of `lie` or of `ly`, `passes` of `pass` or of `passe`.
    Where there are several, the one among known verbs is meant.

    Args:
        singular: such as `lies`.
        verbs: known plural forms or infinitives.
    """
    if singular in _PLURAL:
        return _PLURAL[singular]
    endings = (("s", ""), ("es", ""), ("ies", "y"))
    stems = {singular.removesuffix(old) + new for old, new in endings if singular.endswith(old)}
    possible = {stem for stem in stems if singular_of(stem) == singular and len(stem) > 1}
    known = possible & verbs if len(possible) > 1 else possible
    return known.pop() if len(known) == 1 else None
