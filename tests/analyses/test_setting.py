import jaxtyping
import mpmath
import numpy as np
import pytest
from qkov.analyses.dynamics import Parameterization, Setting, Start
from qkov.analyses.dynamics.setting import check_loss, check_ratio
from qkov.circuits import CallError

PAPER = Setting(M=20, b=50, m=5, n=50)


def test_constants_of_the_two_queries():
    token = Setting(4, 9, 2, 6, "token")
    assert (token.sigma_ov, token.sigma_qk, token.K) == (3.0, 9.0, 3 / 36)
    query_of_its_own = Setting(4, 9, 2, 6, "class")
    assert (query_of_its_own.sigma_ov, query_of_its_own.sigma_qk, query_of_its_own.K) == (3.0, 3.0, 3 / 4)
    assert token.uniform_attention == query_of_its_own.uniform_attention == 0.25


@pytest.mark.parametrize("mu_qk", [-40.0, -1.0, 0.0, 0.559, 7.2, 40.0])
def test_attention_and_background_to_full_relative_accuracy(mu_qk):
    with mpmath.workdps(40):
        relevant = 5 * mpmath.exp(mu_qk)
        np.testing.assert_allclose(PAPER.attention(mu_qk), float(relevant / (relevant + 50)), rtol=1e-14)
        np.testing.assert_allclose(PAPER.background_attention(mu_qk), float(50 / (relevant + 50)), rtol=1e-14)


@pytest.mark.parametrize("mu_ov", [0.0, 1.0, 30.0, 300.0])
def test_loss_is_the_cross_entropy(mu_ov):
    with mpmath.workdps(400):
        margin = 5 * mpmath.e / (5 * mpmath.e + 50) * mu_ov
        expected = float(mpmath.log(1 + 19 * mpmath.exp(-margin)))
    # an error of one rounding in the margin, up to 64, is one of 64 roundings in the loss
    np.testing.assert_allclose(PAPER.loss(1.0, mu_ov), expected, rtol=3e-14)


def test_large_scales_neither_overflow_nor_lose_the_loss():
    assert PAPER.loss(1e4, 500.0) == pytest.approx(19 * np.exp(-500.0), rel=1e-13)
    assert PAPER.attention(1e4) == 1.0
    assert PAPER.loss(np.array([0.0, 1e5]), np.array([0.0, 1e5])) == pytest.approx([np.log(20), 0.0])


@pytest.mark.parametrize("loss", [1e-300, 1e-12, 1e-4, 0.5, 2.9, 800.0])
def test_margin_is_the_logit_gap_at_a_loss(loss):
    with mpmath.workdps(400):
        expected = float(mpmath.log(19 / mpmath.expm1(loss)))
    assert PAPER.margin(loss) == pytest.approx(expected, rel=1e-14)


def test_vectorized_as_scalar():
    mu_qk, mu_ov = np.linspace(-3, 9, 7), np.linspace(0, 60, 7)
    np.testing.assert_array_equal(PAPER.attention(mu_qk), [PAPER.attention(float(q)) for q in mu_qk])
    np.testing.assert_array_equal(
        PAPER.loss(mu_qk, mu_ov), [PAPER.loss(float(q), float(o)) for q, o in zip(mu_qk, mu_ov, strict=True)]
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((1, 5, 2, 3), "M must be an int >= 2, got 1"),
        ((4, 5, 6, 3), "at most b = 5, got 6"),
        ((4, 5, 0, 3), "m must be an int >= 1, got 0"),
        ((4, 5, 2, 0), "n must be an int >= 1, got 0"),
        ((4, 0, 2, 3), "b must be an int >= 1, got 0"),
        ((4, 5.0, 2, 3), "b must be an int >= 1, got 5.0"),
        ((4, 5, True, 3), "m must be an int >= 1, got True"),
        ((4, 5, 2, 3, "last"), 'query must be "token" or "class", got \'last\''),
    ],
)
def test_a_wrong_setting_is_named(arguments, words, monkeypatch):
    # the annotations, which only tests check, would speak first
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(CallError, match=words):
        Setting(*arguments)


def test_parameterizations_by_name():
    assert Parameterization.parse(" caFo ") is Parameterization.CAFO
    assert [p.value for p in Parameterization if p.factorized_attention] == ["FACO", "FAFO"]
    assert [p.value for p in Parameterization if p.factorized_output] == ["CAFO", "FAFO"]
    with pytest.raises(CallError, match="'OACO' is not known; expected one of CACO, CAFO, FACO, FAFO"):
        Parameterization.parse("OACO")


def test_default_starts():
    assert Start.default(Parameterization.CACO) == Start(0.0, 0.0)
    assert Start.default(Parameterization.CAFO) == Start(0.0, 0.01)
    assert Start.checked(None, Parameterization.FACO) == Start(0.01, 0.0)
    assert Start.checked(Start(0.5, 0.25), Parameterization.FAFO) == Start(0.5, 0.25)


@pytest.mark.parametrize(
    ("parameterization", "start", "name"),
    [
        (Parameterization.FACO, (0.0, 0.0), "mu_qk"),
        (Parameterization.FAFO, (-0.1, 0.1), "mu_qk"),
        (Parameterization.CAFO, (0.0, 0.0), "mu_ov"),
    ],
)
def test_a_factorized_circuit_cannot_start_at_its_saddle(parameterization, start, name):
    with pytest.raises(CallError, match=f"{name} must be > 0 for {parameterization.value}.*saddle"):
        Start.checked(Start(*start), parameterization)


@pytest.mark.parametrize("start", [(np.nan, 0.0), (0.0, np.inf), (0.0, -1.0)])
def test_a_start_is_finite_and_its_output_not_negative(start):
    with pytest.raises(CallError, match="must be"):
        Start(*start)


@pytest.mark.parametrize("r", [0.0, -1.0, np.nan, np.inf])
def test_r_is_positive(r):
    with pytest.raises(CallError, match="positive"):
        check_ratio(r)


@pytest.mark.parametrize("loss", [0.0, -1.0, np.log(20), 5.0, np.nan])
def test_a_loss_out_of_reach_gives_the_range(loss):
    with pytest.raises(CallError, match=r"between 0 and 2\.99573"):
        check_loss(PAPER, loss, Start(0.0, 0.0))
    with pytest.raises(CallError, match="out of reach"):
        check_loss(PAPER, np.array([0.5, loss]), Start(0.0, 0.0))
