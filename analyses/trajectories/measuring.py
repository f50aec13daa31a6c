"""The rows of one checkpoint: all quantities of its circuits and head groups, and how far they moved."""

import math
from collections.abc import Iterator
from itertools import repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...circuits.algebra.circuit import Circuit
from ...circuits.algebra.measure import FACTOR_QUANTITIES, measure
from ...circuits.algebra.threads import side_by_side
from ...circuits.checkpoints.runs import Checkpoint
from ...circuits.errors import QkovError
from ...circuits.visible_text import visible
from ...circuits.weights.attention_weights import AttentionWeights
from ...circuits.weights.composition import composition_scores
from ...circuits.weights.layer_keys import layer_label
from .left_out import blamed, blaming
from .motion import MOTION, effective_ratio, motion, motion_and_direction
from .view import Opened, TaskDirections, View

#: The offsets at which ||W_QK(offset)|| of a rotary model is measured.
ROTARY_OFFSETS = [0, *(2**power for power in range(11))]

#: The quantities that belong to all heads that share keys and values, because training moves their factors together.
GROUP_QUANTITIES = ("omega_largest", "omega_mean", "omega_self", *FACTOR_QUANTITIES)


def checkpoint_rows(
    current: Opened,
    before: Opened | None,
    reference: Opened | None,
    directions: TaskDirections | None,
    view: View,
    source: str,
) -> list[dict[str, Any]]:
    """Return the rows of a checkpoint, one for each layer, head and circuit, all with the same columns.

    Heads that share keys and values (grouped-query attention) each have a row, with norms, ranks and so on of their own
    matrix. `GROUP_QUANTITIES` are those of the group, W_K [W_Q1', W_Q2', ...] or [W_O1; W_O2; ...] W_V, repeated in the
    rows of its heads; they are missing in all of them if one head of the group is not finite.

    Args:
        current: The checkpoint.
        before: The previous checkpoint; None at the first.
        reference: The checkpoint with which it is compared; None if there is none.
        directions: The directions with which it is compared, in place of a reference.
        view: The basis and the rotary offset.
        source: The name of the run, stored in every row.

    Raises:
        CallError: A direction does not have the circuit's shape, or the view is not possible.
        UnusableCheckpointError: A checkpoint cannot be read, or does not have the layers and shapes of the others. A
            checkpoint that does not agree with the reference is at fault itself, since the first agrees with it.
    """
    identity = {
        "source": visible(source),
        "step": current.checkpoint.step,
        "stated_step": current.stated_step,
        "score_scale": False,
        "previous_step": None if before is None else before.checkpoint.step,
        "reference": _reference_name(reference, directions),
        **{f"training_{name}": value for name, value in sorted(current.weights.scalars.items())},
    }

    def rows_of(
        layers: tuple[AttentionWeights, AttentionWeights | None, AttentionWeights | None],
    ) -> list[dict[str, Any]]:
        weights, referred, earlier = layers
        quantities: dict[str, dict[str, Tensor]] = {}
        circuits = view.circuits(weights)
        for name, circuit in circuits.items():
            direction = None
            if directions is not None:
                direction = directions.circuits[name]
            elif referred is not None and reference is not None:
                direction = _counterpart(circuit, current, _circuits(view, referred, reference), reference, name)
            old = None
            if earlier is not None and before is not None:
                with blaming(before.checkpoint):
                    old = _counterpart(circuit, current, _circuits(view, earlier, before), before, name)
            steps = 0 if before is None else _steps_between(before.checkpoint, current.checkpoint)
            quantities[name] = _quantities(circuit, old, steps, direction, eigenvalues=name == "OV")
            quantities[name] |= _group_quantities(weights, name, view)
        return [identity | row for row in _layer_rows(weights, circuits, quantities, view)]

    referred_layers = _layers(reference, current, view, at_fault=current)
    earlier_layers = _layers(before, current, view, at_fault=before)
    layers = zip(
        blamed(view.layers(current.weights), current.checkpoint), referred_layers, earlier_layers, strict=False
    )
    rows = [row for of_layer in side_by_side(rows_of, layers) for row in of_layer]
    columns = dict.fromkeys(column for row in rows for column in row)
    return [{column: row.get(column) for column in columns} for row in rows]


def composition_columns(current: Opened, view: View, source: str) -> dict[str, Any]:
    """Return the composition scores of a checkpoint as the columns of a table, one row for each kind and pair of heads.

    Args:
        current: The checkpoint.
        view: The basis and the rotary offset.
        source: The name of the run, stored in every row.

    Raises:
        CallError: The view is not possible.
    """
    columns: dict[str, list[Any]] = {name: [] for name in ("stack", "kind", "chance", "score")}
    numbers: dict[str, list[np.ndarray]] = {
        f"{side}_{unit}": [] for side in ("earlier", "later") for unit in ("layer", "head")
    }
    for pair in composition_scores(view.layers(current.weights), view.basis, view.rotary_offset):
        for kind, scores in pair.scores.items():
            earlier, later = np.indices(scores.shape)
            count = scores.numel()
            columns["stack"] += [pair.stack] * count
            columns["kind"] += [kind] * count
            columns["chance"] += [pair.chance] * count
            columns["score"] += scores.flatten().tolist()
            numbers["earlier_layer"].append(np.full(count, pair.earlier))
            numbers["later_layer"].append(np.full(count, pair.later))
            numbers["earlier_head"].append(earlier.ravel())
            numbers["later_head"].append(later.ravel())
    count = len(columns["score"])
    return {
        "source": [visible(source)] * count,
        "step": [current.checkpoint.step] * count,
        "basis": [view.basis] * count,
        "rotary_offset": [view.rotary_offset] * count,
        **columns,
        **{name: np.concatenate([np.empty(0, dtype=int), *parts]) for name, parts in numbers.items()},
    }


def _layer_rows(
    weights: AttentionWeights, circuits: dict[str, Circuit], quantities: dict[str, dict[str, Tensor]], view: View
) -> Iterator[dict[str, Any]]:
    listed = {
        name: {quantity: values.tolist() for quantity, values in by_quantity.items()}
        for name, by_quantity in quantities.items()
    }
    speeds = {name: values.get("relative_speed") for name, values in listed.items()}
    at_offsets = _norms_at_offsets(weights, view)
    for name, circuit in circuits.items():
        finite = _finite(circuit)
        for head in range(circuit.shape[0]):
            yield {
                **view.head_identity(weights, name, head),
                "qk_norm": weights.query_norm is not None or weights.key_norm is not None,
                "rows": circuit.shape[-2],
                "columns": circuit.shape[-1],
                "rank_bound": circuit.rank_bound,
                "factorized": circuit.right is not None,
                # LAPACK may also fail on finite weights, and every quantity of the head is NaN then.
                "finite": finite[head] and not math.isnan(listed[name]["frobenius_norm"][head]),
                **dict.fromkeys(MOTION),
                **{quantity: values[head] for quantity, values in listed[name].items()},
                "effective_ratio": effective_ratio(speeds, head),
                "rotary_offsets": ROTARY_OFFSETS if name == "QK" and at_offsets is not None else None,
                "frobenius_norm_at_offsets": at_offsets[head] if name == "QK" and at_offsets is not None else None,
            }


def _quantities(
    circuit: Circuit, old: Circuit | None, steps: int, direction: Circuit | None, *, eigenvalues: bool
) -> dict[str, Tensor]:
    """Return what a circuit is, how far it has moved, and how it lies along a direction, as far as there are these."""
    if old is not None and direction is not None:
        return measure(circuit, eigenvalues=eigenvalues) | motion_and_direction(circuit, old, steps, direction)
    quantities = measure(circuit, reference=direction, eigenvalues=eigenvalues)
    return quantities if old is None else quantities | motion(circuit, old, steps)


def _norms_at_offsets(weights: AttentionWeights, view: View) -> list[list[float]] | None:
    rotary = weights.facts.rotary
    if rotary is None or rotary.frequencies is None or weights.W_Q is None or weights.W_K is None:
        return None
    return weights.rotary_norms(ROTARY_OFFSETS, view.basis).T.tolist()


def _group_quantities(weights: AttentionWeights, name: str, view: View) -> dict[str, Tensor]:
    """The quantities of a group of heads, repeated for each of its heads; none if heads are not grouped."""
    if weights.group_size == 1:
        return {}
    grouped = weights.qk_groups(view.basis, view.offset(weights)) if name == "QK" else weights.ov_groups(view.basis)
    quantities = measure(grouped, eigenvalues=False)
    times = weights.heads // grouped.shape[0]
    return {quantity: quantities[quantity].repeat_interleave(times) for quantity in GROUP_QUANTITIES}


def _layers(
    other: Opened | None, current: Opened, view: View, at_fault: Opened | None
) -> Iterator[AttentionWeights | None]:
    if other is None or at_fault is None:
        return repeat(None)
    held, expected = other.weights.layer_keys, current.weights.layer_keys
    with blaming(at_fault.checkpoint):
        if held != expected:
            raise QkovError(
                f"{other.checkpoint.address} has the layers {_in_words(held)} and {current.checkpoint.address} has "
                f"{_in_words(expected)}: the checkpoints of one run should have the same layers"
            )
    return blamed(view.layers(other.weights), other.checkpoint)


def _circuits(view: View, weights: AttentionWeights, opened: Opened) -> dict[str, Circuit]:
    with blaming(opened.checkpoint):
        return view.circuits(weights)


def _in_words(layers: list[tuple[str, int]]) -> str:
    return ", ".join(layer_label(*key) for key in layers)


def _counterpart(circuit: Circuit, current: Opened, circuits: dict[str, Circuit], other: Opened, name: str) -> Circuit:
    """The same circuit in another checkpoint of the run."""
    counterpart = circuits.get(name)
    if counterpart is None or counterpart.shape != circuit.shape:
        shape = "none" if counterpart is None else f"one of shape {tuple(counterpart.shape)}"
        raise QkovError(
            f"{current.checkpoint.name} has a W_{name} of shape {tuple(circuit.shape)} [head, rows, columns] and "
            f"{other.checkpoint.name} has {shape}: the checkpoints of one run should agree"
        )
    return counterpart


def _steps_between(before: Checkpoint, current: Checkpoint) -> int:
    if before.step is None or current.step is None:
        raise QkovError(f"{before.address} and {current.address} are compared, but their steps are not known")
    return current.step - before.step


def _reference_name(reference: Opened | None, directions: TaskDirections | None) -> str | None:
    if directions is not None:
        return directions.name
    return None if reference is None else f"{reference.checkpoint.unit} {reference.checkpoint.step}"


def _finite(circuit: Circuit) -> list[bool]:
    factors = [factor for factor in (circuit.left, circuit.right) if factor is not None]
    # float8 has no isfinite.
    return (
        torch.stack([torch.isfinite(factor.double()).flatten(1).all(dim=1) for factor in factors]).all(dim=0).tolist()
    )
