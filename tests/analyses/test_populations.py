"""The exact population's gradient against the reduced equations, and samples against the exact population."""

import numpy as np
import pytest
import torch
from qkov.analyses.dynamics import (
    Parameterization,
    Setting,
    SingleLayerAttention,
    directions,
    exact_population,
    rates,
    relevant_attention,
)
from qkov.analyses.dynamics.populations import sample_population
from qkov.circuits import CallError

SETTINGS = [
    Setting(M=2, b=3, m=2, n=4, query="token"),
    Setting(M=4, b=4, m=1, n=4, query="token"),
    Setting(M=3, b=4, m=4, n=2, query="token"),
    Setting(M=3, b=5, m=3, n=6, query="class"),
    Setting(M=4, b=2, m=1, n=2, query="class"),
]
SCALES = [(0.0, 0.0), (0.3, 2.0), (2.5, 7.0), (-0.4, 3.0)]


def collapsed_model(setting: Setting, mu_qk: float, mu_ov: float) -> SingleLayerAttention:
    exact = directions(setting)
    model = SingleLayerAttention(exact.qk.shape[0], setting.M, Parameterization.CACO)
    with torch.no_grad():
        model.get_parameter("W_QK").copy_(mu_qk * exact.qk)
        model.get_parameter("W_OV").copy_(mu_ov * exact.ov)
    return model


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_directions_have_the_singular_values_of_the_theory(setting):
    exact = directions(setting)
    qk, ov = np.linalg.svd(exact.qk.numpy())[1], np.linalg.svd(exact.ov.numpy())[1]
    np.testing.assert_allclose(qk[: setting.M], setting.sigma_qk, rtol=1e-12)
    np.testing.assert_allclose(qk[setting.M :], 0, atol=1e-12)
    np.testing.assert_allclose(ov[: setting.M - 1], setting.sigma_ov, rtol=1e-12)
    np.testing.assert_allclose(ov[setting.M - 1 :], 0, atol=1e-12)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("scales", SCALES, ids=str)
def test_full_batch_gradient_is_the_reduced_equations_along_the_directions(setting, scales):
    mu_qk, mu_ov = scales
    model, exact = collapsed_model(setting, mu_qk, mu_ov), directions(setting)
    population = exact_population(setting)
    logits = model(population)[0]
    loss = torch.nn.functional.cross_entropy(logits, population.label)
    loss.backward()
    qk_rate, ov_rate = rates(setting, Parameterization.CACO, 1.0, mu_qk, mu_ov)
    assert loss.item() == pytest.approx(setting.loss(mu_qk, mu_ov), rel=1e-12)
    for name, rate, direction in (("W_QK", qk_rate, exact.qk), ("W_OV", ov_rate, exact.ov)):
        gradient = model.get_parameter(name).grad
        assert gradient is not None
        # 1e-13: sums of up to a few hundred terms of order one tenth, in float64
        torch.testing.assert_close(-gradient[0, 0], rate * direction, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_attention_over_counts_is_softmax_attention_over_the_written_out_tokens(setting):
    generator = torch.Generator().manual_seed(3)
    population = sample_population(setting, 20, generator)
    model = SingleLayerAttention(population.embedding.shape[1], setting.M, Parameterization.CACO)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    W_QK, W_OV = (model.get_parameter(name).detach()[0, 0].numpy() for name in ("W_QK", "W_OV"))
    embedding = population.embedding.numpy()
    logits = model(population)[0].detach().numpy()
    alpha = relevant_attention(model.attention(population, model.products()[0]), population).item()
    masses = []
    for sequence, (counts, query) in enumerate(zip(population.counts.numpy(), population.query.tolist(), strict=True)):
        tokens = np.repeat(np.arange(len(counts)), counts.astype(int))
        assert len(tokens) == setting.m + setting.n
        scores = np.array([embedding[token] @ W_QK @ embedding[query] for token in tokens])
        weights = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
        context = sum(weight * embedding[token] for weight, token in zip(weights, tokens, strict=True))
        np.testing.assert_allclose(logits[sequence], W_OV @ context, rtol=1e-11, atol=1e-12)
        own = range(setting.b * population.label[sequence], setting.b * (population.label[sequence] + 1))
        masses.append(weights[[token in own for token in tokens]].sum())
    assert alpha == pytest.approx(np.mean(masses), rel=1e-11)


def test_exact_population_is_every_window_and_query_of_every_class():
    setting = Setting(M=3, b=4, m=2, n=2, query="token")
    population = exact_population(setting)
    assert len(population) == 3 * 4 * 4
    seen = {
        (int(label), tuple(counts[: setting.b * setting.M].nonzero().flatten().tolist()), int(query))
        for label, counts, query in zip(population.label, population.counts, population.query, strict=True)
    }
    expected = {
        (y, tuple(sorted(4 * y + (start + offset) % 4 for offset in range(2))), 4 * y + query)
        for y in range(3)
        for start in range(4)
        for query in range(4)
    }
    assert seen == expected
    background = population.counts[:, 12:] @ population.embedding[12:]
    torch.testing.assert_close(background, torch.zeros_like(background), rtol=0, atol=0)


def test_samples_have_the_exact_population_as_their_mean():
    setting = Setting(M=3, b=4, m=2, n=6, query="token")
    sampled = sample_population(setting, 40_000, torch.Generator().manual_seed(0))
    exact = exact_population(setting)
    assert bool((sampled.counts[:, :12].sum(dim=1) == 2).all())
    assert bool((sampled.counts[:, 12:].sum(dim=1) == 6).all())
    # Each mean is of 40,000 draws with a standard deviation below 1: five standard errors are 0.025.
    torch.testing.assert_close(sampled.counts.mean(dim=0), exact.counts.mean(dim=0), rtol=0, atol=0.025)
    again = sample_population(setting, 40_000, torch.Generator().manual_seed(0))
    assert torch.equal(sampled.counts, again.counts)
    other = sample_population(setting, 40_000, torch.Generator().manual_seed(1))
    assert not torch.equal(sampled.counts, other.counts)


def test_an_odd_background_is_refused():
    with pytest.raises(CallError, match="n = 3; use n = 4"):
        exact_population(Setting(M=2, b=2, m=1, n=3))
