"""The reduced equations against dense gradients of the attention layer on a whole population."""

import itertools

import numpy as np
import pytest
from qkov.analyses.dynamics import Parameterization, Setting, Start, integrate, rates
from qkov.analyses.dynamics.equations import preconditioner
from qkov.circuits import CallError
from scipy.integrate import solve_ivp

SMALL = [
    Setting(2, 2, 1, 2, "token"),
    Setting(2, 2, 1, 2, "class"),
    Setting(3, 4, 2, 4, "token"),
    Setting(3, 4, 2, 4, "class"),
]
PAPER = Setting(20, 50, 5, 50)


def population(setting):
    """Every cyclic window of every class with every query, and +/- background pairs: keys, queries, labels."""
    tokens = setting.M * setting.b
    basis = np.eye(tokens + setting.n // 2 + setting.M)
    background = np.concatenate([basis[tokens : tokens + setting.n // 2]] * 2) * np.repeat(
        [[1], [-1]], setting.n // 2, 0
    )
    keys, queries, labels = [], [], []
    for label, window in itertools.product(range(setting.M), range(setting.b)):
        of_class = [label * setting.b + (window + i) % setting.b for i in range(setting.m)]
        own = (
            [tokens + setting.n // 2 + label] if setting.query == "class" else label * setting.b + np.arange(setting.b)
        )
        for query in own:
            keys.append(np.concatenate([basis[of_class], background]))
            queries.append(basis[query])
            labels.append(label)
    return np.array(keys), np.array(queries), np.array(labels)


def directions(setting):
    """C_QK and C_OV."""
    tokens = setting.M * setting.b
    d_model = tokens + setting.n // 2 + setting.M
    sums = np.zeros((setting.M, d_model))
    for label in range(setting.M):
        sums[label, label * setting.b : (label + 1) * setting.b] = 1
    side = sums if setting.query == "token" else np.eye(d_model)[tokens + setting.n // 2 :]
    return sums.T @ side, (np.eye(setting.M) - 1 / setting.M) @ sums


def gradients(data, w_qk, w_ov):
    """Mean cross-entropy over the population and its gradients in W_QK and W_OV, by the chain rule."""
    keys, queries, labels = data
    scores = np.einsum("sjd,de,se->sj", keys, w_qk, queries)
    pattern = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    read = np.einsum("sj,sjd->sd", pattern, keys)
    logits = read @ w_ov.T
    probability = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    loss = -np.log(probability[np.arange(len(labels)), labels]).mean()
    by_logits = (probability - np.eye(len(w_ov))[labels]) / len(labels)
    by_pattern = np.einsum("sjd,sd->sj", keys, by_logits @ w_ov)
    by_scores = pattern * (by_pattern - (pattern * by_pattern).sum(1, keepdims=True))
    return loss, np.einsum("sjd,sj,se->de", keys, by_scores, queries), by_logits.T @ read


def factors(scale, direction):
    """Balanced factors of scale * direction."""
    left, singular, right = np.linalg.svd(direction)
    rank = int((singular > 1e-9).sum())
    root = np.sqrt(scale * singular[:rank])
    return left[:, :rank] * root, root[:, None] * right[:rank]


@pytest.mark.parametrize("setting", SMALL)
@pytest.mark.parametrize(("mu_qk", "mu_ov"), [(0.0, 0.4), (0.7, 2.0), (2.5, 5.0)])
def test_collapsed_rates_and_loss_are_those_of_the_layer(setting, mu_qk, mu_ov):
    c_qk, c_ov = directions(setting)
    loss, g_qk, g_ov = gradients(population(setting), mu_qk * c_qk, mu_ov * c_ov)
    rate_qk, rate_ov = rates(setting, Parameterization.CACO, 3.0, mu_qk, mu_ov)
    np.testing.assert_allclose(loss, setting.loss(mu_qk, mu_ov), rtol=1e-13)
    np.testing.assert_allclose(-3.0 * g_qk, rate_qk * c_qk, rtol=0, atol=1e-13 * rate_qk)
    np.testing.assert_allclose(-g_ov, rate_ov * c_ov, rtol=0, atol=1e-13 * rate_ov)


@pytest.mark.parametrize("setting", SMALL)
def test_factorized_rates_are_those_of_the_factors(setting):
    c_qk, c_ov = directions(setting)
    mu_qk, mu_ov, r = 0.3, 1.2, 0.7
    _, g_qk, g_ov = gradients(population(setting), mu_qk * c_qk, mu_ov * c_ov)
    rate_qk, rate_ov = rates(setting, Parameterization.FAFO, r, mu_qk, mu_ov)
    for gradient, scale, direction, rate in ((r * g_qk, mu_qk, c_qk, rate_qk), (g_ov, mu_ov, c_ov, rate_ov)):
        left, right = factors(scale, direction)
        velocity = -(left @ left.T @ gradient + gradient @ right.T @ right)
        np.testing.assert_allclose(velocity, rate * direction, rtol=0, atol=1e-13 * rate)


@pytest.mark.parametrize("setting", SMALL[:2])
@pytest.mark.parametrize("parameterization", list(Parameterization))
def test_flow_of_the_whole_layer_follows_the_reduced_equations(setting, parameterization):
    """Gradient flow on every entry of the matrices, or of their factors, from the start to a loss near 0.1."""
    data, (c_qk, c_ov), r = population(setting), directions(setting), 2.0
    start = Start.default(parameterization)
    pieces = []
    for factorized, scale, direction in (
        (parameterization.factorized_attention, start.mu_qk, c_qk),
        (parameterization.factorized_output, start.mu_ov, c_ov),
    ):
        pieces.append(factors(scale, direction) if factorized else (scale * direction,))
    shapes = [matrix.shape for piece in pieces for matrix in piece]
    ends = np.cumsum([np.prod(shape) for shape in shapes])

    def unpack(state):
        flat = iter(part.reshape(shape) for part, shape in zip(np.split(state, ends[:-1]), shapes, strict=True))
        return [tuple(next(flat) for _ in piece) for piece in pieces]

    def product(piece):
        return piece[0] @ piece[1] if len(piece) == 2 else piece[0]

    def velocity(_, state):
        circuits = unpack(state)
        _, g_qk, g_ov = gradients(data, *map(product, circuits))
        speeds = []
        for piece, gradient in zip(circuits, (r * g_qk, g_ov), strict=True):
            if len(piece) == 2:
                speeds += [-gradient @ piece[1].T, -piece[0].T @ gradient]
            else:
                speeds.append(-gradient)
        return np.concatenate([speed.ravel() for speed in speeds])

    reduced = integrate(setting, parameterization, r, until_loss=0.1)
    state = np.concatenate([matrix.ravel() for piece in pieces for matrix in piece])
    solved = solve_ivp(velocity, (0, reduced.time[-1]), state, method="DOP853", rtol=1e-9, atol=1e-12)
    w_qk, w_ov = map(product, unpack(solved.y[:, -1]))
    np.testing.assert_allclose(w_qk, reduced.mu_qk[-1] * c_qk, rtol=0, atol=1e-6 * reduced.mu_qk[-1])
    np.testing.assert_allclose(w_ov, reduced.mu_ov[-1] * c_ov, rtol=0, atol=1e-6 * reduced.mu_ov[-1])


def test_preconditioner_is_one_for_a_collapsed_circuit():
    setting = Setting(4, 9, 2, 6, "token")
    assert preconditioner(setting, Parameterization.CACO, 0.5, 2.0) == (1.0, 1.0)
    assert preconditioner(setting, Parameterization.FACO, 0.5, 2.0) == (9.0, 1.0)
    assert preconditioner(setting, Parameterization.CAFO, 0.5, 2.0) == (1.0, 12.0)


def test_rates_at_a_huge_margin_vanish_without_overflow():
    assert rates(PAPER, Parameterization.FAFO, 1.0, 20.0, 1e4) == (0.0, 0.0)


@pytest.mark.parametrize("parameterization", list(Parameterization))
def test_dense_solution_satisfies_the_equations_between_its_steps(parameterization):
    flow = integrate(PAPER, parameterization, 1.0, until_loss=1e-6)
    time = np.geomspace(1e-3, flow.time[-1] / 2, 40)
    step = 1e-4 * time[:, None]
    here, after, before = (flow.at(time * factor) for factor in (1, 1 + 1e-4, 1 - 1e-4))
    scales = np.stack([here.mu_qk, here.mu_ov], 1)
    speed = np.array([rates(PAPER, parameterization, 1.0, *pair) for pair in scales.tolist()])
    measured = np.stack([after.mu_qk - before.mu_qk, after.mu_ov - before.mu_ov], 1) / (2 * step)
    # (1e-4)^2 of curvature, and the solver's own error (1e-13 absolute, 1e-12 a step relative) over the difference
    allowed = 1e-6 * np.abs(speed) + (1e-12 + 1e-11 * scales) / step
    np.testing.assert_array_less(np.abs(measured - speed), allowed)


@pytest.mark.parametrize("parameterization", list(Parameterization))
@pytest.mark.parametrize("r", [1e-3, 1e3])
def test_a_loss_of_1e_12_is_reached(parameterization, r):
    flow = integrate(PAPER, parameterization, r, until_loss=1e-12)
    assert flow.loss[-1] == pytest.approx(1e-12, rel=1e-9)
    assert np.all(np.diff(flow.loss) < 0)
    assert np.all(np.diff(flow.attention) >= 0)
    assert flow.time[-1] > 1e11


def test_until_time_and_until_loss_agree():
    by_loss = integrate(PAPER, Parameterization.FACO, 0.1, until_loss=1e-3)
    by_time = integrate(PAPER, Parameterization.FACO, 0.1, until_time=by_loss.time[-1])
    assert by_time.loss[-1] == pytest.approx(1e-3, rel=1e-8)
    assert by_time.time[-1] == pytest.approx(by_loss.time[-1], rel=1e-13)
    middle = by_loss.at(by_loss.time[::7])
    np.testing.assert_allclose(middle.mu_qk, by_loss.mu_qk[::7], rtol=1e-10)
    assert len(middle.attention) == len(middle.loss) == len(middle.time)


def test_rate_ratio_is_a_change_of_clock_for_qk_alone():
    """At mu_OV fixed, dmu_QK/dt is proportional to r and dmu_OV/dt does not depend on it."""
    slow, fast = (rates(PAPER, Parameterization.FAFO, r, 0.4, 3.0) for r in (0.5, 5.0))
    assert fast[0] == pytest.approx(10 * slow[0], rel=1e-14)
    assert fast[1] == slow[1]


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({}, "either until_time or until_loss"),
        ({"until_time": 1.0, "until_loss": 0.1}, "either until_time or until_loss"),
        ({"until_time": -1.0}, "until_time must be positive"),
        ({"until_loss": 3.5}, "out of reach"),
        ({"until_loss": 0.1, "start": Start(0.0, 0.0)}, "saddle"),
    ],
)
def test_wrong_calls(limits, words):
    with pytest.raises(CallError, match=words):
        integrate(PAPER, Parameterization.CAFO, 1.0, **limits)


def test_times_outside_the_flow_are_refused():
    flow = integrate(PAPER, Parameterization.CACO, 1.0, until_time=10.0)
    with pytest.raises(CallError, match=r"must lie in \[0, 10\]"):
        flow.at(np.array([1.0, 11.0]))
