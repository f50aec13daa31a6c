"""Which growth law a trained run follows while attention is still near uniform."""

from dataclasses import dataclass

import pandas as pd

from ..dynamics.growth_laws import GrowthFits, TooFewSamplesError, fit_growth, straight_line_slope
from .comparison import Trajectories, positive_scales
from .reproduction import Reproduction, Run


@dataclass(frozen=True)
class GrowthReading:
    """A run's part before saturation against the four laws.

    Attributes:
        series: the checkpoints before saturation.
        fits: all four laws; None where there are too few checkpoints.
        slope_predicted: of theory, in the coordinates of the run's own law.
        decided: mu_QK grew by more than a tenth; before that an exponential and a line are the same.
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
        series = positive_scales(measured[run.name])
        mu_qk, mu_ov = series["mu_qk"].to_numpy(), series["mu_ov"].to_numpy()
        try:
            fits = fit_growth(mu_ov, mu_qk, setting, departure)
        except TooFewSamplesError:
            fits = None
        before = series.head(0 if fits is None else fits.samples)
        growth = 0.0 if fits is None else float(before["mu_qk"].max() / before["mu_qk"].iloc[0])
        readings.append(
            GrowthReading(
                run=run,
                series=before,
                fits=fits,
                slope_predicted=straight_line_slope(setting, run.parameterization, run.ratio, run.start),
                decided=growth > 1.1,
            )
        )
    return readings
