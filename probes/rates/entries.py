"""Find which entries of which parameters of a model are its QK circuit, and which its OV circuit."""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Mapping as Dictionary
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from ...analyses.dynamics.model import SingleLayerAttention
from ...circuits.errors import CallError, QkovError
from ...circuits.live.parameters import LiveParameters
from ...circuits.reading.options import ReadingOptions
from ...circuits.weights.attention_weights import AttentionWeights
from ...circuits.weights.layer_keys import LayerKey

CircuitName = Literal["QK", "OV"]

WEIGHTS: dict[CircuitName, tuple[str, ...]] = {"QK": ("W_Q", "W_K", "W_QK"), "OV": ("W_V", "W_O", "W_OV")}
BIASES: dict[CircuitName, tuple[str, ...]] = {"QK": ("b_Q", "b_K"), "OV": ("b_V", "b_O")}

#: The number of the first slice. No weight is as large, so a smaller number is a weight and not the number of a slice;
#: from here on float64 still holds every integer exactly.
_FIRST_NUMBER = 2.0**40


#: The layer, the weight, and the query heads that use one head's part of it.
_Head = tuple[LayerKey, str, range]


@dataclass(frozen=True, eq=False)
class HeadBlock:
    """The entries of one parameter that are one head's part of one weight.

    Attributes:
        layer: The stack and the number of the layer.
        weight: The name of the weight, such as W_Q.
        heads: The query heads that use it: several where heads share keys and values, and all of them for b_O.
        slices: The indices along each dimension of the parameter, as ranges.
    """

    layer: LayerKey
    weight: str
    heads: range
    slices: tuple[tuple[range, ...], ...]

    @property
    def count(self) -> int:
        """The number of entries."""
        return math.prod(sum(map(len, ranges)) for ranges in self.slices)


@dataclass(frozen=True, eq=False)
class CircuitEntries:
    """The entries of one parameter that belong to one circuit: some slices along one of its dimensions, or all.

    Attributes:
        name: The name of the parameter in the model.
        parameter: The parameter that holds the entries.
        circuit: The circuit to which they belong.
        dimension: The dimension along which a fused parameter is divided.
        ranges: The ranges of indices along that dimension.
        blocks: The same entries, head by head.
    """

    name: str
    parameter: nn.Parameter
    circuit: CircuitName
    dimension: int
    ranges: tuple[range, ...]
    blocks: tuple[HeadBlock, ...]

    @property
    def is_whole(self) -> bool:
        """Whether these are all entries of the parameter."""
        return sum(map(len, self.ranges)) == self.parameter.shape[self.dimension]

    @property
    def count(self) -> int:
        """The number of entries."""
        return self.parameter.numel() // self.parameter.shape[self.dimension] * sum(map(len, self.ranges))

    def views(self) -> list[Tensor]:
        """Return the current entries, without gradient, sharing the parameter's memory."""
        values = self.parameter.detach()
        return [values.narrow(self.dimension, indices.start, len(indices)) for indices in self.ranges]


def circuit_entries(model: nn.Module, options: ReadingOptions | None, biases: bool) -> list[CircuitEntries]:
    """Find the entries of both circuits in the parameters of a model, each parameter once.

    Every slice of every parameter gets a number. `LiveParameters` recognises the architecture and arranges these
    numbers as it arranges the weights, so that W_Q then holds the numbers of the slices from which it is made.

    Args:
        model: Any model that `open_model` reads, or a `SingleLayerAttention`.
        options: How to read the model; by default everything is recognised.
        biases: Whether b_Q and b_K belong to QK, and b_V and b_O to OV; otherwise they belong to neither.

    Returns:
        The entries, one element for each parameter and circuit.

    Raises:
        CallError: The model is not a torch.nn.Module, the options do not go together, or both circuits hold the same
            entries.
        QkovError: No attention is found, or it is not kept in parameters.
    """
    if isinstance(model, SingleLayerAttention):
        return list(_entries_of_single_layer(model))
    live = LiveParameters(model, options)
    numbering = _SliceNumbers(model)
    found: dict[tuple[int, CircuitName], dict[_Head, list[tuple[range, ...]]]] = {}
    for dimension in range(numbering.dimensions):
        numbered = live.read(lambda parameter, along=dimension: numbering.along(parameter, along))
        for layer in numbered.layers():
            for circuit, name, numbers in _tensors_of_circuits(layer, biases):
                for heads, of_head in _by_head(layer, name, numbers):
                    for parameter, slices in numbering.decoded(of_head, f"{name} of {layer.label}"):
                        head = (layer.stack, layer.layer), name, heads
                        found.setdefault((parameter, circuit), {}).setdefault(head, []).append(slices)
    entries = [numbering.entries(parameter, circuit, slices) for (parameter, circuit), slices in found.items()]
    _demand_disjoint(entries)
    return entries


def in_words(names: Iterable[str]) -> str:
    """Return names of tensors in one line, with names that differ only in numbers written as one."""
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(re.sub(r"(?<![^.])\d+(?![^.])", "*", name), []).append(name)
    return ", ".join(
        members[0] if len(members) == 1 else f"{template} ({len(members)})" for template, members in alike.items()
    )


class _SliceNumbers:
    """A number for every slice along a dimension of every parameter, which identifies both."""

    def __init__(self, model: nn.Module) -> None:
        named = dict(model.named_parameters())
        self._names, self._parameters = list(named), list(named.values())
        self._index = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        self._longest = max((size for parameter in self._parameters for size in parameter.shape), default=1)
        self.dimensions = max((parameter.ndim for parameter in self._parameters), default=0)

    def along(self, parameter: nn.Parameter, dimension: int) -> Tensor:
        """The numbers of a parameter's slices along a dimension, in its shape but without its memory."""
        first = _FIRST_NUMBER + self._index[id(parameter)] * self._longest
        if dimension >= parameter.ndim:
            return torch.tensor(first, dtype=torch.float64).expand(parameter.shape)
        size = parameter.shape[dimension]
        numbers = torch.arange(first, first + size, dtype=torch.float64)
        return numbers.view(size, *[1] * (parameter.ndim - dimension - 1)).expand(parameter.shape)

    def decoded(self, numbers: Tensor, name: str) -> Iterator[tuple[int, tuple[range, ...]]]:
        """Yield the index of each parameter to which the numbers belong, and the indices of its slices."""
        for axis, stride in enumerate(numbers.stride()):
            if stride == 0:
                numbers = numbers.narrow(axis, 0, 1)
        numbers = numbers.unique() - _FIRST_NUMBER
        if numbers[0] < 0:
            raise QkovError(f"{name} is kept in a buffer, not in a parameter, so no optimizer moves it")
        parameters = torch.div(numbers, self._longest, rounding_mode="floor").long()
        for index in parameters.unique().tolist():
            yield index, _ranges((numbers[parameters == index] - index * self._longest).long())

    def entries(
        self, index: int, circuit: CircuitName, by_head: Dictionary[_Head, Sequence[tuple[range, ...]]]
    ) -> CircuitEntries:
        """The entries in those slices; every layout divides a parameter among the circuits along one dimension."""
        parameter = self._parameters[index]
        blocks = tuple(HeadBlock(*head, tuple(slices[: parameter.ndim])) for head, slices in by_head.items())
        slices = [_joined(block.slices[axis] for block in blocks) for axis in range(parameter.ndim)]
        divided = (axis for axis, size in enumerate(parameter.shape) if sum(map(len, slices[axis])) < size)
        dimension = next(divided, 0)
        return CircuitEntries(self._names[index], parameter, circuit, dimension, slices[dimension], blocks)


def _tensors_of_circuits(layer: AttentionWeights, biases: bool) -> Iterator[tuple[CircuitName, str, Tensor]]:
    for circuit, weights in WEIGHTS.items():
        for name in (*weights, *(BIASES[circuit] if biases else ())):
            tensor = getattr(layer, name)
            if tensor is not None:
                yield circuit, name, tensor


def _by_head(layer: AttentionWeights, name: str, numbers: Tensor) -> Iterator[tuple[range, Tensor]]:
    """The parts of a weight or bias, each with the query heads that use it."""
    if name == "b_O":
        yield range(layer.heads), numbers
        return
    size = layer.heads // numbers.shape[0]
    for index, of_head in enumerate(numbers):
        yield range(index * size, (index + 1) * size), of_head


def _entries_of_single_layer(model: SingleLayerAttention) -> Iterator[CircuitEntries]:
    circuits: dict[CircuitName, tuple[str, ...]] = {"QK": model.attention_names, "OV": model.output_names}
    for circuit, names in circuits.items():
        for name in names:
            parameter = model.get_parameter(name)
            whole = [(range(size),) for size in parameter.shape]
            blocks = tuple(
                HeadBlock(("", 0), name, range(head, head + 1), (whole[0], (range(head, head + 1),), *whole[2:]))
                for head in range(model.heads)
            )
            yield CircuitEntries(name, parameter, circuit, 0, whole[0], blocks)


def _ranges(indices: Tensor) -> tuple[range, ...]:
    """Indices in ascending order, as few ranges."""
    ends = [*(indices.diff() != 1).nonzero()[:, 0].tolist(), len(indices) - 1]
    starts = [0, *(end + 1 for end in ends[:-1])]
    firsts, lasts = indices[starts].tolist(), indices[ends].tolist()
    return tuple(range(first, last + 1) for first, last in zip(firsts, lasts, strict=True))


def _joined(several: Iterable[tuple[range, ...]]) -> tuple[range, ...]:
    distinct = set(several)
    return _ranges(torch.tensor(sorted({index for ranges in distinct for part in ranges for index in part})))


def _demand_disjoint(entries: list[CircuitEntries]) -> None:
    of_qk = {id(part.parameter): part for part in entries if part.circuit == "QK"}
    for other in entries:
        part = of_qk.get(id(other.parameter))
        if other.circuit == "OV" and part is not None and _overlap(part, other):
            raise CallError(
                f"entries of {other.name} belong to both the QK circuit and the OV circuit (shared weights), which "
                f"cannot learn at two rates: untie them, or leave them out of a mapping"
            )


def _overlap(one: CircuitEntries, other: CircuitEntries) -> bool:
    if one.dimension != other.dimension:
        return True
    return any(max(a.start, b.start) < min(a.stop, b.stop) for a in one.ranges for b in other.ranges)
