import json
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import pytest
from qkov.analyses.dynamics import Parameterization, Setting, Start, at_loss, integrate, time_to_loss
from qkov.analyses.dynamics.matched_loss import mu_qk_along
from qkov.circuits import CallError

ROWS = json.loads((Path(__file__).parent / "data" / "matched_loss.json").read_text(encoding="utf-8"))["rows"]
PAPER = Setting(20, 50, 5, 50, "token")
OTHER = Setting(4, 10, 10, 10, "class")
ALL = list(Parameterization)


def test_all_reference_rows():
    assert len(ROWS) == 160
    for row in ROWS:
        setting = Setting(row["M"], row["b"], row["m"], row["n"], row["query"])
        start = Start(row["mu_qk0"], row["mu_ov0"])
        state = at_loss(setting, Parameterization(row["parameterization"]), row["r"], row["loss"], start)
        np.testing.assert_allclose(state, [row["mu_qk"], row["mu_ov"], row["alpha"]], rtol=1e-13)


@pytest.mark.parametrize(
    ("r", "mu_ov", "mu_qk", "attention"), [(0.01, 81.669, 0.559, 0.149), (0.1, 42.282, 1.395, 0.287)]
)
def test_the_figures_the_paper_printed(r, mu_ov, mu_qk, attention):
    """Figure 4 of "Faster Query-Key Learning Sharpens Attention": its own simulation, stopped at a loss of 1e-4."""
    state = at_loss(PAPER, Parameterization.CACO, r, 1e-4)
    assert (round(state.mu_ov, 3), round(state.mu_qk, 3), round(state.attention, 3)) == (mu_ov, mu_qk, attention)


def test_sharpness_at_equal_loss_spans_0_149_to_0_993():
    """The test that the paper's review asks for: r = 100 against r = 0.01 at the same loss."""
    sharp, flat = (at_loss(PAPER, Parameterization.CACO, r, 1e-4).attention for r in (100, 0.01))
    assert (round(sharp, 3), round(flat, 3)) == (0.993, 0.149)


@pytest.mark.parametrize("parameterization", ALL)
@pytest.mark.parametrize("r", [1e-3, 1e3])
@pytest.mark.parametrize("loss", [0.5, 1e-12])
@pytest.mark.parametrize("setting", [PAPER, OTHER])
def test_extremes_against_a_root_of_40_digits(setting, parameterization, r, loss):
    start = Start.default(parameterization)
    with mpmath.workdps(40):
        ratio, r_exact, b = mpmath.mpf(setting.m) / setting.n, mpmath.mpf(r), mpmath.mpf(setting.b)
        sigma = b if setting.query == "token" else mpmath.sqrt(b)
        constant = mpmath.mpf(setting.M - 1) / setting.M / (b if setting.query == "token" else 1)
        margin = mpmath.log((setting.M - 1) / mpmath.expm1(mpmath.mpf(loss)))

        def left(q):
            if parameterization.factorized_attention:
                return (mpmath.log(q) + ratio * mpmath.ei(q)) / (2 * sigma)
            return q + ratio * mpmath.exp(q)

        def right(mu):
            return mu / (2 * mpmath.sqrt(b)) if parameterization.factorized_output else mu**2 / 2

        def residual(q):
            mu = margin * (1 + mpmath.exp(-q) / ratio)
            grown = right(mu) - right(mpmath.mpf(start.mu_ov))
            return left(q) - left(mpmath.mpf(start.mu_qk)) - r_exact * constant * grown

        below, above = mpmath.mpf(start.mu_qk), mpmath.mpf(40)
        for _ in range(140):
            middle = (below + above) / 2
            below, above = (middle, above) if residual(middle) < 0 else (below, middle)
        expected = [float(below), float(margin * (1 + mpmath.exp(-below) / ratio))]
    state = at_loss(setting, parameterization, r, loss)
    np.testing.assert_allclose([state.mu_qk, state.mu_ov], expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("setting", "parameterization", "r", "loss"),
    [
        (OTHER, Parameterization.CACO, 1e-3, 0.5),
        (PAPER, Parameterization.CAFO, 1.0, 1e-4),
        (PAPER, Parameterization.FACO, 1e3, 0.5),
        (PAPER, Parameterization.FAFO, 1e-3, 1e-12),
        (OTHER, Parameterization.FAFO, 1e3, 1e-12),
    ],
)
def test_root_and_quadrature_agree_with_integration(setting, parameterization, r, loss):
    flow = integrate(setting, parameterization, r, until_loss=loss)
    state = at_loss(setting, parameterization, r, loss)
    # the solver's global error, and for the time its thirtyfold amplification by e^margin
    assert state.mu_qk == pytest.approx(flow.mu_qk[-1], rel=1e-9)
    assert state.mu_ov == pytest.approx(flow.mu_ov[-1], rel=1e-9)
    assert time_to_loss(setting, parameterization, r, loss) == pytest.approx(flow.time[-1], rel=1e-8)


def test_time_of_the_collapsed_layer_against_a_quadrature_of_30_digits():
    """CACO has mu_OV in closed form on the first integral, so that time is an integral over v = sqrt(mu_QK)."""
    last = at_loss(PAPER, Parameterization.CACO, 10.0, 1e-4).mu_qk
    with mpmath.workdps(30):
        drive = mpmath.mpf(10) * 19 / (20 * 50)

        def per_v(v):
            q = v**2
            mu = mpmath.sqrt(2 * (q + mpmath.expm1(q) / 10) / drive) if v else mpmath.mpf(0)
            alpha = 1 / (1 + 10 * mpmath.exp(-q))
            rate = drive * alpha * (1 - alpha) * mu / (50 * (mpmath.exp(alpha * mu) + 19))
            return 2 * v / rate

        expected: Any = mpmath.quad(per_v, mpmath.linspace(mpmath.mpf(10) ** -20, mpmath.sqrt(last), 30))
    # the last mu_QK is known to 1e-16, which e^margin turns into 1e-14 of the time
    assert time_to_loss(PAPER, Parameterization.CACO, 10.0, 1e-4) == pytest.approx(float(expected), rel=1e-12)


def test_time_where_attention_stands_still():
    """At r -> 0 a collapsed output takes b ((e^x - 1) + (M-1) x) / alpha^2 to the margin x."""
    loss = 1e-3
    margin = np.log(19 / np.expm1(loss))
    expected = 50 * (np.expm1(margin) + 19 * margin) * 11**2
    assert time_to_loss(PAPER, Parameterization.CACO, 1e-14, loss) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("parameterization", ALL)
def test_arrays_of_losses(parameterization):
    losses = np.array([[0.5, 1e-2], [1e-4, 1e-8]])
    state = at_loss(OTHER, parameterization, 2.0, losses)
    assert state.mu_qk.shape == state.mu_ov.shape == state.attention.shape == (2, 2)
    for index in np.ndindex(2, 2):
        single = at_loss(OTHER, parameterization, 2.0, float(losses[index]))
        assert (state.mu_qk[index], state.mu_ov[index], state.attention[index]) == single
    np.testing.assert_allclose(OTHER.loss(state.mu_qk, state.mu_ov), losses, rtol=1e-13)


@pytest.mark.parametrize("parameterization", ALL)
def test_path_without_time_passes_through_the_state_at_a_loss(parameterization):
    start = Start(0.2, 0.3)
    state = at_loss(PAPER, parameterization, 5.0, np.array([0.5, 1e-3, 1e-6]), start)
    np.testing.assert_allclose(mu_qk_along(PAPER, parameterization, 5.0, state.mu_ov, start), state.mu_qk, rtol=1e-13)
    assert mu_qk_along(PAPER, parameterization, 5.0, 0.3, start) == 0.2


@pytest.mark.parametrize("parameterization", ALL)
def test_just_below_the_loss_at_the_start(parameterization):
    start = Start(0.4, 2.0)
    loss = np.nextafter(PAPER.loss(0.4, 2.0), 0)
    state = at_loss(PAPER, parameterization, 1.0, float(loss), start)
    np.testing.assert_allclose(state[:2], [0.4, 2.0], rtol=1e-12)
    assert 0 <= time_to_loss(PAPER, parameterization, 1.0, float(loss), start) < 1e-9


@pytest.mark.parametrize("loss", [0.0, -0.1, np.log(20), 4.0])
def test_losses_out_of_reach(loss):
    for solve in (at_loss, time_to_loss):
        with pytest.raises(CallError, match=r"between 0 and 2\.99573"):
            solve(PAPER, Parameterization.CACO, 1.0, loss)


def test_wrong_calls():
    with pytest.raises(CallError, match="r, the ratio"):
        at_loss(PAPER, Parameterization.CACO, -1.0, 0.1)
    with pytest.raises(CallError, match="saddle"):
        at_loss(PAPER, Parameterization.FAFO, 1.0, 0.1, Start(0.0, 0.1))
    with pytest.raises(CallError, match=r"mu_ov only grows from its start, 0\.01; got 0"):
        mu_qk_along(PAPER, Parameterization.CAFO, 1.0, 0.0)
