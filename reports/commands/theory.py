"""The commands that compute the paper's theory: `qkov reproduce` and `qkov predict`."""

from pathlib import Path
from typing import Annotated

import typer

from ...circuits.errors import CallError
from .options import Json, command_as_typed, print_json


def reproduce(
    out: Annotated[Path, typer.Option(help="Folder for checkpoints, stores and the report.")] = Path("qkov-reproduce"),
    quick: Annotated[bool, typer.Option(help="Larger steps, fewer checkpoints, down to a loss of 1e-4.")] = False,
    as_json: Json = False,
) -> None:
    """Train the four parameterizations on the exact population, compare with theory, write the report."""
    from ...analyses.studies.reproduction import Plan
    from ...analyses.studies.reproduction import reproduce as run_reproduction
    from ...analyses.studies.tables import all_tables
    from ..pages.reproduction_report import reproduction_summary, write_reproduction_report
    from .progress import WorkProgress

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
    from ...analyses.dynamics.matched_loss import at_loss, time_to_loss
    from ...analyses.dynamics.setting import Parameterization, Setting, Start

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
