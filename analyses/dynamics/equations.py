"""The reduced equations of gradient flow for mu_QK and mu_OV, and their integration."""

import math
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float
from scipy.integrate import OdeSolution, solve_ivp

from ...circuits.errors import CallError, QkovError
from .setting import Parameterization, Scalar, Setting, Start, check_loss, check_ratio

#: Longer times would overflow a double. A loss that takes longer is below about 1e-290.
LONGEST_LOG_TIME = 690.0


def preconditioner(
    setting: Setting, parameterization: Parameterization, mu_qk: Scalar, mu_ov: Scalar
) -> tuple[float, float]:
    """Return the factors, for QK and for OV, by which factorization multiplies a circuit's own equation.

    The factor is 1 for a collapsed circuit and 2 sigma mu for a factorized one: Omega(mu C) acts on C as the scalar
    2 sigma mu when all the singular values of C equal sigma.

    Args:
        setting: the data, which fixes sigma_QK and sigma_OV.
        parameterization: which circuits are factorized.
        mu_qk: scale of W_QK = mu_qk C_QK.
        mu_ov: scale of W_OV = mu_ov C_OV.

    Returns:
        (factor for QK, factor for OV).

    Source: derived for this project; see docs/theory, the preconditioner.
    """
    return (
        2 * setting.sigma_qk * mu_qk if parameterization.factorized_attention else 1.0,
        2 * setting.sigma_ov * mu_ov if parameterization.factorized_output else 1.0,
    )


def rates(
    setting: Setting, parameterization: Parameterization, r: Scalar, mu_qk: Scalar, mu_ov: Scalar
) -> tuple[float, float]:
    """Return the right-hand sides (dmu_QK/dt, dmu_OV/dt) of gradient flow at eta_OV = 1 and eta_QK = r.

        dmu_OV/dt = f_OV alpha / (b D)        dmu_QK/dt = f_QK r K alpha (1 - alpha) mu_OV / (b D)

    Here alpha = m e^mu_QK / (m e^mu_QK + n) is the attention on the relevant tokens, D = e^{alpha mu_OV} + M - 1,
    K = (M-1)/(M b) for a token query and (M-1)/M for a class query, and f_QK and f_OV are 1 for a collapsed circuit
    and 2 sigma mu for a factorized one.

    Args:
        setting: the data.
        parameterization: which circuits are factorized.
        r: ratio eta_QK / eta_OV of the learning rates.
        mu_qk: scale of W_QK = mu_qk C_QK.
        mu_ov: scale of W_OV = mu_ov C_OV.

    Returns:
        (dmu_QK/dt, dmu_OV/dt).

    Source: Theorem 1 of "Faster Query-Key Learning Sharpens Attention" for CACO with a token query. The class query
    and the factorized circuits were derived for this project; see docs/theory, collapsed and factorized dynamics.
    """
    attention = setting.attention(float(mu_qk))
    # This form of 1/D vanishes instead of overflowing at a large margin.
    shrinking = math.exp(-attention * mu_ov)
    common = attention * shrinking / (setting.b * (1 + (setting.M - 1) * shrinking))
    for_qk, for_ov = preconditioner(setting, parameterization, mu_qk, mu_ov)
    return (
        float(for_qk * r * setting.K * setting.background_attention(float(mu_qk)) * mu_ov * common),
        float(for_ov * common),
    )


@dataclass(frozen=True, eq=False)
class Trajectory:
    """Gradient flow from a start, sampled at increasing times. `at` samples it at other times.

    Attributes:
        setting: the data.
        time: t, with eta_OV = 1.
        mu_qk: scale of W_QK = mu_qk C_QK.
        mu_ov: scale of W_OV = mu_ov C_OV.
        solution: (mu_qk, mu_ov) as a function of log-time ln(1 + t).
    """

    setting: Setting
    time: Float[np.ndarray, " time"]
    mu_qk: Float[np.ndarray, " time"]
    mu_ov: Float[np.ndarray, " time"]
    solution: OdeSolution = field(repr=False)

    @property
    def attention(self) -> Float[np.ndarray, " time"]:
        """Attention alpha = m e^mu_QK / (m e^mu_QK + n) on the relevant tokens."""
        return self.setting.attention(self.mu_qk)

    @property
    def loss(self) -> Float[np.ndarray, " time"]:
        """Cross-entropy ln(1 + (M-1) e^{-alpha mu_OV})."""
        return self.setting.loss(self.mu_qk, self.mu_ov)

    def at(self, time: Float[np.ndarray, " sample"]) -> "Trajectory":
        """Return the same flow at other times.

        Raises:
            CallError: a time is negative or later than the last integrated time.
        """
        log_time = np.log1p(time)
        last = self.solution.t_max
        # A time that went through expm1 and back may exceed the end by a rounding error.
        if np.any(log_time < 0) or np.any(log_time > last + 1e-12):
            raise CallError(
                f"Trajectory.at: times must lie in [0, {math.expm1(last):.6g}], "
                f"got {time.min():.6g} to {time.max():.6g}."
            )
        mu_qk, mu_ov = self.solution(np.minimum(log_time, last))
        return Trajectory(self.setting, time, mu_qk, mu_ov, self.solution)


@dataclass(frozen=True)
class _Reached:
    """An event for the solver: zero where the margin alpha mu_OV is reached. solve_ivp reads the name `terminal`."""

    setting: Setting
    margin: float
    terminal: bool = True

    def __call__(self, _: float, scales: np.ndarray) -> float:
        return float(self.setting.attention(scales[0]) * scales[1] - self.margin)


def integrate(
    setting: Setting,
    parameterization: Parameterization,
    r: Scalar,
    *,
    until_time: Scalar | None = None,
    until_loss: Scalar | None = None,
    start: Start | None = None,
) -> Trajectory:
    """Integrate the equations of `rates` up to a time or down to a loss.

    The solver runs in log-time ln(1 + t), in which mu_OV grows about linearly however long the flow lasts. It controls
    the relative error of a factorized circuit's mu, which begins close to its saddle. Scales are accurate to about
    1e-10, relative.

    Args:
        setting: the data.
        parameterization: which circuits are factorized.
        r: ratio eta_QK / eta_OV of the learning rates.
        until_time: time at which to stop, with eta_OV = 1. Give this or `until_loss`.
        until_loss: cross-entropy in nats at which to stop. Give this or `until_time`.
        start: the scales at time 0; None stands for `Start.default`.

    Returns:
        The flow at the times that the solver chose.

    Raises:
        CallError: not exactly one of until_time and until_loss is given, the time is not positive and finite, the loss
            is not between 0 and the loss at the start, r is not positive and finite, or a factorized circuit starts at
            its saddle.
        QkovError: the solver stopped early.

    Source: see `rates`.
    """
    r, start = check_ratio(r), Start.checked(start, parameterization)
    if (until_time is None) == (until_loss is None):
        raise CallError(
            f"integrate: give either until_time or until_loss, got until_time={until_time!r} and "
            f"until_loss={until_loss!r}."
        )
    end, events = LONGEST_LOG_TIME, []
    if until_time is not None:
        if not 0 < until_time < math.exp(LONGEST_LOG_TIME):
            raise CallError(f"integrate: until_time must be positive and finite, got {until_time!r}.")
        end = math.log1p(until_time)
    if until_loss is not None:
        check_loss(setting, float(until_loss), start)
        events.append(_Reached(setting, setting.margin(float(until_loss))))

    def slope(log_time: float, scales: np.ndarray) -> np.ndarray:
        return math.exp(log_time) * np.array(rates(setting, parameterization, r, *scales.tolist()))

    solved = solve_ivp(
        slope,
        (0.0, end),
        np.array([start.mu_qk, start.mu_ov], dtype=float),
        method="LSODA",
        rtol=1e-12,
        atol=[
            1e-300 if parameterization.factorized_attention else 1e-13,
            1e-300 if parameterization.factorized_output else 1e-13,
        ],
        dense_output=True,
        events=events,
    )
    if not solved.success or (events and solved.status != 1):
        raise QkovError(
            f"integrate: {parameterization.value} at r = {r:g} stopped at time {math.expm1(solved.t[-1]):.6g}, "
            f"mu_qk = {solved.y[0, -1]:.6g}, mu_ov = {solved.y[1, -1]:.6g}: {solved.message}"
        )
    return Trajectory(setting, np.expm1(solved.t), solved.y[0], solved.y[1], solved.sol)
