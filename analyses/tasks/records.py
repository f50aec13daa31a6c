"""What task sources read: files wherever they lie, and data sets that the `datasets` library knows."""

import json
import re
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from ...circuits.errors import CallError, QkovError, reason
from ...circuits.storage.address import place_of
from ...circuits.storage.places import LocalPlace, Place

_HUB_ID = re.compile(r"\w[\w.\-]*(?:/[\w.\-]+)?(?:@\S+)?")
#: Endings of files; a name with one of them was not meant for the hub.
_FILE = re.compile(r"\.(csv|gold|gz|jsonl?|parquet|text|tsv|txt|zip)$")


def data_place(data: Path | str) -> Place | None:
    """Return where data lie: a path here or an address that fsspec knows; None for the id of a data set on the hub."""
    if isinstance(data, Path) or "://" in data:
        return place_of(data)
    path = Path(data)
    if path.exists() or not _HUB_ID.fullmatch(data) or _FILE.search(data):
        return LocalPlace(path)
    # A mistyped path in a folder that is there was not meant for the hub.
    return LocalPlace(path) if len(path.parts) > 1 and Path(path.parts[0]).is_dir() else None


def files_in(place: Place, endings: Sequence[str], split: str | None) -> list[Place]:
    """Return a file itself, or the files of a folder that end so and, where a split is given, begin with its name.

    Raises:
        CallError: there is none, or a split is asked of a single file.
    """
    if not place.is_folder():
        if split is not None:
            raise CallError(f"{place} is one file, so that no split {split!r} can be picked: leave the split out")
        if not place.is_file():
            raise CallError(f"{place} does not exist: expected a file or a folder with {' or '.join(endings)} files")
        return [place]
    files = [entry for entry in place.entries() if entry.name.endswith(tuple(endings)) and entry.is_file()]
    of_split = [file for file in files if split is None or re.fullmatch(rf"{re.escape(split)}([.\-].*)?", file.name)]
    if not of_split:
        names = ", ".join(file.name for file in files) or "none"
        wanted = f"{split} with " if split is not None else ""
        raise CallError(f"{place} has no file {wanted}ending in {' or '.join(endings)}; such files there: {names}")
    return of_split


def read_text(place: Place) -> str:
    """Return the text of a file in UTF-8.

    Raises:
        QkovError: it cannot be read, or is in another encoding.
    """
    try:
        return place.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise QkovError(f"{place} is not text in UTF-8 ({reason(error)}): convert it") from error


def read_json(place: Place) -> Any:
    """Return what a JSON file holds.

    Raises:
        QkovError: it cannot be read, or is no JSON.
    """
    try:
        return json.loads(read_text(place))
    except json.JSONDecodeError as error:
        raise QkovError(f"{place} is not JSON ({reason(error)}): is it cut short?") from error


def read_records(place: Place) -> list[dict[str, Any]]:
    """Return the records of a file: one JSON object a line, or a JSON list of them.

    Raises:
        QkovError: it cannot be read; a line, which is named, is no JSON object.
    """
    text = read_text(place)
    if text.lstrip().startswith("["):
        records = read_json(place)
        lines = [f"entry {number}" for number in range(len(records))]
    else:
        # Not splitlines, which breaks at characters that JSON may hold.
        numbered = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
        lines = [f"line {number}" for number, _ in numbered]
        records = [_parsed(place, number, line) for number, line in numbered]
    for where, record in zip(lines, records, strict=True):
        if not isinstance(record, dict):
            raise QkovError(f"{where} of {place} is {str(record)[:60]!r}; expected a JSON object")
    return records


def hub_rows(data: Path | str, split: str | None) -> Iterator[dict[str, Any]]:
    """Yield the rows of a data set by `datasets`: of one split, or of all.

    Args:
        data: `name` or `organisation/name` on the hub, each also with `@revision`; or a folder with files that
            `datasets` reads, such as Parquet or JSON lines.
        split: such as `validation`; None for all.

    Raises:
        QkovError: it cannot be loaded.
    """
    import datasets

    name, _, revision = str(data).partition("@") if not Path(data).exists() else (str(data), "", "")
    try:
        loaded: Any = datasets.load_dataset(name, split=split, revision=revision or None)
    except Exception as error:  # of many kinds, by what is missing
        raise QkovError(
            f"{data} is no path here, and datasets cannot load it ({reason(error)}): check the name, the split and the "
            f"connection, or download it and give the path"
            if not Path(data).exists()
            else f"datasets cannot load {data} ({reason(error)}): check its files and the split"
        ) from error
    yield from loaded if split is not None else chain.from_iterable(loaded.values())


def field(record: dict[str, Any], name: str, where: object) -> Any:
    """Return a field of a record.

    Raises:
        QkovError: it has none of that name; the message lists those it has.
    """
    if name not in record:
        raise QkovError(f"a record of {where} has no field {name!r}; its fields are {', '.join(map(str, record))}")
    return record[name]


def _parsed(place: Place, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise QkovError(f"line {number} of {place} is not JSON ({reason(error)}): is the file cut short?") from error
