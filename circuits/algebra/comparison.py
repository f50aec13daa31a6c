"""A circuit compared with itself at another time and with a direction at once, for all heads of a layer."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from .circuit import Circuit
from .joint_grams import BESIDE, CHANGE, FACTOR, Gram, Side, Sums, Term, grams
from .measure import measure
from .products import at_home
from .spectrum import chosen
from .threads import in_threads


class Comparison(NamedTuple):
    """How a circuit C is related to C_before, at another time, and to a direction R.

    Attributes:
        norm: ||C||_F.
        norm_before: ||C_before||_F.
        change_norm: ||C - C_before||_F.
        inner: <C, C_before>.
        scale: <C, R> / <R, R>.
        cosine: <C, R> / (||C||_F ||R||_F).
    """

    norm: Float64[Tensor, "*batch"]
    norm_before: Float64[Tensor, "*batch"]
    change_norm: Float64[Tensor, "*batch"]
    inner: Float64[Tensor, "*batch"]
    scale: Float64[Tensor, "*batch"]
    cosine: Float64[Tensor, "*batch"]


def compare(circuit: Circuit, before: Circuit, direction: Circuit) -> Comparison:
    """Compare a circuit with itself at another time and with a direction, at about the cost of one Gram matrix.

    What is NaN or infinite in one of the three makes those figures NaN that depend on it.

    Args:
        circuit: C, [*batch, rows, columns].
        before: C_before, of the same shape.
        direction: R, of the same shape, or with fewer batch dimensions that broadcast to it.

    Raises:
        CallError: The shapes differ.
    """
    circuit.demand_shape(before.shape, "compare: the circuit before")
    circuit.demand_shape(direction.shape, "compare: the direction")
    if not _are_alike(circuit, before, direction):
        return _by_factors(circuit, before, direction)
    flat = [_flat(each, circuit.batch_shape) for each in (circuit, direction, before)]
    parts = in_threads(
        lambda start, stop: _some([(left[start:stop], right[start:stop]) for left, right in flat]),
        circuit.batch_shape.numel(),
    )
    return Comparison(*(torch.cat(values).reshape(circuit.batch_shape) for values in zip(*parts, strict=True)))


def _are_alike(*circuits: Circuit) -> bool:
    """Return whether all are factored, at one rank that is not above their dimensions."""
    ranks = {None if each.right is None else each.left.shape[-1] for each in circuits}
    return len(ranks) == 1 and None not in ranks and circuits[0].left.shape[-1] <= min(circuits[0].shape[-2:])


def _flat(circuit: Circuit, batch: torch.Size) -> tuple[Tensor, Tensor]:
    assert circuit.right is not None, "the circuit is factored"
    left, right = (
        at_home(factor).expand(*batch, *factor.shape[-2:]).reshape(-1, *factor.shape[-2:])
        for factor in (circuit.left, circuit.right)
    )
    return left, right


def _some(pairs: list[tuple[Tensor, Tensor]]) -> Comparison:
    """Compare some matrices, by their factors where Gram matrices are not accurate enough."""
    lefts, rights = zip(*pairs, strict=True)
    found = [_by_grams(*both) for both in grams(Side(*lefts), Side(*(right.mT for right in rights)))]
    figures = Comparison(*(torch.cat(values) for values in zip(*(figures for figures, _ in found), strict=True)))
    rest = ~torch.cat([accurate for _, accurate in found])
    if rest.any():
        circuit, direction, before = (Circuit(chosen(left, rest), chosen(right, rest)) for left, right in pairs)
        for values, of_rest in zip(figures, _by_factors(circuit, before, direction), strict=True):
            values[rest] = of_rest
    return figures


def _by_grams(left: Gram, right: Gram) -> tuple[Comparison, Bool[Tensor, " batch"]]:
    sums = Sums(left, right)
    (a, of_a, change_a), (b, of_b, change_b) = left.sizes, right.sizes
    whole = [Term(a * b, FACTOR, None, FACTOR)]
    direction = [Term(of_a * of_b, BESIDE, None, BESIDE)]
    # C_before - C
    change = [
        Term(a * change_b, FACTOR, None, CHANGE),
        Term(change_a * b, CHANGE, None, FACTOR),
        Term(change_a * change_b, CHANGE, None, CHANGE),
    ]
    (norm, *checks), (change_norm, of_change), (size, of_direction) = (
        sums.norm(terms) for terms in (whole, change, direction)
    )
    norm_before, of_before = sums.norm([*whole, *change])
    inner = norm.square() + sums.inner(whole, change)
    along = sums.inner(whole, direction)
    accurate = left.are_in_range & right.are_in_range & checks[0] & of_change & of_direction & of_before
    return Comparison(norm, norm_before, change_norm, inner, along / size.square(), along / (norm * size)), accurate


def _by_factors(circuit: Circuit, before: Circuit, direction: Circuit) -> Comparison:
    figures = measure(circuit, direction, eigenvalues=False)
    return Comparison(
        circuit.frobenius_norm(),
        before.frobenius_norm(),
        (circuit - before).frobenius_norm(),
        circuit.inner(before),
        figures["reference_scale"],
        figures["reference_cosine"],
    )
