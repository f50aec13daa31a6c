"""The command `qkov predict`."""

from typing import Annotated

import typer

from ..terminal.output import print_json, say
from ..terminal.requirements import demand_supported
from .options import Json, one_of


def predict(
    loss: Annotated[float, typer.Option(help="Cross-entropy at which to stop, in nats.")],
    ratio: Annotated[float, typer.Option(help="Ratio of the learning rates, r = eta_QK / eta_OV.")] = 1.0,
    parameterization: Annotated[
        str | None,
        typer.Option(help="CACO, CAFO, FACO or FAFO: collapsed or factorized attention, then output. Default: all."),
    ] = None,
    classes: Annotated[int, typer.Option(help="Number of classes, M.")] = 20,
    class_tokens: Annotated[int, typer.Option(help="Number of tokens of each class, b.")] = 50,
    relevant: Annotated[int, typer.Option(help="Number of tokens of the class in a sequence, m.")] = 5,
    background: Annotated[int, typer.Option(help="Number of background tokens in a sequence, n.")] = 50,
    query: Annotated[
        str,
        typer.Option(
            help="Query of a sequence: token (one of its class's tokens) or class (a separate query for each class)."
        ),
    ] = "token",
    start_qk: Annotated[
        float | None, typer.Option(help="Start value of mu_QK. Default: 0 if collapsed, 0.01 if factorized.")
    ] = None,
    start_ov: Annotated[
        float | None, typer.Option(help="Start value of mu_OV. Default: 0 if collapsed, 0.01 if factorized.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict attention and both scales at a loss.

    Prints alpha, mu_QK, mu_OV and the time at which gradient flow passes the loss. Nothing is trained.
    """
    demand_supported("numpy", "scipy")

    from ...analyses.dynamics.matched_loss import at_loss, time_to_loss
    from ...analyses.dynamics.setting import Parameterization, Setting, Start

    setting = Setting(
        M=classes, b=class_tokens, m=relevant, n=background, query=one_of("query", query, ("token", "class"))
    )
    wanted = list(Parameterization) if parameterization is None else [Parameterization.parse(parameterization)]
    predictions = []
    for chosen in wanted:
        default = Start.default(chosen)
        start = Start(
            default.mu_qk if start_qk is None else start_qk,
            default.mu_ov if start_ov is None else start_ov,
        )
        state = at_loss(setting, chosen, ratio, loss, start)
        predictions.append(
            {
                "parameterization": chosen.value,
                "ratio": ratio,
                "loss": loss,
                "mu_ov": float(state.mu_ov),
                "mu_qk": float(state.mu_qk),
                "alpha": float(state.attention),
                "time": time_to_loss(setting, chosen, ratio, loss, start),
            }
        )
    if as_json:
        print_json(predictions if parameterization is None else predictions[0])
        return
    say(
        f"M = {classes}, b = {class_tokens}, m = {relevant}, n = {background}, {query} query; "
        f"r = {ratio:g}, loss {loss:g}"
    )
    say(f"uniform attention would put {setting.uniform_attention:.4f} on the relevant tokens")
    for prediction in predictions:
        say(
            f"{prediction['parameterization']}  alpha {prediction['alpha']:.6f}  mu_QK {prediction['mu_qk']:.6g}  "
            f"mu_OV {prediction['mu_ov']:.6g}  time {prediction['time']:.6g} / eta_OV"
        )
