"""Whether a sweep may go on with a store: it has to be of the same run, measured in the same way."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...circuits.errors import CallError
from ...circuits.public_addresses import identity
from ...circuits.storage.address import place_of
from ...circuits.storage.lens import is_lens, lens_model
from ...circuits.storage.places import LocalPlace
from .store import RunStore

#: How much of a setting's value a message repeats.
_LONGEST = 80


@dataclass(frozen=True)
class Source:
    """The run that a store is made from.

    Attributes:
        name: Its path or its address, without secrets.
        identity: A hash of it that stays the same when the address is signed anew.
    """

    name: str
    identity: str

    @classmethod
    def of(cls, run: Path | str) -> "Source":
        """Return the source at a path or an address."""
        if is_lens(run):
            model = lens_model(str(run))
            # Whichever of its names was typed, it is the same model.
            return cls(str(model), identity(str(replace(model, name=model.official))))
        place = place_of(run)
        if isinstance(place, LocalPlace):
            path = str(place.path.resolve())
            return cls(path, identity(path))
        return cls(place.address, identity(place.location))


def demand_resumable(store: RunStore, source: Source, settings: dict[str, Any]) -> dict[str, Any] | None:
    """Return the description of a store that a sweep may go on with, or None if it is free to be begun.

    A store in which nothing was measured yet is free.

    Args:
        store: The store.
        source: The run of the sweep.
        settings: The settings of the sweep, as run.json returns them.

    Raises:
        CallError: The store belongs to another run or was made with other settings; the first that differs is named.
    """
    if not store.exists():
        return None
    description = store.description()
    if description.get("live"):
        raise CallError(
            f"{store.folder} holds the run of a model in training, which a CircuitProbe writes; give another --out"
        )
    if not store.steps():
        return None
    stored = description.get("source_identity") or identity(str(description.get("source")))
    if stored != source.identity:
        raise CallError(
            f"{store.folder} was made from {description.get('source')}, and this call reads {source.name}; "
            f"give another --out, or delete it"
        )
    differences = list(_differences(description.get("settings"), settings))
    if differences:
        name, old, new = differences[0]
        more = len(differences) - 1
        further = f", and {more} more setting{'s differ' if more > 1 else ' differs'}" if more else ""
        raise CallError(
            f"{store.folder} was made with {name} {_short(old)}, and this call has {_short(new)}{further}; "
            f"give another --out, or delete it"
        )
    return description


def _differences(old: Any, new: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the name, the old and the new value of each setting that differs."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys([*old, *new]):
            yield from _differences(old.get(key), new.get(key), f"{name}.{key}" if name else key)
    elif old != new:
        yield name or "settings", old, new


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
