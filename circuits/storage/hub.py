"""The revisions of a model on the hub."""

import re
from fnmatch import fnmatch
from urllib.parse import quote

from ..errors import CallError
from .address import place_of
from .hub_answers import asked
from .places import Place

_HUB = re.compile(r"hf://(?P<repository>[^/@]+/[^/@]+)(?P<within>/.*)?")


def revisions_of(run: str, pattern: str) -> list[tuple[str, Place]]:
    """Return the branches and tags of a model whose names match a pattern, each with the place of its files.

    Args:
        run: `organisation/model` or `hf://organisation/model`, optionally followed by a folder.
        pattern: A pattern such as `step*`, where `*` matches anything.

    Returns:
        The name and the place of each matching revision.

    Raises:
        CallError: The address is not a model on the hub, or no revision matches.
        QkovError: The hub does not answer, or has no such model.
    """
    address = place_of(run).address
    match = _HUB.fullmatch(address)
    if match is None:
        raise CallError(
            f"{run} is not a model on the hub, and only those have revisions: expected organisation/model without @"
        )
    names = _names(match["repository"])
    matching = [name for name in names if fnmatch(name, pattern)]
    if not matching:
        raise CallError(
            f"no revision of {match['repository']} matches {pattern!r}; it has {', '.join(names[:8])}"
            + f" and {len(names) - 8} more" * (len(names) > 8)
        )
    return [
        (name, place_of(f"hf://{match['repository']}@{quote(name, safe='')}{match['within'] or ''}"))
        for name in matching
    ]


def _names(repository: str) -> list[str]:
    from huggingface_hub import HfApi

    refs = asked(repository, lambda: HfApi().list_repo_refs(repository))
    return list(dict.fromkeys(ref.name for ref in (*refs.branches, *refs.tags)))
