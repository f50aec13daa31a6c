"""Intervals against scipy's own bootstrap, the normal distribution and closed forms of the variance."""

import numpy as np
import pytest
from qkov.analyses.attention import Bootstrap
from qkov.analyses.attention.intervals import EXACT, NO_SPREAD, TOO_FEW, _weights, mean_intervals
from qkov.circuits import CallError
from scipy.stats import beta, bootstrap


def drawn(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def test_an_interval_of_one_run_is_scipy_s_own():
    values = drawn(2, 1, 80)
    found = mean_intervals(values, Bootstrap(resamples=999, seed=7))
    for row, sample in zip(found[["value", "low", "high"]].to_numpy(), values[:, 0], strict=True):
        own = bootstrap((sample,), np.mean, n_resamples=999, method="percentile", rng=np.random.default_rng(7))
        np.testing.assert_allclose(row[1:], own.confidence_interval, rtol=1e-12)
        np.testing.assert_allclose(row[0], sample.mean(), rtol=1e-12)


def test_normal_samples_are_covered_as_often_as_said():
    samples = drawn(200, 1, 100, seed=1)
    found = [mean_intervals(sample[None], Bootstrap(resamples=599, seed=seed)) for seed, sample in enumerate(samples)]
    covered = sum(bool(one["low"][0] <= 0 <= one["high"][0]) for one in found)
    # Percentile intervals of 100 normal values cover 94.5%; the standard error of 200 trials is 1.6%.
    assert 0.945 - 3 * 0.016 <= covered / 200 < 1


def test_another_confidence_gives_an_interval_of_its_width():
    values = drawn(1, 1, 2000)
    found = mean_intervals(values, Bootstrap(resamples=4000, confidence=0.5))
    width = 2 * 0.67449 * values.std() / np.sqrt(2000)
    np.testing.assert_allclose(found["high"] - found["low"], width, rtol=0.08)


@pytest.mark.parametrize(("of_examples", "of_runs"), [(1.0, 0.0), (0.0, 1.0), (1.0, 0.3)])
def test_runs_and_examples_are_drawn_apart_and_examples_alike_in_every_run(of_examples, of_runs):
    runs, examples = 20, 150
    values = of_runs * drawn(runs, 1, seed=2) + of_examples * drawn(1, examples, seed=3)
    found = mean_intervals(values[None], Bootstrap(resamples=6000))
    variance = np.var(values.mean(axis=1)) / runs + np.var(values.mean(axis=0)) / examples
    # Drawn apart in each run, examples would count as twenty times as many: an interval of a quarter of the width.
    np.testing.assert_allclose(found["high"] - found["low"], 2 * 1.96 * np.sqrt(variance), rtol=0.08)
    assert found["runs"].tolist() == [runs]
    assert found["examples"].tolist() == [examples]


def test_figures_share_their_draws_and_their_batches_do_not_matter(monkeypatch):
    values = drawn(3, 4, 30)
    at_once = mean_intervals(values)
    monkeypatch.setattr("qkov.analyses.attention.intervals._AT_ONCE", 30 * 500)
    np.testing.assert_allclose(mean_intervals(values[1:2])[["value"]], at_once.loc[1:1, ["value"]], rtol=1e-12)
    one, other = (mean_intervals(given)[["low", "high"]].to_numpy() for given in (values, values[1:2]))
    np.testing.assert_allclose(one[1], other[0], rtol=1e-12)
    assert mean_intervals(values, Bootstrap(seed=1))["low"].tolist() != at_once["low"].tolist()


@pytest.mark.parametrize(("at_once", "rows"), [(30 * 500, 500), (30 * 500 + 29, 500), (7, 1)])
def test_no_more_indices_are_drawn_at_once_than_allowed_unless_the_examples_are_more(monkeypatch, at_once, rows):
    shapes = []

    def watched(indices, count):
        shapes.append(indices.shape)
        return _weights(indices, count)

    monkeypatch.setattr("qkov.analyses.attention.intervals._AT_ONCE", at_once)
    monkeypatch.setattr("qkov.analyses.attention.intervals._weights", watched)
    mean_intervals(drawn(1, 1, 30), Bootstrap(resamples=1200))
    assert max(shapes) == (rows, 30)
    assert sum(count for count, _ in shapes) >= 1200


def test_a_figure_of_two_means():
    values = np.abs(drawn(2, 1, 200)) + 1
    ratio = mean_intervals(values, Bootstrap(resamples=999), of=lambda means: means[:1] / means[1:])
    own = bootstrap(
        (values[0, 0], values[1, 0]),
        lambda one, other, axis: one.mean(axis) / other.mean(axis),
        paired=True,
        n_resamples=999,
        method="percentile",
        rng=np.random.default_rng(0),
    )
    np.testing.assert_allclose(ratio[["low", "high"]].iloc[0], own.confidence_interval, rtol=1e-12)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_shares_of_none_and_of_all_have_exact_intervals(value):
    found = mean_intervals(np.full((1, 1, 20), value), shares=True).iloc[0]
    successes = int(20 * value)
    low = float(beta.ppf(0.025, successes, 21 - successes)) if successes else 0.0
    high = float(beta.ppf(0.975, successes + 1, 20 - successes)) if successes < 20 else 1.0
    np.testing.assert_allclose([found["low"], found["high"]], [low, high], rtol=1e-9)
    assert found["value"] == value
    assert found["interval"] == EXACT


def test_shares_of_some_are_drawn_beside_a_share_of_all():
    values = np.stack([np.ones(40), np.arange(40) % 2])[:, None]
    found = mean_intervals(values, shares=True)
    assert found["interval"].tolist() == [EXACT, "bootstrap"]
    np.testing.assert_allclose(found["high"][1] - found["low"][1], 2 * 1.96 * 0.5 / np.sqrt(40), rtol=0.1)


def test_no_spread_and_too_few_examples():
    constant = mean_intervals(np.full((1, 3, 5), 0.1)).iloc[0]
    assert (constant["low"], constant["high"], constant["interval"]) == (
        constant["value"],
        constant["value"],
        NO_SPREAD,
    )
    single = mean_intervals(np.full((1, 3, 1), 0.1)).iloc[0]
    assert single["value"] == pytest.approx(0.1)
    assert np.isnan(single[["low", "high"]].astype(float)).all()
    assert single["interval"] == TOO_FEW
    assert mean_intervals(np.empty((2, 1, 0)))["value"].isna().all()


def test_examples_with_an_unknown_value_are_left_out():
    values = drawn(2, 2, 30)
    values[1, 0, 4] = np.nan
    found = mean_intervals(values)
    np.testing.assert_allclose(found["value"], np.delete(values, 4, axis=2).mean(axis=(1, 2)), rtol=1e-12)
    assert found["examples"].tolist() == [29, 29]


def test_wrong_settings_are_refused():
    with pytest.raises(CallError, match="resamples should be at least 1, got 0"):
        Bootstrap(resamples=0)
    for confidence in (95.0, 1.0, 0.0):
        with pytest.raises(CallError, match=f"confidence is a share between 0 and 1, got {confidence}"):
            Bootstrap(confidence=confidence)
    assert Bootstrap(resamples=1).resamples == 1
    with pytest.raises(CallError, match="at least one run"):
        mean_intervals(np.empty((1, 0, 3)))
