"""The options of `qkov explain` as the library's settings."""

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from ...circuits.errors import CallError
from .options import one_of

if TYPE_CHECKING:
    from ...analyses.attention.explanation.settings import ExplanationSettings
    from ...analyses.attention.rationales.perturbation import Perturbation

#: How a token can be removed: the word on the command line, and the library's name for it.
REMOVALS = {"delete": "deletion", "mask": "mask token", "attention": "attention mask"}


@dataclass(frozen=True)
class ExplainOptions:
    """The options of `qkov explain` that become settings of the explanation; None stands for the default."""

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
        """Return the settings of the explanation.

        Args:
            task: The name of the task.
            residual_stream: Whether the model has a residual stream. By default rollout then gives half of each layer
                to the identity.

        Raises:
            CallError: An option is out of range, or the task has no paper convention and that was chosen.
        """
        from ...analyses.attention.explanation.settings import ExplanationSettings
        from ...analyses.attention.measures.rollout import Rollout
        from ...analyses.attention.rationales.attribution import quick_methods

        default = 0.5 if residual_stream and self.convention == "standard" else 0.0
        residual = default if self.residual is None else self.residual
        return ExplanationSettings(
            methods=quick_methods() if self.methods is None else _methods(self.methods),
            rollout=Rollout(residual=residual, heads=cast(Any, one_of("fusion", self.fusion, ("mean", "max", "min")))),
            perturbation=self._perturbation(),
            target=one_of("target", self.target, ("predicted", "label")),
            draws=self.draws,
            seed=self.seed,
            batch_tokens=self.batch_tokens,
            paper_readout=None if self.convention == "standard" else _paper_readout(task, residual),
        )

    def _perturbation(self) -> "Perturbation":
        from ...analyses.attention.rationales.perturbation import ERASER, PAPER

        convention = one_of("convention", self.convention, ("standard", "paper"))
        chosen = {"standard": ERASER, "paper": PAPER}[convention]
        cuts = chosen.cuts if self.cuts is None else _cuts(self.cuts)
        return replace(chosen, cuts=cuts, removal=cast(Any, REMOVALS[one_of("removal", self.removal, tuple(REMOVALS))]))


def task_options(typed: list[str]) -> dict[str, Any]:
    """Return the options of a task from the form NAME=VALUE; values that are JSON are parsed as JSON.

    Raises:
        CallError: An option does not have that form.
    """
    options = {}
    for option in typed:
        name, equals, value = option.partition("=")
        if not equals or not name:
            raise CallError(f"--option should be NAME=VALUE, got {option!r}")
        try:
            options[name.replace("-", "_")] = json.loads(value)
        except json.JSONDecodeError:
            options[name.replace("-", "_")] = value
    return options


def _methods(typed: str) -> tuple[str, ...]:
    from ...analyses.attention.rationales.attribution import all_methods

    if typed == "all":
        return all_methods()
    return tuple(name.strip() for name in typed.split(","))


def _cuts(typed: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) / 100 for part in typed.split(","))
    except ValueError as error:
        raise CallError(f"--cuts should be comma-separated percentages such as 1,5,10,20,50; got {typed!r}") from error


def _paper_readout(task: str, residual: float) -> Any:
    from ...analyses.attention.measures.paper_readout import HATEXPLAIN_READOUT, SUBJECT_VERB_READOUT

    readouts = {"hatexplain": HATEXPLAIN_READOUT, "agreement": SUBJECT_VERB_READOUT}
    if task not in readouts:
        raise CallError(
            f"{task} has no paper convention, since the paper's code pads only the sequences of "
            f"{' and '.join(readouts)}; leave out --convention paper"
        )
    return replace(readouts[task], residual=residual)
