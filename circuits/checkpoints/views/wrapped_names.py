"""Tensor names without the parts that compiling, sharding and activation checkpointing insert."""

import re
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from ...errors import QkovError
from ..tensor_file import TensorFile

#: The wrappers of torch.compile, FullyShardedDataParallel and activation checkpointing, as they appear in names.
_WRAPPERS = re.compile(r"(?:(?<=\.)|^)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


def unwrapped(file: TensorFile) -> TensorFile:
    """Return the same tensors by the names that they had before the model was wrapped.

    The file itself is returned if the model was not wrapped.

    Raises:
        QkovError: Two tensors would have the same name.
    """
    stored: dict[str, str] = {}
    for name in file.shapes:
        plain = _WRAPPERS.sub("", name)
        if plain in stored:
            raise QkovError(
                f"{file.address} holds the same weights twice, as {stored[plain]} and as {name}; "
                f"name the ones to read in a mapping file (--map FILE.toml)"
            )
        stored[plain] = name
    return file if all(plain == name for plain, name in stored.items()) else UnwrappedNames(file, stored)


class UnwrappedNames(TensorFile):
    """The tensors of a file under other names.

    Attributes:
        stored: The name of each tensor in the file, by its new name.
    """

    def __init__(self, file: TensorFile, stored: dict[str, str]) -> None:
        """Rename the tensors of a file.

        Args:
            file: The file.
            stored: The name of each tensor in the file, by its new name.
        """
        super().__init__(file.address)
        self._file = file
        self.stored = stored
        self.shapes = _Renamed(file.shapes, stored)
        self.take_facts(file)

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the tensors with these names.

        Raises:
            QkovError: As for the file itself.
        """
        read = self._file.read([self.stored[name] for name in names])
        return {name: read[self.stored[name]] for name in names}


class _Renamed(Mapping[str, tuple[int, ...]]):
    """Shapes under other names; those of sharded weights are looked up when they are requested."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], stored: dict[str, str]) -> None:
        self._shapes, self._stored = shapes, stored

    def __getitem__(self, name: str) -> tuple[int, ...]:
        return self._shapes[self._stored[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)
