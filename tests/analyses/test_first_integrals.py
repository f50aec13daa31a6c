import jaxtyping
import mpmath
import numpy as np
import pytest
from qkov.analyses.dynamics import Parameterization, Setting, Start, first_integral_residual, fit_ratio, integrate
from qkov.analyses.dynamics.first_integrals import attention_change, attention_slope, g, h, output_change
from qkov.circuits import CallError

PAPER = Setting(20, 50, 5, 50, "token")
OTHER = Setting(4, 10, 10, 10, "class")
ALL = list(Parameterization)


def series(setting, parameterization, r, loss, start=None):
    """A run sampled evenly in log-time."""
    flow = integrate(setting, parameterization, r, until_loss=loss, start=start)
    return flow.at(np.expm1(np.linspace(0, np.log1p(flow.time[-1]), 200)))


@pytest.mark.parametrize("mu_qk", [0.01, 0.3, 1.0, 7.0, 30.0])
def test_g_and_h(mu_qk):
    with mpmath.workdps(30):
        assert g(PAPER, mu_qk) == pytest.approx(float(mu_qk + mpmath.expm1(mu_qk) / 10), rel=1e-14)
        expected = mpmath.log(mu_qk) + mpmath.ei(mu_qk) / 10
        # Ei has a root near 0.37, where only its absolute error is small
        assert h(PAPER, mu_qk) == pytest.approx(float(expected), rel=2e-14, abs=2e-15)


@pytest.mark.parametrize("step", [1e-12, 1e-6, 0.003, 0.9999, 1.0001, 25.0])
@pytest.mark.parametrize("start", [0.01, 0.7, 4.0])
@pytest.mark.parametrize("parameterization", [Parameterization.CACO, Parameterization.FACO])
def test_a_change_is_accurate_however_short(parameterization, start, step):
    with mpmath.workdps(50):
        first, last = mpmath.mpf(start), mpmath.mpf(start) + mpmath.mpf(step)
        if parameterization.factorized_attention:
            change = mpmath.log(last / first) + (mpmath.ei(last) - mpmath.ei(first)) / 10
            expected = float(change / (2 * 50))
        else:
            expected = float(last - first + (mpmath.exp(last) - mpmath.exp(first)) / 10)
    assert attention_change(PAPER, parameterization, start, step) == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize("parameterization", ALL)
def test_slope_is_the_derivative_of_the_left_side(parameterization):
    with mpmath.workdps(30):

        def left(q):
            if parameterization.factorized_attention:
                return (mpmath.log(q) + mpmath.ei(q) / 10) / 100
            return q + mpmath.exp(q) / 10

        expected = float(mpmath.diff(left, mpmath.mpf(1.7)))
    assert attention_slope(PAPER, parameterization, 1.7) == pytest.approx(expected, rel=1e-13)


def test_right_sides():
    assert output_change(OTHER, Parameterization.FACO, 1.0, 3.0) == pytest.approx(0.75 * (9 - 1) / 2, rel=1e-15)
    assert output_change(OTHER, Parameterization.CAFO, 1.0, 3.0) == pytest.approx(0.75 * 2 / (2 * 10**0.5), rel=1e-15)


@pytest.mark.parametrize("setting", [PAPER, OTHER])
@pytest.mark.parametrize("parameterization", ALL)
@pytest.mark.parametrize("r", [0.01, 1.0, 100.0])
def test_a_run_is_attributed_and_its_ratio_recovered(setting, parameterization, r):
    """All four start at the same positive scales, so that each could have made each series."""
    run = series(setting, parameterization, r, 1e-3, Start(0.01, 0.01))
    result = fit_ratio(run.mu_ov, run.mu_qk, setting)
    assert result.best is parameterization
    assert result.fits[parameterization].r == pytest.approx(r, rel=1e-9)
    assert result.fits[parameterization].residual < 1e-9
    assert min(fit.residual for other, fit in result.fits.items() if other is not parameterization) > 1e-3
    exact = first_integral_residual(setting, parameterization, r, run.mu_qk, run.mu_ov)
    np.testing.assert_allclose(exact, 0, atol=1e-9)


@pytest.mark.parametrize("parameterization", ALL)
def test_noise_leaves_the_attribution_and_most_of_the_ratio(parameterization):
    run = series(PAPER, parameterization, 1.0, 1e-4, Start(0.01, 0.01))
    noise = np.random.default_rng(0).normal(scale=0.01, size=len(run.time))
    result = fit_ratio(run.mu_ov, run.mu_qk * np.exp(noise), PAPER)
    assert result.best is parameterization
    assert result.fits[parameterization].r == pytest.approx(1.0, rel=0.05)
    assert result.fits[parameterization].residual == pytest.approx(0.01, rel=0.5)


def test_residual_is_the_misfit_in_mu_qk():
    """Shifting single values of mu_QK by a known amount is what the residual reports, over the rms change."""
    for parameterization in ALL:
        run = series(PAPER, parameterization, 1.0, 1e-2)
        shift = np.where(np.arange(200) % 2 == 1, 1e-7, 0.0)
        residual = first_integral_residual(PAPER, parameterization, 1.0, run.mu_qk + shift, run.mu_ov)
        change = np.sqrt(np.mean((run.mu_qk - run.mu_qk[0]) ** 2))
        # to first order: a relative error of the size of the shift over mu_QK >= 0.01
        np.testing.assert_allclose(residual, shift / change, rtol=1e-4, atol=1e-9)


def test_a_run_from_the_origin_rules_out_factorized_circuits():
    run = series(PAPER, Parameterization.CACO, 1.0, 1e-3)
    fits = fit_ratio(run.mu_ov, run.mu_qk, PAPER)
    assert fits.best is Parameterization.CACO
    for parameterization in (Parameterization.CAFO, Parameterization.FACO, Parameterization.FAFO):
        assert np.isnan(fits.fits[parameterization]).all()
    assert np.isnan(first_integral_residual(PAPER, Parameterization.FAFO, 1.0, run.mu_qk, run.mu_ov)).all()


@pytest.mark.parametrize(
    ("mu_qk", "mu_ov", "words"),
    [
        ([0.0, 1.0], [0.0, 1.0], "same three or more times, got 2 and 2"),
        ([0.0, 1.0, 2.0], [0.0, 1.0, 2.0, 3.0], "got 3 and 4"),
        ([0.0, np.nan, 2.0], [0.0, 1.0, 2.0], "mu_qk must be finite at every time, got nan"),
        ([0.0, 0.0, 0.0], [0.0, 1.0, 2.0], "mu_qk must change over the series, got 0 throughout"),
        ([0.0, 1.0, 2.0], [3.0, 3.0, 3.0], "mu_ov must change"),
    ],
)
def test_a_series_that_says_nothing_is_refused(mu_qk, mu_ov, words, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(CallError, match=words):
        fit_ratio(np.array(mu_ov), np.array(mu_qk), PAPER)


def test_three_samples_are_enough():
    mu_ov = np.array([0.1, 1.1, 2.1])
    mu_qk = np.array([0.2, 0.4, 1.2])
    assert np.isfinite(fit_ratio(mu_ov, mu_qk, PAPER).fits[Parameterization.CACO].r)
