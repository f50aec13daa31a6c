"""Scales and attention at a given loss, and the time to it, without integrating the equations."""

import math
from collections.abc import Callable
from typing import NamedTuple, cast, overload

import numpy as np
from jaxtyping import Float
from scipy.integrate import quad
from scipy.optimize import brentq

from ...circuits.errors import CallError, QkovError
from .equations import rates
from .first_integrals import attention_change, output_change
from .setting import Numbers, Parameterization, Scalar, Setting, Start, check_loss, check_ratio

# One step past a bracket that is exact on paper, so that rounding cannot put the root outside it
_WIDENED = 1 + 1e-9
_TIME_TOLERANCE = 1e-11


class AtLoss(NamedTuple):
    """The state of gradient flow at a loss.

    Attributes:
        mu_qk: scale of W_QK = mu_qk C_QK.
        mu_ov: scale of W_OV = mu_ov C_OV.
        attention: alpha, on the relevant tokens.
    """

    mu_qk: float
    mu_ov: float
    attention: float


class AtLosses(NamedTuple):
    """The state of gradient flow at each of an array of losses: the attributes of `AtLoss`, as arrays."""

    mu_qk: Float[np.ndarray, "*losses"]
    mu_ov: Float[np.ndarray, "*losses"]
    attention: Float[np.ndarray, "*losses"]


@overload
def at_loss(
    setting: Setting, parameterization: Parameterization, r: Scalar, loss: Scalar, start: Start | None = None
) -> AtLoss: ...
@overload
def at_loss(
    setting: Setting,
    parameterization: Parameterization,
    r: Scalar,
    loss: Float[np.ndarray, "*losses"],
    start: Start | None = None,
) -> AtLosses: ...
def at_loss(
    setting: Setting,
    parameterization: Parameterization,
    r: Scalar,
    loss: Scalar | Float[np.ndarray, "*losses"],
    start: Start | None = None,
) -> AtLoss | AtLosses:
    """Return mu_QK, mu_OV and the attention at which gradient flow passes a loss.

    The loss fixes alpha mu_OV = ln((M-1)/(e^L - 1)). With mu_OV = that / alpha(mu_QK), the first integral is one
    equation in mu_QK whose left side grows with mu_QK and whose right side falls: one root. It lies between the start
    and the mu_QK that the right side would lead to if attention had stayed at the start's. Derived for this project.

    Raises:
        CallError: a loss outside (0, loss at the start), r not positive, a factorized circuit started at its saddle.
    """
    r, start = check_ratio(r), Start.checked(start, parameterization)
    losses = loss if isinstance(loss, np.ndarray) else np.array([float(loss)])
    check_loss(setting, losses, start)
    first_attention = setting.attention(float(start.mu_qk))

    def mu_qk_at(margin: float) -> float:
        def residual(step: float) -> float:
            mu_ov = margin / setting.attention(start.mu_qk + step)
            right = output_change(setting, parameterization, start.mu_ov, mu_ov)
            return attention_change(setting, parameterization, start.mu_qk, step) - r * right

        most = r * output_change(setting, parameterization, start.mu_ov, margin / first_attention)
        return start.mu_qk + _root(residual, _farthest_step(setting, parameterization, start.mu_qk, most))

    margins = setting.margin(losses)
    mu_qk = np.array([mu_qk_at(margin) for margin in margins.ravel().tolist()]).reshape(margins.shape)
    attention = setting.attention(mu_qk)
    states = AtLosses(mu_qk, margins / attention, attention)
    return states if isinstance(loss, np.ndarray) else AtLoss(*(scales.item() for scales in states))


def mu_qk_along(
    setting: Setting,
    parameterization: Parameterization,
    r: Scalar,
    mu_ov: Numbers,
    start: Start | None = None,
) -> Numbers:
    """Return the mu_QK that the first integral gives at each mu_OV: the exact path, with time left out.

    Raises:
        CallError: a mu_ov that is not finite or below the start's, r not positive, a factorized circuit started at
            its saddle.
    """
    r, start = check_ratio(r), Start.checked(start, parameterization)
    scales = np.asarray(mu_ov, dtype=float)
    outside = scales[~((scales >= start.mu_ov) & np.isfinite(scales))]
    if outside.size:
        raise CallError(f"mu_ov only grows from its start, {start.mu_ov:g}; got {outside[0]:.6g}.")
    right = r * output_change(setting, parameterization, start.mu_ov, scales)

    def mu_qk_at(change: float) -> float:
        def residual(step: float) -> float:
            return attention_change(setting, parameterization, start.mu_qk, step) - change

        return start.mu_qk + _root(residual, _farthest_step(setting, parameterization, start.mu_qk, change))

    mu_qk = np.array([mu_qk_at(change) for change in right.ravel().tolist()]).reshape(right.shape)
    return cast("Numbers", mu_qk if isinstance(mu_ov, np.ndarray) else float(mu_qk))


def time_to_loss(
    setting: Setting,
    parameterization: Parameterization,
    r: Scalar,
    loss: Scalar,
    start: Start | None = None,
) -> float:
    """Return the time at which gradient flow passes a loss, at eta_OV = 1 and eta_QK = r.

        t = integral of dmu_OV / (dmu_OV/dt), with mu_QK on the first integral,

    taken over s with mu_OV = start + c (e^s - 1), which is even in ln mu_OV near a factorized output's saddle, where
    the rate vanishes, and fine enough near a collapsed output's start for attention to move there. Derived for this
    project.

    Raises:
        CallError: as `at_loss`.
        QkovError: the quadrature did not converge.
    """
    r, start = check_ratio(r), Start.checked(start, parameterization)
    reached = at_loss(setting, parameterization, r, float(loss), start).mu_ov - start.mu_ov
    if reached <= 0:
        # the loss is within a rounding of the start's
        return 0.0
    unit = start.mu_ov if parameterization.factorized_output else 1e-3 * reached

    def per_s(s: float) -> float:
        mu_ov = start.mu_ov + unit * math.expm1(s)
        mu_qk = mu_qk_along(setting, parameterization, r, mu_ov, start)
        return unit * math.exp(s) / rates(setting, parameterization, r, mu_qk, mu_ov)[1]

    time, error = quad(
        per_s, 0.0, math.log1p(reached / unit), epsabs=0.0, epsrel=_TIME_TOLERANCE, limit=500, full_output=1
    )[:2]
    if not error <= 100 * _TIME_TOLERANCE * time:
        raise QkovError(
            f"time_to_loss: {parameterization.value} at r = {r:g}, loss = {loss:g}: the quadrature reached a relative "
            f"error of {error / time:.1e} only. Integrate the equations instead (`integrate`)."
        )
    return float(time)


def _farthest_step(setting: Setting, parameterization: Parameterization, mu_qk: Scalar, change: float) -> float:
    """Return a step of mu_QK over which the left side of the first integral changes by at least `change`.

    Delta g >= s and Delta g >= (m/n) e^q (e^s - 1) for collapsed attention. For factorized attention, Delta h >=
    (1 + m/n) ln(1 + s/q) since e^q >= 1, and Delta h >= (m/n) e (e^{(q+s)/2} - e^{q/2}) since e^q / q >= e^{q/2} e/2.
    """
    ratio = setting.m / setting.n
    if not parameterization.factorized_attention:
        return min(change, math.log1p(change / (ratio * math.exp(mu_qk))))
    change = 2 * setting.sigma_qk * change
    return min(
        mu_qk * math.expm1(min(change / (1 + ratio), 700.0)),
        2 * math.log1p(change / (ratio * math.exp(1 + mu_qk / 2))),
    )


def _root(residual: Callable[[float], float], farthest: float) -> float:
    """Return the root in [0, farthest] of a residual that increases from a value <= 0."""
    if farthest <= 0 or residual(0.0) == 0:
        return 0.0
    return cast("float", brentq(residual, 0.0, farthest * _WIDENED, xtol=1e-300, maxiter=500))
