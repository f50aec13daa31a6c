"""How mu_QK grows with mu_OV and in time, before and after attention saturates."""

import math
from typing import NamedTuple, cast

import numpy as np
from jaxtyping import Float
from scipy.optimize import brentq
from scipy.special import expi, lambertw, wrightomega

from ...circuits.errors import CallError
from .first_integrals import applies, check_series, output_change
from .setting import Numbers, Parameterization, Scalar, Setting, Start, check_ratio


def straight_line(parameterization: Parameterization, mu_qk: Numbers, mu_ov: Numbers) -> tuple[Numbers, Numbers]:
    """Return the coordinates (x, y) in which growth before saturation is a straight line.

        CACO (mu_OV^2, mu_QK)      CAFO (mu_OV, mu_QK)      FACO (mu_OV^2, ln mu_QK)      FAFO (mu_OV, ln mu_QK)

    Source: CACO is Lemma 3 of "Faster Query-Key Learning Sharpens Attention"; the others were derived for this
        project. See docs/theory, growth before saturation.
    """
    x = mu_ov if parameterization.factorized_output else mu_ov**2
    return x, cast("Numbers", np.log(mu_qk)) if parameterization.factorized_attention else mu_qk


def straight_line_slope(
    setting: Setting, parameterization: Parameterization, r: Scalar, start: Start | None = None
) -> float:
    """Return the slope dy/dx of a law in the coordinates of `straight_line`, with alpha frozen at its start alpha_0.

        CACO  r K (1 - alpha_0) / 2                CAFO  r K (1 - alpha_0) / (2 sigma_O)
        FACO  r K (1 - alpha_0) sigma_Q            FAFO  r K (1 - alpha_0) sigma_Q / sigma_O

    At the default starts alpha_0 is m/(m+n), exactly for collapsed attention and to 0.01 for factorized attention.

    Args:
        setting: the data.
        parameterization: which circuits are factorized.
        r: ratio eta_QK / eta_OV of the learning rates.
        start: the scales at time 0; None stands for `Start.default`.

    Raises:
        CallError: r is not positive and finite, or a factorized circuit starts at its saddle.

    Source: dmu_QK/dmu_OV with alpha = alpha_0. CACO is Lemma 3 of "Faster Query-Key Learning Sharpens Attention"; the
        others were derived for this project. See docs/theory, growth before saturation.
    """
    start = Start.checked(start, parameterization)
    return check_ratio(r) * _slope_per_r(setting, parameterization, float(start.mu_qk))


def _slope_per_r(setting: Setting, parameterization: Parameterization, mu_qk: float) -> float:
    """Return the law's slope at r = 1, with alpha frozen at its value for mu_QK."""
    slope = setting.K * setting.background_attention(mu_qk) / 2
    if parameterization.factorized_output:
        slope /= setting.sigma_ov
    if parameterization.factorized_attention:
        slope *= 2 * setting.sigma_qk
    return float(slope)


def mu_qk_before_saturation(
    setting: Setting, parameterization: Parameterization, r: Scalar, mu_ov: Numbers, start: Start | None = None
) -> Numbers:
    """Return the mu_QK that the law before saturation gives at each mu_OV.

        CACO, CAFO  mu_QK(0) + c Delta x        FACO, FAFO  mu_QK(0) exp(c Delta x)

    c is `straight_line_slope` and x is the coordinate of `straight_line`. To first order in the change of mu_QK this
    is the first integral, so its relative error vanishes with r.

    Args:
        setting: the data.
        parameterization: which circuits are factorized.
        r: ratio eta_QK / eta_OV of the learning rates.
        mu_ov: scale of W_OV.
        start: the scales at time 0; None stands for `Start.default`.

    Raises:
        CallError: as for `straight_line_slope`.
    """
    start = Start.checked(start, parameterization)
    slope = straight_line_slope(setting, parameterization, r, start)
    x = mu_ov - start.mu_ov if parameterization.factorized_output else mu_ov**2 - start.mu_ov**2
    if parameterization.factorized_attention:
        return cast("Numbers", start.mu_qk * np.exp(slope * x))
    return start.mu_qk + slope * x


def log_time_coefficient(
    setting: Setting, parameterization: Parameterization, r: Scalar, start: Start | None = None
) -> float:
    """Return the constant c of the law in time.

        CACO  mu_QK ~ c ln^2 t          CAFO  mu_QK ~ c ln t
        FACO  ln mu_QK ~ c ln^2 t       FAFO  ln mu_QK ~ c ln t, a power of t

    c is `straight_line_slope` divided by alpha_0^2 for a collapsed output and by alpha_0 for a factorized one. The laws
    hold while mu_OV ~ (1/alpha_0) ln t: at times long enough for that, and before saturation.

    Args:
        setting: the data.
        parameterization: which circuits are factorized.
        r: ratio eta_QK / eta_OV of the learning rates.
        start: the scales at time 0; None stands for `Start.default`.

    Raises:
        CallError: as for `straight_line_slope`.

    Source: CACO is Lemma 3 of "Faster Query-Key Learning Sharpens Attention"; the others were derived for this
        project. See docs/theory, growth before saturation.
    """
    start = Start.checked(start, parameterization)
    attention = float(setting.attention(float(start.mu_qk)))
    slope = straight_line_slope(setting, parameterization, r, start)
    return slope / (attention if parameterization.factorized_output else attention**2)


def mu_ov_at_fixed_attention(
    setting: Setting,
    parameterization: Parameterization,
    time: Numbers,
    attention: Scalar,
    start: Start | None = None,
) -> Numbers:
    """Return mu_OV at each time while the attention stays fixed: at alpha_0 before saturation, at 1 after it.

        e^x + (M-1) x = e^x_0 + (M-1) x_0 + alpha^2 t / b                                collapsed output
        Ei(x) + (M-1) ln x = Ei(x_0) + (M-1) ln x_0 + 2 sigma_O alpha t / b              factorized output

    Here x = alpha mu_OV, and both equations are exact. So x ~ ln t in both, plus ln ln t for a factorized output.

    Args:
        setting: the data.
        parameterization: which circuits are factorized.
        time: t with eta_OV = 1, as a number or an array of any shape.
        attention: the fixed attention alpha.
        start: the scales at time 0; None stands for `Start.default`.

    Raises:
        CallError: attention is not in (0, 1], a time is negative, or a factorized circuit starts at its saddle.

    Source: derived for this project; see docs/theory, growth before saturation.
    """
    start = Start.checked(start, parameterization)
    if not 0 < attention <= 1:
        raise CallError(f"attention must be in (0, 1], got {attention!r}.")
    times = np.asarray(time, dtype=float)
    if not np.all(times >= 0):
        raise CallError(f"time must be >= 0, got {times.min():g}.")
    first, others = attention * start.mu_ov, setting.M - 1
    if parameterization.factorized_output:
        elapsed = 2 * setting.sigma_ov * attention / setting.b * times
        margins = [_margin_of_factorized_output(first, others, clock) for clock in elapsed.ravel().tolist()]
        margin = np.array(margins).reshape(times.shape)
    else:
        # With u = e^x / (M-1) the equation becomes ln u + u = z, which the Wright omega function solves.
        total = (math.exp(first) + others * first + attention**2 / setting.b * times) / others
        margin = math.log(others) + np.log(wrightomega(total - math.log(others)))
    mu_ov = margin / attention
    return cast("Numbers", mu_ov if isinstance(time, np.ndarray) else float(mu_ov))


def _margin_of_factorized_output(first: float, others: int, elapsed: float) -> float:
    """Return the x at which Ei(x) + others ln x has grown by `elapsed` since x = first."""

    def missing(x: float) -> float:
        return expi(first) - expi(x) - others * math.log(x / first) + elapsed

    lower, upper = first, 2 * first
    while missing(upper) >= 0:
        lower, upper = upper, 2 * upper
    return cast("float", brentq(missing, lower, upper, xtol=math.ulp(first)))


def mu_qk_after_saturation(setting: Setting, parameterization: Parameterization, r: Scalar, mu_ov: Numbers) -> Numbers:
    """Return mu_QK at a mu_OV long after saturation, from the leading terms of the first integral.

        (m/n) e^mu_QK = E                              collapsed attention
        (m/n) e^mu_QK / mu_QK = 2 sigma_Q E            factorized attention, the larger root

    Here E = r K mu_OV^2 / 2 for a collapsed output and r K mu_OV / (2 sigma_O) for a factorized one. With
    mu_OV ~ ln t, mu_QK ~ 2 ln ln t after a collapsed output and ln ln t after a factorized one, for both kinds of
    attention. The neglected terms are of order mu_QK e^-mu_QK for collapsed attention but 1/mu_QK for factorized
    attention, which approaches its limit slowly.

    Args:
        setting: the data.
        parameterization: which circuits are factorized.
        r: ratio eta_QK / eta_OV of the learning rates.
        mu_ov: scale of W_OV, positive.

    Returns:
        mu_QK; nan where the equation has no root yet.

    Raises:
        CallError: r is not positive and finite.

    Source: derived for this project; see docs/theory, growth before saturation.
    """
    ratio = setting.m / setting.n
    drive = check_ratio(r) * output_change(setting, parameterization, 0.0, mu_ov)
    if not parameterization.factorized_attention:
        return cast("Numbers", np.log(drive / ratio))
    inverse = ratio / (2 * setting.sigma_qk * drive)
    root = np.where(inverse < math.exp(-1), -lambertw(-np.minimum(inverse, math.exp(-1)), -1).real, np.nan)
    return cast("Numbers", root)


def background_attention_after_saturation(
    setting: Setting, parameterization: Parameterization, r: Scalar, mu_ov: Numbers
) -> Numbers:
    """Return the background attention 1 - alpha ~ (n/m) e^{-mu_QK} at a mu_OV long after saturation.

        CACO  2 / (r K mu_OV^2)                            CAFO  2 sigma_O / (r K mu_OV)
        FACO  1 / (sigma_Q r K mu_OV^2 mu_QK)              FAFO  sigma_O / (sigma_Q r K mu_OV mu_QK)

    mu_QK comes from `mu_qk_after_saturation`.

    Args:
        setting: the data.
        parameterization: which circuits are factorized.
        r: ratio eta_QK / eta_OV of the learning rates.
        mu_ov: scale of W_OV, positive.

    Returns:
        1 - alpha; nan where `mu_qk_after_saturation` is nan.

    Raises:
        CallError: r is not positive and finite.

    Source: derived for this project; see docs/theory, growth before saturation.
    """
    mu_qk = mu_qk_after_saturation(setting, parameterization, r, mu_ov)
    return cast("Numbers", setting.n / setting.m * np.exp(-mu_qk))


class GrowthFit(NamedTuple):
    """A straight line through a series in one law's coordinates; every attribute is nan if the law does not apply.

    Attributes:
        slope: slope of the line.
        intercept: intercept of the line.
        r_squared: share of the variance of the law's own y (mu_QK or ln mu_QK) that the line explains.
        residual: rms misfit of mu_QK itself divided by the rms of its change, so that laws can be compared.
        r: eta_QK / eta_OV that the theory derives from the slope.
    """

    slope: float
    intercept: float
    r_squared: float
    residual: float
    r: float


class GrowthFits(NamedTuple):
    """The fits of all four laws to one series.

    Attributes:
        fits: the fit of each parameterization's law.
        best: the parameterization whose law has the smallest residual.
        samples: number of samples, counted from the first, that precede saturation and were used.
    """

    fits: dict[Parameterization, GrowthFit]
    best: Parameterization
    samples: int


class TooFewSamplesError(CallError):
    """A series with too few samples before saturation to fit a line."""


def fit_growth(
    mu_ov: Float[np.ndarray, " time"],
    mu_qk: Float[np.ndarray, " time"],
    setting: Setting,
    departure: Scalar = 0.1,
) -> GrowthFits:
    """Fit each growth law to the part of a measured series that precedes saturation.

        CACO  mu_QK = a + c mu_OV^2             CAFO  mu_QK = a + c mu_OV
        FACO  ln mu_QK = a + c mu_OV^2          FAFO  ln mu_QK = a + c mu_OV

    That part ends when 1 - alpha, which the laws assume to be constant, has fallen by the fraction `departure`. The
    lines are least-squares fits in the law's coordinates. As long as ln mu_QK has changed by much less than 1, this
    fit cannot distinguish an exponential from a line; `fit_ratio` still can.

    Args:
        mu_ov: scale of W_OV at each time.
        mu_qk: scale of W_QK at each time.
        setting: the data.
        departure: relative fall of 1 - alpha that ends the fitted part.

    Returns:
        The line of each law, the law that fits best, and the number of samples used.

    Raises:
        TooFewSamplesError: there are fewer than three samples before saturation.
        CallError: the lengths differ, a value is not finite, mu_qk or mu_ov is constant, or departure is not in (0, 1).

    Source: CACO is Lemma 3 of "Faster Query-Key Learning Sharpens Attention"; the others were derived for this
        project. See docs/theory, growth before saturation.
    """
    if not 0 < departure < 1:
        raise CallError(f"departure, the fall of 1 - alpha that ends the fit, must be in (0, 1), got {departure!r}.")
    check_series(mu_qk, mu_ov)
    background = setting.background_attention(mu_qk)
    samples = int(np.argmax(np.append(background < (1 - departure) * background[0], True)))
    if samples < 3:
        raise TooFewSamplesError(
            f"fit_growth needs at least three samples before saturation, got {samples}; log more often at the start, "
            f"or raise departure (now {departure:g})."
        )
    mu_ov, mu_qk = mu_ov[:samples], mu_qk[:samples]
    check_series(mu_qk, mu_ov)
    fits = {
        parameterization: _fit_line(setting, parameterization, mu_qk, mu_ov) for parameterization in Parameterization
    }
    # CACO applies to any series, so at least one residual is a number.
    best = min(fits, key=lambda parameterization: np.nan_to_num(fits[parameterization].residual, nan=np.inf))
    return GrowthFits(fits, best, samples)


def _fit_line(setting: Setting, parameterization: Parameterization, mu_qk: np.ndarray, mu_ov: np.ndarray) -> GrowthFit:
    """Return the least-squares line in the coordinates of one law."""
    if not applies(parameterization, mu_qk, mu_ov):
        return GrowthFit(math.nan, math.nan, math.nan, math.nan, math.nan)
    x, y = straight_line(parameterization, mu_qk, mu_ov)
    off_x, off_y = x - x.mean(), y - y.mean()
    slope = float(off_x @ off_y / (off_x @ off_x))
    line = y.mean() + slope * off_x
    predicted = np.exp(line) if parameterization.factorized_attention else line
    return GrowthFit(
        slope,
        float(y.mean() - slope * x.mean()),
        float(1 - np.sum((y - line) ** 2) / np.sum(off_y**2)),
        float(np.sqrt(np.mean((predicted - mu_qk) ** 2) / np.mean((mu_qk - mu_qk[0]) ** 2))),
        slope / _slope_per_r(setting, parameterization, float(mu_qk[0])),
    )
