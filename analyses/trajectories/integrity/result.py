"""The result of an audit: what was checked in a series of checkpoints, and what was found."""

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from ....circuits.checkpoints.steps.step import step_in_words
from ....circuits.weights.layer_keys import LayerKey, capitalised, layers_in_words
from .findings import (
    LARGEST_RATIO,
    Finding,
    distant_checkpoints,
    frozen_layers,
    identical_checkpoints,
    identical_layers,
    key_of,
    other_layers,
)
from .wording import of_damaged_layer, steps_in_words


@dataclass(frozen=True)
class Integrity:
    """What was checked in a series of checkpoints, and what was found.

    Attributes:
        checked: The steps whose content is known; None for a single checkpoint of unknown step.
        unknown: Why the content of a step is unknown, by step.
        findings: What was found.
        frozen: The layers that are identical in all checkpoints while others change.
        untested: What could not be compared although it was read, in words.
        left_out: Why a file or folder of the run is not one of its checkpoints, by name.
        unit: What a step counts: steps, or epochs where nothing better is known.
    """

    checked: list[int | None]
    unknown: dict[int, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    frozen: list[LayerKey] = field(default_factory=list)
    untested: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    unit: str = "step"

    @property
    def is_sound(self) -> bool:
        """Whether every checkpoint was checked and nothing was found."""
        return not self.findings and not self.unknown

    def as_dict(self) -> dict[str, Any]:
        """Return everything in a form that JSON can hold."""
        return {
            "checked": self.checked,
            "unit": self.unit,
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


def integrity_of(contents: pd.DataFrame, unknown: dict[int, str] | None = None, unit: str = "step") -> Integrity:
    """Return what the contents of a run's layers say about the run.

    Args:
        contents: The contents, with the columns of `RunStore.contents`.
        unknown: Why the content of other steps is unknown, by step.
        unit: What a step counts.
    """
    if contents["step"].nunique() < 2:
        steps = [None if pd.isna(step) else int(step) for step in contents["step"].unique()]
        return Integrity(checked=steps, unknown=unknown or {}, unit=unit)
    contents = contents.sort_values(["step", "stack", "layer"])
    others = other_layers(contents, unit)
    excluded = [step for finding in others for step in finding.steps]
    alike = contents[~contents["step"].isin(excluded)]
    # NaN is content, but it has no distance.
    finite = alike["sketch"].map(lambda sketch: bool(np.isfinite(sketch).all())).astype(bool)
    damaged = alike[~finite].groupby(["stack", "layer"])["step"].apply(list)
    identical = identical_checkpoints(contents, unit)
    return Integrity(
        checked=[int(step) for step in contents["step"].unique()],
        unknown=unknown or {},
        findings=[
            *others,
            *identical,
            *identical_layers(contents, unit),
            *distant_checkpoints(alike[finite], {step for finding in identical for step in finding.steps}, unit),
        ],
        frozen=frozen_layers(contents),
        unit=unit,
        untested=[of_damaged_layer(key_of(key), steps, unit) for key, steps in damaged.items()],
    )


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
            f"{capitalised(steps_in_words(steps, integrity.unit))} {'were' if len(steps) > 1 else 'was'} not checked: "
            f"{reason}"
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
        f"{capitalised(named)} {'are' if several else 'is'} frozen: {'their' if several else 'its'} attention "
        f"weights are identical in {'both' if count == 2 else f'all {count}'} checkpoints, while other layers change."
    ]


def summary(integrity: Integrity) -> str:
    """Return what was checked and how much was found, in one sentence."""
    count, unit = len(integrity.checked), integrity.unit
    if count == 0:
        return "No checkpoint could be checked."
    if count == 1:
        return f"Only {step_in_words(integrity.checked[0], unit)} was read: there is nothing to compare it with."
    missing = f" ({len(integrity.unknown)} more were not checked)" if integrity.unknown else ""
    what = f"{count} checkpoints, {unit} {integrity.checked[0]} to {integrity.checked[-1]}{missing}"
    if integrity.findings:
        number = len(integrity.findings)
        return f"Checked {what}: {number} finding{'s' * (number > 1)}."
    unchanging = "no layer but frozen ones" if integrity.frozen else "no layer"
    neighbours = (
        f", and none is more than about {LARGEST_RATIO} times as far from its neighbours as they are from each other "
        "(the first and the last have only one)"
        if count > 2
        else ""
    )
    return f"Checked {what}: no two are identical, {unchanging} is identical in several{neighbours}."
