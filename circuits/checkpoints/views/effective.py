"""Weights that a file holds as the parts from which torch computes them: weight_norm and pruning."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..tensor_file import TensorFile

#: Names of the first part of a weight, a size or a mask, and how its name and that of the second part end.
_PARTS = (
    (re.compile(r"(?P<module>(?:.+\.)?)parametrizations\.(?P<weight>\w+)\.original0"), "original0", "original1"),
    (re.compile(r"(?P<module>(?:.+\.)?)(?P<weight>\w*weight)_g"), "_g", "_v"),
    (re.compile(r"(?P<module>(?:.+\.)?)(?P<weight>\w*(?:weight|bias))_mask"), "_mask", "_orig"),
)


@dataclass(frozen=True)
class _Weight:
    """A weight that two tensors of the file make up."""

    parts: tuple[str, str]
    compute: Callable[[Tensor, Tensor], Tensor]


def effective(file: TensorFile) -> TensorFile:
    """Return the same file with the weights that weight_norm or pruning compute in place of their parts.

    The file itself is returned if it holds no such parts.
    """
    weights: dict[str, _Weight] = {}
    names = set(file.shapes)
    for name in names:
        for pattern, first, second in _PARTS:
            match = pattern.fullmatch(name)
            if match is None:
                continue
            whole, other = f"{match['module']}{match['weight']}", name.removesuffix(first) + second
            if other not in names or whole in names:
                continue
            compute = _computation(first, file.shapes[name], file.shapes[other])
            if compute is not None and _are_all(names, name, first, other):
                weights[whole] = _Weight((name, other), compute)
    return EffectiveWeights(file, weights) if weights else file


class EffectiveWeights(TensorFile):
    """The tensors of a file, some of which are computed from others."""

    def __init__(self, file: TensorFile, weights: dict[str, _Weight]) -> None:
        """Put computed weights in the place of their parts.

        Args:
            file: The file.
            weights: What computes each weight, by its name.
        """
        super().__init__(file.address)
        self._file, self._weights = file, weights
        parts = {part for weight in weights.values() for part in weight.parts}
        self.shapes = {name: file.shapes[name] for name in file.shapes if name not in parts}
        self.shapes |= {name: file.shapes[weight.parts[1]] for name, weight in weights.items()}
        self.take_facts(file)

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the tensors with these names.

        Raises:
            QkovError: As for the file itself.
        """
        stored = [part for name in names for part in self._stored(name)]
        read = self._file.read(list(dict.fromkeys(stored)))
        return {
            name: self._weights[name].compute(*(read[part] for part in self._weights[name].parts))
            if name in self._weights
            else read[name]
            for name in names
        }

    def _stored(self, name: str) -> Iterable[str]:
        return self._weights[name].parts if name in self._weights else (name,)


def _computation(
    first: str, shape: tuple[int, ...], other: tuple[int, ...]
) -> Callable[[Tensor, Tensor], Tensor] | None:
    """Return how torch computes a weight from two parts of these shapes, or None if they are not such parts."""
    if first == "_mask":
        return _pruned if shape == other else None
    kept = [side for side, whole in zip(shape, other, strict=False) if side == whole != 1]
    is_norm = (
        len(shape) == len(other)
        and len(kept) <= 1
        and all(side in (1, w) for side, w in zip(shape, other, strict=True))
    )
    return _normalised if shape == () or (is_norm and shape != other) else None


def _are_all(names: set[str], name: str, first: str, other: str) -> bool:
    """Return whether a parametrisation consists of two tensors alone, as that of weight_norm does."""
    if first != "original0":
        return True
    folder = name.removesuffix(first)
    return {each for each in names if each.startswith(folder)} == {name, other}


def _normalised(g: Tensor, v: Tensor) -> Tensor:
    """Return g v / ||v||, with the norm over the dimensions along which g is one number."""
    wide = v.double()
    over = [d for d in range(v.ndim) if g.ndim == 0 or g.shape[d] == 1]
    norm = wide.square().sum(over, keepdim=True).sqrt()
    return (g.double() * wide / norm).to(v.dtype)


def _pruned(mask: Tensor, original: Tensor) -> Tensor:
    return original * mask.to(original.dtype)
