"""The first integrals: the relation between mu_QK and mu_OV that holds at every time, and its fit to a series."""

import math
from typing import NamedTuple, cast

import numpy as np
from jaxtyping import Float
from numpy.polynomial.legendre import leggauss
from scipy.special import expi

from ...circuits.errors import CallError
from .setting import Numbers, Parameterization, Scalar, Setting, check_ratio

_NODES, _WEIGHTS = leggauss(20)


def g(setting: Setting, mu_qk: Numbers) -> Numbers:
    """Return g(q) = q + (m/n)(e^q - 1), so that dg/dq = 1/(1 - alpha). It belongs to collapsed attention."""
    return cast("Numbers", mu_qk + setting.m / setting.n * np.expm1(mu_qk))


def h(setting: Setting, mu_qk: Numbers) -> Numbers:
    """Return h(q) = ln q + (m/n) Ei(q), q > 0, so that dh/dq = 1/(q (1 - alpha)), for factorized attention."""
    return cast("Numbers", np.log(mu_qk) + setting.m / setting.n * expi(mu_qk))


def attention_change(setting: Setting, parameterization: Parameterization, start: Scalar, step: Numbers) -> Numbers:
    """Return the change of the first integral's left side while mu_QK moves from `start` to start + step.

    The change is Delta g(mu_QK) for collapsed attention and Delta h(mu_QK) / (2 sigma_Q) for factorized attention,
    where both scales must be positive. It is accurate relative to the change itself, which may be far smaller than g
    or h.

    Source: derived for this project; see docs/theory, first integrals.
    """
    ratio = setting.m / setting.n
    if parameterization.factorized_attention:
        change = (np.log1p(step / start) + ratio * _expi_change(start, step)) / (2 * setting.sigma_qk)
    else:
        change = step + ratio * math.exp(start) * np.expm1(step)
    return cast("Numbers", change)


def attention_slope(setting: Setting, parameterization: Parameterization, mu_qk: Numbers) -> Numbers:
    """Return the left side's derivative: 1/(1 - alpha), divided by 2 sigma_Q mu_QK for factorized attention."""
    collapsed = 1 / setting.background_attention(mu_qk)
    if parameterization.factorized_attention:
        return collapsed / (2 * setting.sigma_qk * mu_qk)
    return collapsed


def output_change(setting: Setting, parameterization: Parameterization, start: Scalar, mu_ov: Numbers) -> Numbers:
    """Return the change of the first integral's right side, at r = 1, while mu_OV moves from `start` to mu_ov.

    The change is K Delta(mu_OV^2) / 2 for a collapsed output and K Delta(mu_OV) / (2 sigma_O) for a factorized one.
    """
    step = mu_ov - start
    if parameterization.factorized_output:
        return setting.K * step / (2 * setting.sigma_ov)
    return setting.K * step * (mu_ov + start) / 2


def first_integral_residual(
    setting: Setting,
    parameterization: Parameterization,
    r: Scalar,
    mu_qk: Float[np.ndarray, " time"],
    mu_ov: Float[np.ndarray, " time"],
) -> Float[np.ndarray, " time"]:
    """Return how far a measured series is from a first integral, at each time, in units of the change of mu_QK.

        (Delta left - r Delta right) / (d left / d mu_QK) / rms(Delta mu_QK)

    Delta is the change since the first sample. The first integral Delta left = r Delta right is

        CACO  Delta g(mu_QK)               = r K Delta(mu_OV^2) / 2
        CAFO  Delta g(mu_QK)               = r K Delta(mu_OV) / (2 sigma_O)
        FACO  Delta h(mu_QK) / (2 sigma_Q) = r K Delta(mu_OV^2) / 2
        FAFO  Delta h(mu_QK) / (2 sigma_Q) = r K Delta(mu_OV) / (2 sigma_O)

    with g(q) = q + (m/n)(e^q - 1) and h(q) = ln q + (m/n) Ei(q). To first order, (Delta left - r Delta right) divided
    by the derivative is the misfit in mu_QK itself, so residuals of different parameterizations can be compared
    although their first integrals have different scales. 0 is an exact fit; an rms near 1 explains nothing.

    Args:
        setting: the data.
        parameterization: which circuits are assumed to be factorized.
        r: ratio eta_QK / eta_OV of the learning rates.
        mu_qk: scale of W_QK at each time.
        mu_ov: scale of W_OV at each time.

    Returns:
        The residual at each time; nan throughout if a factorized circuit would need a scale <= 0.

    Raises:
        CallError: there are fewer than three samples, the lengths differ, a value is not finite, mu_qk or mu_ov is
            constant, or r is not positive and finite.

    Source: derived for this project; see docs/theory, first integrals.
    """
    r = check_ratio(r)
    left, right = _sides(setting, parameterization, mu_qk, mu_ov)
    return left - r * right


class RatioFit(NamedTuple):
    """The fit of one parameterization to a series.

    Attributes:
        r: least-squares eta_QK / eta_OV; nan if the parameterization does not apply.
        residual: rms of `first_integral_residual` at that r; nan if the parameterization does not apply.
    """

    r: float
    residual: float


class RatioFits(NamedTuple):
    """The fits of all four parameterizations to a series.

    Attributes:
        fits: the fit of each parameterization.
        best: the parameterization with the smallest residual.
    """

    fits: dict[Parameterization, RatioFit]
    best: Parameterization


def fit_ratio(mu_ov: Float[np.ndarray, " time"], mu_qk: Float[np.ndarray, " time"], setting: Setting) -> RatioFits:
    """Estimate r from a measured series under each parameterization, and name the parameterization that fits best.

    Every first integral is linear in r, Delta left = r Delta right, so r is the slope of a least-squares line through
    the origin. Samples are weighted by d mu_QK / d left, as in `first_integral_residual`, whose rms is the residual. A
    parameterization whose factorized circuit would need a scale <= 0 gets nan.

    Args:
        mu_ov: scale of W_OV at each time.
        mu_qk: scale of W_QK at each time.
        setting: the data.

    Returns:
        The fit of each parameterization, and the parameterization with the smallest residual.

    Raises:
        CallError: there are fewer than three samples, the lengths differ, a value is not finite, or mu_qk or mu_ov is
            constant.

    Source: derived for this project; see docs/theory, first integrals.
    """
    fits = {}
    for parameterization in Parameterization:
        left, right = _sides(setting, parameterization, mu_qk, mu_ov)
        r = left @ right / (right @ right)
        fits[parameterization] = RatioFit(float(r), float(np.sqrt(np.mean((left - r * right) ** 2))))
    # CACO applies to any series, so at least one residual is a number.
    best = min(fits, key=lambda parameterization: np.nan_to_num(fits[parameterization].residual, nan=np.inf))
    return RatioFits(fits, best)


def check_series(mu_qk: np.ndarray, mu_ov: np.ndarray) -> None:
    """Raise CallError unless both scales are finite, change, and are given at the same three or more times."""
    if len(mu_qk) != len(mu_ov) or len(mu_qk) < 3:
        raise CallError(
            f"A series needs mu_qk and mu_ov at the same three or more times, got {len(mu_qk)} and {len(mu_ov)} values."
        )
    for name, series in (("mu_qk", mu_qk), ("mu_ov", mu_ov)):
        if not np.all(np.isfinite(series)):
            raise CallError(f"{name} must be finite at every time, got {series[~np.isfinite(series)][0]}.")
        if np.ptp(series) == 0:
            raise CallError(f"{name} must change over the series, got {series[0]:.6g} throughout.")


def applies(parameterization: Parameterization, mu_qk: np.ndarray, mu_ov: np.ndarray) -> bool:
    """Return whether a series fits a parameterization: a factorized circuit's scale must be positive throughout."""
    return bool(
        (np.all(mu_qk > 0) or not parameterization.factorized_attention)
        and (np.all(mu_ov > 0) or not parameterization.factorized_output)
    )


def _sides(
    setting: Setting, parameterization: Parameterization, mu_qk: np.ndarray, mu_ov: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return both sides of the first integral at r = 1, in units of the change of mu_QK; nan if it does not apply."""
    check_series(mu_qk, mu_ov)
    if not applies(parameterization, mu_qk, mu_ov):
        return np.full(len(mu_qk), np.nan), np.full(len(mu_qk), np.nan)
    unit = attention_slope(setting, parameterization, mu_qk) * np.sqrt(np.mean((mu_qk - mu_qk[0]) ** 2))
    return (
        attention_change(setting, parameterization, mu_qk[0], mu_qk - mu_qk[0]) / unit,
        output_change(setting, parameterization, mu_ov[0], mu_ov) / unit,
    )


def _expi_change(start: Scalar, step: Numbers) -> Numbers:
    """Return Ei(start + step) - Ei(start) without the cancellation that a short step would cause.

    Ei(q) = euler_gamma + ln q + integral from 0 to q of (e^s - 1)/s ds. This integrand is entire, so 20 Gauss nodes
    give its integral over a step of at most 1 up to rounding.
    """
    short = np.clip(step, -1.0, 1.0)
    nodes = start + np.multiply.outer(short, (1 + _NODES) / 2)
    entire = np.expm1(nodes) / nodes @ _WEIGHTS * short / 2
    change = np.where(abs(step) <= 1, np.log1p(step / start) + entire, expi(start + step) - expi(start))
    return cast("Numbers", change)
