"""The command `qkov explain`."""

import warnings
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from ...circuits.errors import QkovError
from ..terminal.output import command_as_typed, default_folder, print_json, say
from ..terminal.progress import WorkProgress
from ..terminal.requirements import demand_supported
from .explain_options import ExplainOptions, task_options
from .options import Json, one_of


def explain(
    model: Annotated[
        str,
        typer.Argument(
            help="A folder that transformers saved, a run of its Trainer or of qkov reproduce (the last checkpoint is "
            "used), a GGUF file, a hub id, NAME or NAME@REVISION, or lens:NAME for a model that TransformerLens names."
        ),
    ],
    task: Annotated[
        str,
        typer.Argument(
            help="The task: fifty-token, population, induction, agreement, hatexplain, eraser, squad, or lines (JSON "
            "lines with tokens or text, relevant, and label, and pair and pair_relevant for a second text)."
        ),
    ],
    data: Annotated[str | None, typer.Option(help="Data for the task: path, URL or hub id of a data set.")] = None,
    split: Annotated[str | None, typer.Option(help="Split of the data set to use.")] = None,
    limit: Annotated[
        int, typer.Option(min=0, help="Maximum number of examples, sampled with --seed; 0 uses all.")
    ] = 200,
    option: Annotated[
        list[str] | None,
        typer.Option(help="An option of the task as NAME=VALUE, such as subjects=FILE. Can be repeated."),
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option(help="Kind of model: classifier, causal or masked. Needed only if the model does not say it."),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Address of the tokenizer, if it is not stored beside the model.")
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated attribution methods; the first is examined in detail; 'all' runs every method. "
            "Default: the fast ones."
        ),
    ] = None,
    cuts: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated percentages of tokens to remove. Default: 1,5,10,20,50; 5 with --convention paper."
        ),
    ] = None,
    removal: Annotated[
        str,
        typer.Option(
            help="How tokens are removed: delete, mask (replace by the mask token) or attention (hide by the attention "
            "mask)."
        ),
    ] = "delete",
    convention: Annotated[
        str, typer.Option(help="Convention to follow: standard, or paper for the choices of the paper's released code.")
    ] = "standard",
    residual: Annotated[
        float | None,
        typer.Option(
            help="Weight of the identity in rollout. Default: 0.5; 0 if the model has no residual stream or with "
            "--convention paper."
        ),
    ] = None,
    fusion: Annotated[
        str, typer.Option(help="How the heads of a layer are fused into one attention map: mean, max or min.")
    ] = "mean",
    target: Annotated[
        str, typer.Option(help="Whose probability is explained: predicted (the model's answer) or label.")
    ] = "predicted",
    draws: Annotated[int, typer.Option(min=1, help="Number of random rankings for each example.")] = 5,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed for sampling examples, random rankings and bootstrap intervals.")
    ] = 0,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens in one batch.")] = 2048,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the tables and the report. Default: qkov-MODEL-TASK.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure where attention goes on a task.

    Measures how much attention the relevant tokens get and whether attention is faithful to the model's predictions,
    and writes tables and a report.
    """
    demand_supported(
        *("torch", "transformers", "captum", "datasets", "scipy", "pandas", "pyarrow", "matplotlib", "jinja2")
    )
    options = ExplainOptions(methods, cuts, removal, convention, residual, fusion, target, draws, seed, batch_tokens)
    # Wrong options are refused before anything is loaded; the settings themselves depend on the model.
    options.settings(task, residual_stream=True)

    from ...analyses.attention.explanation.explanation import explain as explain_task
    from ...analyses.attention.explanation.files import write_explanation
    from ...analyses.attention.models.loading import KINDS, load_model
    from ...analyses.attention.models.task_fitting import fit_task
    from ...analyses.attention.models.tokenisers import load_tokeniser
    from ...analyses.tasks.loading import load_task
    from ..pages.explain_report import explain_summary, write_explain_report

    chosen = None if kind is None else cast(Any, one_of("kind", kind, KINDS))
    out = default_folder(model, task) if out is None else out
    of_task = task_options(option or [])
    _silence_transformers()
    with WorkProgress("explain", quiet=as_json) as progress:
        progress.update(0, 1, f"loading {model}")
        tokeniser = None if tokenizer is None else load_tokeniser(tokenizer)
        if task == "induction" and "vocabulary" not in of_task:
            tokeniser = tokeniser or load_tokeniser(model)
            of_task |= _vocabulary(tokeniser)
        examples = load_task(task, data, split, limit or None, seed, **of_task)
        loaded = load_model(model, chosen, mask_token=getattr(tokeniser, "mask_token_id", None))
        tokeniser = tokeniser or _tokeniser_beside(model, examples)
        with warnings.catch_warnings():
            # What they say about labels is among the lines at the end.
            warnings.simplefilter("ignore", UserWarning)
            fitted = fit_task(examples, loaded, tokeniser)
        settings = options.settings(task, residual_stream=loaded.residual_stream)
        explanation = explain_task(loaded, fitted, settings, tokeniser=tokeniser, progress=progress.update)
    explanation.description["command"] = command_as_typed()
    write_explanation(explanation, out)
    report = write_explain_report(explanation, out / "report.html", command=command_as_typed(), folder=out)
    summary = explain_summary(explanation)
    if as_json:
        print_json({"report": str(report), "tables": str(out), **summary})
        return
    for line in _lines(summary):
        say(line)
    say(f"tables: {out}")
    say(f"report: {report}")


def _tokeniser_beside(model: str, task: Any) -> Any | None:
    """Return the tokenizer beside a model. A task that is already in tokens can do without one."""
    from ...analyses.attention.models.tokenisers import load_tokeniser
    from ...analyses.tasks.example import TextExample

    try:
        return load_tokeniser(model)
    except QkovError:
        if any(isinstance(example, TextExample) for example in task.examples):
            raise
        return None


def _vocabulary(tokeniser: Any) -> dict[str, Any]:
    """Return the options of the induction task: the tokens that stand for text, and the one that begins a text."""
    special = set(tokeniser.all_special_ids)
    ids = sorted(token for token in tokeniser.get_vocab().values() if token not in special)
    return {"vocabulary": ids, "first": tokeniser.bos_token_id}


def _lines(summary: dict[str, Any]) -> list[str]:
    lines = [f"{summary['examples']} examples of {summary['task']}"]
    if summary["accuracy"] is not None:
        lines[0] += f"; {summary['model']} is right in {100 * summary['accuracy']:.1f} %"
    if summary["chosen_checkpoint"]:
        lines.insert(0, summary["chosen_checkpoint"])
    if summary["pairs"]:
        lines.append(
            f"{summary['pairs']} of {summary['examples']} examples are pairs of texts; relevant: "
            f"{summary['relevant_tokens']}"
        )
    if summary["spaced_labels"]:
        lines.append(
            f"{summary['spaced_labels']} of {summary['examples']} labels were changed: the tokenizer puts the space in "
            "front of them apart, so the space was put behind the text, and the first token with content is predicted"
        )
    if summary["blank_labels"]:
        lines.append(f"warning: {summary['blank_labels']} of {summary['examples']} labels are only white space")
    for name, result in summary["relevance"].items():
        lines.append(
            f"{name} by {summary['method']}: {result['value']:.4f} ({result['low']:.4f} to {result['high']:.4f}), "
            f"chance {result['chance']:.4f}"
        )
    if not summary["relevance"]:
        lines.append("no example has relevant tokens, so attention on relevant tokens was not measured")
    for method, results in summary["methods"].items():
        shown = [f"{name} {result['value']:.4f}" for name, result in results.items() if not name.endswith(" random")]
        lines.append(f"{method}: {', '.join(shown)}")
    for part, reasons in summary["left_out"].items():
        lines += [f"left out of {part}: {count} {reason}" for reason, count in reasons.items()]
    return lines


def _silence_transformers() -> None:
    """Keep the messages and bars that transformers shows while it loads a model off the terminal."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
