"""The two present-tense forms of an English verb, third person singular and plural, each derived from the other."""

import re
from collections.abc import Set

_IRREGULAR = {"are": "is", "have": "has", "do": "does", "go": "goes"}
_PLURAL = {singular: plural for plural, singular in _IRREGULAR.items()}


def singular_of(plural: str) -> str:
    """Return the third person singular of a plural form, such as `is` for `are` and `tries` for `try`."""
    if plural in _IRREGULAR:
        return _IRREGULAR[plural]
    if re.search(r"[^aeiou]y$", plural):
        return f"{plural[:-1]}ies"
    return f"{plural}es" if re.search(r"(s|x|z|ch|sh|[^aeiou]o)$", plural) else f"{plural}s"


def plural_of(singular: str, verbs: Set[str]) -> str | None:
    """Return the plural form of a third person singular, or None if it is not certain.

    There may be several candidates: `lies` could come from `lie` or from `ly`, and `passes` from `pass` or from
    `passe`. Of several candidates, the only one among the known verbs is returned.

    Args:
        singular: the third person singular, such as `lies`.
        verbs: known plural forms or infinitives.
    """
    if singular in _PLURAL:
        return _PLURAL[singular]
    endings = (("s", ""), ("es", ""), ("ies", "y"))
    stems = {singular.removesuffix(old) + new for old, new in endings if singular.endswith(old)}
    possible = {stem for stem in stems if singular_of(stem) == singular and len(stem) > 1}
    known = possible & verbs if len(possible) > 1 else possible
    return known.pop() if len(known) == 1 else None
