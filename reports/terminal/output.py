"""What the commands print for programs, how they quote themselves, and where they write by default."""

import json
import math
import shlex
import sys
from pathlib import Path
from typing import Any

from ...circuits.visible_text import visible


def say(text: str) -> None:
    """Print a line for people; characters of an input's names that would act on the terminal are shown as escapes."""
    print(visible(text))


def print_json(result: Any) -> None:
    """Print a result as JSON. JSON has neither NaN nor infinity, so null stands for a value that is not defined."""
    print(json.dumps(_without_nan(result), indent=1, allow_nan=False))


def command_as_typed() -> str:
    """Return the command that is running, quoted so that it can be pasted into a shell, without secrets."""
    return command(*sys.argv[1:])


def command(*words: str) -> str:
    """Return a command of qkov, quoted so that it can be pasted into a shell, without secrets."""
    from ...circuits.public_addresses import public_address, without_secrets

    return shlex.join(["qkov", *(without_secrets(public_address(word)) for word in words)])


def default_folder(address: str, *more: str) -> Path:
    """Return the folder that a command writes to by default: qkov-NAME, in the current folder.

    Args:
        address: The address of a checkpoint, a run or a model. NAME is its last part, without the suffix of a weight
            file; of a remote address, only the characters that any file system accepts. Of `lens:NAME` it is NAME.
        more: Further parts of the folder's name, such as the name of a task.
    """
    from ...circuits.checkpoints.tensor_file import SUFFIXES
    from ...circuits.storage.address import place_of
    from ...circuits.storage.lens import PREFIX, is_lens
    from ...circuits.storage.places import LocalPlace
    from ...circuits.storage.remote_names import slug

    if is_lens(address):
        return Path("-".join(("qkov", slug(address.removeprefix(PREFIX)), *more)))
    place = place_of(address)
    name = place.name.removesuffix(place.suffix) if place.suffix in SUFFIXES else place.name
    return Path("-".join(("qkov", name if isinstance(place, LocalPlace) else slug(name), *more)))


def _without_nan(result: Any) -> Any:
    if isinstance(result, float) and not math.isfinite(result):
        return None
    if isinstance(result, dict):
        return {key: _without_nan(value) for key, value in result.items()}
    if isinstance(result, list):
        return [_without_nan(value) for value in result]
    return result
