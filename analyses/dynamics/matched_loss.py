"""Scales and attention at a given loss, and the time to reach it, without integrating the equations."""

import math
from collections.abc import Callable
from typing import NamedTuple, cast, overload

import numpy as np
from jaxtyping import Float
from scipy.integrate import quad
from scipy.optimize import brentq

from ...circuits.errors import CallError, QkovError
from .equations import LONGEST_LOG_TIME, rates
from .first_integrals import attention_change, output_change
from .setting import Numbers, Parameterization, Scalar, Setting, Start, check_loss, check_ratio

# The bracket is exact on paper. Widening it slightly keeps rounding from putting the root outside it.
_WIDENED = 1 + 1e-9
# e^mu_QK, and e^step, must stay well inside the range of a double.
_LARGEST_SCALE = 700.0
# Below this size doubles lose relative precision, so the bracket needs more room than _WIDENED gives.
_FEWER_DIGITS = 1e-300
# brentq halves the tolerance, so half of this must not round to zero.
_SMALLEST_TOLERANCE = 2e-323
_TIME_TOLERANCE = 1e-11


class AtLoss(NamedTuple):
    """The state of gradient flow at a loss.

    Attributes:
        mu_qk: scale of W_QK = mu_qk C_QK.
        mu_ov: scale of W_OV = mu_ov C_OV.
        attention: attention alpha on the relevant tokens.
    """

    mu_qk: float
    mu_ov: float
    attention: float


class AtLosses(NamedTuple):
    """The state of gradient flow at each of an array of losses.

    Attributes:
        mu_qk: scale of W_QK = mu_qk C_QK, in the shape of the losses.
        mu_ov: scale of W_OV = mu_ov C_OV, in the shape of the losses.
        attention: attention alpha on the relevant tokens, in the shape of the losses.
    """

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

    The loss L fixes alpha mu_OV = ln((M-1)/(e^L - 1)). Substituting mu_OV = ln((M-1)/(e^L - 1)) / alpha(mu_QK) into the
    first integral gives one equation in mu_QK. Its left side grows with mu_QK and its right side falls, so it has
    exactly one root. The root lies between the start and the mu_QK that the right side would lead to if attention had
    stayed at its value at the start.

    Args:
        setting: the data.
        parameterization: which circuits are factorized.
        r: ratio eta_QK / eta_OV of the learning rates.
        loss: cross-entropy in nats, as a number or an array of any shape.
        start: the scales at time 0; None stands for `Start.default`.

    Returns:
        `AtLoss` for a number, `AtLosses` with arrays of the shape of `loss` for an array.

    Raises:
        CallError: a loss is not between 0 and the loss at the start, r is not positive and finite, or a factorized
            circuit starts at its saddle.
        QkovError: the root cannot be found in double precision, because an exponential would overflow.

    Source: derived for this project; see docs/theory, first integrals at equal loss.
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
        farthest = _farthest_step(setting, parameterization, start.mu_qk, most)
        return start.mu_qk + _step_to_root(residual, farthest, start.mu_qk, f"{parameterization.value} at r = {r:g}")

    # Rounding may put the margin of a loss next to the start's loss below the margin at the start.
    margins = np.maximum(setting.margin(losses), first_attention * start.mu_ov)
    with np.errstate(over="ignore"):
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
    """Return the mu_QK that the first integral gives at each mu_OV: the exact path, without time.

    Args:
        setting: the data.
        parameterization: which circuits are factorized.
        r: ratio eta_QK / eta_OV of the learning rates.
        mu_ov: scale of W_OV, as a number or an array of any shape.
        start: the scales at time 0; None stands for `Start.default`.

    Returns:
        mu_QK, in the shape of `mu_ov`.

    Raises:
        CallError: a mu_ov is not finite or is below the start's, r is not positive and finite, or a factorized circuit
            starts at its saddle.
        QkovError: the root cannot be found in double precision, because an exponential would overflow.

    Source: derived for this project; see docs/theory, first integrals.
    """
    r, start = check_ratio(r), Start.checked(start, parameterization)
    scales = np.asarray(mu_ov, dtype=float)
    outside = scales[~((scales >= start.mu_ov) & np.isfinite(scales))]
    if outside.size:
        raise CallError(f"mu_ov only grows from its start, {start.mu_ov:g}; got {outside[0]:.6g}.")

    def mu_qk_at(change: float) -> float:
        def residual(step: float) -> float:
            return attention_change(setting, parameterization, start.mu_qk, step) - change

        farthest = _farthest_step(setting, parameterization, start.mu_qk, change)
        return start.mu_qk + _step_to_root(residual, farthest, start.mu_qk, f"{parameterization.value} at r = {r:g}")

    with np.errstate(over="ignore"):
        right = r * output_change(setting, parameterization, start.mu_ov, scales)
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

        t = integral of dmu_OV / (dmu_OV/dt), with mu_QK on the first integral

    The integration variable is s, with mu_OV = start + c (e^s - 1). It is even in ln mu_OV near a factorized output's
    saddle, where the rate vanishes, and fine enough near a collapsed output's start for attention to move there.

    Args:
        setting: the data.
        parameterization: which circuits are factorized.
        r: ratio eta_QK / eta_OV of the learning rates.
        loss: cross-entropy in nats.
        start: the scales at time 0; None stands for `Start.default`.

    Raises:
        CallError: as for `at_loss`.
        QkovError: as for `at_loss`; or the quadrature did not converge, or the time exceeds e^690.

    Source: derived for this project; see docs/theory, first integrals at equal loss.
    """
    r, start = check_ratio(r), Start.checked(start, parameterization)
    reached = at_loss(setting, parameterization, r, float(loss), start).mu_ov - start.mu_ov
    if reached <= 0:
        # The loss equals the start's loss up to rounding.
        return 0.0
    unit = start.mu_ov if parameterization.factorized_output else 1e-3 * reached

    def per_s(s: float) -> float:
        mu_ov = start.mu_ov + unit * math.expm1(s)
        mu_qk = mu_qk_along(setting, parameterization, r, mu_ov, start)
        rate = rates(setting, parameterization, r, mu_qk, mu_ov)[1]
        return unit * math.exp(s) / rate if rate > 0 else math.inf

    time, error = quad(
        per_s, 0.0, math.log1p(reached / unit), epsabs=0.0, epsrel=_TIME_TOLERANCE, limit=500, full_output=1
    )[:2]
    if not time < math.exp(LONGEST_LOG_TIME):
        raise QkovError(
            f"time_to_loss: {parameterization.value} at r = {r:g} needs longer than e^{LONGEST_LOG_TIME:g} to reach "
            f"loss {loss:g}, which a double cannot hold; choose a larger loss."
        )
    if not error <= 100 * _TIME_TOLERANCE * time:
        raise QkovError(
            f"time_to_loss: {parameterization.value} at r = {r:g}, loss = {loss:g}: the quadrature only reached a "
            f"relative error of {error / time:.1e}. Integrate the equations instead (`integrate`)."
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


def _step_to_root(residual: Callable[[float], float], farthest: float, mu_qk: Scalar, problem: str) -> float:
    """Return the step of mu_QK in [0, farthest] at which a residual that increases from a value <= 0 is zero."""
    if farthest <= 0 or mu_qk + farthest == mu_qk or residual(0.0) == 0:
        return 0.0
    lower, upper = 0.0, min(farthest * _WIDENED, _LARGEST_SCALE, _LARGEST_SCALE - mu_qk)
    while upper < _FEWER_DIGITS and residual(upper) < 0:
        upper *= 2
    # Where mu_OV^2 overflows the residual is -inf. Halving only needs its sign; brentq needs finite values.
    while residual(lower) == -math.inf and lower < (middle := (lower + upper) / 2) < upper:
        lower, upper = (middle, upper) if residual(middle) < 0 else (lower, middle)
    if not -math.inf < residual(lower) <= 0 <= residual(upper) < math.inf:
        raise QkovError(
            f"{problem}: the first integral cannot be solved in double precision from mu_qk = {mu_qk:g}, because an "
            "exponential overflows before the root is reached; use a smaller r or a start nearer to 0."
        )
    return cast("float", brentq(residual, lower, upper, xtol=_SMALLEST_TOLERANCE, maxiter=2000))
