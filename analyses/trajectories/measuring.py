"""The rows of one checkpoint: every figure of its circuits and of their groups, and what moved."""

from collections.abc import Iterator
from itertools import repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...circuits.algebra.circuit import Circuit
from ...circuits.algebra.measure import FACTOR_QUANTITIES, measure
from ...circuits.algebra.threads import side_by_side
from ...circuits.errors import QkovError
from ...circuits.weights.attention_weights import AttentionWeights
from ...circuits.weights.composition import composition_scores
from ...circuits.weights.layer_keys import layer_label
from .motion import MOTION, effective_ratio, motion
from .view import Opened, TaskDirections, View

#: Where ||W_QK(offset)|| of a rotary model is measured.
ROTARY_OFFSETS = [0, *(2**power for power in range(11))]

#: What belongs to the heads that share keys and values together, since training moves their factors together.
GROUP_FIGURES = ("omega_largest", "omega_mean", "omega_self", *FACTOR_QUANTITIES)


def checkpoint_rows(
    current: Opened,
    before: Opened | None,
    reference: Opened | None,
    directions: TaskDirections | None,
    view: View,
    source: str,
) -> list[dict[str, Any]]:
    """Return the rows of a checkpoint, one for each layer, head and circuit, all with the same columns.

    Heads that share keys and values (grouped-query attention) have rows of their own, with norms, ranks and the rest of
    their own matrix; `GROUP_FIGURES` are those of the group, W_K [W_Q1', W_Q2', ...] or [W_O1; W_O2; ...] W_V, and the
    same in the rows of its heads. They are missing in all of them where one head of the group is not finite.

    Raises:
        CallError: a direction has not the circuit's shape, or the view is not possible.
        QkovError: the checkpoints do not have the same layers and shapes.
    """
    about = {
        "source": source,
        "step": current.checkpoint.step,
        "basis": view.basis,
        "score_scale": False,
        "previous_step": None if before is None else before.checkpoint.step,
        "reference": _reference_name(reference, directions),
        **{f"training_{name}": value for name, value in sorted(current.weights.scalars.items())},
    }

    def rows_of(
        layers: tuple[AttentionWeights, AttentionWeights | None, AttentionWeights | None],
    ) -> list[dict[str, Any]]:
        weights, earlier, referred = layers
        figures: dict[str, dict[str, Tensor]] = {}
        circuits = view.circuits(weights)
        for name, circuit in circuits.items():
            direction = None
            if directions is not None:
                direction = directions.circuits[name]
            elif referred is not None and reference is not None:
                direction = _counterpart(circuit, current, view.circuits(referred), reference, name)
            figures[name] = measure(circuit, reference=direction, eigenvalues=name == "OV")
            figures[name] |= _of_groups(weights, name, view)
            if earlier is not None and before is not None:
                old = _counterpart(circuit, current, view.circuits(earlier), before, name)
                figures[name] |= motion(circuit, old, current.checkpoint.step - before.checkpoint.step)
        return [about | row for row in _layer_rows(weights, circuits, figures, view)]

    layers = zip(
        view.layers(current.weights), _layers(before, current, view), _layers(reference, current, view), strict=False
    )
    rows = [row for of_layer in side_by_side(rows_of, layers) for row in of_layer]
    columns = dict.fromkeys(column for row in rows for column in row)
    return [{column: row.get(column) for column in columns} for row in rows]


def composition_columns(current: Opened, view: View, source: str) -> dict[str, Any]:
    """Return the composition scores of a checkpoint as the columns of a table, one row for each kind and two heads.

    Raises:
        CallError: the view is not possible.
    """
    columns: dict[str, list[Any]] = {name: [] for name in ("stack", "kind", "chance", "score")}
    places: dict[str, list[np.ndarray]] = {
        f"{when}_{what}": [] for when in ("earlier", "later") for what in ("layer", "head")
    }
    for pair in composition_scores(view.layers(current.weights), view.basis, view.rotary_offset):
        for kind, scores in pair.scores.items():
            earlier, later = np.indices(scores.shape)
            count = scores.numel()
            columns["stack"] += [pair.stack] * count
            columns["kind"] += [kind] * count
            columns["chance"] += [pair.chance] * count
            columns["score"] += scores.flatten().tolist()
            places["earlier_layer"].append(np.full(count, pair.earlier))
            places["later_layer"].append(np.full(count, pair.later))
            places["earlier_head"].append(earlier.ravel())
            places["later_head"].append(later.ravel())
    count = len(columns["score"])
    return {
        "source": [source] * count,
        "step": [current.checkpoint.step] * count,
        "basis": [view.basis] * count,
        "rotary_offset": [view.rotary_offset] * count,
        **columns,
        **{name: np.concatenate([np.empty(0, dtype=int), *parts]) for name, parts in places.items()},
    }


def _layer_rows(
    weights: AttentionWeights, circuits: dict[str, Circuit], figures: dict[str, dict[str, Tensor]], view: View
) -> Iterator[dict[str, Any]]:
    listed = {name: {figure: value.tolist() for figure, value in of.items()} for name, of in figures.items()}
    speeds = {name: values.get("relative_speed") for name, values in listed.items()}
    at_offsets = _norms_at_offsets(weights, view)
    for name, circuit in circuits.items():
        finite = _finite(circuit)
        rotary = name == "QK" and weights.facts.rotary is not None
        for head in range(circuit.shape[0]):
            yield {
                "stack": weights.stack,
                "layer": weights.layer,
                "head": head,
                "key_value_head": head // weights.group_size,
                "circuit": name,
                "rotary_offset": view.rotary_offset if rotary else None,
                "qk_norm": weights.query_norm is not None or weights.key_norm is not None,
                "rows": circuit.shape[-2],
                "columns": circuit.shape[-1],
                "rank_bound": circuit.rank_bound,
                "factorized": circuit.right is not None,
                "finite": finite[head],
                **dict.fromkeys(MOTION),
                **{figure: value[head] for figure, value in listed[name].items()},
                "effective_ratio": effective_ratio(speeds, head),
                "rotary_offsets": ROTARY_OFFSETS if name == "QK" and at_offsets is not None else None,
                "frobenius_norm_at_offsets": at_offsets[head] if name == "QK" and at_offsets is not None else None,
            }


def _norms_at_offsets(weights: AttentionWeights, view: View) -> list[list[float]] | None:
    rotary = weights.facts.rotary
    if rotary is None or rotary.frequencies is None or weights.W_Q is None or weights.W_K is None:
        return None
    return weights.rotary_norms(ROTARY_OFFSETS, view.basis).T.tolist()


def _of_groups(weights: AttentionWeights, name: str, view: View) -> dict[str, Tensor]:
    """The figures that belong to a group of heads, once for each of its heads; none where heads are not grouped."""
    if weights.group_size == 1:
        return {}
    grouped = weights.qk_groups(view.basis, view.offset(weights)) if name == "QK" else weights.ov_groups(view.basis)
    figures = measure(grouped, eigenvalues=False)
    times = weights.heads // grouped.shape[0]
    return {figure: figures[figure].repeat_interleave(times) for figure in GROUP_FIGURES}


def _layers(other: Opened | None, current: Opened, view: View) -> Iterator[AttentionWeights | None]:
    if other is None:
        return repeat(None)
    held, wanted = other.weights.layer_keys, current.weights.layer_keys
    if held != wanted:
        raise QkovError(
            f"{other.checkpoint.address} has the layers {_in_words(held)} and {current.checkpoint.address} has "
            f"{_in_words(wanted)}: the checkpoints of one run should have the same"
        )
    return view.layers(other.weights)


def _in_words(layers: list[tuple[str, int]]) -> str:
    return ", ".join(layer_label(*key) for key in layers)


def _counterpart(circuit: Circuit, current: Opened, circuits: dict[str, Circuit], other: Opened, name: str) -> Circuit:
    """The same circuit in another checkpoint of the run."""
    found = circuits.get(name)
    if found is None or found.shape != circuit.shape:
        shape = "none" if found is None else f"one of shape {tuple(found.shape)}"
        raise QkovError(
            f"{current.checkpoint.name} has a W_{name} of shape {tuple(circuit.shape)} [head, rows, columns] and "
            f"{other.checkpoint.name} has {shape}: the checkpoints of one run should agree"
        )
    return found


def _reference_name(reference: Opened | None, directions: TaskDirections | None) -> str | None:
    if directions is not None:
        return directions.name
    return None if reference is None else f"step {reference.checkpoint.step}"


def _finite(circuit: Circuit) -> list[bool]:
    factors = [factor for factor in (circuit.left, circuit.right) if factor is not None]
    # float8 knows no isfinite of its own.
    return (
        torch.stack([torch.isfinite(factor.double()).flatten(1).all(dim=1) for factor in factors]).all(dim=0).tolist()
    )
