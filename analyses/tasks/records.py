"""Records of task data: from local or remote files, and from data sets that the `datasets` library can load."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from itertools import chain
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

from ...circuits.errors import CallError, QkovError, named_input, reason
from ...circuits.storage.address import place_of
from ...circuits.storage.places import LocalPlace, Place
from .example import Task

_HUB_ID = re.compile(r"\w[\w.\-]*(?:/[\w.\-]+)?(?:@\S+)?")
# A name with one of these endings is meant as a file, not as the id of a data set on the hub.
_FILE = re.compile(r"\.(csv|gold|gz|jsonl?|parquet|text|tsv|txt|zip)$")


Parameters = ParamSpec("Parameters")


def of_data(
    expected: str,
) -> Callable[
    [Callable[Concatenate[Path | str, Parameters], Task]], Callable[Concatenate[Path | str, Parameters], Task]
]:
    """Return a decorator for the source of a task, so that whatever is raised while data are read names the data.

    Args:
        expected: what the data should be, such as "the layout of ERASER".
    """

    def decorate(
        source: Callable[Concatenate[Path | str, Parameters], Task],
    ) -> Callable[Concatenate[Path | str, Parameters], Task]:
        @wraps(source)
        def read(data: Path | str, *arguments: Parameters.args, **options: Parameters.kwargs) -> Task:
            with named_input(data, expected, "compare its records with that format"):
                return source(data, *arguments, **options)

        return read

    return decorate


def data_place(data: Path | str) -> Place | None:
    """Return the place of data at a local path or an fsspec address, or None for the id of a data set on the hub."""
    if isinstance(data, Path) or "://" in data:
        return place_of(data)
    path = Path(data)
    if path.exists() or not _HUB_ID.fullmatch(data) or _FILE.search(data):
        return LocalPlace(path)
    # A path in an existing folder was mistyped, and is not meant as a hub id.
    return LocalPlace(path) if len(path.parts) > 1 and Path(path.parts[0]).is_dir() else None


def files_in(place: Place, endings: Sequence[str], split: str | None) -> list[Place]:
    """Return the file at a place, or the files of a folder that have one of the endings and belong to the split.

    Args:
        place: a file or a folder.
        endings: endings of the file names in a folder, such as `.json`.
        split: name of the split, with which a file name must begin; None for all files.

    Raises:
        CallError: there is no such file, or a split was requested from a single file.
    """
    if not place.is_folder():
        if split is not None:
            raise CallError(f"{place} is a single file, so split {split!r} cannot be selected; leave the split out")
        if not place.is_file():
            raise CallError(f"{place} does not exist: expected a file or a folder with {' or '.join(endings)} files")
        return [place]
    files = [entry for entry in place.entries() if entry.name.endswith(tuple(endings)) and entry.is_file()]
    of_split = [file for file in files if split is None or re.fullmatch(rf"{re.escape(split)}([.\-].*)?", file.name)]
    if not of_split:
        names = ", ".join(file.name for file in files) or "none"
        wanted = f"{split} with " if split is not None else ""
        raise CallError(f"{place} has no file {wanted}ending in {' or '.join(endings)}; it has these: {names}")
    return of_split


def read_text(place: Place) -> str:
    """Return the text of a UTF-8 file.

    Raises:
        QkovError: the file cannot be read, or is not UTF-8.
    """
    with named_input(place, "UTF-8 text", "convert it to UTF-8"):
        return place.read_bytes().decode("utf-8-sig")


def read_json(place: Place) -> Any:
    """Return the content of a JSON file.

    Raises:
        QkovError: the file cannot be read, or is not JSON.
    """
    with named_input(place, "JSON", "check whether the file is truncated"):
        return json.loads(read_text(place))


def read_records(place: Place) -> list[dict[str, Any]]:
    """Return the records of a file: one JSON object per line, or a JSON list of objects.

    Raises:
        QkovError: the file cannot be read, or a line or entry is not a JSON object; the message names it.
    """
    text = read_text(place)
    if text.lstrip().startswith("["):
        records = read_json(place)
        lines = [f"entry {number}" for number in range(len(records))]
    else:
        # splitlines would also split at characters that JSON strings may contain.
        numbered = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
        lines = [f"line {number}" for number, _ in numbered]
        records = [_parsed(place, number, line) for number, line in numbered]
    for where, record in zip(lines, records, strict=True):
        if not isinstance(record, dict):
            raise QkovError(f"{where} of {place} is {str(record)[:60]!r}; expected a JSON object")
    return records


def hub_rows(data: Path | str, split: str | None) -> Iterator[dict[str, Any]]:
    """Yield the rows of one split, or of all splits, of a data set that the `datasets` library loads.

    Args:
        data: `name` or `organization/name` on the hub, optionally followed by `@revision`; or a folder with files that
            `datasets` reads, such as Parquet or JSON lines.
        split: name of the split, such as `validation`; None for all splits.

    Raises:
        QkovError: the data set cannot be loaded.
    """
    import datasets

    name, _, revision = str(data).partition("@") if not Path(data).exists() else (str(data), "", "")
    try:
        loaded: Any = datasets.load_dataset(name, split=split, revision=revision or None)
    except Exception as error:  # datasets raises many kinds of exceptions
        raise QkovError(
            f"{data} is not an existing path, and datasets cannot load it ({reason(error)}); check the name, the split "
            f"and the connection, or download the data set and give its path"
            if not Path(data).exists()
            else f"datasets cannot load {data} ({reason(error)}); check its files and the split"
        ) from error
    with named_input(data, "a data set", "check its files"):
        yield from loaded if split is not None else chain.from_iterable(loaded.values())


def field(record: dict[str, Any], name: str, where: object) -> Any:
    """Return a field of a record.

    Args:
        record: the record.
        name: name of the field.
        where: source of the record, for the message.

    Raises:
        QkovError: the record has no such field; the message lists its fields.
    """
    if not isinstance(record, dict):
        raise QkovError(f"a record of {where} is {str(record)[:60]!r}; expected a JSON object with {name!r}")
    if name not in record:
        raise QkovError(f"a record of {where} has no field {name!r}; its fields are {', '.join(map(str, record))}")
    return record[name]


def _parsed(place: Place, number: int, line: str) -> Any:
    with named_input(f"line {number} of {place}", "JSON", "check whether the file is truncated"):
        return json.loads(line)
