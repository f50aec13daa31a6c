"""Whether a series of checkpoints is what it claims to be: what the contents of its layers say about each other."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
import pandas as pd
from jaxtyping import Float64

from ...circuits.weights.layer_keys import LayerKey, enumerated, layers_in_words

#: A jump away from the run and the jump back are both larger than this many times the distance of the checkpoints
#: before and after. It is at most 2^(-1/2) for a straight path or a random walk, and 1 for draws around a fixed point.
LARGEST_RATIO = 1.5
#: How many steps a sentence names.
_NAMED = 12

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


@dataclass(frozen=True)
class Integrity:
    """What was checked in a series of checkpoints, and what was found.

    Attributes:
        checked: The steps whose content is known.
        unknown: Why the content of a step is unknown, by step.
        findings: What was found.
        frozen: The layers that are identical in all checkpoints while others change.
        untested: What could not be compared although it was read, in words.
        left_out: Why a file or folder of the run is not one of its checkpoints, by name.
    """

    checked: list[int]
    unknown: dict[int, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    frozen: list[LayerKey] = field(default_factory=list)
    untested: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def is_sound(self) -> bool:
        """Whether every checkpoint was checked and nothing was found."""
        return not self.findings and not self.unknown

    def as_dict(self) -> dict[str, Any]:
        """Return everything in a form that JSON can hold."""
        return {
            "checked": self.checked,
            "unknown": [{"step": step, "reason": reason} for step, reason in self.unknown.items()],
            "findings": [
                {
                    name: [list(each) if isinstance(each, tuple) else each for each in value]
                    if isinstance(value, tuple)
                    else value
                    for name, value in asdict(finding).items()
                }
                for finding in self.findings
            ],
            "frozen": [list(key) for key in self.frozen],
            "untested": self.untested,
            "left_out": self.left_out,
            "summary": summary(self),
        }


def integrity_of(contents: pd.DataFrame, unknown: dict[int, str] | None = None) -> Integrity:
    """Return what the contents of a run's layers say about the run.

    Args:
        contents: The contents, with the columns of `RunStore.contents`.
        unknown: Why the content of other steps is unknown, by step.
    """
    if contents["step"].isna().all():
        # A single checkpoint whose step is not known is no series, and there is nothing to compare it with.
        return Integrity(checked=[], unknown=unknown or {}, findings=[], frozen=[], untested=[])
    contents = contents.sort_values(["step", "stack", "layer"], ignore_index=True)
    others = other_layers(contents)
    excluded = [step for finding in others for step in finding.steps]
    alike = contents[~contents["step"].isin(excluded)]
    # NaN is content, but it has no distance.
    finite = alike["sketch"].map(lambda sketch: bool(np.isfinite(sketch).all())).astype(bool)
    damaged = alike[~finite].groupby(["stack", "layer"], sort=False)["step"].apply(list)
    return Integrity(
        checked=[int(step) for step in contents["step"].unique()],
        unknown=unknown or {},
        findings=[
            *others,
            *identical_checkpoints(contents),
            *identical_layers(contents),
            *distant_checkpoints(alike[finite]),
        ],
        frozen=frozen_layers(contents),
        untested=[
            f"{steps_in_words(steps, capital=True)} {'have' if len(steps) > 1 else 'has'} NaN or infinite weights in "
            f"{layers_in_words([_key(key)])}, which have no distance from others."
            for key, steps in damaged.items()
        ],
    )


def other_layers(contents: pd.DataFrame) -> list[Finding]:
    """Return the checkpoints whose layers, or their shapes, are not those of most checkpoints of the run."""
    held = {
        int(step): tuple(rows[["stack", "layer", "shapes"]].itertuples(index=False, name=None))
        for step, rows in contents.groupby("step")
    }
    if len(set(held.values())) < 2:
        return []
    # The later one of two that are equally frequent.
    usual = Counter(reversed(held.values())).most_common(1)[0][0]
    example = max(step for step, layers in held.items() if layers == usual)
    findings = []
    for step, layers in held.items():
        if layers == usual:
            continue
        keys, expected = [key[:2] for key in layers], [key[:2] for key in usual]
        if keys != expected:
            difference = f"{layers_in_words(keys)}; step {example} has {layers_in_words(expected)}"
            about = tuple(sorted(set(keys) ^ set(expected)))
        else:
            differing = [(one, other) for one, other in zip(layers, usual, strict=True) if one != other]
            (stack, layer, shapes), (*_, expected_shapes) = differing[0]
            difference = f"{shapes} in {layers_in_words([(stack, layer)])}; step {example} has {expected_shapes}"
            about = tuple(one[:2] for one, _ in differing)
        findings.append(
            Finding(
                "other_layers", (step,), about, f"Step {step} is of another shape than the run: it has {difference}."
            )
        )
    return findings


def identical_checkpoints(contents: pd.DataFrame) -> list[Finding]:
    """Return the groups of checkpoints whose attention weights are identical to the bit in all layers."""
    all_steps = contents["step"].unique()
    findings = []
    for steps in _identical_steps(contents):
        layers = tuple(_key(key) for key in _rows_of(contents, steps[0])[["stack", "layer"]].itertuples(index=False))
        if len(steps) == len(all_steps):
            sentence = (
                f"{'Both' if len(steps) == 2 else f'All {len(steps)}'} checkpoints, {steps_in_words(steps)}, hold "
                "identical attention weights, to the bit: "
                "one was copied, or attention was not trained."
            )
        else:
            sentence = f"{steps_in_words(steps, capital=True)} hold identical attention weights, to the bit."
        findings.append(Finding("identical_checkpoints", steps, layers, sentence))
    return findings


def frozen_layers(contents: pd.DataFrame) -> list[LayerKey]:
    """Return the layers that are identical in all checkpoints, if there are two or more and other layers change."""
    count = contents["step"].nunique()
    by_layer = contents.groupby(["stack", "layer"], sort=False)["digest"].agg(["nunique", "size"])
    same = by_layer[(by_layer["nunique"] == 1) & (by_layer["size"] == count)]
    return [] if count < 2 or len(same) == len(by_layer) else [_key(key) for key in same.index]


def identical_layers(contents: pd.DataFrame) -> list[Finding]:
    """Return the layers that are identical to the bit in several checkpoints, though not in all.

    Layers that are frozen in all checkpoints, and checkpoints that are identical in all layers, are not among them.
    """
    steps_of_run = [int(step) for step in contents["step"].unique()]
    frozen, whole = set(frozen_layers(contents)), [set(steps) for steps in _identical_steps(contents)]
    groups: dict[tuple[int, ...], list[LayerKey]] = {}
    for key, rows in contents.groupby(["stack", "layer"], sort=False):
        if _key(key) in frozen:
            continue
        for steps in _equal(zip(rows["step"], rows["digest"], strict=True)):
            if not any(set(steps) <= identical for identical in whole):
                groups.setdefault(steps, []).append(_key(key))
    return [
        Finding("identical_layers", steps, tuple(layers), _of_identical_layers(steps, layers, steps_of_run))
        for steps, layers in sorted(groups.items())
    ]


def distant_checkpoints(contents: pd.DataFrame) -> list[Finding]:
    """Return the checkpoints that are farther from their neighbours than these are from each other.

    For checkpoints p and n with others between them, p+1 to n-1, these are reported if in some layer

        min(|W(p+1) - W(p)|, |W(n) - W(n-1)|) > 1.5 |W(n) - W(p)|,

    where W are the attention weights, without biases, and the distances are estimated from the sketches. On a straight
    path and on a random walk of many weights the left side is at most 0.71 |W(n) - W(p)|; for weights drawn anew around
    a fixed point at each checkpoint it is 1.0 |W(n) - W(p)|. Of nested pairs only the innermost is reported, and a pair
    that is identical to the bit is not. The first and the last checkpoint have only one neighbour.
    """
    found: dict[tuple[int, int], list[tuple[LayerKey, tuple[float, ...]]]] = {}
    steps_of: dict[tuple[int, int], tuple[int, ...]] = {}
    for key, rows in contents.groupby(["stack", "layer"], sort=False):
        steps = [int(step) for step in rows["step"]]
        sketches = np.stack([np.asarray(sketch, dtype=float) for sketch in rows["sketch"]])
        for before, after, distances in _excursions(sketches, list(rows["digest"])):
            pair = steps[before], steps[after]
            found.setdefault(pair, []).append((_key(key), distances))
            steps_of[pair] = tuple(steps[before + 1 : after])
    findings = []
    for pair, layers in sorted(found.items()):
        _, distances = max(layers, key=lambda each: _ratio(each[1]))
        keys = tuple(key for key, _ in layers)
        sentence = _of_distant_checkpoints(steps_of[pair], pair, list(keys), distances)
        findings.append(Finding("distant_checkpoints", steps_of[pair], keys, sentence, pair, distances))
    return findings


def sentences(integrity: Integrity) -> list[str]:
    """Return a sentence for each finding, for what is unknown, and for layers that are frozen."""
    return [
        *(finding.sentence for finding in integrity.findings),
        *unknown_sentences(integrity),
        *frozen_sentences(integrity),
    ]


def unknown_sentences(integrity: Integrity) -> list[str]:
    """Return the sentences that name what was not checked, one for each reason."""
    by_reason: dict[str, list[int]] = {}
    for step, reason in integrity.unknown.items():
        by_reason.setdefault(reason, []).append(step)
    return [
        *(
            f"{steps_in_words(steps, capital=True)} {'were' if len(steps) > 1 else 'was'} not checked: {reason}"
            for reason, steps in by_reason.items()
        ),
        *integrity.untested,
    ]


def frozen_sentences(integrity: Integrity) -> list[str]:
    """Return the sentence that names the frozen layers; none if there are none."""
    layers, count = integrity.frozen, len(integrity.checked)
    if not layers:
        return []
    several = len(layers) > 1
    named = layers_in_words(layers)
    return [
        f"{named[0].upper()}{named[1:]} {'are' if several else 'is'} frozen: {'their' if several else 'its'} attention "
        f"weights are identical in {'both' if count == 2 else f'all {count}'} checkpoints, while other layers change."
    ]


def summary(integrity: Integrity) -> str:
    """Return what was checked and how much was found, in one sentence."""
    count = len(integrity.checked)
    if count == 0:
        return "No checkpoint could be checked."
    if count == 1:
        return f"Only step {integrity.checked[0]} was read: there is nothing to compare it with."
    missing = f" ({len(integrity.unknown)} more were not checked)" if integrity.unknown else ""
    what = f"{count} checkpoints, step {integrity.checked[0]} to {integrity.checked[-1]}{missing}"
    if integrity.findings:
        number = len(integrity.findings)
        return f"Checked {what}: {number} finding{'s' * (number > 1)}."
    unchanging = "no layer but frozen ones" if integrity.frozen else "no layer"
    neighbours = (
        ", and none is farther from its neighbours than they are from each other (the first and the last have only one)"
        if count > 2
        else ""
    )
    return f"Checked {what}: no two are identical, {unchanging} is identical in several{neighbours}."


def steps_in_words(steps: Iterable[int], capital: bool = False) -> str:
    """Return steps in words: "step 5", "steps 0, 10 and 30"; of many only the first are named."""
    numbers = [str(step) for step in steps]
    more = len(numbers) - _NAMED
    shown = [*numbers[:_NAMED], f"{more} more"] if more > 1 else numbers
    return f"{'S' if capital else 's'}tep{'s' * (len(numbers) > 1)} {enumerated(shown)}"


def _of_identical_layers(steps: tuple[int, ...], layers: list[LayerKey], steps_of_run: list[int]) -> str:
    named, several = layers_in_words(layers), len(layers) > 1
    first, last = steps_of_run.index(steps[0]), steps_of_run.index(steps[-1])
    between = [step for step in steps_of_run[first:last] if step not in steps]
    same = (
        f"{named[0].upper()}{named[1:]} {'are' if several else 'is'} identical, to the bit, at {steps_in_words(steps)}"
    )
    if between:
        return f"{same}, but not at {steps_in_words(between)} in between."
    outside = [*steps_of_run[:first][-1:], *steps_of_run[last + 1 :][:1]]
    return (
        f"{same}, while other layers change, but not at {steps_in_words(outside)}: "
        f"{'they were' if several else 'it was'} frozen for a time, or these checkpoints hold weights of each other."
    )


def _of_distant_checkpoints(
    steps: tuple[int, ...], neighbours: tuple[int, int], layers: list[LayerKey], distances: tuple[float, ...]
) -> str:
    before, after = neighbours
    to, back, across = (f"{distance:.2g}" for distance in distances)
    most = (
        f" in {layers_in_words(layers)}"
        if len(layers) == 1
        else f" in {len(layers)} layers ({layers_in_words(layers)})"
    )
    if len(steps) == 1:
        return (
            f"Step {steps[0]} is farther from its neighbours, steps {before} and {after}, than they are from each other"
            f"{most}: {to} and {back}, against {across}, relative to the norm of the weights."
        )
    return (
        f"{steps_in_words(steps, capital=True)} lie apart{most}: the run jumps by {to} after step {before} and by "
        f"{back} before step {after}, which are only {across} from each other, relative to the norm of the weights."
    )


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
        (step, tuple(rows[["stack", "layer", "digest"]].itertuples(index=False, name=None)))
        for step, rows in contents.groupby("step")
    )


def _equal(contents: Iterable[tuple[Any, Any]]) -> list[tuple[int, ...]]:
    """Return the groups of two or more steps with the same content, in the order of their first steps."""
    groups: dict[Any, list[int]] = {}
    for step, content in contents:
        groups.setdefault(content, []).append(int(step))
    return [tuple(steps) for steps in groups.values() if len(steps) > 1]


def _rows_of(contents: pd.DataFrame, step: int) -> pd.DataFrame:
    return contents[contents["step"] == step]


def _key(key: Any) -> LayerKey:
    stack, layer = key
    return str(stack), int(layer)
