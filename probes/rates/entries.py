"""Find which entries of which parameters of a model are its QK circuit, and which its OV circuit."""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from numbers import Real
from typing import Literal

import torch
from torch import Tensor, nn

from ...analyses.dynamics.model import SingleLayerAttention
from ...circuits.errors import CallError, QkovError
from ...circuits.live.parameters import LiveParameters
from ...circuits.reading.options import ReadingOptions
from ...circuits.weights.attention_weights import AttentionWeights

CircuitName = Literal["QK", "OV"]

WEIGHTS: dict[CircuitName, tuple[str, ...]] = {"QK": ("W_Q", "W_K", "W_QK"), "OV": ("W_V", "W_O", "W_OV")}
BIASES: dict[CircuitName, tuple[str, ...]] = {"QK": ("b_Q", "b_K"), "OV": ("b_V", "b_O")}

#: The key of a parameter group that holds its multiple of the base rate.
MULTIPLIER = "multiplier"

#: The number of the first slice. No weight is as large, so a smaller number is a weight and not the number of a slice;
#: from here on float64 still holds every integer exactly.
_FIRST_NUMBER = 2.0**40


@dataclass(frozen=True, eq=False)
class CircuitEntries:
    """The entries of one parameter that belong to one circuit: some slices along one of its dimensions, or all.

    Attributes:
        name: The name of the parameter in the model.
        parameter: The parameter that holds the entries.
        circuit: The circuit to which they belong.
        dimension: The dimension along which a fused parameter is divided.
        ranges: The ranges of indices along that dimension.
    """

    name: str
    parameter: nn.Parameter
    circuit: CircuitName
    dimension: int
    ranges: tuple[range, ...]

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
    indices: dict[tuple[int, CircuitName], list[set[int]]] = {}
    for dimension in range(numbering.dimensions):
        numbered = live.read(lambda parameter, along=dimension: numbering.along(parameter, along))
        for layer in numbered.layers():
            for circuit, name, numbers in _tensors_of_circuits(layer, biases):
                for parameter, slices in numbering.decoded(numbers, f"{name} of {layer.label}"):
                    key = parameter, circuit
                    indices.setdefault(key, [set() for _ in range(numbering.dimensions)])[dimension] |= slices
    entries = [numbering.entries(parameter, circuit, slices) for (parameter, circuit), slices in indices.items()]
    _demand_disjoint(entries)
    return entries


def trainable(entries: list[CircuitEntries], multipliers: dict[str, float]) -> list[CircuitEntries]:
    """Return the entries whose parameters are trained.

    Args:
        entries: The entries of both circuits.
        multipliers: The multiplier of each circuit.

    Raises:
        CallError: No parameter of a circuit is trained although its multiplier is not 1.
    """
    trained = [part for part in entries if part.parameter.requires_grad]
    for circuit, multiplier in multipliers.items():
        if multiplier != 1 and not any(part.circuit == circuit for part in trained):
            frozen = in_words(part.name for part in entries if part.circuit == circuit)
            cause = f"its parameters are frozen: {frozen}" if frozen else "the model has none of its weights"
            raise CallError(
                f"no parameter of the {circuit} circuit is trained, so {multiplier:g} times the rate has no effect: "
                f"{cause}"
            )
    return trained


def circuit_multipliers(qk: float, ov: float) -> dict[str, float]:
    """Return the multiplier of each circuit by its name.

    Args:
        qk: The multiplier of the QK circuit.
        ov: The multiplier of the OV circuit.

    Raises:
        CallError: A multiplier is zero, negative, infinite or not a number.
    """
    for name, multiplier in (("qk", qk), ("ov", ov)):
        if not (is_finite(multiplier) and multiplier > 0):
            raise CallError(f"the multiplier {name} should be a finite number above 0, got {multiplier!r}")
    return {"QK": qk, "OV": ov}


def is_finite(value: object) -> bool:
    """Return whether a value is a finite number; a string never is."""
    return isinstance(value, Real) and math.isfinite(value)


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

    def decoded(self, numbers: Tensor, name: str) -> Iterator[tuple[int, set[int]]]:
        """Yield the index of each parameter to which the numbers belong, and the indices of its slices."""
        for axis, stride in enumerate(numbers.stride()):
            if stride == 0:
                numbers = numbers.narrow(axis, 0, 1)
        numbers = numbers.unique() - _FIRST_NUMBER
        if numbers[0] < 0:
            raise QkovError(f"{name} is kept in a buffer, not in a parameter, so no optimizer moves it")
        parameters = torch.div(numbers, self._longest, rounding_mode="floor").long()
        for index in parameters.unique().tolist():
            yield index, set((numbers[parameters == index] - index * self._longest).long().tolist())

    def entries(self, index: int, circuit: CircuitName, slices: list[set[int]]) -> CircuitEntries:
        """The entries in those slices; every layout divides a parameter along one dimension at most."""
        parameter = self._parameters[index]
        divided = (axis for axis, size in enumerate(parameter.shape) if len(slices[axis]) < size)
        dimension = next(divided, 0)
        return CircuitEntries(self._names[index], parameter, circuit, dimension, _ranges(slices[dimension]))


def _tensors_of_circuits(layer: AttentionWeights, biases: bool) -> Iterator[tuple[CircuitName, str, Tensor]]:
    for circuit, weights in WEIGHTS.items():
        for name in (*weights, *(BIASES[circuit] if biases else ())):
            tensor = getattr(layer, name)
            if tensor is not None:
                yield circuit, name, tensor


def _entries_of_single_layer(model: SingleLayerAttention) -> Iterator[CircuitEntries]:
    circuits: dict[CircuitName, tuple[str, ...]] = {"QK": model.attention_names, "OV": model.output_names}
    for circuit, names in circuits.items():
        for name in names:
            parameter = model.get_parameter(name)
            yield CircuitEntries(name, parameter, circuit, 0, (range(parameter.shape[0]),))


def _ranges(indices: set[int]) -> tuple[range, ...]:
    ranges: list[range] = []
    for index in sorted(indices):
        if ranges and ranges[-1].stop == index:
            ranges[-1] = range(ranges[-1].start, index + 1)
        else:
            ranges.append(range(index, index + 1))
    return tuple(ranges)


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
