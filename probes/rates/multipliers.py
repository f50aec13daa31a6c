"""Multipliers of the learning rate: of a circuit, of its layers, or of single heads."""

import math
from collections.abc import Iterable, Iterator
from collections.abc import Mapping as Dictionary
from numbers import Integral, Real
from typing import Any

from jaxtyping import Float
from torch import Tensor

from ...circuits.errors import CallError
from ...circuits.weights.layer_keys import LayerKey, layer_label, layer_name, layers_in_words
from .entries import CircuitEntries, CircuitName, HeadBlock

#: One number; numbers by layer, or by layer and head; or a tensor of them.
Multipliers = float | Dictionary[Any, Any] | Float[Tensor, " layer"] | Float[Tensor, "layer head"]

#: The argument that states the multipliers of a circuit.
ARGUMENTS: dict[CircuitName, str] = {"QK": "qk", "OV": "ov"}


class HeadMultipliers:
    """The multiplier of each head of each layer and circuit, which can change between steps."""

    def __init__(self, entries: Iterable[CircuitEntries], qk: Multipliers, ov: Multipliers) -> None:
        """Give each head its multiplier; 1 where a mapping does not name it.

        Args:
            entries: The entries of both circuits.
            qk: What was given for the QK circuit.
            ov: What was given for the OV circuit.

        Raises:
            CallError: A layer or a head is not in the model, is named twice, or the shape of a tensor is another.
        """
        sizes: dict[CircuitName, dict[LayerKey, int]] = {"QK": {}, "OV": {}}
        for part in entries:
            for block in part.blocks:
                of_circuit = sizes[part.circuit]
                of_circuit[block.layer] = max(of_circuit.get(block.layer, 0), block.heads.stop)
        given: dict[CircuitName, Multipliers] = {"QK": qk, "OV": ov}
        self._of: dict[CircuitName, dict[LayerKey, list[float]]] = {
            circuit: _by_layer(ARGUMENTS[circuit], of_circuit, sizes[circuit]) for circuit, of_circuit in given.items()
        }

    def heads(self, circuit: CircuitName) -> Dictionary[LayerKey, list[float]]:
        """Return the multipliers of a circuit's heads by layer."""
        return self._of[circuit]

    def all_of(self, circuit: CircuitName) -> set[float]:
        """Return the different multipliers of a circuit; none if the model has no weights of it."""
        return {multiplier for heads in self._of[circuit].values() for multiplier in heads}

    def of(self, circuit: CircuitName, block: HeadBlock) -> float:
        """Return the multiplier of a block: the lowest of those of the heads that use it."""
        return min(self._of[circuit][block.layer][head] for head in block.heads)

    def set(self, circuit: CircuitName, layer: LayerKey, head: int, multiplier: float) -> None:
        """Change the multiplier of one head.

        Args:
            circuit: QK or OV.
            layer: The stack and the number of the layer.
            head: The query head.
            multiplier: The new multiplier.
        """
        self._of[circuit][layer][head] = multiplier

    def demand_one_each(self, entries: Iterable[CircuitEntries]) -> None:
        """Refuse different multipliers for the same entries.

        Args:
            entries: The entries of both circuits.

        Raises:
            CallError: Heads or layers that share weights have different multipliers.
        """
        for part in entries:
            known: dict[tuple[tuple[range, ...], ...], tuple[float, HeadBlock]] = {}
            for block in part.blocks:
                multipliers = {self._of[part.circuit][block.layer][head] for head in block.heads}
                if len(multipliers) > 1:
                    raise CallError(_of_shared_heads(part, block, sorted(multipliers)))
                (multiplier,) = multipliers
                other, first = known.setdefault(block.slices, (multiplier, block))
                if other != multiplier:
                    raise CallError(
                        f"{layer_name(*first.layer)} and {layer_name(*block.layer)} share {part.name}, so they need "
                        f"one multiplier in {ARGUMENTS[part.circuit]}, and have {other:g} and {multiplier:g}"
                    )


def demand_multipliers(qk: Multipliers, ov: Multipliers) -> None:
    """Refuse what is not a multiplier, before a model is read.

    Args:
        qk: What was given for the QK circuit.
        ov: What was given for the OV circuit.

    Raises:
        CallError: A multiplier is zero, negative, infinite or not a number, or the argument is of another kind.
    """
    for name, given in (("qk", qk), ("ov", ov)):
        for where, multiplier in _numbers(given):
            if not (is_finite(multiplier) and multiplier > 0):
                raise CallError(f"the multiplier {name}{where} should be a finite number above 0, got {multiplier!r}")


def is_finite(value: object) -> bool:
    """Return whether a value is a finite number; a string never is."""
    return isinstance(value, Real) and math.isfinite(value)


def _numbers(given: Any) -> Iterator[tuple[str, Any]]:
    """All numbers that are given, each with where it stands."""
    if isinstance(given, Dictionary):
        for key, value in given.items():
            for where, number in _numbers(value):
                yield f" of {key!r}{where}", number
    elif isinstance(given, Tensor) and given.ndim:
        for index, number in enumerate(given.detach().flatten().tolist()):
            yield f" at {index}", number
    elif isinstance(given, list | tuple):
        for index, number in enumerate(given):
            yield f" at {index}", number
    else:
        yield "", given


def _by_layer(name: str, given: Multipliers, sizes: Dictionary[LayerKey, int]) -> dict[LayerKey, list[float]]:
    if not sizes and not (isinstance(given, Real) and given == 1):
        raise CallError(
            f"the model has no weights of the {name.upper()} circuit, so {name} has no effect: leave it out"
        )
    if isinstance(given, Dictionary):
        return _of_mapping(name, given, sizes)
    if isinstance(given, Tensor | list | tuple):
        return _of_tensor(name, given, sizes)
    return {layer: [float(given)] * heads for layer, heads in sizes.items()}


def _of_tensor(name: str, given: Any, sizes: Dictionary[LayerKey, int]) -> dict[LayerKey, list[float]]:
    if not isinstance(given, Tensor):
        raise CallError(f"{name} is a {type(given).__name__}: make it a tensor [layer] or [layer, head], or a mapping")
    if len({stack for stack, _ in sizes}) > 1:
        raise CallError(
            f"{name} is a tensor, but the model has several stacks, {layers_in_words(sizes)}: use a mapping"
        )
    heads = set(sizes.values())
    expected = [len(sizes), *heads] if given.ndim == 2 and len(heads) == 1 else [len(sizes)]
    if list(given.shape) != expected:
        and_heads = f" or {[len(sizes), *heads]}" if len(heads) == 1 else ", as its layers differ in heads"
        raise CallError(
            f"{name} should have the shape {[len(sizes)]}{and_heads}, for {layers_in_words(sizes)}, got "
            f"{list(given.shape)}"
        )
    rows = given.tolist()
    return {
        layer: list(row) if isinstance(row, list) else [row] * sizes[layer]
        for layer, row in zip(sorted(sizes), rows, strict=True)
    }


def _of_mapping(
    name: str, given: Dictionary[Any, Any], sizes: Dictionary[LayerKey, int]
) -> dict[LayerKey, list[float]]:
    """Multipliers by layer, in which what is said of a head counts more than what is said of its layer."""
    found = {layer: [1.0] * heads for layer, heads in sizes.items()}
    named: dict[tuple[LayerKey, int | None], Any] = {}
    for key in given:
        layer, head = _place(name, key, sizes)
        if (layer, head) in named:
            raise CallError(f"{name} names {layer_name(*layer)} twice, as {named[layer, head]!r} and as {key!r}")
        named[layer, head] = key
    for (layer, head), key in sorted(named.items(), key=lambda item: item[0][1] is not None):
        value: Any = given[key].tolist() if isinstance(given[key], Tensor) else given[key]
        numbers: list[Any] = list(value) if isinstance(value, list | tuple) else [value] * sizes[layer]
        is_list = isinstance(value, list | tuple)
        if len(numbers) != sizes[layer] or not all(map(is_finite, numbers)) or (is_list and head is not None):
            wanted = "a number" if head is not None else f"a number, or one for each of {sizes[layer]} heads"
            raise CallError(f"at {key!r}, {name} should have {wanted}, got {given[key]!r}")
        if head is None:
            found[layer] = [float(number) for number in numbers]
        else:
            found[layer][head] = float(numbers[head])
    return found


def _place(name: str, key: Any, sizes: Dictionary[LayerKey, int]) -> tuple[LayerKey, int | None]:
    """The layer that a key names, and the head if it names one."""
    parts = key if isinstance(key, tuple) else (key,)
    for count in (2, 1):
        layers = _layers(parts[:count], sizes) if len(parts) in (count, count + 1) else []
        if len(layers) > 1:
            raise CallError(
                f"{name} names {key!r}, which may be any of {layers_in_words(layers)}: write {layers[0]!r} or "
                f"{layer_name(*layers[0])!r}"
            )
        if layers:
            (layer,), rest = layers, parts[count:]
            if not rest:
                return layer, None
            if isinstance(rest[0], Integral) and 0 <= int(rest[0]) < sizes[layer]:
                return layer, int(rest[0])
            raise CallError(f"{name} names {key!r}, but {layer_name(*layer)} has the heads 0 to {sizes[layer] - 1}")
    raise CallError(
        f"{name} names {key!r}, but the model has {layers_in_words(sizes)} with this circuit: a "
        f"key is a layer's number, (stack, number), or its name, and for one head (number, head) or "
        f"(stack, number, head)"
    )


def _layers(parts: tuple[Any, ...], sizes: Dictionary[LayerKey, int]) -> list[LayerKey]:
    """The layers that some parts of a key may mean: a stack and a number, a name, or a number alone."""
    if len(parts) == 2:
        return [layer for layer in sizes if layer == parts]
    return [layer for layer in sizes if parts == (layer[1],) or parts[0] in (layer_name(*layer), layer_label(*layer))]


def _of_shared_heads(part: CircuitEntries, block: HeadBlock, multipliers: list[float]) -> str:
    numbers = " and ".join(f"{multiplier:g}" for multiplier in multipliers)
    return (
        f"heads {block.heads.start} to {block.heads.stop - 1} of {layer_name(*block.layer)} share {block.weight} in "
        f"{part.name}, so they need one multiplier in {ARGUMENTS[part.circuit]}, and have {numbers}"
    )
