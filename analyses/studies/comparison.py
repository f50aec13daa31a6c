"""Tables that compare the trained runs of a reproduction with the theory and with each other."""

from typing import Any

import numpy as np
import pandas as pd

from ..dynamics.equations import integrate
from ..dynamics.matched_loss import at_loss
from ..dynamics.setting import Parameterization
from .reproduction import Reproduction
from .trajectories import Trajectories


def matched_loss_table(reproduction: Reproduction, measured: Trajectories) -> pd.DataFrame:
    """Return the trained and the predicted mu_QK, mu_OV and alpha of every balanced run at every loss.

    The prediction is for the loss of the plan, through which the run passes exactly (to second order in its step). The
    column `difference` is the larger of the relative differences of the two scales.

    Args:
        reproduction: the finished reproduction.
        measured: its trajectories.
    """
    rows = []
    for run in reproduction.of_kind("balanced"):
        at_step = measured[run.name].set_index("step")
        for loss, step in sorted(run.reached.items(), reverse=True):
            trained = at_step.loc[step]
            predicted = at_loss(reproduction.plan.setting, run.parameterization, run.ratio, loss, run.start)
            rows.append(
                {
                    "parameterization": run.parameterization.value,
                    "ratio": run.ratio,
                    "loss": loss,
                    "loss_trained": trained["loss"],
                    "mu_qk": trained["mu_qk"],
                    "mu_qk_predicted": float(predicted.mu_qk),
                    "mu_ov": trained["mu_ov"],
                    "mu_ov_predicted": float(predicted.mu_ov),
                    "alpha": trained["attention"],
                    "alpha_predicted": float(predicted.attention),
                }
            )
    return _with_difference(pd.DataFrame(rows), "", "_predicted")


#: Losses below those that training reaches, for which there is only the theory.
FAR_LOSSES = (1e-12, 1e-16)


def long_after_table(reproduction: Reproduction, measured: Trajectories) -> pd.DataFrame:
    """Return alpha of every balanced run at ever smaller losses, and the prediction also for losses not reached.

    Columns: parameterization, ratio, loss, alpha_predicted, and alpha, which is NaN where the run did not go that far.
    Compared across r at one loss, this is the falsification test that the paper's review proposes: is attention
    sharper at r = 100 than at r = 0.01?

    Args:
        reproduction: the finished reproduction.
        measured: its trajectories.
    """
    rows = []
    for run in reproduction.of_kind("balanced"):
        alpha = measured[run.name].set_index("step")["attention"]
        for loss in (*(loss for loss in reproduction.plan.losses if loss <= 1e-2), *FAR_LOSSES):
            predicted = at_loss(reproduction.plan.setting, run.parameterization, run.ratio, loss, run.start)
            rows.append(
                {
                    "parameterization": run.parameterization.value,
                    "ratio": run.ratio,
                    "loss": loss,
                    "alpha_predicted": float(predicted.attention),
                    "alpha": alpha[run.reached[loss]] if loss in run.reached else np.nan,
                }
            )
    return pd.DataFrame(rows)


def flow_table(reproduction: Reproduction, measured: Trajectories) -> pd.DataFrame:
    """Return how far every balanced run is from the integrated equations at the times of its checkpoints.

    Columns: parameterization, ratio, mu_qk and mu_ov (the largest relative distance once the predicted scale exceeds a
    thousandth of its last value), and alpha (the largest distance). Where a scale grows exponentially, a small delay
    appears as a larger distance.

    Args:
        reproduction: the finished reproduction.
        measured: its trajectories.
    """
    rows = []
    for run in reproduction.of_kind("balanced"):
        later = measured[run.name].query("time > 0")
        time = later["time"].to_numpy()
        flow = integrate(
            reproduction.plan.setting, run.parameterization, run.ratio, until_time=float(time[-1]), start=run.start
        ).at(time)
        rows.append(
            {
                "parameterization": run.parameterization.value,
                "ratio": run.ratio,
                "mu_qk": _relative_distance(later["mu_qk"].to_numpy(), flow.mu_qk),
                "mu_ov": _relative_distance(later["mu_ov"].to_numpy(), flow.mu_ov),
                "alpha": float(abs(later["attention"].to_numpy() - flow.attention).max()),
            }
        )
    return pd.DataFrame(rows)


def _relative_distance(trained: np.ndarray, predicted: np.ndarray) -> float:
    grown = predicted > 1e-3 * predicted[-1]
    return float(np.abs(trained[grown] / predicted[grown] - 1).max())


def rescaled_table(reproduction: Reproduction, measured: Trajectories) -> pd.DataFrame:
    """Return the collapsed runs trained at the rescaled rate beside the factorized runs, at every loss.

    Both started from the same products. The column `difference` is the larger of the relative differences of mu_QK and
    mu_OV. The times are those of each run's own gradient flow.

    Args:
        reproduction: the finished reproduction.
        measured: its trajectories.
    """
    factorized = {
        run.ratio: run for run in reproduction.of_kind("balanced") if run.parameterization is Parameterization.FAFO
    }
    rows = []
    for run in reproduction.of_kind("rescaled"):
        other = factorized[run.ratio]
        collapsed, traced = (measured[name].set_index("step") for name in (run.name, other.name))
        for loss, step in sorted(run.reached.items(), reverse=True):
            row: dict[str, Any] = {"ratio": run.ratio, "loss": loss}
            for quantity in ("mu_qk", "mu_ov", "attention", "time"):
                row[f"{quantity}_collapsed"] = collapsed.loc[step, quantity]
                row[f"{quantity}_factorized"] = traced.loc[other.reached[loss], quantity]
            rows.append(row)
    return _with_difference(pd.DataFrame(rows), "_collapsed", "_factorized")


def preconditioner_table(reproduction: Reproduction, measured: Trajectories) -> pd.DataFrame:
    """Compare, for every factorized circuit, the steps taken with Omega(C) G and with the exact operator.

    Columns: kind, parameterization, ratio, circuit; omega_cosine (the smallest over the saved steps) and omega_error
    (the largest); exact_cosine and exact_error likewise; gradient_cosine (the smallest, with -G and no preconditioner);
    and omega_cosine_start, the cosine with Omega(C) G at the first step.

    Args:
        reproduction: the finished reproduction.
        measured: its trajectories.
    """
    rows = []
    for run in reproduction.of_kind("balanced", "spread", "unbalanced"):
        steps = measured[run.name]
        for circuit, factorized in (
            ("QK", run.parameterization.factorized_attention),
            ("OV", run.parameterization.factorized_output),
        ):
            if not factorized:
                continue
            side = circuit.lower()
            rows.append(
                {
                    "kind": run.kind,
                    "parameterization": run.parameterization.value,
                    "ratio": run.ratio,
                    "circuit": circuit,
                    "omega_cosine_start": steps[f"omega_cosine_{side}"].iloc[0],
                    "omega_cosine": steps[f"omega_cosine_{side}"].min(),
                    "omega_error": steps[f"omega_error_{side}"].max(),
                    "gradient_cosine": steps[f"gradient_cosine_{side}"].min(),
                    "exact_cosine": steps[f"exact_cosine_{side}"].min(),
                    "exact_error": steps[f"exact_error_{side}"].max(),
                }
            )
    return pd.DataFrame(rows)


def _with_difference(table: pd.DataFrame, ending: str, reference: str) -> pd.DataFrame:
    """Add the larger relative difference of mu_qk and mu_ov between the columns with two endings."""
    differences = [abs(table[f"{mu}{ending}"] / table[f"{mu}{reference}"] - 1) for mu in ("mu_qk", "mu_ov")]
    return table.assign(difference=np.maximum(*differences))
