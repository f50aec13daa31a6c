"""Trained runs against the theory, which is an independent route to the same figures."""

import itertools

import numpy as np
import pytest
import torch
from qkov.analyses.dynamics import (
    ConstantRate,
    Parameterization,
    RelativeStep,
    Setting,
    SingleLayerAttention,
    Start,
    State,
    aligned_start,
    at_loss,
    directions,
    exact_population,
    integrate,
    train,
)
from qkov.analyses.dynamics.populations import sample_population
from qkov.analyses.dynamics.starts import random_start
from qkov.circuits import CallError, QkovError

SETTING = Setting(M=3, b=3, m=1, n=4, query="token")
CLASS_QUERY = Setting(M=3, b=3, m=1, n=4, query="class")


def started(
    setting: Setting, parameterization: Parameterization, runs: int = 1, start: Start | None = None
) -> SingleLayerAttention:
    exact = directions(setting)
    model = SingleLayerAttention(exact.qk.shape[0], setting.M, parameterization, d_head=setting.M, runs=runs)
    aligned_start(model, exact, start or Start.default(parameterization))
    return model


def scales(setting: Setting, model: SingleLayerAttention, run: int = 0) -> tuple[float, float]:
    """mu_QK and mu_OV: least squares along the fixed directions."""
    exact = directions(setting)
    qk, ov = (product[run, 0].detach() for product in model.products())
    return float((qk * exact.qk).sum() / exact.qk.square().sum()), float(
        (ov * exact.ov).sum() / exact.ov.square().sum()
    )


def finish(model: SingleLayerAttention, *arguments, **options) -> State:
    *_, last = train(model, *arguments, **options)
    return last


@pytest.mark.parametrize("setting", [SETTING, CLASS_QUERY], ids=["token", "class"])
@pytest.mark.parametrize("parameterization", Parameterization)
def test_matched_loss_is_predicted_and_the_difference_shrinks_with_the_step(setting, parameterization):
    ratios = [0.1, 30.0]
    differences = []
    for step in (0.02, 0.01):
        model = started(setting, parameterization, runs=2)
        finish(model, exact_population(setting), ratios, step_size=RelativeStep(step), losses=[0.3, 0.01])
        per_run = []
        for run, ratio in enumerate(ratios):
            predicted = at_loss(setting, parameterization, ratio, 0.01)
            mu_qk, mu_ov = scales(setting, model, run)
            per_run.append(max(abs(mu_qk / predicted.mu_qk - 1), abs(mu_ov / predicted.mu_ov - 1)))
        differences.append(per_run)
    coarse, fine = np.array(differences)
    assert (fine < 0.01).all()
    # Gradient descent is Euler's method, of first order: half the step, half the error; more than a quarter is left
    # over for the second order, and for runs whose error is already of the size of the landing's.
    assert (fine < 0.75 * coarse).all()


def test_a_constant_rate_follows_the_equations_in_time():
    rate, steps = 0.05, 2000
    model = started(SETTING, Parameterization.FAFO)
    last = finish(model, exact_population(SETTING), [2.0], step_size=ConstantRate(rate), max_steps=steps)
    assert last.step == steps
    assert float(last.time[0]) == pytest.approx(rate * steps, rel=1e-12)
    predicted = integrate(SETTING, Parameterization.FAFO, 2.0, until_time=rate * steps)
    mu_qk, mu_ov = scales(SETTING, model)
    # Euler's error is of the order of the change in a step, under half a percent here.
    assert mu_qk == pytest.approx(predicted.mu_qk[-1], rel=0.02)
    assert mu_ov == pytest.approx(predicted.mu_ov[-1], rel=0.02)
    assert float(last.loss[0]) == pytest.approx(predicted.loss[-1], rel=0.03)


def test_every_loss_is_passed_exactly():
    model = started(SETTING, Parameterization.CACO, runs=2)
    wanted = [0.5, 0.1, 0.01]
    reached: list[dict[float, float]] = [{}, {}]
    for state in train(model, exact_population(SETTING), [0.1, 10.0], step_size=RelativeStep(0.02), losses=wanted):
        for run in range(2):
            reached[run] |= dict.fromkeys(state.reached[run], float(state.loss[run]))
    for run in range(2):
        assert list(reached[run]) == wanted
        for loss, actual in reached[run].items():
            # The step is shortened by its first order, so what is left is of second order in a step of 2 %.
            assert actual == pytest.approx(loss, rel=0.02**2)


@pytest.mark.parametrize("ratio", [0.1, 10.0])
def test_a_collapsed_run_at_the_rescaled_rate_traces_the_factorized_one(ratio):
    """The review's concrete test: equal initial products, balanced, rate eta 2 sigma mu(t)."""
    start = Start(0.02, 0.05)
    differences = []
    for step in (0.02, 0.01):
        pair = []
        for parameterization, rescaled in ((Parameterization.FAFO, False), (Parameterization.CACO, True)):
            model = started(SETTING, parameterization, start=start)
            last = finish(
                model,
                exact_population(SETTING),
                [ratio],
                step_size=RelativeStep(step),
                losses=[0.05],
                rescaled=rescaled,
            )
            pair.append((*scales(SETTING, model), float(last.time[0])))
        differences.append(np.abs(np.array(pair[1]) / np.array(pair[0]) - 1).max())
    assert differences[1] < 0.01
    assert differences[1] < 0.75 * differences[0]
    # Without the rescaled rate the collapsed run goes elsewhere.
    plain = started(SETTING, Parameterization.CACO, start=start)
    finish(plain, exact_population(SETTING), [ratio], step_size=RelativeStep(0.01), losses=[0.05])
    assert abs(scales(SETTING, plain)[0] / pair[0][0] - 1) > 0.1


@pytest.mark.parametrize(("imbalance", "spread"), [(0.0, 0.0), (1.5, 0.0), (0.0, 1.0)])
def test_no_step_is_larger_than_it_says(imbalance, spread):
    step = 0.02
    model = started(SETTING, Parameterization.FAFO, 2)
    aligned_start(model, directions(SETTING), Start(0.05, 0.05), imbalance, spread)
    options = {"step_size": RelativeStep(step), "losses": [0.05]}
    states = list(train(model, exact_population(SETTING), [0.1, 50.0], **options))
    limits = []
    for before, after in itertools.pairwise(states):
        for run in range(2):
            if not bool(before.active[run]):
                assert float(after.time[run]) == float(before.time[run])
                continue
            assert float(after.time[run] - before.time[run]) == pytest.approx(float(before.rate[run]), rel=1e-9)
            moves = []
            for name in ("qk", "ov"):
                old, new = (getattr(state.attention_weights(run), name)().dense() for state in (before, after))
                moves.append(float((new - old).norm() / old.norm()))
            falls = float(1 - after.loss[run] / before.loss[run])
            # To first order; what is over is of the second, by how much depends on the directions that the start takes
            # among equal singular values.
            assert max(*moves, falls) < step * (1 + 4 * step)
            limits.append((*moves, falls))
    # Somewhere each circuit, and the loss, moves by as much as it may.
    assert all(largest > step * (1 - 2 * step) for largest in np.array(limits).max(axis=0))


def test_a_collapsed_start_leaves_no_trace_in_the_other_circuit():
    """A first step as long as the loss alone allows would carry W_OV off before W_QK had moved at all."""
    model = started(SETTING, Parameterization.FACO)
    early = 0.95 * float(np.log(3))
    finish(model, exact_population(SETTING), [30.0], step_size=RelativeStep(0.01), losses=[early])
    predicted = at_loss(SETTING, Parameterization.FACO, 30.0, early)
    mu_qk, mu_ov = scales(SETTING, model)
    assert mu_qk == pytest.approx(predicted.mu_qk, rel=0.05)
    assert mu_ov == pytest.approx(predicted.mu_ov, rel=0.05)


def test_runs_trained_together_are_the_runs_trained_alone():
    ratios = [0.1, 1.0, 10.0]
    together = started(SETTING, Parameterization.CAFO, runs=3)
    finish(together, exact_population(SETTING), ratios, step_size=RelativeStep(0.02), losses=[0.1])
    for run, ratio in enumerate(ratios):
        alone = started(SETTING, Parameterization.CAFO)
        finish(alone, exact_population(SETTING), [ratio], step_size=RelativeStep(0.02), losses=[0.1])
        np.testing.assert_allclose(scales(SETTING, together, run), scales(SETTING, alone), rtol=1e-10)


def test_sampled_training_is_seeded_and_learns():
    def trained(seed: int) -> tuple[torch.Tensor, float]:
        model = SingleLayerAttention(exact_population(SETTING).embedding.shape[1], 3, Parameterization.FAFO)
        random_start(model, 0)
        generator = torch.Generator().manual_seed(seed)
        last = finish(
            model,
            lambda: sample_population(SETTING, 64, generator),
            [1.0],
            step_size=ConstantRate(0.3),
            max_steps=400,
        )
        return model.get_parameter("W_Q").detach(), float(last.loss[0])

    weights, loss = trained(5)
    assert loss < 0.5 * np.log(3)
    again, _ = trained(5)
    assert torch.equal(weights, again)
    other, _ = trained(6)
    assert not torch.equal(weights, other)


def test_states_keep_their_weights_while_training_goes_on():
    model = started(SETTING, Parameterization.CACO)
    states = list(train(model, exact_population(SETTING), [1.0], step_size=ConstantRate(1.0), max_steps=2))
    assert [state.step for state in states] == [0, 1, 2]
    assert float(states[0].weights["W_OV"].abs().max()) == 0
    moved = states[1].weights["W_OV"] - states[0].weights["W_OV"]
    torch.testing.assert_close(moved, -states[0].ov_gradient, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("ratio", [0.01, 100.0])
def test_each_circuit_that_is_still_at_zero_takes_a_twentieth_of_the_first_step(ratio):
    """There is no distance yet that the step could be small against, so the loss alone limits it, 20 * 20 times."""
    model = started(SETTING, Parameterization.CACO)
    first = next(train(model, exact_population(SETTING), [ratio], step_size=RelativeStep(0.02)))
    power = ratio * first.qk_gradient.square().sum() + first.ov_gradient.square().sum()
    assert first.rate.tolist() == pytest.approx([0.02 / 20**2 * float(first.loss / power)], rel=1e-12)


def test_several_relevant_tokens_compete_and_one_does_not():
    """With m > 1 a difference between tokens of a class grows at large r; the step size has no part in it."""

    def cosine_left(setting: Setting, step: float) -> float:
        model = started(setting, Parameterization.CACO)
        noise = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1e-7 * torch.randn(parameter.shape, generator=noise, dtype=torch.float64))
        finish(model, exact_population(setting), [100.0], step_size=RelativeStep(step), losses=[1e-3])
        exact, qk = directions(setting).qk, model.products()[0][0, 0].detach()
        return float(1 - (qk * exact).sum() / (qk.norm() * exact.norm()))

    competing = Setting(M=3, b=4, m=4, n=16)
    alone = Setting(M=3, b=4, m=1, n=4)
    assert cosine_left(alone, 0.02) < 1e-6
    assert cosine_left(competing, 0.02) > 1e-3
    assert cosine_left(competing, 0.01) > 1e-3


def test_the_rescaled_rate_is_for_one_head():
    exact = directions(SETTING)
    model = SingleLayerAttention(exact.qk.shape[0], SETTING.M, Parameterization.CACO, heads=2)
    with pytest.raises(CallError, match="the rescaled rate needs a model with one head; this one has 2 heads"):
        next(train(model, exact_population(SETTING), [1.0], step_size=ConstantRate(1.0), rescaled=True))


def test_wrong_calls_are_refused():
    model = started(SETTING, Parameterization.CACO)
    population = exact_population(SETTING)
    with pytest.raises(CallError, match="the model has 1 runs, but 2 ratios were given"):
        next(train(model, population, [1.0, 2.0], step_size=ConstantRate(1.0)))
    with pytest.raises(CallError, match="must be positive"):
        next(train(model, population, [0.0], step_size=ConstantRate(1.0)))
    with pytest.raises(CallError, match="rate must be positive, got 0"):
        ConstantRate(0.0)
    with pytest.raises(CallError, match="step must be positive"):
        RelativeStep(-0.1)


def test_divergence_names_the_step():
    model = started(SETTING, Parameterization.FAFO)
    with pytest.raises(QkovError, match=r"training diverged at step \d+"):
        finish(model, exact_population(SETTING), [1.0], step_size=ConstantRate(1e200), max_steps=50)
