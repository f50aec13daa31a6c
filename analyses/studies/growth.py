"""The growth law that a trained run follows while its attention is still near uniform."""

from dataclasses import dataclass

import pandas as pd

from ..dynamics.growth_laws import GrowthFits, TooFewSamplesError, fit_growth, straight_line_slope
from .reproduction import Reproduction, Run
from .trajectories import Trajectories, positive_scales


@dataclass(frozen=True)
class GrowthComparison:
    """The part of a run before saturation, compared with the four growth laws.

    Attributes:
        run: the run.
        series: the run's checkpoints before saturation.
        fits: the fits of all four laws; None if there are too few checkpoints.
        slope_predicted: the slope that the theory predicts, in the coordinates of the run's own law.
        decided: whether mu_QK grew by more than a tenth. Below that, an exponential and a line look the same.
    """

    run: Run
    series: pd.DataFrame
    fits: GrowthFits | None
    slope_predicted: float
    decided: bool


def compare_growth(
    reproduction: Reproduction, measured: Trajectories, departure: float = 0.1
) -> list[GrowthComparison]:
    """Compare the growth of every balanced run before saturation with the four laws.

    Args:
        reproduction: the finished reproduction.
        measured: its trajectories.
        departure: relative fall of 1 - alpha at which saturation begins.
    """
    setting = reproduction.plan.setting
    comparisons = []
    for run in reproduction.of_kind("balanced"):
        series = positive_scales(measured[run.name])
        mu_qk, mu_ov = series["mu_qk"].to_numpy(), series["mu_ov"].to_numpy()
        try:
            fits = fit_growth(mu_ov, mu_qk, setting, departure)
        except TooFewSamplesError:
            fits = None
        before = series.head(0 if fits is None else fits.samples)
        growth = 0.0 if fits is None else float(before["mu_qk"].max() / before["mu_qk"].iloc[0])
        comparisons.append(
            GrowthComparison(
                run=run,
                series=before,
                fits=fits,
                slope_predicted=straight_line_slope(setting, run.parameterization, run.ratio, run.start),
                decided=growth > 1.1,
            )
        )
    return comparisons
