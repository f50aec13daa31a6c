"""The growth of scores, the step at which they pass a limit, and the rates that hold them, against closed forms."""

import math

import numpy as np
import pytest
import torch
from qkov.probes import Alarm
from qkov.probes.health.alarms import in_one_line
from qkov.probes.health.growth import braking_multiples, growth_rates, holding_multiples, steps_to_limit
from qkov.probes.health.history import Done, Limits, _Layer
from qkov.probes.health.scores import LayerScores

GENERATOR = np.random.default_rng(0)


def doubles(values):
    return torch.tensor(values, dtype=torch.float64)


def test_growth_is_the_slope_of_a_least_squares_line():
    steps = np.cumsum(GENERATOR.integers(1, 5, size=20)).astype(float)
    scores = np.exp(GENERATOR.normal(size=(20, 3)))
    expected = np.polyfit(steps, np.log(scores), 1)[0]
    positions = torch.from_numpy(np.repeat(steps[:, None], 3, axis=1))
    np.testing.assert_allclose(growth_rates(positions, torch.from_numpy(scores)), expected, rtol=1e-12)


def test_records_without_a_score_above_0_do_not_count():
    steps = np.arange(12.0)
    scores = np.exp(0.3 * steps) + GENERATOR.uniform(size=12)
    expected = np.polyfit(steps[4:], np.log(scores[4:]), 1)[0]
    damaged = scores.copy()
    damaged[:4] = [-3.0, 0.0, math.nan, math.inf]
    rate = growth_rates(torch.from_numpy(steps[:, None]), torch.from_numpy(damaged[:, None]))
    np.testing.assert_allclose(rate, [expected], rtol=1e-12)


@pytest.mark.parametrize(("records", "is_known"), [(4, False), (5, True)])
def test_fewer_than_five_records_say_nothing_of_growth(records, is_known):
    steps = torch.arange(records, dtype=torch.float64)[:, None]
    rate = float(growth_rates(steps, (0.2 * steps).exp()))
    assert math.isclose(rate, 0.2, rel_tol=1e-12) if is_known else math.isnan(rate)


def test_growth_is_unknown_where_nothing_moved():
    positions = torch.ones(9, 1, dtype=torch.float64)
    assert growth_rates(positions, torch.rand(9, 1, dtype=torch.float64)).isnan().all()


def test_a_score_that_grows_at_its_rate_is_at_the_limit_after_the_steps_that_are_told():
    scores, rates = doubles([2.0, 40.0, 99.0]), doubles([0.3, 0.01, 1e-4])
    left = steps_to_limit(scores, rates, 100.0)
    np.testing.assert_allclose(scores * (left * rates).exp(), [100.0] * 3, rtol=1e-12)


def test_where_there_is_no_growth_the_step_is_unknown_and_above_the_limit_it_is_now():
    scores = doubles([50.0, 50.0, 50.0, -3.0, math.nan, 100.0, 200.0, 200.0])
    rates = doubles([0.0, -0.1, math.nan, 0.1, 0.1, math.nan, -0.1, 0.1])
    left = steps_to_limit(scores, rates, 100.0)
    assert left[:5].isnan().all()
    assert left[5:].tolist() == [0.0, 0.0, 0.0]


def test_at_the_rate_that_holds_it_a_score_reaches_the_limit_at_the_horizon():
    score, rate, horizon = 20.0, 0.05, 100
    multiple = float(holding_multiples(doubles([score]), doubles([rate]), 100.0, horizon)[0])
    assert 0 < multiple < 1
    for _ in range(horizon):
        score *= math.exp(multiple * rate)
    assert math.isclose(score, 100.0, rel_tol=1e-12)


def test_the_rate_that_holds_a_score_is_full_without_danger_and_0_above_the_limit():
    scores, rates = doubles([20.0, 20.0, 120.0, 120.0, 20.0]), doubles([1e-3, -0.1, 0.1, -0.1, math.nan])
    multiples = holding_multiples(scores, rates, 100.0, 100)
    assert multiples[:4].tolist() == [1.0, 1.0, 0.0, 1.0]
    assert multiples[4].isnan()


def test_growth_of_a_score_is_in_proportion_to_the_rate_of_both_factors_to_first_order():
    """What the multiples rest on: d/dm of (q + m dq) . (k + m dk) at 0, against products that are formed whole."""
    x_query, x_key = GENERATOR.normal(size=(2, 6))
    W_Q, W_K, step_Q, step_K = GENERATOR.normal(size=(4, 6, 3))

    def score(multiple: float) -> float:
        return float(x_query @ (W_Q + multiple * step_Q) @ (W_K + multiple * step_K).T @ x_key)

    first = x_query @ (step_Q @ W_K.T + W_Q @ step_K.T) @ x_key
    second = x_query @ step_Q @ step_K.T @ x_key
    for multiple in (1e-3, 0.1, 1.0):
        assert math.isclose(score(multiple) - score(0), multiple * first + multiple**2 * second, rel_tol=1e-9)


def test_a_braked_score_stays_under_the_limit_whatever_steps_come():
    """As long as a step at the full rate multiplies it by no more than limit / start, and growth goes with the rate."""
    limit, start = 100.0, 10.0
    score = torch.full((50,), 1.0, dtype=torch.float64)
    for _ in range(200):
        growth = torch.from_numpy(GENERATOR.uniform(-0.5, 1.0, size=50)) * math.log(limit / start)
        told = torch.from_numpy(GENERATOR.uniform(-0.1, 0.1, size=50))
        score = score * (braking_multiples(score, told, limit, start, 100) * growth).exp()
    assert bool((score <= limit * (1 + 1e-12)).all())
    assert bool((score > 0.9 * limit).any())


def test_a_single_step_that_is_larger_passes_the_limit():
    score = doubles([9.0])
    grown = score * (braking_multiples(score, doubles([0.0]), 100.0, 10.0, 100) * math.log(12.0)).exp()
    assert float(grown) > 100


@pytest.mark.parametrize("rate", [math.nan, -0.1, 0.0, math.log(10.0) / 100])
def test_the_brake_is_off_up_to_its_start_and_full_at_the_limit(rate):
    scores = doubles([0.5, 10.0, 10.0 * math.sqrt(10.0), 100.0, 1e6, -4.0, math.nan])
    multiples = braking_multiples(scores, torch.full_like(scores, rate), 100.0, 10.0, 100)
    np.testing.assert_allclose(multiples, [1, 1, 0.5, 0, 0, 1, 1], atol=1e-14)


def test_fast_growth_is_braked_to_the_rate_that_reaches_the_limit_at_the_horizon():
    scores, rates = doubles([9.0, 20.0, 90.0]), doubles([0.5, 0.5, 0.5])
    multiples = braking_multiples(scores, rates, 100.0, 10.0, 100)
    assert multiples[0] == 1
    np.testing.assert_allclose(multiples[1:], holding_multiples(scores, rates, 100.0, 100)[1:], rtol=1e-12)


def alarm(**changes):
    fields = {"step": 60, "stack": "", "layer": 1, "head": 3, "score": 45.0, "growth": math.log(1.02)}
    fields |= {"steps_left": 40.3, "multiple": 0.403, "limit": 100.0, "horizon": 100}
    return Alarm(**fields | changes)


def test_an_alarm_says_when_the_limit_is_passed_and_what_would_hold_it():
    assert str(alarm()) == (
        "step 60: the largest score of layer 1 head 3 is 45.0 and grows by 2 % a step, so that it passes 100 at step "
        "101 if it goes on; W_Q and W_K at 0.4 times their rate would hold it under 100 for 100 steps"
    )


@pytest.mark.parametrize(
    ("growth", "said"),
    [
        (0.1, "and grows by 11 % a step; a lower rate of W_Q and W_K does not bring it back under the limit, and"),
        (0.0, "100; it does not grow"),
        (-0.1, "100; it does not grow"),
        (math.nan, "100; its growth is unknown"),
    ],
)
def test_an_alarm_above_the_limit_says_how_it_grows(growth, said):
    text = str(alarm(score=130.0, growth=growth, steps_left=0.0, stack="decoder"))
    assert text.startswith(
        "step 60: the largest score of decoder layer 1 head 3 is 130.0, which is not under the limit"
    )
    assert said in text


def test_several_alarms_are_told_by_the_first_to_pass():
    alarms = [alarm(steps_left=50.0), alarm(steps_left=7.0, head=5), alarm(steps_left=20.0)]
    assert "head 5" in in_one_line(alarms)
    assert in_one_line(alarms).endswith("(and 2 other heads)")
    assert in_one_line(alarms[:2]).endswith("(and 1 other head)")
    assert in_one_line(alarms[:1]) == str(alarms[0])


def test_growth_at_the_full_rate_counts_the_rates_at_which_the_steps_were_taken():
    """Scores grow by 0.1 for each step at the full rate; steps at half the rate and of three numbers at once."""
    told = []

    def decide(scores: torch.Tensor, growth: torch.Tensor) -> Done:
        told.append(growth)
        return Done(0.5 * torch.ones_like(scores), torch.ones_like(scores))

    layer = _Layer(Limits(limit=100.0, least=1.0, horizon=50, window=20, kept=20))
    growth = []
    for step in range(0, 24, 3):
        largest = torch.tensor([2.0, 5.0], dtype=torch.float64) * math.exp(0.1 * 0.5 * step)
        seen = LayerScores(largest, torch.ones(2, dtype=torch.float64))
        growth.append(layer.states(step, seen, decide).growth)
    np.testing.assert_allclose(growth[-1], [0.05, 0.05], rtol=1e-9)
    np.testing.assert_allclose(told[-1], [0.1, 0.1], rtol=1e-9)


def test_growth_is_known_however_near_the_steps_are():
    positions = torch.linspace(0, 0.1, 6, dtype=torch.float64)[:, None].expand(6, 2)
    np.testing.assert_allclose(growth_rates(positions, (0.3 * positions).exp()), [0.3, 0.3], rtol=1e-9)


def test_of_alarms_that_pass_at_once_the_larger_score_is_told():
    small, large = alarm(score=60.0, head=1), alarm(score=80.0, head=2)
    for alarms in ([small, large], [large, small]):
        assert in_one_line(alarms) == f"{large} (and 1 other head)"
