"""Folders of checkpoints: what they contain, and which of their files are a model's weights."""

from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import cached_property
from pathlib import PurePath

from ..errors import QkovError
from ..storage.places import Place
from .companions import models_among
from .parallel.deepspeed import whole_model
from .parallel.distributed_file import METADATA, is_distributed
from .refusals import foreign_weights, parts_without_index, unreadable_collection
from .sharded_file import read_index
from .tensor_file import ARRAYS, SUFFIXES

#: What a model's own weights are called; the first name that is found counts.
_WEIGHTS = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
    "consolidated.safetensors",
    "consolidated.00.pth",
    "lit_model.pth",
)
#: What training saves beside the weights.
_COMPANIONS = (
    *("optimizer*", "scheduler*", "scaler*", "sampler*", "rng_state*", "random_states*", "training_args.bin"),
    *("custom_checkpoint_*", "dl_state_dict*"),
)


class Folder:
    """A folder whose entries are listed at most once, since every listing of a remote folder is a request.

    Attributes:
        place: The place of the folder.
    """

    def __init__(self, place: Place, parent: "Folder | None" = None) -> None:
        """Wrap a folder; nothing is listed yet.

        Args:
            place: The place of the folder.
            parent: The folder that contains it, if that was listed already.
        """
        self.place = place
        self._parent = parent
        self._probed: dict[str, Place | None] = {}

    @cached_property
    def entries(self) -> dict[str, Place]:
        """The files and folders in the folder, by name.

        Raises:
            QkovError: The folder cannot be listed.
        """
        return {entry.name: entry for entry in self.place.entries()}

    @cached_property
    def subfolders(self) -> "list[Folder]":
        """The folders in the folder, without the hidden ones."""
        return [
            Folder(entry, self)
            for name, entry in self.entries.items()
            if not name.startswith(".") and entry.is_folder()
        ]

    @cached_property
    def parent(self) -> "Folder | None":
        """The folder that contains this one, or None at the top of a file system or repository."""
        if self._parent is not None:
            return self._parent
        return None if self.place.parent is None else Folder(self.place.parent)

    def file(self, name: str) -> Place | None:
        """Return the file with that name, or None if there is none.

        A folder that was not listed is asked for this one file, since web servers often list no folders.
        """
        if name not in self._probed:
            place = self.entries.get(name) if "entries" in vars(self) else self.place.child(name)
            self._probed[name] = place if place is not None and place.is_file() else None
        return self._probed[name]


@dataclass(frozen=True)
class Contents:
    """The weights in a folder.

    Attributes:
        weights: The file or index of the one model whose folder it is.
        loose: Other files of weights.
        refusal: Why weights that exist cannot be read, and what to do about it.
        is_below: Whether the weights are in a folder below this one.
        others: What the files are that end as files of weights do and are not; by name.
    """

    weights: Place | None
    loose: list[Place]
    refusal: str | None
    is_below: bool = False
    others: dict[str, str] = field(default_factory=dict)


def contents_of(folder: Folder) -> Contents:
    """Look for weights in a folder; files are opened only where their names leave open which of them are models.

    Raises:
        QkovError: The folder cannot be listed.
    """
    entries, names = folder.entries, list(folder.entries)
    refusal = unreadable_collection(folder.place, names)
    parts = parts_without_index(names)
    own = next((name for name in _WEIGHTS if name in entries and not _is_left_over(name, entries)), None)
    if own is None:
        indices = [name for name in names if name.endswith((".safetensors.index.json", ".bin.index.json"))]
        own = indices[0] if len(indices) == 1 else None
    if own == "consolidated.00.pth" and "consolidated.01.pth" in entries:
        own = None
    if own is None:
        own = METADATA if is_distributed(names) else whole_model(names)
    if own is not None:
        return Contents(entries[own], [], None)
    files = [entry for name, entry in entries.items() if PurePath(name).suffix in SUFFIXES and entry.is_file()]
    named = {file.name: "is what training saves beside the weights, by its name" for file in files if _is_beside(file)}
    loose = [] if refusal or parts else [file for file in files if file.name not in named]
    # Arrays are taken for weights where there are no other files of weights.
    loose = [file for file in loose if file.suffix not in ARRAYS] or loose
    below = [] if loose else _below(folder)
    if len(below) == 1:
        return Contents(below[0], [], None, is_below=True)
    if not loose:
        refusal = refusal or parts or foreign_weights(names)
        return Contents(None, [], refusal and f"{folder.place} holds {refusal}")
    models, others = models_among(loose)
    return Contents(None, models, None, others=named | others)


def _below(folder: Folder) -> list[Place]:
    """Return the weights of parallel training in the folders below, into which some programs put them."""
    found = []
    for inner in folder.subfolders:
        names = [] if inner.place.name.startswith("optim") else list(inner.entries)
        name = METADATA if is_distributed(names) else whole_model(names)
        if name is not None:
            found.append(inner.entries[name])
    return found


def weights_of(folder: Folder) -> Place:
    """Return the file or index that holds a folder's weights.

    Raises:
        QkovError: The folder holds no weights that can be read, or several models.
    """
    contents = contents_of(folder)
    if contents.weights is not None:
        return contents.weights
    if contents.refusal is not None:
        raise QkovError(contents.refusal)
    if len(contents.loose) == 1:
        return contents.loose[0]
    if contents.loose:
        names = ", ".join(place.name for place in contents.loose[:4])
        raise QkovError(
            f"{folder.place} holds {len(contents.loose)} files of weights ({names} ...); give the path of one"
        )
    raise QkovError(no_checkpoint_in(folder))


def no_checkpoint_in(folder: Folder) -> str:
    """Return the message for a folder that holds no weights."""
    held = ", ".join(list(folder.entries)[:8]) or "nothing"
    return f"{folder.place} holds no checkpoint: expected files that end in {', '.join(SUFFIXES)}, found {held}"


def _is_left_over(name: str, entries: dict[str, Place]) -> bool:
    """Return whether an index was left by an older save whose shards are gone; the model is one file now."""
    if not name.endswith(".index.json") or name.removesuffix(".index.json") not in entries:
        return False
    return not set(read_index(entries[name]).values()) <= set(entries)


def _is_beside(file: Place) -> bool:
    return any(fnmatch(file.name, pattern) for pattern in _COMPANIONS)
