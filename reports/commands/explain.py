"""The command `qkov explain`."""

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from ...circuits.errors import CallError

if TYPE_CHECKING:
    from ...analyses.attention.explanation.settings import ExplanationSettings
from pathlib import Path
from typing import Annotated

import typer

from ...circuits.errors import QkovError
from .options import Json, command_as_typed, print_json

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
        from ...analyses.attention.explanation.settings import QUICK_METHODS, ExplanationSettings
        from ...analyses.attention.measures.rollout import Rollout

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
        from ...analyses.attention.rationales.perturbation import ERASER, PAPER

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
    from ...analyses.attention.explanation.settings import QUICK_METHODS
    from ...analyses.attention.rationales.attribution import METHODS

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
    from ...analyses.attention.measures.paper_readout import AGREEMENT_READING, HATEXPLAIN_READING

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


def explain(
    model: Annotated[
        str,
        typer.Argument(help="A folder that transformers saved, a GGUF file, a hub id, or a run of `qkov reproduce`."),
    ],
    task: Annotated[
        str,
        typer.Argument(
            help="fifty-token, population, induction, agreement, hatexplain, eraser, squad, or lines: "
            "{tokens or text, relevant, label} a line."
        ),
    ],
    data: Annotated[str | None, typer.Option(help="Of the task: path, URL or hub id of a data set.")] = None,
    split: Annotated[str | None, typer.Option(help="Of the data.")] = None,
    limit: Annotated[int, typer.Option(min=0, help="So many examples, drawn with the seed; 0 for all.")] = 200,
    option: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE, an option of the task, such as subjects=FILE; repeatable.")
    ] = None,
    kind: Annotated[
        str | None, typer.Option(help="classifier, causal or masked, where the model does not say it.")
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Where it is, if not beside the model.")] = None,
    methods: Annotated[
        str | None,
        typer.Option(help="Apart by commas, first the one to look at closely; all for every one. The quick ones."),
    ] = None,
    cuts: Annotated[str | None, typer.Option(help="Percent of the tokens to remove. 1,5,10,20,50.")] = None,
    removal: Annotated[
        str, typer.Option(help="delete, mask (the mask token instead) or attention (hidden by the attention mask).")
    ] = "delete",
    convention: Annotated[str, typer.Option(help="right, or paper: as the paper's released code does.")] = "right",
    residual: Annotated[
        float | None, typer.Option(help="Share of the identity in rollout. 0.5; 0 without a residual stream.")
    ] = None,
    fusion: Annotated[str, typer.Option(help="How heads become one map: mean, max or min.")] = "mean",
    target: Annotated[str, typer.Option(help="Whose probability is explained: predicted, or label.")] = "predicted",
    draws: Annotated[int, typer.Option(min=1, help="Random rankings of each example.")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="Of examples, random rankings and intervals.")] = 0,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Most tokens that go through the model at once.")] = 2048,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the tables and the report; qkov-MODEL-TASK if not given.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Where a model's attention goes on a task, and whether it is faithful: tables and a report."""
    typed = TypedSettings(methods, cuts, removal, convention, residual, fusion, target, draws, seed, batch_tokens)
    typed.settings(task, residual_stream=True)

    from ...analyses.attention.explanation.explanation import explain as explain_task
    from ...analyses.attention.explanation.files import write_explanation
    from ...analyses.attention.models.loading import KINDS, load_model
    from ...analyses.attention.models.task_fitting import fit_task
    from ...analyses.attention.models.tokenisers import load_tokeniser
    from ...analyses.tasks.loading import load_task
    from ..pages.explain_report import explain_summary, write_explain_report
    from .progress import WorkProgress

    chosen = None if kind is None else cast(Any, one_of("kind", kind, KINDS))
    out = _default_folder(model, task) if out is None else out
    options = task_options(option or [])
    _silence_transformers()
    with WorkProgress("explain", quiet=as_json) as progress:
        progress.update(0, 1, f"loading {model}")
        tokeniser = None if tokenizer is None else load_tokeniser(tokenizer)
        if task == "induction" and "vocabulary" not in options:
            tokeniser = tokeniser or load_tokeniser(model)
            options |= _vocabulary(tokeniser)
        examples = load_task(task, data, split, limit or None, seed, **options)
        given = load_model(model, chosen, mask_token=getattr(tokeniser, "mask_token_id", None))
        tokeniser = tokeniser or _beside(model, examples)
        fitted = fit_task(examples, given, tokeniser)
        settings = typed.settings(task, residual_stream=given.residual_stream)
        explanation = explain_task(given, fitted, settings, tokeniser=tokeniser, progress=progress.update)
    explanation.description["command"] = command_as_typed()
    write_explanation(explanation, out)
    report = write_explain_report(explanation, out / "report.html", command=command_as_typed(), folder=out)
    summary = explain_summary(explanation)
    if as_json:
        print_json({"report": str(report), "tables": str(out), **summary})
        return
    for line in _lines(summary):
        print(line)
    print(f"tables: {out}")
    print(f"report: {report}")


def _beside(model: str, task: Any) -> Any | None:
    """The tokeniser beside a model; where the task is in tokens already, it only gives them names."""
    from ...analyses.attention.models.tokenisers import load_tokeniser
    from ...analyses.tasks.example import TextExample

    try:
        return load_tokeniser(model)
    except QkovError:
        if any(isinstance(example, TextExample) for example in task.examples):
            raise
        return None


def _vocabulary(tokeniser: Any) -> dict[str, Any]:
    """For induction: the tokens that stand for text, and the one that begins it, if there is one."""
    special = set(tokeniser.all_special_ids)
    ids = sorted(token for token in tokeniser.get_vocab().values() if token not in special)
    return {"vocabulary": ids, "first": tokeniser.bos_token_id}


def _lines(summary: dict[str, Any]) -> list[str]:
    lines = [f"{summary['examples']} examples of {summary['task']}"]
    if summary["accuracy"] is not None:
        lines[0] += f"; {summary['model']} is right in {100 * summary['accuracy']:.1f} %"
    for name, figure in summary["relevance"].items():
        lines.append(
            f"{name} by {summary['method']}: {figure['value']:.4f} ({figure['low']:.4f} to {figure['high']:.4f}), "
            f"chance {figure['chance']:.4f}"
        )
    if not summary["relevance"]:
        lines.append("no example has relevant tokens: nothing is said of where attention goes")
    for method, figures in summary["methods"].items():
        shown = [f"{name} {figure['value']:.4f}" for name, figure in figures.items() if not name.endswith(" random")]
        lines.append(f"{method}: {', '.join(shown)}")
    for part, reasons in summary["left_out"].items():
        lines += [f"left out of {part}: {count} {reason}" for reason, count in reasons.items()]
    return lines


def _silence_transformers() -> None:
    """What it says while it loads a model is not of this command."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _default_folder(model: str, task: str) -> Path:
    from ...circuits.checkpoints.folders import SUFFIXES
    from ...circuits.storage.address import place_of

    place = place_of(model)
    name = place.name.removesuffix(place.suffix) if place.suffix in SUFFIXES else place.name
    return Path(f"qkov-{name}-{task}")
