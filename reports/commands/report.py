"""The command `qkov report`."""

from pathlib import Path
from typing import Annotated

import typer

from ..terminal.output import command_as_typed, print_json, say
from ..terminal.requirements import demand_supported
from .options import Json


def report(
    stores: Annotated[
        list[Path],
        typer.Argument(help="One or more run stores, or one folder that qkov reproduce or qkov explain wrote."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="HTML file to write. Default: report.html in the store; qkov-comparison.html for several stores."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Render a report again, or compare runs side by side."""
    demand_supported("pandas", "pyarrow", "matplotlib", "jinja2")

    from ...analyses.attention.explanation.files import is_explanation, read_explanation
    from ...analyses.studies.reproduction import is_reproduction, open_reproduction
    from ...analyses.studies.tables import all_tables
    from ..pages.explain_report import write_explain_report
    from ..pages.reproduction_report import write_reproduction_report
    from ..pages.run_report import write_run_report

    if len(stores) == 1 and is_reproduction(stores[0]):
        written = write_reproduction_report(
            all_tables(open_reproduction(stores[0])), out or stores[0] / "report.html", command=command_as_typed()
        )
    elif len(stores) == 1 and is_explanation(stores[0]):
        written = write_explain_report(
            read_explanation(stores[0]), out or stores[0] / "report.html", command=command_as_typed(), folder=stores[0]
        )
    else:
        default = stores[0] / "report.html" if len(stores) == 1 else Path("qkov-comparison.html")
        written = write_run_report(stores, out or default, command=command_as_typed())
    if as_json:
        print_json({"report": str(written)})
        return
    say(f"report: {written}")
