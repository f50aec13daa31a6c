"""The theory of the paper, exactly: equations, first integrals, populations, the single-layer model, training."""

from .equations import Trajectory, integrate, rates
from .first_integrals import RatioFit, RatioFits, first_integral_residual, fit_ratio
from .growth_laws import GrowthFit, GrowthFits, fit_growth
from .matched_loss import AtLoss, AtLosses, at_loss, time_to_loss
from .model import SingleLayerAttention, relevant_attention
from .populations import directions, exact_population
from .sequences import Sequences
from .setting import Parameterization, Setting, Start
from .starts import aligned_start
from .step_sizes import ConstantRate, RelativeStep
from .training import State, train

__all__ = [
    "AtLoss",
    "AtLosses",
    "ConstantRate",
    "GrowthFit",
    "GrowthFits",
    "Parameterization",
    "RatioFit",
    "RatioFits",
    "RelativeStep",
    "Sequences",
    "Setting",
    "SingleLayerAttention",
    "Start",
    "State",
    "Trajectory",
    "aligned_start",
    "at_loss",
    "directions",
    "exact_population",
    "first_integral_residual",
    "fit_growth",
    "fit_ratio",
    "integrate",
    "rates",
    "relevant_attention",
    "time_to_loss",
    "train",
]
