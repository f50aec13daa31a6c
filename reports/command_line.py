"""The command `qkov`: thin over the library, one clear line for whatever goes wrong."""

import errno
import sys
from pathlib import Path
from typing import Annotated

import typer
from typer.exceptions import TyperException

from ..circuits.errors import CallError, QkovError
from .explain_command import explain
from .options import Family, Heads, Json, Map, Prefix, Revisions, TrustPickle, command_as_typed, print_json
from .track_command import track

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="The query-key and output-value circuits of trained transformers, and how training made them.",
)


@app.command()
def reproduce(
    out: Annotated[Path, typer.Option(help="Folder for checkpoints, stores and the report.")] = Path("qkov-reproduce"),
    quick: Annotated[bool, typer.Option(help="Larger steps, fewer checkpoints, down to a loss of 1e-4.")] = False,
    as_json: Json = False,
) -> None:
    """Train the four parameterizations on the exact population, compare with theory, write the report."""
    from ..analyses.studies.reproduction import Plan
    from ..analyses.studies.reproduction import reproduce as run_reproduction
    from ..analyses.studies.tables import all_tables
    from .progress import WorkProgress
    from .reproduction_report import reproduction_summary, write_reproduction_report

    with WorkProgress("reproduce", quiet=as_json) as progress:
        plan = Plan.quick() if quick else Plan()
        tables = all_tables(run_reproduction(plan, out, progress=progress.update, command=command_as_typed()))
        report = write_reproduction_report(tables, out / "report.html", command=command_as_typed())
    summary = reproduction_summary(tables)
    if as_json:
        print_json({"report": str(report), **summary})
        return
    print(f"matched loss: trained within {100 * summary['largest_difference']:.2g} % of the prediction in all runs")
    print(f"first integrals: relative residual at most {summary['largest_residual']:.2g}")
    print(
        f"Omega(C) G against the step taken: cosine at least {summary['balanced_cosine']:.6f} balanced, "
        f"{summary['unbalanced_cosine']:.3f} at the unbalanced start"
    )
    print(f"report: {report}")


@app.command()
def predict(
    loss: Annotated[float, typer.Option(help="Cross-entropy at which to stop, in nats.")],
    ratio: Annotated[float, typer.Option(help="r = eta_QK / eta_OV.")] = 1.0,
    parameterization: Annotated[
        str | None,
        typer.Option(help="CACO, CAFO, FACO or FAFO (collapsed or factorized attention, output); all if not given."),
    ] = None,
    classes: Annotated[int, typer.Option(help="M, classes.")] = 20,
    class_tokens: Annotated[int, typer.Option(help="b, tokens of each class.")] = 50,
    relevant: Annotated[int, typer.Option(help="m, tokens of the class in a sequence.")] = 5,
    background: Annotated[int, typer.Option(help="n, background tokens in a sequence.")] = 50,
    query: Annotated[
        str, typer.Option(help="token: the query is a token of the class; class: a vector of its own.")
    ] = "token",
    start_qk: Annotated[float | None, typer.Option(help="mu_QK at the start; 0 collapsed, 0.01 factorized.")] = None,
    start_ov: Annotated[float | None, typer.Option(help="mu_OV at the start; 0 collapsed, 0.01 factorized.")] = None,
    as_json: Json = False,
) -> None:
    """Theory alone: alpha, mu_QK, mu_OV and the time at a loss, for any parameterization and r."""
    from ..analyses.dynamics.matched_loss import at_loss, time_to_loss
    from ..analyses.dynamics.setting import Parameterization, Setting, Start

    if query not in ("token", "class"):
        raise CallError(f"--query should be token or class, got {query!r}")
    setting = Setting(M=classes, b=class_tokens, m=relevant, n=background, query=query)
    asked = list(Parameterization) if parameterization is None else [Parameterization.parse(parameterization)]
    predictions = []
    for chosen in asked:
        default = Start.default(chosen)
        start = Start(
            default.mu_qk if start_qk is None else start_qk,
            default.mu_ov if start_ov is None else start_ov,
        )
        found = at_loss(setting, chosen, ratio, loss, start)
        predictions.append(
            {
                "parameterization": chosen.value,
                "ratio": ratio,
                "loss": loss,
                "mu_ov": float(found.mu_ov),
                "mu_qk": float(found.mu_qk),
                "alpha": float(found.attention),
                "time": time_to_loss(setting, chosen, ratio, loss, start),
            }
        )
    if as_json:
        print_json(predictions if parameterization is None else predictions[0])
        return
    print(
        f"M = {classes}, b = {class_tokens}, m = {relevant}, n = {background}, {query} query; "
        f"r = {ratio:g}, loss {loss:g}"
    )
    print(f"uniform attention would put {setting.uniform_attention:.4f} on the relevant tokens")
    for found in predictions:
        print(
            f"{found['parameterization']}  alpha {found['alpha']:.6f}  mu_QK {found['mu_qk']:.6g}  "
            f"mu_OV {found['mu_ov']:.6g}  time {found['time']:.6g} / eta_OV"
        )


@app.command()
def inspect(
    checkpoint: Annotated[
        str, typer.Argument(help="A checkpoint, or a folder of them (the last one is opened): path, URL or hub id.")
    ],
    mapping: Map = None,
    family: Family = None,
    heads: Heads = None,
    prefix: Prefix = None,
    revisions: Revisions = None,
    trust_pickle: TrustPickle = False,
    as_json: Json = False,
) -> None:
    """What was found in a file or folder, and what would be measured."""
    from ..circuits.checkpoints import find_run
    from ..circuits.inspection import inspect_checkpoint
    from ..circuits.mapping import read_mapping
    from ..circuits.reading import ReadingOptions
    from .inspection_text import inspection_lines

    found = find_run(checkpoint, revisions)
    named = None if mapping is None else read_mapping(mapping)
    options = ReadingOptions(named, family, heads, prefix, trust_pickle)
    facts = inspect_checkpoint(options.open(found.checkpoints[-1].address))
    facts["steps"] = [each.step for each in found.checkpoints]
    facts["left_out"] = found.left_out
    if as_json:
        print_json(facts)
        return
    steps = facts["steps"]
    print(
        f"{checkpoint}: {len(steps)} checkpoint{'s' * (len(steps) > 1)}, step {steps[0]}"
        + f" to {steps[-1]}" * (len(steps) > 1)
    )
    for name, reason in found.left_out.items():
        print(f"left out {name}: {reason}")
    print(f"opened {facts['address']}: {facts['tensors']} tensors")
    for line in inspection_lines(facts):
        print(line)


@app.command()
def families(as_json: Json = False) -> None:
    """The families of models that are recognised, and what is named and skipped."""
    from .families_table import families_facts, families_lines

    if as_json:
        print_json(families_facts())
        return
    for line in families_lines():
        print(line)


app.command()(track)
app.command()(explain)


@app.command()
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
    from ..analyses.attention.explanation_files import is_explanation, read_explanation
    from ..analyses.studies.reproduction import is_reproduction, open_reproduction
    from ..analyses.studies.tables import all_tables
    from .explain_report import write_explain_report
    from .reproduction_report import write_reproduction_report
    from .run_report import write_run_report

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


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and leave with its status: 0 done, 1 the work failed, 2 the call was wrong."""
    sys.exit(run(arguments))


def run(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit status; whatever goes wrong is one line on standard error."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments:
        app(["--help"], standalone_mode=False, prog_name="qkov")
        return 2
    try:
        status = app(arguments, standalone_mode=False, prog_name="qkov")
    except CallError as error:
        return _refuse(str(error), 2)
    except QkovError as error:
        return _refuse(str(error), 1)
    except TyperException as error:
        return _refuse(f"{error.format_message()} (qkov --help lists the commands)", error.exit_code)
    except OSError as error:
        where = f" ({error.filename2 or error.filename})" if error.filename else ""
        more = "; make room and run the same command again" if error.errno == errno.ENOSPC else ""
        return _refuse(f"{error.strerror or error}{where}: nothing is half written{more}", 1)
    if status == _INTERRUPTED:
        return _refuse("interrupted; nothing is half written: run the same command again to finish", 1)
    return status if isinstance(status, int) else 0


# What typer returns for Ctrl-C.
_INTERRUPTED = 130


def _refuse(message: str, status: int) -> int:
    print("qkov: " + " ".join(message.split()), file=sys.stderr)
    return status
