"""The tensors of one step that is spread over several files, such as one for each layer."""

from collections.abc import Sequence

from torch import Tensor

from ...errors import QkovError
from ..tensor_file import TensorFile


class JoinedFiles(TensorFile):
    """The tensors of several files under one roof.

    Tensors keep their names if no two files use the same name. Otherwise the numbers of the layer and of the head are
    put in front of the names of all of them, as in `3.W_Q` and `3.0.W_Q`.
    """

    def __init__(self, address: str, files: dict[str, TensorFile]) -> None:
        """Join files.

        Args:
            address: Where the files are, for messages.
            files: The files, by the numbers of the layer and of the head joined by a dot.

        Raises:
            QkovError: The files state different configs.
        """
        super().__init__(address)
        names = [name for file in files.values() for name in file.shapes]
        is_shared = len(set(names)) < len(names)
        self._home = {
            (f"{part}.{name}" if is_shared else name): (file, name)
            for part, file in files.items()
            for name in file.shapes
        }
        self.shapes = {name: file.shapes[inner] for name, (file, inner) in self._home.items()}
        first, *others = files.values()
        self.waits = first.waits
        self.config, self.config_origin = first.config, first.config_origin
        self.values = {
            name: value
            for name, value in first.values.items()
            if all(name in other.values and other.values[name] == value for other in others)
        }
        if any(other.config != self.config for other in others):
            raise QkovError(f"{address} is spread over files with different configs; expected the same model in all")

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the tensors with these names, file by file.

        Raises:
            QkovError: As for the files themselves.
        """
        by_file: dict[int, list[str]] = {}
        for name in names:
            by_file.setdefault(id(self._home[name][0]), []).append(name)
        tensors: dict[str, Tensor] = {}
        for members in by_file.values():
            file = self._home[members[0]][0]
            read = file.read([self._home[name][1] for name in members])
            tensors |= {name: read[self._home[name][1]] for name in members}
        return {name: tensors[name] for name in names}
