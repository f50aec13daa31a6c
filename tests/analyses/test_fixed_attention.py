import numpy as np
import pytest
import torch
from qkov.analyses.dynamics.fifty_token_task import FiftyTokenTask
from qkov.analyses.dynamics.fixed_attention import (
    attention_on_inputs,
    group_means,
    linear_start,
    output_gradients,
    output_losses,
    train_fixed_attention,
)
from qkov.circuits import CallError

ALPHAS = (0.2, 0.7, 1.0)


def attended(tokens, alpha):
    """Mean one-hot vector under attention alpha on distinct tokens, from the tokens themselves."""
    distinct = tokens >= 10
    attention = torch.where(
        distinct, alpha / distinct.sum(dim=1, keepdim=True), (1 - alpha) / (~distinct).sum(dim=1, keepdim=True)
    )
    return (attention[..., None] * torch.nn.functional.one_hot(tokens, 50)).sum(dim=1)


def test_gradients_and_losses_are_those_of_autograd():
    task = FiftyTokenTask()
    tokens, label = task.sample(32, np.random.default_rng(0))
    weights = linear_start(len(ALPHAS), 7, np.random.default_rng(1), torch.float64)
    reach = attention_on_inputs(torch.tensor(ALPHAS, dtype=torch.float64))
    inputs = group_means(task.sequences(tokens), torch.float64)
    targets = torch.nn.functional.one_hot(label, 4).double().T @ inputs / len(label)
    gradients = output_gradients(weights, reach, inputs, targets)
    losses = output_losses(weights, reach, inputs, label)
    for run, alpha in enumerate(ALPHAS):
        x = attended(tokens, torch.tensor(alpha, dtype=torch.float64))
        W_OV, W_O, W_V = (weight[run].clone().requires_grad_() for weight in weights)
        collapsed = torch.nn.functional.cross_entropy(x @ W_OV[:, :50].T + W_OV[:, 50], label)
        factorized = torch.nn.functional.cross_entropy(x @ W_V[:, :50].T @ W_O.T, label)
        torch.testing.assert_close(losses[run], collapsed.detach(), rtol=0, atol=1e-12)
        torch.testing.assert_close(losses[len(ALPHAS) + run], factorized.detach(), rtol=0, atol=1e-12)
        expected = torch.autograd.grad(collapsed + factorized, (W_OV, W_O, W_V))
        for gradient, reference in zip(gradients, expected, strict=True):
            torch.testing.assert_close(gradient[run], reference, rtol=0, atol=1e-12)


def test_the_start_is_that_of_linear_layers():
    weights = linear_start(2, 16, np.random.default_rng(0), torch.float64)
    for weight, inputs in zip(weights, (50, 16, 50), strict=True):
        assert torch.equal(weight[0], weight[1])
        bound = inputs**-0.5
        assert weight.abs().max() <= bound
        assert weight.abs().max() > 0.9 * bound
        assert weight.mean().abs() < 0.2 * bound


def test_a_group_that_does_not_occur_counts_as_zero():
    tokens = torch.tensor([[10, 10, 11, 5], [0, 1, 0, 5]])
    expected = torch.zeros(2, 51)
    expected[0, [10, 11, 5, 50]] = torch.tensor([2 / 3, 1 / 3, 1, 1])
    expected[1, [0, 1, 5, 50]] = torch.tensor([1 / 2, 1 / 4, 1 / 4, 1])
    torch.testing.assert_close(group_means(FiftyTokenTask(context_length=3).sequences(tokens), torch.float32), expected)


def test_a_seed_gives_the_same_losses_and_another_seed_others():
    once, again, other = (
        train_fixed_attention(FiftyTokenTask(), ALPHAS, steps=40, batch=16, seed=seed, evaluation=64)
        for seed in (5, 5, 6)
    )
    assert torch.equal(once.collapsed, again.collapsed)
    assert torch.equal(once.factorized, again.factorized)
    assert not torch.equal(once.collapsed, other.collapsed)


def test_losses_are_measured_at_log_spaced_steps_up_to_the_last():
    losses = train_fixed_attention(FiftyTokenTask(), ALPHAS, steps=64, measurements=6, evaluation=64)
    assert losses.steps == (2, 4, 8, 16, 32, 64)
    assert losses.collapsed.shape == losses.factorized.shape == (6, 3)
    assert torch.equal(losses.final_collapsed, losses.collapsed[-1])
    assert torch.equal(losses.final_factorized, losses.factorized[-1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"alphas": (0.5, 1.2)}, "from 0 to 1"),
        ({"alphas": ()}, "one or more shares"),
        ({"steps": 0}, "steps must be positive; got 0"),
        ({"alphas": (-0.1,)}, "from 0 to 1"),
        ({"rate": -0.1}, "rate must be positive"),
        ({"rate": 0.0}, "rate must be positive; got 0"),
    ],
)
def test_a_call_out_of_range_is_refused(arguments, message):
    with pytest.raises(CallError, match=message):
        train_fixed_attention(FiftyTokenTask(), **arguments)


def test_final_losses_are_the_published_ones():
    """Figures: saved output of the fixed-attention notebook in the paper's repository, commit 9e89c94."""
    losses = train_fixed_attention(FiftyTokenTask())
    np.testing.assert_allclose(losses.final_collapsed, [0.598, 0.158, 0.0645, 0.0346, 0.0216], rtol=0.05)
    np.testing.assert_allclose(losses.final_factorized, [0.0038, 0.0015, 0.00089, 0.00063, 0.00049], rtol=0.05)


def test_attention_may_be_nothing_or_all():
    losses = train_fixed_attention(FiftyTokenTask(), (0.0, 1.0), steps=1, batch=1, measurements=1, evaluation=4)
    assert losses.collapsed.shape == (1, 2)
