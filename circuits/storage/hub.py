"""The revisions of a model on the hub."""

import re
from fnmatch import fnmatch
from urllib.parse import quote

from ..errors import CallError, QkovError, reason
from .address import place_of
from .places import Place

_HUB = re.compile(r"hf://(?P<repository>[^/@]+/[^/@]+)(?P<within>/.*)?")


def revisions_of(run: str, pattern: str) -> list[tuple[str, Place]]:
    """Return the branches and tags of a model whose names fit a pattern, each with the place of its files.

    Args:
        run: `organisation/model` or `hf://organisation/model`, with a folder behind it or not.
        pattern: with `*` for anything, such as `step*`.

    Raises:
        CallError: the address is none of the hub, or no revision fits.
        QkovError: the hub does not answer, or has no such model.
    """
    address = place_of(run).address
    found = _HUB.fullmatch(address)
    if found is None:
        raise CallError(
            f"{run} is no model on the hub, and only those have revisions: expected organisation/model without @"
        )
    names = _names(found["repository"])
    fitting = [name for name in names if fnmatch(name, pattern)]
    if not fitting:
        raise CallError(
            f"no revision of {found['repository']} fits {pattern!r}; it has {', '.join(names[:8])}"
            + f" and {len(names) - 8} more" * (len(names) > 8)
        )
    return [
        (name, place_of(f"hf://{found['repository']}@{quote(name, safe='')}{found['within'] or ''}"))
        for name in fitting
    ]


def _names(repository: str) -> list[str]:
    # Slow to import, and only a run on the hub needs it.
    from huggingface_hub import HfApi
    from huggingface_hub.errors import OfflineModeIsEnabled, RepositoryNotFoundError

    try:
        refs = HfApi().list_repo_refs(repository)
    except RepositoryNotFoundError as error:
        raise QkovError(
            f"the hub has no model {repository}, or it is private and this machine is not logged in (hf auth login)"
        ) from error
    except OfflineModeIsEnabled as error:
        raise QkovError(f"{repository} is on the hub, and HF_HUB_OFFLINE forbids to ask it; unset it") from error
    except Exception as error:  # the client passes on what its own libraries raise
        raise QkovError(f"the hub does not answer for {repository} ({reason(error)}): check the connection") from error
    return list(dict.fromkeys(ref.name for ref in (*refs.branches, *refs.tags)))
