"""Weights that an index spreads over several files; a file is opened when a tensor of it is asked for."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath, PureWindowsPath

from torch import Tensor

from ..errors import QkovError
from ..storage.places import LocalPlace, Place
from .safetensors_file import SafetensorsFile
from .tensor_file import TensorFile
from .torch_file import TorchFile


class ShardedWeights(TensorFile):
    """The tensors that a `*.index.json` names, each in one of the files beside it.

    Attributes:
        shard_of: the name of the file that holds each tensor.
    """

    def __init__(self, index: Place, trust_pickle: bool = False) -> None:
        """Read the index.

        Args:
            index: the place of the index.
            trust_pickle: let PyTorch files run the code that they name.

        Raises:
            QkovError: the index is damaged, points out of its folder, or names a file that is missing.
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
        """Return the tensors of those names, file by file.

        Raises:
            QkovError: a file is missing, damaged, or does not hold what the index says.
        """
        by_shard: dict[str, list[str]] = {}
        for name in names:
            by_shard.setdefault(self.shard_of[name], []).append(name)
        found: dict[str, Tensor] = {}
        for members in by_shard.values():
            found |= self.holder(members).read(members)
        return {name: found[name] for name in names}

    def holder(self, names: Sequence[str]) -> TensorFile:
        """Return the file that holds these tensors, which the index puts in one.

        Raises:
            QkovError: the file is missing, damaged, was written again since the index was read, or does not hold one of
                them.
        """
        shard = self.shard_of[names[0]]
        if shard not in self._opened:
            place = self._folder.child(shard)
            if not place.is_file():
                raise self._missing(shard)
            # Opened one after the other, they have to be of one moment all the same.
            place.demand_version(self._versions[shard])
            self._opened[shard] = (
                SafetensorsFile(place) if place.suffix == ".safetensors" else TorchFile(place, self._trust_pickle)
            )
        for name in names:
            if name not in self._opened[shard].shapes:
                raise QkovError(
                    f"{self.address} says that {shard} holds {name}, and it does not: they are of different models; "
                    f"copy all of one"
                )
        return self._opened[shard]

    def _missing(self, shard: str) -> QkovError:
        return QkovError(f"{self._folder.child(shard)} is missing, and {self.address} names it: copy it as well")


class _Shapes(Mapping[str, tuple[int, ...]]):
    """The shapes of tensors, looked up in their file when asked for."""

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
        QkovError: the index is damaged or empty, or points out of its folder.
    """
    try:
        table = json.loads(index.read_bytes())["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise QkovError(
            f"{index.address} is no index: expected JSON with a weight_map; it is cut short; copy it again"
        ) from error
    if not isinstance(table, dict) or not all(isinstance(shard, str) for shard in table.values()) or not table:
        raise QkovError(f"{index.address} names no tensors: expected a weight_map from names to files; copy it again")
    for name, shard in table.items():
        # As any system would read it: an index is written by others.
        paths = PurePosixPath(shard), PureWindowsPath(shard)
        if any(path.is_absolute() or path.drive or path.root or ".." in path.parts for path in paths) or "://" in shard:
            raise QkovError(
                f"{index.address} points out of its folder: it says that {name} is in {shard}, which is refused; "
                f"put the files beside the index and name them so"
            )
    return table


def _folder(index: Place) -> Place:
    folder = index.parent
    if folder is None:
        raise QkovError(f"{index.address} lies in no folder, so that its files cannot be found")
    return folder
