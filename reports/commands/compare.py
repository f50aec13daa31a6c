"""The command `qkov compare`."""

from pathlib import Path
from typing import Annotated

import typer

from ..terminal.output import command_as_typed, default_folder, print_json, say
from ..terminal.requirements import demand_supported
from .options import Family, Heads, Json, MappingFile, Prefix, TrustPickle, reading_options


def compare(
    base: Annotated[str, typer.Argument(help="The model to compare with: path, URL or hub id.")],
    tuned: Annotated[str, typer.Argument(help="The other model, such as one that was tuned from the first.")],
    mapping: MappingFile = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the report and the table. Default: qkov-TUNED-against-BASE."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="File of the table, .parquet or .csv. Default: changes.parquet in the folder."),
    ] = None,
    measure: Annotated[
        list[str] | None,
        typer.Option(
            help="Quantity to draw as a map of layer and head: relative_change, change_stable_rank, "
            "change_effective_rank or change_top_share. Can be repeated. Default: the first and the third."
        ),
    ] = None,
    basis: Annotated[
        str, typer.Option(help="Basis of the circuits: raw, folded or folded_centred, as for qkov track.")
    ] = "raw",
    rotary_offset: Annotated[
        int,
        typer.Option(help="For rotary models: query position minus key position at which W_QK is compared."),
    ] = 0,
    family: Family = None,
    heads: Heads = None,
    prefix: Prefix = None,
    trust_pickle: TrustPickle = False,
    as_json: Json = False,
) -> None:
    """Measure the change of each head between two models.

    Both models have to be of one architecture: the same layers, shapes and kind of positions. A table with a row for
    each head and circuit, and a report with maps of layer and head, are written.
    """
    demand_supported("torch", "safetensors", "fsspec", "pandas", "pyarrow", "matplotlib", "jinja2")

    from ...analyses.trajectories.comparison.files import demand_table_format, write_changes
    from ...analyses.trajectories.comparison.models import compare_models
    from ...circuits.weights.layer_keys import layer_label
    from ..pages.compare_report import MAPPED, write_compare_report
    from .options import one_of

    measures = [
        one_of("measure", each, tuple(MAPPED)) for each in measure or ("relative_change", "change_effective_rank")
    ]
    if output is not None:
        demand_table_format(output)
    if out is None:
        out = default_folder(tuned, "against", default_folder(base).name.removeprefix("qkov-"))
    comparison = compare_models(
        base,
        tuned,
        basis=basis,
        rotary_offset=rotary_offset,
        options=reading_options(mapping, family, heads, prefix, trust_pickle),
    )
    table = output or out / "changes.parquet"
    write_changes(comparison, table)
    report = write_compare_report(comparison, out / "report.html", measures, command_as_typed(), table)
    if as_json:
        print_json(
            {
                "base": comparison.base,
                "tuned": comparison.tuned,
                "basis": comparison.basis,
                "rotary_offset": comparison.rotary_offset,
                "sentences": comparison.sentences(),
                "identical_layers": [layer_label(*key) for key in comparison.identical],
                "heads": comparison.table.to_dict("records"),
                "table": str(table),
                "report": str(report),
            }
        )
        return
    for sentence in comparison.sentences():
        say(sentence)
    say(f"table: {table}")
    say(f"report: {report}")
