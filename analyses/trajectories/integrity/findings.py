"""What the contents of the layers of a series of checkpoints say about each other."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
from jaxtyping import Float64

from ....circuits.weights.layer_keys import LayerKey, capitalised, layers_in_words
from .wording import of_distant_checkpoints, of_identical_checkpoints, of_identical_layers

#: A jump away from the run and the jump back are both larger than this many times the distance of the checkpoints
#: before and after. It is at most 2^(-1/2) for a straight path or a random walk, and 1 for draws around a fixed point.
LARGEST_RATIO = 1.5

Kind = Literal["identical_checkpoints", "identical_layers", "distant_checkpoints", "other_layers"]


@dataclass(frozen=True)
class Finding:
    """Something that a series of checkpoints does not show if each is what training made at its step.

    Attributes:
        kind: Checkpoints that are identical to the bit; layers that are; checkpoints that are farther from their
            neighbours than these are from each other; or a checkpoint with other layers than the rest.
        steps: The steps that it is about.
        layers: The layers that it is about, by stack and number.
        sentence: What was found, in words.
        neighbours: For distant checkpoints, the steps before and after.
        distances: For distant checkpoints, in the layer where it is most pronounced: the distance from the step before,
            to the step after, and between these two, each divided by the norm of the weights before.
    """

    kind: Kind
    steps: tuple[int, ...]
    layers: tuple[LayerKey, ...]
    sentence: str
    neighbours: tuple[int, ...] = ()
    distances: tuple[float, ...] = ()


def other_layers(contents: pd.DataFrame, unit: str = "step") -> list[Finding]:
    """Return the checkpoints whose layers, or their shapes, are not those of most checkpoints of the run."""
    held = {
        int(step): tuple(_rows_of(contents, step)[["stack", "layer", "shapes"]].itertuples(index=False, name=None))
        for step in contents["step"].unique().tolist()
    }
    if len(set(held.values())) < 2:
        return []
    # The later one of two that are equally frequent.
    ((usual, _),) = Counter(reversed(held.values())).most_common(1)
    example = max(step for step, layers in held.items() if layers == usual)
    findings = []
    for step, layers in held.items():
        if layers == usual:
            continue
        keys, expected = [key[:2] for key in layers], [key[:2] for key in usual]
        if keys != expected:
            difference = f"{layers_in_words(keys)}; {unit} {example} has {layers_in_words(expected)}"
            about = tuple(sorted(set(keys) ^ set(expected)))
        else:
            differing = [(one, other) for one, other in zip(layers, usual, strict=True) if one != other]
            (stack, layer, shapes), (*_, expected_shapes) = differing[0]
            difference = f"{shapes} in {layers_in_words([(stack, layer)])}; {unit} {example} has {expected_shapes}"
            about = tuple(one[:2] for one, _ in differing)
        findings.append(
            Finding(
                "other_layers",
                (step,),
                about,
                f"{capitalised(unit)} {step} is of another shape than the run: it has {difference}.",
            )
        )
    return findings


def identical_checkpoints(contents: pd.DataFrame, unit: str = "step") -> list[Finding]:
    """Return the groups of checkpoints whose attention weights are identical to the bit in all layers."""
    all_steps = contents["step"].unique()
    findings = []
    for steps in _identical_steps(contents):
        layers = tuple(key_of(key) for key in _rows_of(contents, steps[0])[["stack", "layer"]].itertuples(index=False))
        sentence = of_identical_checkpoints(steps, len(all_steps), unit)
        findings.append(Finding("identical_checkpoints", steps, layers, sentence))
    return findings


def frozen_layers(contents: pd.DataFrame) -> list[LayerKey]:
    """Return the layers that are identical in all checkpoints, if other layers change."""
    count = contents["step"].nunique()
    by_layer = contents.groupby(["stack", "layer"])["digest"].agg(["nunique", "size"])
    same = by_layer[(by_layer["nunique"] == 1) & (by_layer["size"] == count)]
    return [] if len(same) == len(by_layer) else [key_of(key) for key in same.index]


def identical_layers(contents: pd.DataFrame, unit: str = "step") -> list[Finding]:
    """Return the layers that are identical to the bit in several checkpoints, though not in all.

    Layers that are frozen in all checkpoints, and checkpoints that are identical in all layers, are not among them.
    """
    steps_of_run = [int(step) for step in contents["step"].unique()]
    frozen, whole = set(frozen_layers(contents)), [set(steps) for steps in _identical_steps(contents)]
    groups: dict[tuple[int, ...], list[LayerKey]] = {}
    for key, rows in contents.groupby(["stack", "layer"]):
        if key_of(key) in frozen:
            continue
        for steps in _equal(zip(rows["step"], rows["digest"], strict=True)):
            if not any(set(steps) <= identical for identical in whole):
                groups.setdefault(steps, []).append(key_of(key))
    return [
        Finding("identical_layers", steps, tuple(layers), of_identical_layers(steps, layers, steps_of_run, unit))
        for steps, layers in sorted(groups.items())
    ]


def distant_checkpoints(contents: pd.DataFrame, copies: Collection[int] = (), unit: str = "step") -> list[Finding]:
    """Return the checkpoints that are farther from their neighbours than these are from each other.

    A checkpoint that is identical to another may stand in the wrong place, where it makes others seem distant. So of
    the checkpoints that are not among the copies, those are returned that are distant with the copies taken out; and of
    the copies, those that are distant from the checkpoints around them, which says which of the two does not belong
    where it stands.

    Args:
        contents: The contents of layers with finite weights, in the order of the steps.
        copies: The steps that are identical to others in all layers.
        unit: What a step counts.
    """
    if not copies:
        return _distant(contents, unit)
    without = contents[~contents["step"].isin(copies)]
    misplaced = [finding for finding in _distant(contents, unit) if set(finding.steps) <= set(copies)]
    return sorted([*misplaced, *_distant(without, unit)], key=lambda finding: finding.steps)


def _distant(contents: pd.DataFrame, unit: str) -> list[Finding]:
    """Return the checkpoints that are farther from their neighbours than these are from each other, in a table.

    For checkpoints p and n with others between them, p+1 to n-1, these are reported if in some layer

        min(|W(p+1) - W(p)|, |W(n) - W(n-1)|) > 1.5 |W(n) - W(p)|,

    where W are the attention weights, without biases, and the distances are estimated from the sketches. On a straight
    path and on a random walk of many weights the left side is at most 0.71 |W(n) - W(p)|; for weights drawn anew around
    a fixed point at each checkpoint it is 1.0 |W(n) - W(p)|. Of nested pairs only the innermost is reported, and a pair
    that is identical to the bit is not. The first and the last checkpoint have only one neighbour.
    """
    found: dict[tuple[int, int], list[tuple[LayerKey, tuple[float, ...]]]] = {}
    steps_of: dict[tuple[int, int], tuple[int, ...]] = {}
    for key, rows in contents.groupby(["stack", "layer"]):
        steps = [int(step) for step in rows["step"]]
        sketches = np.stack([np.asarray(sketch, dtype=float) for sketch in rows["sketch"]])
        for before, after, distances in _excursions(sketches, list(rows["digest"])):
            pair = steps[before], steps[after]
            found.setdefault(pair, []).append((key_of(key), distances))
            steps_of[pair] = tuple(steps[before + 1 : after])
    findings = []
    for pair, layers in sorted(found.items()):
        _, distances = max(layers, key=lambda each: _ratio(each[1]))
        keys = tuple(key for key, _ in layers)
        sentence = of_distant_checkpoints(steps_of[pair], pair, list(keys), distances, unit)
        findings.append(Finding("distant_checkpoints", steps_of[pair], keys, sentence, pair, distances))
    return findings


def _excursions(
    sketches: Float64[np.ndarray, "checkpoint group"], digests: list[str]
) -> Iterator[tuple[int, int, tuple[float, ...]]]:
    """Yield the innermost pairs of checkpoints between which the run jumps away and back, with the three distances."""
    jumps = np.linalg.norm(np.diff(sketches, axis=0), axis=1)
    innermost = math.inf
    # From the last to the first, so that a pair that encloses one is met after it.
    for before in range(len(sketches) - 3, -1, -1):
        across = np.linalg.norm(sketches[before + 2 :] - sketches[before], axis=1)
        is_far = np.minimum(jumps[before], jumps[before + 1 :]) > LARGEST_RATIO * across
        for position in np.flatnonzero(is_far):
            after = before + 2 + int(position)
            if after >= innermost:
                break
            if digests[before] == digests[after]:
                continue
            innermost = after
            size = float(np.linalg.norm(sketches[before])) or math.nan
            distances = (jumps[before], jumps[after - 1], across[position])
            yield before, after, tuple(float(distance) / size for distance in distances)
            break


def _ratio(distances: tuple[float, ...]) -> float:
    """Return how much farther a checkpoint is from its neighbours than they are from each other."""
    to, back, across = distances
    return min(to, back) / across if across else math.inf


def _identical_steps(contents: pd.DataFrame) -> list[tuple[int, ...]]:
    """Return the groups of steps at which all layers have the same contents."""
    return _equal(
        (step, tuple(_rows_of(contents, step)[["stack", "layer", "digest"]].itertuples(index=False, name=None)))
        for step in contents["step"].unique().tolist()
    )


def _equal(contents: Iterable[tuple[Any, Any]]) -> list[tuple[int, ...]]:
    """Return the groups of two or more steps with the same content, in the order of their first steps."""
    groups: dict[Any, list[int]] = {}
    for step, content in contents:
        groups.setdefault(content, []).append(int(step))
    return [tuple(steps) for steps in groups.values() if len(steps) > 1]


def _rows_of(contents: pd.DataFrame, step: int) -> pd.DataFrame:
    return contents[contents["step"] == step]


def key_of(key: Any) -> LayerKey:
    """Return the stack and the number of a layer as they are in a table, as plain values."""
    stack, layer = key
    return str(stack), int(layer)
