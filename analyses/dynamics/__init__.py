"""The paper's theory of how attention is learned: equations, first integrals, exact populations and training.

A single attention layer is trained by gradient flow. Its two circuits keep to fixed directions, W_QK = mu_QK C_QK and
W_OV = mu_OV C_OV, so that two scalar equations describe training. Each circuit is either collapsed (one matrix) or
factorized (two); CACO, CAFO, FACO and FAFO name attention first and output second. r = eta_QK / eta_OV is the ratio of
the learning rates. Time is in units of 1 / eta_OV and the loss is in nats.

    from qkov.analyses.dynamics import Parameterization, Setting, at_loss, fit_ratio, integrate

    setting = Setting(M=20, b=50, m=5, n=50, query="token")
    at_loss(setting, Parameterization.CACO, r=0.01, loss=1e-4)  # mu_QK, mu_OV and the attention alpha
    flow = integrate(setting, Parameterization.FAFO, 1.0, until_loss=1e-4)
    fit_ratio(flow.mu_ov, flow.mu_qk, setting).best  # the parameterization that explains the series best

The names in groups:

    What is trained             Setting, Parameterization, Start
    The equations               rates, integrate, Trajectory
    State and time at a loss    at_loss, AtLoss, AtLosses, time_to_loss
    Laws in a measured series   first_integral_residual, fit_ratio, RatioFit, RatioFits, fit_growth, GrowthFit,
                                GrowthFits
    Exact populations           exact_population, directions, Sequences
    Training                    SingleLayerAttention, relevant_attention, aligned_start, train, State, RelativeStep,
                                ConstantRate

Source: "Faster Query-Key Learning Sharpens Attention in Self-Attention Models" (arXiv 2608.06776).
"""

from typing import TYPE_CHECKING

from ...circuits.public_names import lazy_face

if TYPE_CHECKING:
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

__getattr__, __dir__ = lazy_face(__name__)
