"""The root finder and the quadrature of matched_loss at their limits, against 60 digits or closed forms.

A root is checked by the sign of the exact residual on both sides of it, so that no second root finder is needed.
"""

import math

import mpmath
import numpy as np
import pytest
from qkov.analyses.dynamics import Parameterization, Setting, Start, at_loss, time_to_loss
from qkov.analyses.dynamics.first_integrals import attention_change
from qkov.analyses.dynamics.matched_loss import _farthest_step, mu_qk_along
from qkov.circuits import QkovError

PAPER = Setting(20, 50, 5, 50, "token")
OTHER = Setting(4, 10, 10, 10, "class")
SMALL = Setting(2, 1, 1, 1, "token")
CACO, CAFO, FACO, FAFO = Parameterization
ALL = list(Parameterization)


class Exact:
    """The first integral of one flow in mpmath numbers, written apart from the code under test."""

    def __init__(self, setting, parameterization, r, start):
        self.setting, self.parameterization, self.r = setting, parameterization, mpmath.mpf(r)
        self.ratio, self.b = mpmath.mpf(setting.m) / setting.n, mpmath.mpf(setting.b)
        is_token = setting.query == "token"
        self.sigma_qk = self.b if is_token else mpmath.sqrt(self.b)
        self.K = mpmath.mpf(setting.M - 1) / setting.M / (self.b if is_token else 1)
        self.mu_qk, self.mu_ov = mpmath.mpf(start.mu_qk), mpmath.mpf(start.mu_ov)

    def attention(self, mu_qk):
        return 1 / (1 + mpmath.exp(-mu_qk) / self.ratio)

    def left(self, mu_qk):
        step = mu_qk - self.mu_qk
        if self.parameterization.factorized_attention:
            grown = mpmath.log1p(step / self.mu_qk) + self.ratio * (mpmath.ei(mu_qk) - mpmath.ei(self.mu_qk))
            return grown / (2 * self.sigma_qk)
        return step + self.ratio * mpmath.exp(self.mu_qk) * mpmath.expm1(step)

    def right(self, mu_ov):
        if self.parameterization.factorized_output:
            return self.r * self.K * (mu_ov - self.mu_ov) / (2 * mpmath.sqrt(self.b))
        return self.r * self.K * (mu_ov**2 - self.mu_ov**2) / 2

    def residual(self, mu_qk, margin):
        return self.left(mu_qk) - self.right(margin / self.attention(mu_qk))

    def mu_ov_at(self, mu_qk):
        grown = self.left(mu_qk) / (self.r * self.K)
        if self.parameterization.factorized_output:
            return self.mu_ov + 2 * mpmath.sqrt(self.b) * grown
        return mpmath.sqrt(self.mu_ov**2 + 2 * grown)

    def time(self, mu_qk):
        """Time until mu_qk, as an integral of dmu_QK / (dmu_QK/dt) with mu_OV in closed form on the first integral."""

        def per_v(v):
            # mu_OV is smooth in v = sqrt(mu_QK - start), since mu_QK - start grows as mu_OV^2 from a start at 0
            at = self.mu_qk + v**2
            mu, alpha = self.mu_ov_at(at), self.attention(at)
            rate = self.r * self.K * alpha * (1 - alpha) * mu
            rate /= self.b * (mpmath.exp(alpha * mu) + self.setting.M - 1)
            if self.parameterization.factorized_attention:
                rate *= 2 * self.sigma_qk * at
            return 2 * v / rate

        last = mpmath.sqrt(mpmath.mpf(mu_qk) - self.mu_qk)
        return mpmath.quad(per_v, mpmath.linspace(last * mpmath.mpf(10) ** -11, last, 24))


def assert_is_the_root(setting, parameterization, r, loss, start=None, rtol=1e-12):
    start = Start.default(parameterization) if start is None else start
    state = at_loss(setting, parameterization, r, loss, start)
    assert all(map(math.isfinite, state))
    with mpmath.workdps(60):
        exact = Exact(setting, parameterization, r, start)
        found = mpmath.mpf(state.mu_qk)
        margin = exact.attention(found) * mpmath.mpf(state.mu_ov)
        assert float(exact.attention(found)) == pytest.approx(state.attention, rel=1e-12)
        exact_loss = mpmath.log1p((setting.M - 1) * mpmath.exp(-margin))
        # The smallest losses have few digits.
        assert float(exact_loss) == pytest.approx(loss, rel=1e-11, abs=5e-324)
        below = max(exact.mu_qk, found - rtol * abs(found))
        assert exact.residual(below, margin) <= 0
        assert exact.residual(found + rtol * abs(found), margin) >= 0
    return state


@pytest.mark.parametrize("setting", [PAPER, OTHER, SMALL])
@pytest.mark.parametrize("parameterization", ALL)
@pytest.mark.parametrize("r", [1e-290, 1e-30, 1e-8, 1e8, 1e30, 1e290])
def test_extreme_ratios_and_losses(setting, parameterization, r):
    for loss in (5e-324, 1e-300, 1e-20, 0.5):
        assert_is_the_root(setting, parameterization, r, loss)


@pytest.mark.parametrize("setting", [PAPER, OTHER, SMALL])
@pytest.mark.parametrize("parameterization", ALL)
@pytest.mark.parametrize("r", [1e-8, 1.0, 1e30])
@pytest.mark.parametrize("below", [1e-3, 1e-6])
def test_losses_near_that_of_the_start(setting, parameterization, r, below):
    start = Start.default(parameterization)
    loss = float(setting.loss(float(start.mu_qk), float(start.mu_ov))) * (1 - below)
    # The nearness of the start magnifies the rounding of the loss.
    assert_is_the_root(setting, parameterization, r, loss, rtol=1e-15 / below)


# At M = 18 and 97 the rounded margin of that loss lies below the margin at the start.
@pytest.mark.parametrize("M", [2, 18, 97, 1000])
@pytest.mark.parametrize("parameterization", ALL)
def test_the_loss_next_to_that_of_the_start(parameterization, M):
    """Rounding must not take a scale below its start, nor the time below 0."""
    setting, start = Setting(M, 5, 2, 10), Start.default(parameterization)
    loss = float(np.nextafter(setting.loss(float(start.mu_qk), float(start.mu_ov)), 0))
    state = at_loss(setting, parameterization, 1.0, loss)
    assert state.mu_qk >= start.mu_qk
    assert state.mu_ov == pytest.approx(start.mu_ov, abs=1e-12)
    assert state.mu_ov >= start.mu_ov * (1 - 1e-15)
    assert 0 <= time_to_loss(setting, parameterization, 1.0, loss) < 1e-8


@pytest.mark.parametrize("parameterization", [FACO, FAFO])
@pytest.mark.parametrize("mu_qk", [1e-12, 1e-100, 1e-300])
@pytest.mark.parametrize("r", [1e-30, 1e-8, 1.0, 1e8])
@pytest.mark.parametrize("loss", [1e-4, 0.9])
def test_starts_next_to_the_saddle(parameterization, mu_qk, r, loss):
    assert_is_the_root(PAPER, parameterization, r, loss, Start(mu_qk, mu_qk))


@pytest.mark.parametrize("parameterization", [FACO, FAFO])
@pytest.mark.parametrize("r", [1e-8, 1.0, 1e8])
def test_steps_that_a_double_resolves_to_few_digits(parameterization, r):
    """From 1e-300 a short step is below the smallest normal double; the search must still end."""
    start = Start(1e-300, 1e-300)
    loss = math.log(20) - 1e-9
    assert_is_the_root(PAPER, parameterization, r, loss, start, rtol=1e-6)


def test_a_scale_below_the_smallest_normal_double():
    """CACO from 0 at a tiny mu_OV: mu_QK = r K (1 - alpha_0) mu_OV^2 / 2, here 1.2e-318, known to 5e-324."""
    state = at_loss(PAPER, CACO, 1e-300, math.log(20) - 1e-9)
    expected = 1e-300 * (19 / 1000) * (10 / 11) / 2 * state.mu_ov**2
    assert 1e-318 < state.mu_qk < 1.3e-318
    assert state.mu_qk == pytest.approx(expected, abs=2e-322)


@pytest.mark.parametrize("parameterization", [CACO, CAFO])
@pytest.mark.parametrize("r", [1e-300, 1.0, 1e20])
def test_starts_far_below_0_where_mu_ov_squared_overflows(parameterization, r):
    state = assert_is_the_root(PAPER, parameterization, r, 0.1, Start(-600.0, 0.5))
    assert state.mu_qk >= -600


@pytest.mark.parametrize("parameterization", ALL)
@pytest.mark.parametrize("r", [1e-8, 1e8])
def test_starts_far_above_0(parameterization, r):
    state = assert_is_the_root(PAPER, parameterization, r, 1e-8, Start(600.0, 0.5))
    assert state.attention == 1


REFUSED = [
    # This once returned 709.78, where the exponential integral overflows. The root is 712.83.
    (FACO, 1e300, 5e-324, Start(5.0, 0.1)),
    (CACO, 1e300, 1e-20, Start(-30.0, 0.1)),
    (CAFO, 1e304, 5e-324, Start(0.0, 0.01)),
    (FAFO, 1e305, 5e-324, Start(0.01, 0.01)),
    (CACO, 1e100, 0.1, Start(-600.0, 0.5)),
    (CAFO, 1e100, 0.1, Start(-600.0, 0.5)),
]


@pytest.mark.parametrize(("parameterization", "r", "loss", "start"), REFUSED)
def test_a_root_that_a_double_cannot_hold_is_refused(parameterization, r, loss, start):
    for solve in (at_loss, time_to_loss):
        with pytest.raises(QkovError, match="cannot be solved in double precision") as caught:
            solve(PAPER, parameterization, r, loss, start)
        message = str(caught.value)
        assert "\n" not in message
        assert f"{parameterization.value} at r = {r:g}" in message


@pytest.mark.parametrize("mu_ov", [1e160, 1e300])
def test_a_path_beyond_doubles_is_refused(mu_ov):
    with pytest.raises(QkovError, match="CACO at r = 1e\\+08: the first integral cannot be solved"):
        mu_qk_along(PAPER, CACO, 1e8, mu_ov)


def test_the_longest_paths():
    """(m/n) e^mu_QK = r K mu_OV^2 / 2 up to a term mu_QK, for mu_OV up to the square root of the largest double."""
    for mu_ov in (1e50, 1e100, 1e150):
        exact = math.log(19 / 1000 / 2 * 10) + 2 * math.log(mu_ov)
        assert mu_qk_along(PAPER, CACO, 1.0, mu_ov) == pytest.approx(exact, rel=1e-14)


@pytest.mark.parametrize("parameterization", ALL)
@pytest.mark.parametrize("setting", [PAPER, SMALL])
@pytest.mark.parametrize("mu_qk", [-30.0, 1e-300, 1e-6, 0.5, 5.0, 100.0])
def test_the_bracket_reaches_the_change(setting, parameterization, mu_qk):
    mu_qk = abs(mu_qk) if parameterization.factorized_attention else mu_qk
    for change in (1e-300, 1e-20, 1e-3, 1.0, 30.0, 1e10, 1e100):
        farthest = _farthest_step(setting, parameterization, mu_qk, change)
        # A step below the rounding of the start has no digits of its own.
        if mu_qk + farthest != mu_qk:
            assert attention_change(setting, parameterization, mu_qk, farthest) >= change * (1 - 1e-12)
        assert farthest < 720


@pytest.mark.parametrize(
    ("setting", "parameterization", "mu_qk", "change"),
    [
        # Where one term of the left side is all of it, the bound that is made of this term is met.
        (PAPER, CACO, -30.0, 1.0),
        (PAPER, CACO, 30.0, 1e-3),
        (PAPER, FAFO, 1e-9, 0.05),
        # (1/q + e^q/q) s for small steps, bounded by e^q/q s at q = 2.
        (OTHER, FAFO, 2.0, 1e-4),
    ],
)
def test_the_bracket_is_narrow_where_one_term_is_all(setting, parameterization, mu_qk, change):
    farthest = _farthest_step(setting, parameterization, mu_qk, change)
    assert attention_change(setting, parameterization, mu_qk, 0.8 * farthest) < change


TIMES = [
    (PAPER, CACO, 1e4, 1e-8, None),
    (PAPER, CACO, 1e-8, 0.1, None),
    (PAPER, CAFO, 1e-3, 1e-4, None),
    (OTHER, CAFO, 1e6, 1e-30, None),
    (PAPER, FACO, 1e2, 1e-30, None),
    (OTHER, FACO, 1e-3, 1e-4, None),
    (PAPER, FAFO, 1.0, 1e-4, Start(1e-6, 1e-6)),
    (SMALL, FAFO, 1e3, 1e-3, None),
]


@pytest.mark.parametrize(("setting", "parameterization", "r", "loss", "start"), TIMES)
def test_times_against_a_quadrature_without_roots(setting, parameterization, r, loss, start):
    start = Start.default(parameterization) if start is None else start
    last = at_loss(setting, parameterization, r, loss, start).mu_qk
    with mpmath.workdps(35):
        expected = float(Exact(setting, parameterization, r, start).time(last))
    assert time_to_loss(setting, parameterization, r, loss, start) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("parameterization", ALL)
@pytest.mark.parametrize("loss", [5e-324, 1e-307])
def test_a_time_that_a_double_cannot_hold_is_refused(parameterization, loss):
    # With a million classes the margin is so large that the rate itself becomes 0.
    for setting in (PAPER, Setting(10**6, 50, 5, 50)):
        with pytest.raises(QkovError, match=r"needs longer than e\^690 to reach .*; choose a larger loss") as caught:
            time_to_loss(setting, parameterization, 1.0, loss)
        assert "\n" not in str(caught.value)


def test_the_longest_time():
    """At alpha = 1 a collapsed output takes b ((e^x - 1) + (M-1) x) to the margin x: 2e299 here."""
    loss, start = 1e-296, Start(40.0, 0.0)
    margin = math.log(19) - math.log(loss)
    assert time_to_loss(PAPER, CACO, 1e-14, loss, start) == pytest.approx(50 * math.exp(margin), rel=1e-10)


def test_a_quadrature_that_does_not_converge_is_refused():
    """From a saddle at 1e-300 down to 1e-100 the integrand is a spike at the end of an interval of 700."""
    with pytest.raises(
        QkovError, match=r"only reached a relative error of .*Integrate the equations instead"
    ) as caught:
        time_to_loss(PAPER, CAFO, 1.0, 1e-100, Start(0.0, 1e-300))
    assert "\n" not in str(caught.value)
