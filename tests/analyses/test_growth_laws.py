import mpmath
import numpy as np
import pytest
from qkov.analyses.dynamics import Parameterization, Setting, Start, fit_growth, integrate
from qkov.analyses.dynamics.growth_laws import (
    background_attention_after_saturation,
    log_time_coefficient,
    mu_ov_at_fixed_attention,
    mu_qk_after_saturation,
    mu_qk_before_saturation,
    straight_line,
    straight_line_slope,
)
from qkov.analyses.dynamics.matched_loss import mu_qk_along
from qkov.circuits import CallError

PAPER = Setting(20, 50, 5, 50, "token")
OTHER = Setting(4, 10, 10, 10, "class")
ALL = list(Parameterization)


def run(setting, parameterization, r, loss, start=None, samples=400):
    flow = integrate(setting, parameterization, r, until_loss=loss, start=start)
    return flow.at(np.expm1(np.linspace(0, np.log1p(flow.time[-1]), samples)))


@pytest.mark.parametrize(
    ("parameterization", "coefficient"),
    [
        (Parameterization.CACO, 0.75 * 0.5 / 2),
        (Parameterization.CAFO, 0.75 * 0.5 / (2 * 3)),
        (Parameterization.FACO, 0.75 * 0.5 * 3),
        (Parameterization.FAFO, 0.75 * 0.5),
    ],
)
def test_constants_by_hand(parameterization, coefficient):
    """K = 3/4, alpha_0 = 1/2, sigma_O = sigma_Q = 3."""
    start = Start(0.0, 0.01) if not parameterization.factorized_attention else Start(1e-12, 0.01)
    setting = Setting(4, 9, 6, 6, "class")
    assert straight_line_slope(setting, parameterization, 2.0, start) == pytest.approx(2 * coefficient, rel=1e-11)
    in_time = 2 * coefficient * (2 if parameterization.factorized_output else 4)
    assert log_time_coefficient(setting, parameterization, 2.0, start) == pytest.approx(in_time, rel=1e-11)


@pytest.mark.parametrize("setting", [PAPER, OTHER])
@pytest.mark.parametrize("parameterization", ALL)
def test_growth_before_saturation_is_the_limit_of_small_r(setting, parameterization):
    """The law's error, relative to the growth, shrinks in proportion to r."""
    errors = []
    for r in (1e-4, 1e-5):
        flow = run(setting, parameterization, r, 1e-3, samples=100)
        law = mu_qk_before_saturation(setting, parameterization, r, flow.mu_ov)
        errors.append(np.abs(law - flow.mu_qk).max() / (flow.mu_qk[-1] - flow.mu_qk[0]))
    assert errors[0] < 2e-3
    assert errors[1] < errors[0] / 8


@pytest.mark.parametrize("parameterization", [Parameterization.FACO, Parameterization.FAFO])
def test_exponential_law_holds_over_decades_of_mu_qk(parameterization):
    """From a start of 1e-8, four decades of growth leave attention where it was."""
    start = Start(1e-8, 0.01)
    flow = run(PAPER, parameterization, 1.0, 1e-3, start)
    kept = flow.mu_qk < 1e-4
    law = mu_qk_before_saturation(PAPER, parameterization, 1.0, flow.mu_ov[kept], start)
    assert flow.mu_qk[kept][-1] > 1e-5
    np.testing.assert_allclose(law, flow.mu_qk[kept], rtol=2e-4)


@pytest.mark.parametrize("parameterization", [Parameterization.CACO, Parameterization.CAFO])
@pytest.mark.parametrize("attention", [0.1, 1.0])
def test_mu_ov_at_fixed_attention_solves_its_equation(parameterization, attention):
    start = Start(0.0, 0.5)
    times = np.array([0.0, 1e-3, 1.0, 1e4, 1e9])
    mu_ov = mu_ov_at_fixed_attention(PAPER, parameterization, times, attention, start)
    assert mu_ov[0] == pytest.approx(0.5, rel=1e-13)
    with mpmath.workdps(30):
        for time, scale in zip(times[1:], mu_ov[1:], strict=True):
            first, last = attention * mpmath.mpf(0.5), attention * mpmath.mpf(scale)
            if parameterization.factorized_output:
                elapsed = mpmath.ei(last) - mpmath.ei(first) + 19 * mpmath.log(last / first)
                clock = elapsed * 50 / (2 * mpmath.sqrt(50) * attention)
            else:
                clock = (mpmath.exp(last) - mpmath.exp(first) + 19 * (last - first)) * 50 / attention**2
            # x is known to a few roundings of ln 19, and moves the time by dt/dx = 50 (e^x + 19) / alpha^2 at most
            assert float(clock) == pytest.approx(time, rel=1e-12, abs=4e-15 * 50 * 20 / attention**2)
    assert mu_ov_at_fixed_attention(PAPER, parameterization, 1e4, attention, start) == mu_ov[3]


@pytest.mark.parametrize("parameterization", [Parameterization.CACO, Parameterization.CAFO])
@pytest.mark.parametrize("scale", [0.01, 0.74, 1.12, 2.9])
def test_mu_ov_grows_at_its_first_rate_for_a_short_time(parameterization, scale):
    """With x = alpha mu_OV, dx/dt is alpha^2/50 over e^x + 19, or 2 sigma_O alpha/50 times x over e^x + 19."""
    attention = 0.3
    x = attention * scale
    rate = 2 * 50**0.5 * attention / 50 * x if parameterization.factorized_output else attention**2 / 50
    expected = rate / (np.exp(x) + 19) / attention
    for time in (1e-40, 1e-17, 1e-16, 1e-5):
        mu_ov = mu_ov_at_fixed_attention(PAPER, parameterization, time, attention, Start(0.0, scale))
        assert mu_ov - scale == pytest.approx(expected * time, rel=1e-6, abs=2e-14)


@pytest.mark.parametrize("parameterization", ALL)
def test_mu_ov_in_time_is_the_limit_of_small_r(parameterization):
    start = Start.default(parameterization)
    attention = float(PAPER.attention(float(start.mu_qk)))
    errors = []
    for r in (1e-5, 1e-6):
        flow = run(PAPER, parameterization, r, 1e-3, samples=40)
        law = mu_ov_at_fixed_attention(PAPER, parameterization, flow.time, attention)
        errors.append(np.abs(law - flow.mu_ov).max() / flow.mu_ov[-1])
    assert errors[0] < 1e-3
    assert errors[1] < errors[0] / 8


@pytest.mark.parametrize(("parameterization", "power"), [(p, 1 if p.factorized_output else 2) for p in ALL])
def test_growth_in_log_time_approaches_its_coefficient(parameterization, power):
    """The local slope of y against ln^2 t, or ln t, while attention stands still: closer at every later time."""
    r = 1e-6
    flow = integrate(PAPER, parameterization, r, until_time=1e13)
    misses = []
    for time in (1e5, 1e8, 1e11):
        near = flow.at(np.array([time, 1.001 * time]))
        _, y = straight_line(parameterization, near.mu_qk, near.mu_ov)
        root = (y - straight_line(parameterization, flow.mu_qk[:1], flow.mu_ov[:1])[1]) ** (1 / power)
        slope = np.diff(root)[0] / np.log(1.001)
        misses.append(abs(slope / log_time_coefficient(PAPER, parameterization, r) ** (1 / power) - 1))
    assert misses[2] < misses[1] < misses[0]
    # a factorized output has mu_OV ~ ln t + ln ln t, so its slope is only 1/ln t away
    assert misses[2] < (0.06 if parameterization.factorized_output else 2e-3)


@pytest.mark.parametrize("setting", [PAPER, OTHER])
@pytest.mark.parametrize("parameterization", ALL)
def test_after_saturation_is_the_limit_of_large_mu_ov(setting, parameterization):
    mu_ov = np.array([1e4, 1e8, 1e16])
    exact = mu_qk_along(setting, parameterization, 1.0, mu_ov)
    misses = np.abs(mu_qk_after_saturation(setting, parameterization, 1.0, mu_ov) - exact)
    background = background_attention_after_saturation(setting, parameterization, 1.0, mu_ov)
    ratios = np.abs(background / setting.background_attention(exact) - 1)
    assert np.all(np.diff(misses) <= 0)
    assert np.all(np.diff(ratios) <= 0)
    # the next term is of order mu_QK e^-mu_QK for collapsed attention, 1/mu_QK for factorized
    allowed = 1.5 / exact if parameterization.factorized_attention else 30 * exact * np.exp(-exact) + 1e-13
    np.testing.assert_array_less(misses, allowed)
    np.testing.assert_array_less(ratios, allowed)


def test_after_saturation_in_closed_form():
    """1 - alpha = 2/(r K mu_OV^2), 2 sigma_O/(r K mu_OV), and both over 2 sigma_Q mu_QK for factorized attention."""
    kept = {p: float(background_attention_after_saturation(OTHER, p, 4.0, 1e6)) for p in ALL}
    mu_qk = {p: float(mu_qk_after_saturation(OTHER, p, 4.0, 1e6)) for p in ALL}
    root = 10**0.5
    assert kept[Parameterization.CACO] == pytest.approx(2 / (4 * 0.75 * 1e12), rel=1e-12)
    assert kept[Parameterization.CAFO] == pytest.approx(2 * root / (4 * 0.75 * 1e6), rel=1e-12)
    faco = 1 / (root * 4 * 0.75 * 1e12 * mu_qk[Parameterization.FACO])
    assert kept[Parameterization.FACO] == pytest.approx(faco, rel=1e-12)
    fafo = 1 / (4 * 0.75 * 1e6 * mu_qk[Parameterization.FAFO])
    assert kept[Parameterization.FAFO] == pytest.approx(fafo, rel=1e-12)


def test_factorized_attention_has_no_saturated_value_too_early():
    values = mu_qk_after_saturation(PAPER, Parameterization.FAFO, 1e-3, np.array([1.0, 1e6]))
    assert np.isnan(values[0])
    assert values[1] > 1


@pytest.mark.parametrize(("parameterization", "factor"), [(p, 1 if p.factorized_output else 2) for p in ALL])
def test_log_log_time_after_saturation(parameterization, factor):
    """d mu_QK / d ln ln t tends to 2 with a collapsed output and to 1 with a factorized one.

    Factorized attention comes there as slowly as 1 - 1/mu_QK, the slope of ln(e^q / q), which is taken out.
    """
    misses = []
    for time in (1e20, 1e60, 1e240):
        near = np.array([time, time**1.001])
        mu_ov = mu_ov_at_fixed_attention(PAPER, parameterization, near, 1.0)
        mu_qk = mu_qk_along(PAPER, parameterization, 1e4, mu_ov)
        change = np.diff(mu_qk - np.log(mu_qk) if parameterization.factorized_attention else mu_qk)[0]
        misses.append(abs(change / np.log(1.001) / factor - 1))
    assert misses[2] < misses[1] < misses[0]
    assert misses[2] < 0.03


@pytest.mark.parametrize("setting", [PAPER, OTHER])
@pytest.mark.parametrize("parameterization", ALL)
@pytest.mark.parametrize("r", [10.0, 100.0])
def test_each_run_fits_its_own_law_best(setting, parameterization, r):
    """All start at the same positive scales, so that every law applies to every run."""
    flow = run(setting, parameterization, r, 1e-4, Start(1e-3, 1e-2), samples=1000)
    result = fit_growth(flow.mu_ov, flow.mu_qk, setting)
    assert result.best is parameterization
    background = setting.background_attention(flow.mu_qk)
    assert result.samples == np.sum(background >= 0.9 * background[0])
    own = result.fits[parameterization]
    # 1 - alpha falls by a tenth over the fit, which the frozen law cannot know
    assert own.r_squared > 0.999
    assert own.residual < 0.1
    assert own.r == pytest.approx(r, rel=0.1)


def test_a_tighter_departure_reads_the_ratio_better():
    flow = run(PAPER, Parameterization.CACO, 1.0, 1e-4, samples=20_000)
    misses = [
        abs(fit_growth(flow.mu_ov, flow.mu_qk, PAPER, departure).fits[Parameterization.CACO].r - 1)
        for departure in (0.3, 0.1, 0.01)
    ]
    assert misses[2] < misses[1] < misses[0]
    assert misses[2] < 0.01


def test_fit_of_an_exact_line():
    mu_ov = np.linspace(0.1, 2, 20)
    mu_qk = 0.05 + 0.02 * mu_ov
    fits = fit_growth(mu_ov, mu_qk, PAPER).fits
    line = fits[Parameterization.CAFO]
    assert (line.slope, line.intercept) == pytest.approx((0.02, 0.05), rel=1e-12)
    assert line.r_squared == pytest.approx(1.0, abs=1e-12)
    assert line.residual < 1e-12
    background = PAPER.background_attention(float(mu_qk[0]))
    assert line.r == pytest.approx(0.02 * 2 * 50**0.5 / (0.019 * background), rel=1e-12)
    curved = fits[Parameterization.CACO]
    slope, intercept = np.polyfit(mu_ov**2, mu_qk, 1)
    assert (curved.slope, curved.intercept) == pytest.approx((slope, intercept), rel=1e-10)
    assert curved.r_squared == pytest.approx(np.corrcoef(mu_ov**2, mu_qk)[0, 1] ** 2, rel=1e-10)


def test_three_samples_before_saturation_are_enough():
    result = fit_growth(np.array([0.1, 0.2, 0.3]), np.array([0.011, 0.012, 0.013]), PAPER)
    assert result.samples == 3
    assert result.fits[Parameterization.CAFO].slope == pytest.approx(0.01, rel=1e-9)


def test_laws_that_need_positive_scales_are_left_out():
    flow = run(PAPER, Parameterization.CACO, 1.0, 1e-3)
    result = fit_growth(flow.mu_ov, flow.mu_qk, PAPER)
    assert result.best is Parameterization.CACO
    for parameterization in (Parameterization.CAFO, Parameterization.FACO, Parameterization.FAFO):
        assert np.isnan(result.fits[parameterization]).all()


def test_wrong_calls():
    with pytest.raises(CallError, match="three samples before saturation, got 1"):
        fit_growth(np.array([0.1, 5.0, 6.0]), np.array([0.1, 4.0, 5.0]), PAPER)
    for departure in (0.0, 1.0, 1.5):
        with pytest.raises(CallError, match=rf"departure.*got {departure}"):
            fit_growth(np.array([0.1, 5.0, 6.0]), np.array([0.1, 4.0, 5.0]), PAPER, departure)
    for attention in (0.0, 1.5):
        with pytest.raises(CallError, match="attention must be in"):
            mu_ov_at_fixed_attention(PAPER, Parameterization.CACO, 1.0, attention)
    with pytest.raises(CallError, match="time must be >= 0"):
        mu_ov_at_fixed_attention(PAPER, Parameterization.CACO, -1.0, 0.5)
    with pytest.raises(CallError, match="saddle"):
        straight_line_slope(PAPER, Parameterization.FACO, 1.0, Start(0.0, 0.0))
