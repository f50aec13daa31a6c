"""The quantities measured along a trained run, from which the comparisons with the theory start."""

import pandas as pd

from ..dynamics.saved_runs import STEP_COMPARISONS
from .reproduction import Reproduction, Run

#: `trajectory` of each run, by the run's name.
Trajectories = dict[str, pd.DataFrame]


def trajectories(reproduction: Reproduction) -> Trajectories:
    """Return `trajectory` of every run, by the run's name."""
    return {run.name: trajectory(reproduction, run) for run in reproduction.runs}


def trajectory(reproduction: Reproduction, run: Run) -> pd.DataFrame:
    """Return the quantities measured at every saved checkpoint of a run, from its store.

    Args:
        reproduction: the finished reproduction.
        run: one of its runs.

    Returns:
        A row for each checkpoint with the columns step, time, loss, attention, mu_qk and mu_ov (the scale along the
        task direction), cosine_qk and cosine_ov (with that direction), imbalance_qk and imbalance_ov, and
        STEP_COMPARISONS, each with _qk and _ov.
    """
    table = reproduction.store(run).table()
    qk = table[table["circuit"] == "QK"].set_index("step")
    ov = table[table["circuit"] == "OV"].set_index("step")
    columns = {
        "time": qk["training_time"],
        "loss": qk["training_loss"],
        "attention": qk["training_attention"],
        "mu_qk": qk["reference_scale"],
        "mu_ov": ov["reference_scale"],
        "cosine_qk": qk["reference_cosine"],
        "cosine_ov": ov["reference_cosine"],
    }
    for circuit, rows in (("qk", qk), ("ov", ov)):
        columns[f"imbalance_{circuit}"] = rows["imbalance"]
        for comparison in STEP_COMPARISONS:
            columns[f"{comparison}_{circuit}"] = qk[f"training_{comparison}_{circuit}"]
    return pd.DataFrame(columns).rename_axis("step").reset_index()


def positive_scales(series: pd.DataFrame) -> pd.DataFrame:
    """Return the checkpoints at which both scales are positive, so that all four parameterizations are possible.

    A collapsed circuit starts at exactly zero, where a factorized one never is, so that the start alone would decide.
    """
    return series[(series["mu_qk"] > 0) & (series["mu_ov"] > 0)]
