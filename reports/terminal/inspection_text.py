"""The result of `qkov inspect` as lines of text."""

import json
import math
from typing import TYPE_CHECKING, Any

from ...circuits.checkpoints.steps.step import step_in_words

if TYPE_CHECKING:
    from ...circuits.checkpoints.runs import Run

#: How many steps are listed at most.
_STEPS = 12
_NORMS = {"layer_norm": "LayerNorm", "rms_norm": "RMSNorm"}
_POSITIONS = {"alibi": "ALiBi", "relative": "a relative bias on the scores", "absolute": "absolute", "none": "none"}


def inspection_lines(facts: dict[str, Any]) -> list[str]:
    """Return the lines for the facts that `inspect_checkpoint` returned; layers that are alike share their lines."""
    lines = [f"recognised {facts['recognised']}"]
    for stack in facts["stacks"]:
        if stack["stack"]:
            lines.append(f"{stack['stack']}:")
        lines += [f"  {_tensor(role, name, stack['layouts'])}" for role, name in stack["tensors"].items()]
        for numbers, layer in _alike(stack["layers"]):
            lines.append(f"  {_numbers(numbers)}: {_heads(layer)}")
            lines += [f"    {line}" for line in _layer_lines(layer)]
    lines += [f"{what}: {reason}" for what, reason in facts["doubts"].items()]
    lines += [f"skipped {what}: {reason}" for what, reason in facts["skipped"].items()]
    if facts["not_read"]:
        lines.append("not read: " + ", ".join(f"{name} ({what})" for name, what in facts["not_read"].items()))
    if facts["scalars"]:
        lines.append(
            "saved beside the weights: " + ", ".join(f"{name} {value:.6g}" for name, value in facts["scalars"].items())
        )
    return lines


def run_facts(run: "Run") -> dict[str, Any]:
    """Return the steps of a run and how they are known, in a form that JSON can hold."""
    return {
        "steps": [checkpoint.step for checkpoint in run.checkpoints],
        "step_origins": [checkpoint.step_origin for checkpoint in run.checkpoints],
        "unit": run.checkpoints[0].unit,
        "notes": run.notes,
        "left_out": run.left_out,
    }


def run_lines(address: str, run: "Run") -> list[str]:
    """Return the steps of a run, how they are known, and what was left out, as lines of text.

    Args:
        address: The address of the run, as it was typed.
        run: The run.
    """
    checkpoints = run.checkpoints
    first, last = checkpoints[0], checkpoints[-1]
    span = step_in_words(first.step, first.unit) + (f" to {last.step}" if len(checkpoints) > 1 else "")
    lines = [f"{address}: {len(checkpoints)} checkpoint{'s' * (len(checkpoints) > 1)}, {span}"]
    by_origin: dict[str, list[str]] = {}
    for checkpoint in checkpoints:
        if checkpoint.step_origin is not None:
            by_origin.setdefault(checkpoint.step_origin, []).append(str(checkpoint.step))
    for origin, steps in by_origin.items():
        lines.append(f"  {first.unit}{'s' * (len(steps) > 1)} {_shortened(steps)}: {origin}")
    if not by_origin:
        lines.append("  neither its name nor what was read of its files states a step")
    lines += [f"note: {note}" for note in run.notes]
    return lines + [f"left out {name}: {reason}" for name, reason in run.left_out.items()]


def _shortened(steps: list[str]) -> str:
    return ", ".join(steps) if len(steps) <= _STEPS else ", ".join([*steps[: _STEPS - 1], "...", steps[-1]])


def _tensor(role: str, name: str, layouts: dict[str, str]) -> str:
    shown = f"W_{role}" if role in layouts else role
    return f"{shown}: {name}" + (f", axes {layouts[role]}" if role in layouts else "")


def _alike(layers: list[dict[str, Any]]) -> list[tuple[list[int], dict[str, Any]]]:
    groups: dict[str, tuple[list[int], dict[str, Any]]] = {}
    for layer in layers:
        rest = {name: value for name, value in layer.items() if name != "layer"}
        groups.setdefault(json.dumps(rest, sort_keys=True), ([], rest))[0].append(layer["layer"])
    return list(groups.values())


def _numbers(numbers: list[int]) -> str:
    """Name layers by their numbers, and shorten consecutive ones to a range."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    shown = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    return f"layer{'s' * (len(numbers) > 1)} {', '.join(shown)}"


def _heads(layer: dict[str, Any]) -> str:
    heads, few = layer["heads"], layer["key_value_heads"]
    grouped = f", grouped: {few} key-value head{'s' * (few > 1)}" if few != heads else ""
    return f"{heads} head{'s' * (heads > 1)}{grouped}"


def _layer_lines(layer: dict[str, Any]) -> list[str]:
    lines = []
    for name, circuit in layer["circuits"].items():
        kind = (
            f"factors of inner width {circuit['rank_bound']}" if circuit["factorized"] else "collapsed, without factors"
        )
        lines.append(f"W_{name}: {circuit['rows']} x {circuit['columns']} per head, {kind}, {circuit['dtype']}")
    lines.append("; ".join(_scores(layer)))
    lines.append(_norm(layer))
    if layer["query_key_norm"] is not None:
        norm = layer["query_key_norm"]
        over = "over each head" if norm["over"] == "head" else "over all heads together"
        lines.append(
            f"queries and keys are normalised ({_NORMS.get(norm['kind'], 'in an unknown way,')} {over}): "
            "the scale of W_QK does not affect the scores, but its directions do"
        )
    if layer["biases"]:
        lines.append(f"biases {', '.join(layer['biases'])}: read, but part of no circuit")
    facts = layer["facts"]
    if facts["used_by"] > 1:
        lines.append(f"{facts['used_by']} layers use these same weights")
    if facts["unknown"]:
        lines.append(f"unknown: {', '.join(facts['unknown'])}")
    return lines


def _scores(layer: dict[str, Any]) -> list[str]:
    facts = layer["facts"]
    found = []
    if facts["cross"]:
        found.append("cross-attention: keys and values are read from another stack")
    elif facts["causal"] is not None:
        found.append("causal" if facts["causal"] else "bidirectional")
    found.append(_positions(facts))
    if "score_scale" not in facts["unknown"]:
        scale = "1/sqrt(d_head)" if facts["score_scale"] is None else f"{facts['score_scale']:.6g}"
        found.append(f"scores times {scale} (left out of W_QK)")
    if facts["soft_cap"] is not None:
        found.append(f"scores soft-capped at {facts['soft_cap']:g}")
    if facts["clip_qkv"] is not None:
        found.append(f"queries, keys and values clipped at {facts['clip_qkv']:g}")
    if facts["sinks"]:
        found.append("a learned sink takes part of each head's attention")
    if facts["window"] is not None:
        found.append(f"window of {facts['window']} tokens")
    return found


def _positions(facts: dict[str, Any]) -> str:
    rotary = facts["rotary"]
    if rotary is None:
        return f"positions {_POSITIONS.get(facts['positions'], 'unknown')}"
    if rotary["frequencies"] is None:
        return f"rotary positions ({rotary['pairing']}), frequencies unknown: W_QK is measured at offset 0 only"
    shortest, longest = _wavelength(max(rotary["frequencies"])), _wavelength(min(rotary["frequencies"]))
    return (
        f"rotary positions, {rotary['dims']} dimensions in pairs ({rotary['pairing']}), "
        f"wavelengths {shortest:.3g} to {longest:.3g} tokens"
    )


def _wavelength(frequency: float) -> float:
    """Return 2 pi / frequency in tokens; a pair of dimensions that does not rotate has a frequency of 0."""
    return 2 * math.pi / frequency if frequency else math.inf


def _norm(layer: dict[str, Any]) -> str:
    if layer["stored_basis"] != "raw":
        return f"basis {layer['stored_basis']}: the weights are stored in it"
    if "norm" in layer["facts"]["unknown"]:
        return "the norm in front of attention is unknown: only the raw basis is available"
    if layer["norm"] is None:
        return "no norm in front of attention: the folded basis equals the raw basis"
    parts = [part for part in ("gain", "bias") if layer["norm"][part]]
    return f"{_NORMS[layer['norm']['kind']]} in front of attention, " + (
        f"with {' and '.join(parts)}" if parts else "without a gain"
    )
