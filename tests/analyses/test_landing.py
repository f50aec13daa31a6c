"""Landing on losses, on a loss whose course is known."""

import math

import pytest
import torch
from qkov.analyses.dynamics.landing import Landing


def descend(losses, curvature, rate, steps=200):
    """Gradient descent on x^2 / 2 * curvature, whose loss falls by (1 - rate * curvature)^2 a step."""
    x = torch.tensor([1.0, 2.0], dtype=torch.float64)
    landing = Landing(losses, 2)
    course = []
    for _ in range(steps):
        loss = curvature * x.square() / 2
        reached = landing.reach(loss)
        course.append((loss.tolist(), reached))
        if not bool(landing.active.any()):
            break
        step = landing.shorten(torch.full((2,), rate, dtype=torch.float64), loss, (curvature * x).square())
        x = torch.where(landing.active, x - step * curvature * x, x)
    return course


def test_each_loss_is_reached_once_in_order_and_nearly_exactly():
    reached = [{}, {}]
    for loss, at in descend([0.01, 0.3, 0.1], curvature=1.0, rate=0.01, steps=2000):
        for run in range(2):
            for value in at[run]:
                assert value not in reached[run]
                reached[run][value] = loss[run]
    for run in range(2):
        assert list(reached[run]) == [0.3, 0.1, 0.01]
        for value, loss in reached[run].items():
            # ln loss falls by 2 eta - eta^2 + ... where 2 eta is expected; eta is 1 %.
            assert loss == pytest.approx(value, rel=1e-3)


def test_a_loss_met_exactly_is_reached():
    landing = Landing([0.5, 0.25], 2)
    assert landing.reach(torch.tensor([0.5, 0.5000001], dtype=torch.float64)) == [[0.5], []]
    assert landing.reach(torch.tensor([0.25, 0.25], dtype=torch.float64)) == [[0.25], [0.5, 0.25]]


def test_a_step_that_falls_short_is_followed_by_another():
    # The first order promises a fall of ln loss by 2 * 0.45; a quadratic gives more, and lands below.
    course = descend([0.4], curvature=1.0, rate=0.45)
    assert course[-1][0][0] <= 0.4 * 1.01
    # Where the loss hardly falls, a promised landing is not taken for one.
    landing = Landing([0.5], 1)
    rate, loss = torch.tensor([1.0]), torch.tensor([1.0])
    assert landing.shorten(rate, loss, torch.tensor([10.0])).item() == pytest.approx(math.log(2) / 10)
    assert landing.reach(torch.tensor([0.9])) == [[]]
    assert landing.active.tolist() == [True]
    landing.shorten(rate, torch.tensor([0.9]), torch.tensor([10.0]))
    assert landing.reach(torch.tensor([0.504])) == [[0.5]]
    assert landing.active.tolist() == [False]


def test_without_losses_all_runs_go_on():
    landing = Landing([], 2)
    rate = torch.tensor([1.0, 2.0])
    assert landing.reach(torch.tensor([1.0, 0.0])) == [[], []]
    assert landing.active.tolist() == [True, True]
    assert torch.equal(landing.shorten(rate, torch.ones(2), torch.ones(2)), rate)
