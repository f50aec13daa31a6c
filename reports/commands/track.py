"""The command `qkov track`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...circuits.errors import QkovError
from ..terminal.output import command_as_typed, default_folder, print_json, say
from ..terminal.progress import WorkProgress
from ..terminal.requirements import demand_supported
from .options import Family, Heads, Json, MappingFile, Prefix, Revisions, Step, TrustPickle, reading_options

if TYPE_CHECKING:
    from ...analyses.trajectories.tracking import Tracked

#: How many steps of checkpoints that were left out a message lists.
_STEPS = 8


def track(
    run: Annotated[
        str,
        typer.Argument(
            help="A folder of checkpoints, or a single checkpoint: path, URL or hub id; or lens:NAME, for the "
            "checkpoints that TransformerLens lists."
        ),
    ],
    mapping: MappingFile = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the run store and the report. Default: qkov-NAME.")
    ] = None,
    basis: Annotated[
        str,
        typer.Option(
            help="Basis of the circuits: raw, folded (norms folded into the weights) or folded_centred (what is "
            "written to the residual stream is centred as well)."
        ),
    ] = "raw",
    rotary_offset: Annotated[
        int,
        typer.Option(help="For rotary models: query position minus key position at which W_QK is measured."),
    ] = 0,
    composition: Annotated[
        bool, typer.Option("--composition", help="Also measure the composition scores of all pairs of heads.")
    ] = False,
    engine: Annotated[
        str, typer.Option(help="What runs the workers: processes (of this machine), dask or ray.")
    ] = "processes",
    workers: Annotated[
        int | None,
        typer.Option(
            help="Number of workers, each with one thread. Default: one, or all the workers that a cluster has."
        ),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(help="Address of the cluster: tcp://HOST:PORT for dask; HOST:PORT or auto for ray."),
    ] = None,
    family: Family = None,
    heads: Heads = None,
    prefix: Prefix = None,
    revisions: Revisions = None,
    step: Step = None,
    trust_pickle: TrustPickle = False,
    as_json: Json = False,
) -> None:
    """Measure the circuits of a run over training.

    Every checkpoint is measured into a run store, and a report is written. The same command resumes after an
    interruption and measures only the checkpoints that are not yet in the store. A checkpoint that cannot be read is
    left out with the reason, and the exit status is then 1.
    """
    demand_supported("torch", "safetensors", "fsspec", "pandas", "pyarrow", "matplotlib", "jinja2")

    from ...analyses.trajectories.tracking import track as track_run
    from ...circuits.checkpoints.steps.step import step_in_words
    from ..pages.run_facts import step_notes
    from ..pages.run_report import write_run_report

    out = default_folder(run) if out is None else out
    with WorkProgress("track", quiet=as_json) as progress:
        tracked = track_run(
            run,
            out,
            basis=basis,
            rotary_offset=rotary_offset,
            composition=composition,
            engine=engine,
            workers=workers,
            address=address,
            revisions=revisions,
            step=step,
            options=reading_options(mapping, family, heads, prefix, trust_pickle),
            progress=lambda done, total, step, new: progress.update(
                done, total, f"{step_in_words(step)} {'measured' if new else 'already measured'}"
            ),
        )
    report = write_run_report([tracked.store], out / "report.html", command=command_as_typed())
    description = tracked.store.description()
    left_out = description["left_out"]
    if as_json:
        print_json(
            {
                "store": str(out),
                "report": str(report),
                "measured": tracked.measured,
                "kept": tracked.kept,
                "left_out": left_out,
            }
        )
    else:
        new = len(tracked.measured)
        say(f"measured {new} checkpoint{'s' * (new != 1)}, kept {len(tracked.kept)} already measured")
        for note in step_notes(tracked.store.table(), description):
            say(f"note: {note}")
        for name, reason in left_out.items():
            say(f"left out {name}: {reason}")
        say(f"store: {out}")
        say(f"report: {report}")
    if tracked.unusable:
        raise _some_left_out(tracked)


def _some_left_out(tracked: "Tracked") -> QkovError:
    steps, first = list(tracked.unusable), next(iter(tracked.unusable.values()))
    count = len(steps) + len(tracked.measured) + len(tracked.kept)
    listed = ", ".join("unknown" if step is None else str(step) for step in steps[:_STEPS]) + ", ..." * (
        len(steps) > _STEPS
    )
    return QkovError(
        f"{len(steps)} of {count} checkpoints could not be measured (step {listed}); the first: {first}; run the same "
        f"command again once they can be read"
    )
