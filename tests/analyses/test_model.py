"""The single-layer model: heads add up, runs are independent, circuits are what the forward pass uses."""

import pytest
import torch
from qkov.analyses.dynamics import Parameterization, Setting, SingleLayerAttention
from qkov.analyses.dynamics.populations import sample_population

SETTING = Setting(M=3, b=4, m=2, n=4, query="class")


def randomized(model: SingleLayerAttention, seed: int) -> SingleLayerAttention:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


@pytest.mark.parametrize("parameterization", Parameterization)
def test_heads_add_up_and_runs_do_not_touch_each_other(parameterization):
    data = sample_population(SETTING, 12, torch.Generator().manual_seed(0))
    d_model = data.embedding.shape[1]
    both = randomized(SingleLayerAttention(d_model, 3, parameterization, d_head=5, heads=2, runs=3), 1)
    together = both(data)
    for run in range(3):
        total = torch.zeros_like(together[0])
        for head in range(2):
            single = SingleLayerAttention(d_model, 3, parameterization, d_head=5)
            with torch.no_grad():
                for name, parameter in single.named_parameters():
                    parameter.copy_(both.get_parameter(name)[run : run + 1, head : head + 1])
            total = total + single(data)[0]
        torch.testing.assert_close(together[run], total, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("parameterization", Parameterization)
def test_circuits_are_the_products_that_the_forward_pass_uses(parameterization):
    model = randomized(SingleLayerAttention(14, 3, parameterization, d_head=5, heads=2, runs=2), 2)
    qk, ov = model.products()
    torch.testing.assert_close(model.qk().dense(), qk.detach(), rtol=1e-14, atol=0)
    torch.testing.assert_close(model.ov().dense(), ov.detach(), rtol=1e-14, atol=0)
    assert (model.qk().right is not None) == parameterization.factorized_attention
    assert (model.ov().right is not None) == parameterization.factorized_output


def test_score_scale_is_that_of_the_scores():
    data = sample_population(SETTING, 6, torch.Generator().manual_seed(0))
    plain = randomized(SingleLayerAttention(data.embedding.shape[1], 3, Parameterization.CACO), 3)
    scaled = randomized(SingleLayerAttention(data.embedding.shape[1], 3, Parameterization.CACO, score_scale=0.5), 3)
    torch.testing.assert_close(
        scaled.attention(data, scaled.products()[0]), plain.attention(data, 0.5 * plain.products()[0])
    )
