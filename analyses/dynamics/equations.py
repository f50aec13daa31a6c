"""The reduced equations of gradient flow for mu_QK and mu_OV, and their integration."""

import math
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float
from scipy.integrate import OdeSolution, solve_ivp

from ...circuits.errors import CallError, QkovError
from .setting import Parameterization, Scalar, Setting, Start, check_loss, check_ratio

# Times beyond e^690 would overflow; a loss that takes longer is below 1e-290.
_LONGEST_LOG_TIME = 690.0


def preconditioner(
    setting: Setting, parameterization: Parameterization, mu_qk: Scalar, mu_ov: Scalar
) -> tuple[float, float]:
    """Factors (for QK, for OV) by which factorization multiplies a circuit's own equation.

    1 for a collapsed circuit, 2 sigma mu for a factorized one: Omega(mu C) acts on C as the scalar 2 sigma mu when
    all the singular values of C are sigma (derived for this project).
    """
    return (
        2 * setting.sigma_qk * mu_qk if parameterization.factorized_attention else 1.0,
        2 * setting.sigma_ov * mu_ov if parameterization.factorized_output else 1.0,
    )


def rates(
    setting: Setting, parameterization: Parameterization, r: Scalar, mu_qk: Scalar, mu_ov: Scalar
) -> tuple[float, float]:
    """Right-hand sides (dmu_QK/dt, dmu_OV/dt) at eta_OV = 1 and eta_QK = r.

    With alpha the attention, D = e^{alpha mu_OV} + M - 1, and f_QK and f_OV from `preconditioner`,

        dmu_OV/dt = f_OV alpha / (b D)        dmu_QK/dt = f_QK r K alpha (1 - alpha) mu_OV / (b D).

    Source: Theorem 1 of "Faster Query-Key Learning Sharpens Attention" for CACO with a token query; the class query
    and the factorized circuits were derived for this project.
    """
    attention = setting.attention(float(mu_qk))
    # 1/D in a form that vanishes, rather than overflows, at a large margin
    shrinking = math.exp(-attention * mu_ov)
    common = attention * shrinking / (setting.b * (1 + (setting.M - 1) * shrinking))
    for_qk, for_ov = preconditioner(setting, parameterization, mu_qk, mu_ov)
    return (
        float(for_qk * r * setting.K * setting.background_attention(float(mu_qk)) * mu_ov * common),
        float(for_ov * common),
    )


@dataclass(frozen=True, eq=False)
class Trajectory:
    """Gradient flow from a start, sampled at increasing times; `at` samples it elsewhere.

    Attributes:
        setting: the data that it is the flow for.
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
        """Attention alpha on the relevant tokens."""
        return self.setting.attention(self.mu_qk)

    @property
    def loss(self) -> Float[np.ndarray, " time"]:
        """Cross-entropy ln(1 + (M-1) e^{-alpha mu_OV})."""
        return self.setting.loss(self.mu_qk, self.mu_ov)

    def at(self, time: Float[np.ndarray, " sample"]) -> "Trajectory":
        """Return the same flow at other times; CallError for a time that was not integrated."""
        log_time = np.log1p(time)
        last = self.solution.t_max
        # a time that went through expm1 and back may land a rounding beyond the end
        if np.any(log_time < 0) or np.any(log_time > last + 1e-12):
            raise CallError(
                f"Trajectory.at: times must lie in [0, {math.expm1(last):.6g}], "
                f"got {time.min():.6g} to {time.max():.6g}."
            )
        mu_qk, mu_ov = self.solution(np.minimum(log_time, last))
        return Trajectory(self.setting, time, mu_qk, mu_ov, self.solution)


@dataclass(frozen=True)
class _Reached:
    """Zero of the flow at a margin alpha mu_OV, where the solver stops (`terminal` is the name it looks for)."""

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
    """Solve the reduced equations up to a time or down to a loss.

    The solver runs in log-time ln(1 + t), in which mu_OV grows about linearly however long the flow lasts, and
    controls the relative error of a factorized circuit's mu, which begins close to its saddle. Scales are good to about
    1e-10, relative.

    Raises:
        CallError: not exactly one of until_time and until_loss; a time that is not positive and finite; a loss that
            is not between 0 and the loss at the start; r not positive; a factorized circuit at its saddle.
        QkovError: the solver stopped early.
    """
    r, start = check_ratio(r), Start.checked(start, parameterization)
    if (until_time is None) == (until_loss is None):
        raise CallError(
            f"integrate: give either until_time or until_loss, got until_time={until_time!r} and "
            f"until_loss={until_loss!r}."
        )
    end, events = _LONGEST_LOG_TIME, []
    if until_time is not None:
        if not 0 < until_time < math.exp(_LONGEST_LOG_TIME):
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
