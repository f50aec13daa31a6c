"""Starts against the properties that the theory asks of them."""

import math

import pytest
import torch
from qkov.analyses.dynamics import Parameterization, Setting, SingleLayerAttention, Start, aligned_start, directions
from qkov.analyses.dynamics.starts import balanced_factors, identity_start, random_start
from qkov.circuits import CallError

SETTING = Setting(M=4, b=3, m=2, n=4, query="token")


def test_balanced_factors_multiply_to_the_matrix_and_have_equal_grams():
    matrix = torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    A, B = balanced_factors(matrix, 6)
    torch.testing.assert_close(A @ B, matrix, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(A.T @ A, B @ B.T, rtol=1e-12, atol=1e-12)
    assert A.shape == (7, 6)
    assert B.shape == (6, 5)


def test_a_rank_that_does_not_fit_is_refused():
    with pytest.raises(CallError, match="d_head = 2 is too small for a start of rank 3"):
        balanced_factors(torch.eye(3, dtype=torch.float64), 2)


@pytest.mark.parametrize("parameterization", Parameterization)
@pytest.mark.parametrize("imbalance", [0.0, 1.5])
def test_aligned_start_has_the_products_of_the_theory_balanced_or_not(parameterization, imbalance):
    exact = directions(SETTING)
    model = SingleLayerAttention(exact.qk.shape[0], SETTING.M, parameterization, d_head=SETTING.M, runs=2)
    aligned_start(model, exact, Start(0.3, 0.7), imbalance)
    qk, ov = model.products()
    for run in range(2):
        torch.testing.assert_close(qk[run, 0].detach(), 0.3 * exact.qk, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(ov[run, 0].detach(), 0.7 * exact.ov, rtol=1e-12, atol=1e-14)
    for circuit in (model.qk(), model.ov()):
        if circuit.right is not None:
            grams = circuit.left.detach().mT @ circuit.left.detach(), circuit.right.detach() @ circuit.right.detach().mT
            difference = (grams[0] - grams[1]).norm() / grams[0].norm()
            assert bool(difference < 1e-12) == (imbalance == 0)


def test_a_spread_start_is_balanced_with_unequal_singular_values():
    exact = directions(SETTING)
    model = SingleLayerAttention(exact.qk.shape[0], SETTING.M, Parameterization.FAFO, d_head=SETTING.M)
    aligned_start(model, exact, Start(0.3, 0.7), spread=1.0)
    for circuit, scale, count in ((model.qk(), 0.3 * SETTING.sigma_qk, 4), (model.ov(), 0.7 * SETTING.sigma_ov, 3)):
        assert circuit.right is not None
        left, right = circuit.left.detach()[0, 0], circuit.right.detach()[0, 0]
        torch.testing.assert_close(left.T @ left, right @ right.T, rtol=1e-12, atol=1e-13)
        expected = torch.linspace(2, 0, count, dtype=torch.float64).exp()
        expected *= scale / expected.mean()
        torch.testing.assert_close(torch.linalg.svdvals(left @ right)[:count], expected, rtol=1e-12, atol=0)


def test_heads_share_the_start_evenly():
    exact = directions(SETTING)
    model = SingleLayerAttention(exact.qk.shape[0], SETTING.M, Parameterization.CAFO, d_head=SETTING.M, heads=2)
    aligned_start(model, exact, Start(0.0, 0.7))
    torch.testing.assert_close(model.products()[1].sum(dim=1)[0].detach(), 0.7 * exact.ov, rtol=1e-12, atol=1e-14)


def test_identity_start_is_the_papers():
    model = SingleLayerAttention(5, 3, Parameterization.FAFO, d_head=5)
    identity_start(model, 1e-6)
    for name in ("W_Q", "W_K", "W_V"):
        torch.testing.assert_close(model.get_parameter(name)[0, 0].detach(), 1e-6 * torch.eye(5, dtype=torch.float64))
    torch.testing.assert_close(model.get_parameter("W_O")[0, 0].detach(), 1e-6 * torch.eye(5, 3, dtype=torch.float64))


def test_random_start_is_seeded_and_has_the_spread_of_a_linear_layer():
    model = SingleLayerAttention(60, 40, Parameterization.FACO, d_head=30, runs=2)
    random_start(model, 7)
    drawn = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for name, inputs in (("W_Q", 60), ("W_K", 60), ("W_OV", 60)):
        bound = 1 / math.sqrt(inputs)
        assert float(drawn[name].abs().max()) <= bound
        # A uniform variable in [-c, c] has variance c^2 / 3; 1,800 draws or more estimate it within 10 %.
        assert float(drawn[name][0].var()) == pytest.approx(bound**2 / 3, rel=0.1)
        assert torch.equal(drawn[name][0], drawn[name][1])
    random_start(model, 7)
    assert all(torch.equal(parameter, drawn[name]) for name, parameter in model.named_parameters())
    random_start(model, 8)
    assert not torch.equal(model.get_parameter("W_Q"), drawn["W_Q"])
    identity_start(model)
    random_start(model, 7, names=("W_Q", "W_K"))
    assert torch.equal(model.get_parameter("W_Q"), drawn["W_Q"])
    assert float(model.get_parameter("W_OV").detach().abs().max()) == 1e-6
