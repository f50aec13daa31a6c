"""Whether two models compare: the facts of their layers that have to agree."""

import math
from collections.abc import Iterator
from typing import Any

from ....circuits.algebra.circuit import Circuit
from ....circuits.errors import CallError
from ....circuits.weights.attention_weights import AttentionWeights
from ....circuits.weights.layer_keys import layers_in_words
from ....circuits.weights.source import AttentionSource

#: Two models that differ in this much of a rotary frequency have different positions; configs round them.
_SAME_FREQUENCY = 1e-5


def demand_comparable(one: AttentionWeights, other: AttentionWeights, base: str, tuned: str) -> None:
    """Refuse two layers whose circuits do not mean the same.

    Args:
        one: A layer of the base model.
        other: The same layer of the tuned model.
        base: The address of the base model, for the message.
        tuned: The address of the other model.

    Raises:
        CallError: Heads, shapes, the stored basis, norms or positions differ.
    """
    for name, (of_one, of_other) in _facts(one, other):
        if of_one != of_other:
            raise CallError(
                f"{one.label} does not compare: {name} is {of_one} in {base} and {of_other} in {tuned}; "
                f"qkov compare takes two models of one architecture"
            )


def _facts(one: AttentionWeights, other: AttentionWeights) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield the facts that have to agree, as they are in both layers; what is unknown in one of them is left out."""
    yield "the number of heads", (one.heads, other.heads)
    yield "the number of key-value heads", (one.heads // one.group_size, other.heads // other.group_size)
    circuits = [each.circuits(each.stored_basis) for each in (one, other)]
    for name in ("QK", "OV"):
        yield f"the shape of W_{name}", (_shape(circuits[0].get(name)), _shape(circuits[1].get(name)))
    yield "the stored basis", (one.stored_basis, other.stored_basis)
    yield "the kind of attention", tuple("cross" if each.facts.cross else "self" for each in (one, other))
    for name in ("norm", "query_norm", "key_norm"):
        if name != "norm" or "norm" not in one.facts.unknown | other.facts.unknown:
            yield f"the {name.replace('_', ' ')}", tuple(_kind(getattr(each, name)) for each in (one, other))
    if one.facts.positions is not None and other.facts.positions is not None:
        yield "the kind of positions", (one.facts.positions, other.facts.positions)
    rotary, other_rotary = one.facts.rotary, other.facts.rotary
    if rotary is None or other_rotary is None:
        return
    yield "the pairing of rotary dimensions", (rotary.pairing, other_rotary.pairing)
    if rotary.frequencies is None or other_rotary.frequencies is None:
        return
    yield "the number of rotary dimensions", (rotary.dims, other_rotary.dims)
    for pair, frequencies in enumerate(zip(rotary.frequencies, other_rotary.frequencies, strict=False)):
        if not math.isclose(*frequencies, rel_tol=_SAME_FREQUENCY):
            yield f"the frequency of rotary pair {pair}", tuple(f"{frequency:.4g}" for frequency in frequencies)


def _shape(circuit: Circuit | None) -> str:
    return "none" if circuit is None else f"{circuit.shape[-2]} x {circuit.shape[-1]}"


def _kind(norm: Any) -> str:
    return "none" if norm is None else norm.kind or "of unknown kind"


def demand_same_layers(before: AttentionSource, after: AttentionSource) -> None:
    """Refuse two models that do not have the same layers.

    Args:
        before: The base model.
        after: The other model.

    Raises:
        CallError: The layers differ.
    """
    if before.layer_keys != after.layer_keys:
        raise CallError(
            f"{before.address} has {layers_in_words(before.layer_keys)} and {after.address} has "
            f"{layers_in_words(after.layer_keys)}; qkov compare takes two models of one architecture"
        )
