"""The ratio r of learning rates and the parameterization that the weights of each trained run imply."""

from dataclasses import dataclass

import numpy as np

from ..dynamics.first_integrals import first_integral_residual, fit_ratio
from ..dynamics.setting import Parameterization
from .reproduction import Reproduction, Run
from .trajectories import Trajectories, positive_scales


@dataclass(frozen=True)
class RatioEstimate:
    """How a run was trained, according to its weights.

    Attributes:
        run: the run.
        residual: largest absolute residual of the run's own first integral at its own r.
        r: least-squares r under the run's own parameterization.
        best: the parameterization that fits the run best.
        residuals: rms residual of each parameterization at its own least-squares r.
    """

    run: Run
    residual: float
    r: float
    best: Parameterization
    residuals: dict[Parameterization, float]


def estimate_ratios(reproduction: Reproduction, measured: Trajectories) -> list[RatioEstimate]:
    """Return, for every balanced run, the residual of its first integral and the r that its weights imply.

    Args:
        reproduction: the finished reproduction.
        measured: its trajectories.
    """
    setting = reproduction.plan.setting
    estimates = []
    for run in reproduction.of_kind("balanced"):
        series = measured[run.name]
        mu_qk, mu_ov = series["mu_qk"].to_numpy(), series["mu_ov"].to_numpy()
        residual = first_integral_residual(setting, run.parameterization, run.ratio, mu_qk, mu_ov)
        scales = positive_scales(series)
        fits = fit_ratio(scales["mu_ov"].to_numpy(), scales["mu_qk"].to_numpy(), setting)
        estimates.append(
            RatioEstimate(
                run=run,
                residual=float(np.abs(residual).max()),
                r=fits.fits[run.parameterization].r,
                best=fits.best,
                residuals={chosen: fit.residual for chosen, fit in fits.fits.items()},
            )
        )
    return estimates
