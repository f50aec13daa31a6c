"""The revisions of a model on the hub."""

import re
from fnmatch import fnmatch
from urllib.parse import quote

from ..errors import CallError, QkovError, reason
from .address import place_of
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
    # huggingface_hub is slow to import, and only a run on the hub needs it.
    from huggingface_hub import HfApi
    from huggingface_hub.errors import OfflineModeIsEnabled, RepositoryNotFoundError

    try:
        refs = HfApi().list_repo_refs(repository)
    except RepositoryNotFoundError as error:
        raise QkovError(
            f"the hub has no model {repository}, or it is private and this machine is not logged in (hf auth login)"
        ) from error
    except OfflineModeIsEnabled as error:
        raise QkovError(
            f"HF_HUB_OFFLINE is set, so the hub cannot be queried for {repository}; unset it or use a local path"
        ) from error
    except Exception as error:  # the client passes on what its own libraries raise
        raise QkovError(f"the hub does not answer for {repository} ({reason(error)}): check the connection") from error
    return list(dict.fromkeys(ref.name for ref in (*refs.branches, *refs.tags)))
