"""The command `qkov report`."""

from pathlib import Path
from typing import Annotated

import typer

from .options import Json, command_as_typed, print_json


def report(
    stores: Annotated[
        list[Path], typer.Argument(help="Run stores, or one folder that `qkov reproduce` or `qkov explain` wrote.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="HTML file; report.html in the store, or qkov-comparison.html for several.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Render a report again, or compare runs side by side."""
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
    print(f"report: {written}")
