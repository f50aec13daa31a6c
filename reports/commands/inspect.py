"""The command `qkov inspect`."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..terminal.output import command, print_json, say
from ..terminal.requirements import demand_supported
from .options import Family, Heads, Json, MappingFile, Prefix, Revisions, Step, TrustPickle, reading_options

if TYPE_CHECKING:
    from ...circuits.checkpoints.runs import Run
    from ...circuits.reading.options import ReadingOptions

#: The checkpoints of a run are compared if they are on this machine and no larger than this together, in bytes.
_COMPARED = 2**30


def inspect(
    checkpoint: Annotated[
        str,
        typer.Argument(
            help="A checkpoint, or a folder of checkpoints (the last is opened): path, URL, hub id, or lens:NAME for a "
            "model that TransformerLens names."
        ),
    ],
    mapping: MappingFile = None,
    family: Family = None,
    heads: Heads = None,
    prefix: Prefix = None,
    revisions: Revisions = None,
    step: Step = None,
    trust_pickle: TrustPickle = False,
    as_json: Json = False,
) -> None:
    """Show what a checkpoint contains and how it is read.

    Prints the tensors that were recognised, their layouts, and the circuits that qkov track would measure. The
    checkpoints of a run are compared with each other as qkov audit does, if they are on this machine and take no more
    than 1 GiB. Nothing is written.
    """
    demand_supported("torch", "safetensors", "fsspec")

    from ...circuits.checkpoints.runs import find_run
    from ...circuits.checkpoints.steps.step import step_in_words
    from ...circuits.live.lens_models import open_run_checkpoint
    from ...circuits.public_addresses import public_address
    from ...circuits.reading.checkpoint import OpenCheckpoint
    from ...circuits.reading.inspection import inspect_checkpoint
    from ...circuits.storage.lens import is_lens
    from ..terminal.inspection_text import inspection_lines, run_facts, run_lines

    options = reading_options(mapping, family, heads, prefix, trust_pickle)
    patterns = options.patterns(step)
    as_published = is_lens(checkpoint) and "@" not in checkpoint and revisions is None and not patterns
    run = _as_published(checkpoint) if as_published else find_run(checkpoint, revisions, patterns, options.series)
    if not as_json:
        for line in _lens_lines(checkpoint, run) if as_published else run_lines(public_address(checkpoint), run):
            say(line)
    last = run.checkpoints[-1]
    opened = open_run_checkpoint(last, options)
    disagreement = None
    if isinstance(opened, OpenCheckpoint):
        last = last.stated_by(opened.file)
        disagreement = last.disagreement(opened.file)
    facts = inspect_checkpoint(opened)
    comparison, lines = _compared(checkpoint, run, options)
    if as_json:
        run = replace(run, checkpoints=[*run.checkpoints[:-1], last])
        print_json({**facts, **run_facts(run), "integrity": comparison})
        return
    if last.step != run.checkpoints[-1].step:
        say(f"its {step_in_words(last.step, last.unit)}: {last.step_origin}")
    if not run.notes and disagreement is not None:
        say(f"note: {disagreement}")
    for line in lines:
        say(line)
    say(f"opened {facts['address']}: {facts['tensors']} tensors")
    for line in inspection_lines(facts):
        say(line)


def _as_published(address: str) -> "Run":
    """Return the model that TransformerLens names, as it was published last."""
    from ...circuits.checkpoints.runs import Run, lens_checkpoint

    return Run([lens_checkpoint(address)], {})


def _lens_lines(address: str, run: "Run") -> list[str]:
    """Return what a name of TransformerLens stands for, and the checkpoints that TransformerLens lists."""
    from ...circuits.errors import CallError
    from ...circuits.storage.lens import lens_checkpoints, lens_model

    model = lens_model(address)
    lines = [f"{address}: {model.official} on the hub, which is {run.checkpoints[0].address}"]
    try:
        listed, unit = lens_checkpoints(model)
    except CallError:
        return [*lines, "  TransformerLens lists no checkpoints of it"]
    span = f"{unit} {listed[0].label} to {listed[-1].label}"
    return [*lines, f"  TransformerLens lists {len(listed)} checkpoints of it, {span}: {command('track', address)}"]


def _compared(address: str, run: "Run", options: "ReadingOptions") -> tuple[dict[str, Any] | None, list[str]]:
    """Return what an audit of the run's checkpoints found, as JSON and as lines; None if that takes long."""
    if len(run.checkpoints) < 2:
        return None, []
    demand_supported("pandas", "pyarrow")

    from ...analyses.trajectories.integrity.auditing import audit_checkpoints, bytes_on_this_machine
    from ...analyses.trajectories.integrity.result import sentences, summary

    size = bytes_on_this_machine(run.checkpoints)
    if size is None or size > _COMPARED:
        how_much = "over the network" if size is None else f"of {size / 2**30:.1f} GiB in all"
        return None, [
            f"whether checkpoints are identical was not checked, which takes reading all of them {how_much}: "
            f"{command('audit', address)}"
        ]
    audited = audit_checkpoints(run.checkpoints, options)
    return audited.as_dict(), [*sentences(audited), *([] if audited.findings else [summary(audited)])]
