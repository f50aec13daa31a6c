"""Find, order and open checkpoints, reading their attention tensors only, one layer at a time."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .attention_weights import AttentionWeights
from .errors import CallError, QkovError
from .mapping import Mapping, seen
from .saved_format import is_own, own_mapping, own_scalars
from .tensor_files import SUFFIXES, TensorFile, fingerprint, open_tensor_file


@dataclass(frozen=True)
class Checkpoint:
    """One file of a training run, at a step; nothing of it is read yet."""

    step: int
    path: Path

    def fingerprint(self) -> str:
        """Return a hash that changes when the file does."""
        return fingerprint(self.path)


class OpenCheckpoint:
    """A checkpoint whose tensors are known by name and are read layer by layer."""

    def __init__(self, file: TensorFile, mapping: Mapping, recognised: str) -> None:
        """Find the layers.

        Raises:
            QkovError: the file does not hold the tensors that the mapping names.
        """
        self.file = file
        self.mapping = mapping
        self.recognised = recognised
        self._names = mapping.layers(set(file.shapes))
        self.layer_numbers = sorted(self._names)

    @property
    def scalars(self) -> dict[str, float]:
        """Figures saved beside the weights, such as the loss.

        Raises:
            QkovError: the mapping names a scalar that the file does not hold.
        """
        if is_own(self.file):
            return own_scalars(self.file)
        figures = {}
        for name, key in self.mapping.scalars.items():
            if key not in self.file.scalars:
                held = ", ".join(sorted(self.file.scalars)[:12]) or "none"
                raise QkovError(
                    f"{self.file.path} has no scalar {key}, which {self.mapping.origin} names; it has {held}"
                )
            figures[name] = self.file.scalars[key]
        return figures

    def layers(self) -> Iterator[AttentionWeights]:
        """Yield the attention weights of one layer after the other, so that no more than one is in memory.

        Raises:
            QkovError: a tensor's shape does not fit its layout.
        """
        for layer in self.layer_numbers:
            weights = {}
            for role, name in self._names[layer].items():
                for part, tensor in self.mapping.arrange(role, self.file.read(name), name).items():
                    weights[f"W_{part}"] = tensor
            _demand_consistent(layer, weights, self.file.path)
            yield AttentionWeights.of(layer, weights, self.mapping.rotary)


def find_checkpoints(path: Path) -> list[Checkpoint]:
    """Return the checkpoints of a folder in the order of their steps, or the one that a file is.

    The step is the number behind "step" in the file's name, else the one whole number that tells the names apart.
    Order is numerical.

    Raises:
        CallError: there is no such folder or file, it holds no checkpoint, the names do not tell the steps, or two have
            the same one.
    """
    if path.is_file():
        return [Checkpoint(_steps([path])[0], path)]
    if not path.is_dir():
        raise CallError(f"{path} does not exist; expected a folder of checkpoints, or one checkpoint")
    files = sorted(file for file in path.iterdir() if file.is_file() and file.suffix in SUFFIXES)
    if not files:
        held = ", ".join(sorted(file.name for file in path.iterdir())[:8]) or "nothing"
        raise CallError(f"{path} holds no checkpoint: expected files that end in {', '.join(SUFFIXES)}, found {held}")
    by_step: dict[int, Path] = {}
    for file, step in zip(files, _steps(files), strict=True):
        if step in by_step:
            raise CallError(f"{by_step[step].name} and {file.name} in {path} are both of step {step}; keep one of them")
        by_step[step] = file
    return [Checkpoint(step, by_step[step]) for step in sorted(by_step)]


def open_checkpoint(path: Path | str, mapping: Mapping | None = None, trust_pickle: bool = False) -> OpenCheckpoint:
    """Open one checkpoint: its own names where it was saved by qkov, else those that the mapping gives.

    Raises:
        CallError: there is no such file.
        QkovError: the file cannot be read, or its names are not recognised and no mapping was given.
    """
    file = open_tensor_file(Path(path), trust_pickle)
    if mapping is not None:
        return OpenCheckpoint(file, mapping, f"by {mapping.origin}")
    if is_own(file):
        return OpenCheckpoint(file, own_mapping(file), "as qkov's own format")
    raise QkovError(
        f"the tensor names of {path} are not recognised: {seen(set(file.shapes))}; "
        f"say which are W_Q, W_K, W_V and W_O in a mapping file (--map FILE.toml; the README shows one)"
    )


def _steps(files: list[Path]) -> list[int]:
    """The step of each file: the number behind "step" in its name, else the one whole number that tells them apart."""
    marked = [re.findall(r"step\D{0,2}(\d+)", file.stem, flags=re.IGNORECASE) for file in files]
    if any(marked):
        for file, found in zip(files, marked, strict=True):
            if not found:
                raise CallError(
                    f"the name of {file} has no step in it; expected one such as model_step_500{file.suffix}"
                )
        return [int(found[-1]) for found in marked]
    # A decimal fraction, such as a loss, is no step.
    numbers = [[n for n in re.findall(r"\d+(?:\.\d+)?", file.stem) if "." not in n] for file in files]
    if len(files) == 1:
        return [int(numbers[0][0]) if len(numbers[0]) == 1 else 0]
    columns = list(zip(*numbers, strict=False)) if len({len(found) for found in numbers}) == 1 else []
    telling = [column for column in columns if len(set(column)) > 1]
    if len(telling) != 1:
        raise CallError(
            f"the names of {files[0].name}, {files[-1].name} and their like in {files[0].parent} do not say which "
            f"number is the step; put 'step' before it, as in model_step_500{files[0].suffix}"
        )
    return [int(number) for number in telling[0]]


def _demand_consistent(layer: int, weights: dict, path: Path) -> None:
    """Heads and inner widths of the pairs that form a circuit must agree."""
    for first, of_first, second, of_second, what in (
        ("W_Q", 0, "W_K", 0, "heads"),
        ("W_V", 0, "W_O", 0, "heads"),
        ("W_Q", 2, "W_K", 2, "d_head"),
        ("W_V", 2, "W_O", 1, "d_head"),
    ):
        if first in weights and second in weights:
            sizes = weights[first].shape[of_first], weights[second].shape[of_second]
            if sizes[0] != sizes[1]:
                raise QkovError(
                    f"layer {layer} of {path}: {first} has {what} = {sizes[0]} and {second} has {sizes[1]}; "
                    f"they should agree (is the number of heads right?)"
                )
