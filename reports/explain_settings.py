"""What is typed of an explanation's settings, as the settings themselves."""

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from ..circuits.errors import CallError

if TYPE_CHECKING:
    from ..analyses.attention.explanation_settings import ExplanationSettings

#: Ways to remove a token as they are typed, and as the library names them.
REMOVALS = {"delete": "deletion", "mask": "mask token", "attention": "attention mask"}


@dataclass(frozen=True)
class TypedSettings:
    """The options of `qkov explain` that are settings of the explanation, as typed; None where not given."""

    methods: str | None
    cuts: str | None
    removal: str
    convention: str
    residual: float | None
    fusion: str
    target: str
    draws: int
    seed: int
    batch_tokens: int

    def settings(self, task: str, *, residual_stream: bool) -> "ExplanationSettings":
        """Return the settings.

        Args:
            task: by its name.
            residual_stream: whether the model has one, of which rollout takes half by default.

        Raises:
            CallError: an option is out of its range, or the paper's convention is asked of another task than its own.
        """
        from ..analyses.attention.explanation_settings import QUICK_METHODS, ExplanationSettings
        from ..analyses.attention.rollout_settings import Rollout

        default = 0.5 if residual_stream and self.convention == "right" else 0.0
        residual = default if self.residual is None else self.residual
        return ExplanationSettings(
            methods=QUICK_METHODS if self.methods is None else _methods(self.methods),
            rollout=Rollout(residual=residual, heads=cast(Any, one_of("fusion", self.fusion, ("mean", "max", "min")))),
            perturbation=self._perturbation(),
            target=cast(Any, one_of("target", self.target, ("predicted", "label"))),
            draws=self.draws,
            seed=self.seed,
            batch_tokens=self.batch_tokens,
            paper_reading=None if self.convention == "right" else _paper_reading(task, residual),
        )

    def _perturbation(self) -> Any:
        from ..analyses.attention.perturbation import ERASER, PAPER

        chosen = {"right": ERASER, "paper": PAPER}[one_of("convention", self.convention, ("right", "paper"))]
        cuts = chosen.cuts if self.cuts is None else _cuts(self.cuts)
        return replace(chosen, cuts=cuts, removal=cast(Any, REMOVALS[one_of("removal", self.removal, tuple(REMOVALS))]))


def task_options(given: list[str]) -> dict[str, Any]:
    """Return the options of a task, typed as NAME=VALUE; a value that is JSON is what JSON makes of it.

    Raises:
        CallError: one is not of that form.
    """
    options = {}
    for one in given:
        name, equals, value = one.partition("=")
        if not equals or not name:
            raise CallError(f"--option should be NAME=VALUE, got {one!r}")
        try:
            options[name.replace("-", "_")] = json.loads(value)
        except json.JSONDecodeError:
            options[name.replace("-", "_")] = value
    return options


def _methods(typed: str) -> tuple[str, ...]:
    from ..analyses.attention.attribution import METHODS
    from ..analyses.attention.explanation_settings import QUICK_METHODS

    if typed == "all":
        *quick, last = QUICK_METHODS
        return (*quick, *(name for name in METHODS if name not in QUICK_METHODS), last)
    return tuple(name.strip() for name in typed.split(","))


def _cuts(typed: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) / 100 for part in typed.split(","))
    except ValueError as error:
        raise CallError(f"--cuts should be percentages apart by commas, such as 1,5,10,20,50; got {typed!r}") from error


def _paper_reading(task: str, residual: float) -> Any:
    from ..analyses.attention.paper_readout import AGREEMENT_READING, HATEXPLAIN_READING

    readings = {"hatexplain": HATEXPLAIN_READING, "agreement": AGREEMENT_READING}
    if task not in readings:
        raise CallError(
            f"the paper's code pads the sequences of {' and '.join(readings)} alone, so that {task} has no paper "
            f"convention; leave it out"
        )
    return replace(readings[task], residual=residual)


def one_of(option: str, typed: str, known: tuple[str, ...]) -> str:
    """Return what was typed, if it is among what is known.

    Raises:
        CallError: it is not.
    """
    if typed not in known:
        raise CallError(f"--{option} should be one of {', '.join(known)}; got {typed!r}")
    return typed
