"""Which entries of which parameters of a model are its QK circuit, and which its OV circuit."""

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

#: Where the numbers of places begin: no weight is as large, so what is smaller is no place. float64 counts on exactly.
_FIRST_PLACE = 2.0**40


@dataclass(frozen=True, eq=False)
class CircuitEntries:
    """The entries of one parameter that belong to one circuit: some places along one of its dimensions, or all.

    Attributes:
        name: of the parameter in the model.
        parameter: that holds them.
        circuit: to which they belong.
        dimension: along which a fused parameter comes apart.
        ranges: of places along it.
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
        """Number of entries."""
        return self.parameter.numel() // self.parameter.shape[self.dimension] * sum(map(len, self.ranges))

    def views(self) -> list[Tensor]:
        """Return the entries as they are now, without gradient, sharing the parameter's memory."""
        values = self.parameter.detach()
        return [values.narrow(self.dimension, places.start, len(places)) for places in self.ranges]


def circuit_entries(
    model: nn.Module, options: ReadingOptions | None = None, biases: bool = False
) -> list[CircuitEntries]:
    """Find the entries of both circuits in the parameters of a model, each parameter once.

    The architecture is that which `LiveParameters` recognises: places along the parameters are arranged as weights,
    and W_Q then holds the places of its entries.

    Args:
        model: any that `open_model` reads, or a `SingleLayerAttention`.
        options: how to read it, where that is not left to what is recognised.
        biases: whether b_Q and b_K belong to QK, and b_V and b_O to OV; otherwise they belong to neither.

    Raises:
        CallError: it is no torch.nn.Module, the options do not go together, or the same entries are in both circuits.
        QkovError: no attention is found, or it is not kept in parameters.
    """
    if isinstance(model, SingleLayerAttention):
        return list(_of_single_layer(model))
    live = LiveParameters(model, options)
    places = _Places(model)
    found: dict[tuple[int, CircuitName], list[set[int]]] = {}
    for dimension in range(places.dimensions):
        for layer in live.read(lambda parameter, along=dimension: places.along(parameter, along)).layers():
            for circuit, name, numbers in _of_layer(layer, biases):
                for index, rows in places.read(numbers, f"{name} of {layer.label}"):
                    found.setdefault((index, circuit), [set() for _ in range(places.dimensions)])[dimension] |= rows
    entries = [places.entries(index, circuit, rows) for (index, circuit), rows in found.items()]
    _demand_apart(entries)
    return entries


def in_words(names: Iterable[str]) -> str:
    """Return names of tensors in one line, those that differ in numbers alone as one."""
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(re.sub(r"(?<![^.])\d+(?![^.])", "*", name), []).append(name)
    return ", ".join(
        of_one[0] if len(of_one) == 1 else f"{template} ({len(of_one)})" for template, of_one in alike.items()
    )


class _Places:
    """A number for every place along a dimension of every parameter, so that a number tells both."""

    def __init__(self, model: nn.Module) -> None:
        named = dict(model.named_parameters())
        self._names, self._parameters = list(named), list(named.values())
        self._index = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        self._longest = max((size for parameter in self._parameters for size in parameter.shape), default=1)
        self.dimensions = max((parameter.ndim for parameter in self._parameters), default=0)

    def along(self, parameter: nn.Parameter, dimension: int) -> Tensor:
        """The numbers of a parameter's places along a dimension, of its shape but without its memory."""
        first = _FIRST_PLACE + self._index[id(parameter)] * self._longest
        if dimension >= parameter.ndim:
            return torch.tensor(first, dtype=torch.float64).expand(parameter.shape)
        size = parameter.shape[dimension]
        numbers = torch.arange(first, first + size, dtype=torch.float64)
        return numbers.view(size, *[1] * (parameter.ndim - dimension - 1)).expand(parameter.shape)

    def read(self, numbers: Tensor, name: str) -> Iterator[tuple[int, set[int]]]:
        """Each parameter that numbers are of, and its places among them."""
        for axis, stride in enumerate(numbers.stride()):
            if stride == 0:
                numbers = numbers.narrow(axis, 0, 1)
        numbers = numbers.unique() - _FIRST_PLACE
        if numbers[0] < 0:
            raise QkovError(f"{name} is kept in a buffer and in no parameter, so no optimizer moves it")
        indices = torch.div(numbers, self._longest, rounding_mode="floor").long()
        for index in indices.unique().tolist():
            yield index, set((numbers[indices == index] - index * self._longest).long().tolist())

    def entries(self, index: int, circuit: CircuitName, rows: list[set[int]]) -> CircuitEntries:
        """The entries at those places: layouts take a parameter apart along one of its dimensions."""
        parameter = self._parameters[index]
        parted = (axis for axis, size in enumerate(parameter.shape) if len(rows[axis]) < size)
        dimension = next(parted, 0)
        return CircuitEntries(self._names[index], parameter, circuit, dimension, _ranges(rows[dimension]))


def _of_layer(layer: AttentionWeights, biases: bool) -> Iterator[tuple[CircuitName, str, Tensor]]:
    for circuit, weights in WEIGHTS.items():
        for name in (*weights, *(BIASES[circuit] if biases else ())):
            numbers = getattr(layer, name)
            if numbers is not None:
                yield circuit, name, numbers


def _of_single_layer(model: SingleLayerAttention) -> Iterator[CircuitEntries]:
    circuits: dict[CircuitName, tuple[str, ...]] = {"QK": model.attention_names, "OV": model.output_names}
    for circuit, names in circuits.items():
        for name in names:
            parameter = model.get_parameter(name)
            yield CircuitEntries(name, parameter, circuit, 0, (range(parameter.shape[0]),))


def _ranges(places: set[int]) -> tuple[range, ...]:
    ranges: list[range] = []
    for place in sorted(places):
        if ranges and ranges[-1].stop == place:
            ranges[-1] = range(ranges[-1].start, place + 1)
        else:
            ranges.append(range(place, place + 1))
    return tuple(ranges)


def _demand_apart(entries: list[CircuitEntries]) -> None:
    of_qk = {id(one.parameter): one for one in entries if one.circuit == "QK"}
    for other in entries:
        one = of_qk.get(id(other.parameter))
        if other.circuit == "OV" and one is not None and _overlap(one, other):
            raise CallError(
                f"entries of {other.name} belong to the QK circuit and to the OV circuit (shared weights), which "
                f"cannot learn at two rates: untie them, or leave them out of a mapping"
            )


def _overlap(one: CircuitEntries, other: CircuitEntries) -> bool:
    if one.dimension != other.dimension:
        return True
    return any(max(a.start, b.start) < min(a.stop, b.stop) for a in one.ranges for b in other.ranges)


#: The key of a parameter group that tells how many times the base rate it has.
MULTIPLIER = "multiplier"


def circuit_multipliers(qk: float, ov: float) -> dict[str, float]:
    """Return the multiplier of each circuit by its name.

    Raises:
        CallError: one is zero, negative, infinite or no number.
    """
    for name, multiplier in (("qk", qk), ("ov", ov)):
        if not (is_finite(multiplier) and multiplier > 0):
            raise CallError(f"the multiplier {name} should be a finite number above 0, got {multiplier!r}")
    return {"QK": qk, "OV": ov}


def is_finite(value: object) -> bool:
    """Say whether this is a number, and finite; one that is written in a string is none."""
    return isinstance(value, Real) and math.isfinite(value)


def training(entries: list[CircuitEntries], multipliers: dict[str, float]) -> list[CircuitEntries]:
    """Return the entries whose parameters train.

    Raises:
        CallError: none of a circuit does, and its multiplier is not 1.
    """
    found = [one for one in entries if one.parameter.requires_grad]
    for circuit, multiplier in multipliers.items():
        if multiplier != 1 and not any(one.circuit == circuit for one in found):
            frozen = in_words(one.name for one in entries if one.circuit == circuit)
            what = f"its parameters are frozen: {frozen}" if frozen else "none of its weights is there"
            raise CallError(
                f"nothing of the {circuit} circuit trains, so {multiplier:g} times the rate is in vain: {what}"
            )
    return found
