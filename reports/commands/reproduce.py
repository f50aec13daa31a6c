"""The command `qkov reproduce`."""

from pathlib import Path
from typing import Annotated

import typer

from ..terminal.output import command_as_typed, print_json, say
from ..terminal.progress import WorkProgress
from ..terminal.requirements import demand_supported
from .options import Json


def reproduce(
    out: Annotated[Path, typer.Option(help="Folder for the checkpoints, the run stores and the report.")] = Path(
        "qkov-reproduce"
    ),
    quick: Annotated[
        bool, typer.Option("--quick", help="Take larger steps, save fewer checkpoints and stop at a loss of 1e-4.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Train the paper's model and compare it with theory.

    All four parameterizations are trained on the exact population, their circuits are measured from the saved
    checkpoints, and a report compares them with the theory.
    """
    demand_supported("torch", "numpy", "scipy", "pandas", "pyarrow", "safetensors", "matplotlib", "jinja2")

    from ...analyses.studies.plan import Plan
    from ...analyses.studies.tables import all_tables
    from ...analyses.studies.training import reproduce as run_reproduction
    from ..pages.reproduction_report import reproduction_summary, write_reproduction_report

    with WorkProgress("reproduce", quiet=as_json) as progress:
        plan = Plan.quick() if quick else Plan()
        tables = all_tables(run_reproduction(plan, out, progress=progress.update, command=command_as_typed()))
        report = write_reproduction_report(tables, out / "report.html", command=command_as_typed())
    summary = reproduction_summary(tables)
    if as_json:
        print_json({"report": str(report), **summary})
        return
    say(f"matched loss: trained within {100 * summary['largest_difference']:.2g} % of the prediction in all runs")
    say(f"first integrals: relative residual at most {summary['largest_residual']:.2g}")
    say(
        f"Omega(C) G against the step taken: cosine at least {summary['balanced_cosine']:.6f} balanced, "
        f"{summary['unbalanced_cosine']:.3f} at the unbalanced start"
    )
    say(f"report: {report}")
