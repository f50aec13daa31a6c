"""The theory of the paper, exactly: equations, first integrals, populations, the single-layer model, training."""

from .equations import Trajectory, integrate, rates
from .first_integrals import RatioFit, RatioFits, first_integral_residual, fit_ratio
from .growth_laws import GrowthFit, GrowthFits, fit_growth
from .matched_loss import AtLoss, AtLosses, at_loss, time_to_loss
from .setting import Parameterization, Setting, Start

__all__ = [
    "AtLoss",
    "AtLosses",
    "GrowthFit",
    "GrowthFits",
    "Parameterization",
    "RatioFit",
    "RatioFits",
    "Setting",
    "Start",
    "Trajectory",
    "at_loss",
    "first_integral_residual",
    "fit_growth",
    "fit_ratio",
    "integrate",
    "rates",
    "time_to_loss",
]
