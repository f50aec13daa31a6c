"""Weights that an index distributes over several files, each opened when one of its tensors is requested."""

import json
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from ..errors import QkovError
from ..storage.places import LocalPlace, Place
from ..storage.remote_names import refusal_of
from .safetensors_file import SafetensorsFile
from .tensor_file import TensorFile
from .torch_file import TorchFile


class ShardedWeights(TensorFile):
    """The tensors that a `*.index.json` names, each in one of the files beside it.

    Attributes:
        shard_of: The name of the file that holds each tensor.
    """

    def __init__(self, index: Place, trust_pickle: bool = False) -> None:
        """Read the index.

        Args:
            index: The place of the index.
            trust_pickle: Let PyTorch files run the code that they name.

        Raises:
            QkovError: The index is damaged, points outside its folder, or names a file that is missing.
        """
        super().__init__(index.address)
        self._folder, self._trust_pickle = _folder(index), trust_pickle
        self.shard_of = read_index(index)
        self.waits = not isinstance(self._folder, LocalPlace)
        self._opened: dict[str, TensorFile] = {}
        self._versions = {shard: self._folder.child(shard).version() for shard in sorted(set(self.shard_of.values()))}
        if isinstance(self._folder, LocalPlace):
            for shard in self._versions:
                if not self._folder.child(shard).is_file():
                    raise self._missing(shard)
        self.shapes = _Shapes(self)

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the tensors with these names, file by file.

        Raises:
            QkovError: A file is missing or damaged, or does not hold what the index says.
        """
        by_shard: dict[str, list[str]] = {}
        for name in names:
            by_shard.setdefault(self.shard_of[name], []).append(name)
        tensors: dict[str, Tensor] = {}
        for members in by_shard.values():
            tensors |= self.holder(members).read(members)
        return {name: tensors[name] for name in names}

    def holder(self, names: Sequence[str]) -> TensorFile:
        """Return the file that holds these tensors, which the index puts into one file.

        Raises:
            QkovError: The file is missing or damaged, was written again since the index was read, or does not hold one
                of the tensors.
        """
        shard = self.shard_of[names[0]]
        if shard not in self._opened:
            place = self._folder.child(shard)
            if not place.is_file():
                raise self._missing(shard)
            # The shards are opened one after another, but must all be from the same save.
            place.demand_version(self._versions[shard])
            self._opened[shard] = (
                SafetensorsFile(place) if place.suffix == ".safetensors" else TorchFile(place, self._trust_pickle)
            )
        for name in names:
            if name not in self._opened[shard].shapes:
                raise QkovError(
                    f"{self.address} says that {shard} holds {name}, but it does not: they belong to different models; "
                    f"copy all files of one model"
                )
        return self._opened[shard]

    def _missing(self, shard: str) -> QkovError:
        return QkovError(f"{self._folder.child(shard)} is missing, but {self.address} names it; copy it as well")


class _Shapes(Mapping[str, tuple[int, ...]]):
    """The shapes of tensors, looked up in their file when they are requested."""

    def __init__(self, weights: ShardedWeights) -> None:
        self._weights = weights

    def __getitem__(self, name: str) -> tuple[int, ...]:
        return self._weights.holder([name]).shapes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights.shard_of)

    def __len__(self) -> int:
        return len(self._weights.shard_of)


def read_index(index: Place) -> dict[str, str]:
    """Return the name of the file that holds each tensor.

    Raises:
        QkovError: The index is damaged or empty, or points outside its folder.
    """
    try:
        table = json.loads(index.read_bytes())["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise QkovError(
            f"{index.address} is not an index: expected JSON with a weight_map; it was cut short; copy it again"
        ) from error
    if not isinstance(table, dict) or not all(isinstance(shard, str) for shard in table.values()) or not table:
        raise QkovError(f"{index.address} names no tensors: expected a weight_map from names to files; copy it again")
    for name, shard in table.items():
        demand_inside(shard, name, index)
    return table


def demand_inside(shard: str, name: str, index: Place) -> None:
    """Refuse a file that is not in the folder of the index that names it, or below.

    An index may come from anyone.

    Args:
        shard: The name of the file.
        name: What it should hold.
        index: The index.

    Raises:
        QkovError: The name leads out of the folder.
    """
    if any(refusal_of(part) for part in shard.split("/")):
        raise QkovError(
            f"{index.address} points outside its folder: it says that {name} is in {shard}, which is refused; "
            f"put the files beside the index and correct their names in the index"
        )


def _folder(index: Place) -> Place:
    folder = index.parent
    if folder is None:
        raise QkovError(f"{index.address} is not in a folder, so its files cannot be found")
    return folder
