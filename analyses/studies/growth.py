"""Which growth law a trained run follows while attention is still near uniform."""

from dataclasses import dataclass

import pandas as pd

from ...circuits.errors import CallError
from ..dynamics.growth_laws import GrowthFits, fit_growth, straight_line_slope
from .comparison import Trajectories
from .reproduction import Reproduction, Run


@dataclass(frozen=True)
class GrowthReading:
    """A run's part before saturation against the four laws.

    Attributes:
        series: the checkpoints before saturation.
        fits: all four laws; None where there are too few checkpoints.
        slope_predicted: of theory, in the coordinates of the run's own law.
        decided: mu_QK grew enough for the laws to be told apart: by at least a tenth of what it was where attention is
            factorized, an exponential and a line being the same before that.
    """

    run: Run
    series: pd.DataFrame
    fits: GrowthFits | None
    slope_predicted: float
    decided: bool


def read_growth(reproduction: Reproduction, measured: Trajectories, departure: float = 0.1) -> list[GrowthReading]:
    """Return for every balanced run how its growth before saturation compares with the four laws.

    Args:
        reproduction: finished.
        measured: its trajectories.
        departure: saturation begins where 1 - alpha has fallen by this fraction.
    """
    setting = reproduction.plan.setting
    readings = []
    for run in reproduction.of_kind("balanced"):
        series = measured[run.name]
        mu_qk, mu_ov = series["mu_qk"].to_numpy(), series["mu_ov"].to_numpy()
        try:
            fits = fit_growth(mu_ov, mu_qk, setting, departure)
        except CallError:
            fits = None
        before = series.head(0 if fits is None else fits.samples)
        growth = 0.0 if fits is None else before["mu_qk"].max() / abs(before["mu_qk"].iloc[0] or before["mu_qk"].max())
        readings.append(
            GrowthReading(
                run=run,
                series=before,
                fits=fits,
                slope_predicted=straight_line_slope(setting, run.parameterization, run.ratio, run.start),
                decided=fits is not None and (not run.parameterization.factorized_attention or bool(growth > 1.1)),
            )
        )
    return readings
