"""What a name from afar may be: the name of one file or folder, and never a path."""

import re
from urllib.parse import unquote

from ..visible_text import visible

#: The longest name, in bytes, that file systems store.
_LONGEST = 255
_SEPARATOR = re.compile(r"[/\\]")
_DRIVE = re.compile(r"[A-Za-z]:")
#: The longest part of a name that the name of an output folder repeats.
_LONGEST_SLUG = 100


def refusal_of(name: str) -> str | None:
    """Return why a name that another machine or a file states is refused as the name of one file, or None.

    The name is judged as it stands and with its escapes such as %2F decoded, however often they were encoded. Names of
    existing files and folders on this machine, which its user chose, are not judged.

    Args:
        name: The name, without the folder.
    """
    for form in _decoded_forms(name):
        if form in ("", ".", ".."):
            return "does not name a file"
        if _SEPARATOR.search(form):
            return "is a path and not a name"
        if _DRIVE.match(form):
            return "begins with the letter of a drive"
        if visible(form) != form:
            return "holds control characters"
        if len(form.encode()) > _LONGEST:
            return f"is longer than {_LONGEST} bytes"
    return None


def last_part(path: str) -> str:
    """Return the last name in a path from afar, whatever stands between its names: slashes, backslashes or escapes.

    Args:
        path: The path, with escapes such as %20.
    """
    *_, decoded = _decoded_forms(path)
    # A name may hold what looks like an escape, as in 100%25, unless that hides a separator.
    last = unquote(path.rstrip("/").rpartition("/")[2])
    return last if refusal_of(last) is None else _SEPARATOR.split(decoded.rstrip("/\\"))[-1]


def slug(name: str) -> str:
    """Return a name for an output folder that is made from a name from afar: letters, digits and ._@+=- alone."""
    return re.sub(r"[^\w.@+=-]+", "-", name).strip(".-")[:_LONGEST_SLUG] or "remote"


def _decoded_forms(name: str) -> list[str]:
    forms = [name]
    # Each decoding makes the name shorter, so this ends.
    while (decoded := unquote(forms[-1])) != forms[-1]:
        forms.append(decoded)
    return forms
