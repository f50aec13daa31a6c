"""Saved runs: the same seed and settings give the same files, and what they say of a step is so."""

import numpy as np
import pytest
import torch
from qkov.analyses.dynamics import (
    Parameterization,
    RelativeStep,
    Setting,
    SingleLayerAttention,
    Start,
    aligned_start,
    directions,
    exact_population,
    train,
)
from qkov.analyses.dynamics.saved_runs import compare_step, log_spaced_steps, save_runs
from qkov.circuits import Circuit, find_checkpoints, open_checkpoint

SETTING = Setting(M=3, b=2, m=1, n=2)


def saved(folder, imbalance=0.0):
    exact = directions(SETTING)
    model = SingleLayerAttention(exact.qk.shape[0], 3, Parameterization.FAFO, d_head=3, runs=2)
    aligned_start(model, exact, Start(0.1, 0.1), imbalance)
    ratios = [0.5, 5.0]
    states = train(model, exact_population(SETTING), ratios, step_size=RelativeStep(0.02), losses=[0.5, 0.05])
    folders = [folder / "slow", folder / "fast"]
    reached = save_runs(states, folders, [{"ratio": ratio} for ratio in ratios], ratios, log_spaced_steps(1000, 10))
    return folders, reached


def test_log_spaced_steps():
    assert log_spaced_steps(1000, 4) == {0, 1, 10, 100, 1000}


def test_runs_are_saved_at_their_steps_and_losses_with_what_a_reader_needs(tmp_path):
    folders, reached = saved(tmp_path)
    for folder, losses in zip(folders, reached, strict=True):
        checkpoints = find_checkpoints(folder)
        steps = [checkpoint.step for checkpoint in checkpoints]
        assert steps[0] == 0
        assert steps == sorted(steps)
        assert set(losses.values()) <= set(steps)
        assert list(losses) == [0.5, 0.05]
        assert steps[-1] == losses[0.05]
        last = open_checkpoint(checkpoints[-1].address)
        assert abs(last.scalars["loss"] / 0.05 - 1) < 1e-3
        (weights,) = last.layers()
        assert weights.W_Q is not None
        assert weights.W_Q.dtype == torch.float64


def test_the_same_run_gives_the_same_bytes(tmp_path):
    first, _ = saved(tmp_path / "a")
    second, _ = saved(tmp_path / "b")
    for one, other in zip(first, second, strict=True):
        names = sorted(path.name for path in one.iterdir())
        assert names == sorted(path.name for path in other.iterdir())
        assert all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


def test_omega_tells_the_step_of_balanced_factors_only(tmp_path):
    for imbalance, tells in ((0.0, True), (1.5, False)):
        folders, _ = saved(tmp_path / str(imbalance), imbalance)
        for checkpoint in find_checkpoints(folders[0])[:3]:
            scalars = open_checkpoint(checkpoint.address).scalars
            for circuit in ("qk", "ov"):
                assert (scalars[f"omega_cosine_{circuit}"] > 0.999) == tells
                # The exact operator leaves out only the second order of the step, here 1 % of the first.
                assert scalars[f"exact_error_{circuit}"] < 0.02


def test_a_step_up_the_gradient_has_a_cosine_below_zero():
    generator = torch.Generator().manual_seed(0)
    A, B, G = (torch.randn(1, *shape, generator=generator, dtype=torch.float64) for shape in ((4, 4), (4, 4), (4, 4)))
    up = Circuit(A @ B + 1e-3 * (A @ A.mT @ G + G @ B.mT @ B))
    figures = compare_step(Circuit(A, B), up, G, 1e-3)
    assert figures["exact_cosine"] == pytest.approx(-1)
    assert figures["gradient_cosine"] < 0
    assert figures["exact_error"] == pytest.approx(2)


def test_compare_step_against_dense_algebra():
    rng = np.random.default_rng(0)
    A, B, G_A, G_B = (rng.standard_normal(shape) for shape in ((6, 2), (2, 5), (6, 2), (2, 5)))
    G = rng.standard_normal((6, 5))
    rate = 1e-3
    after = (A + rate * G_A) @ (B + rate * G_B)
    figures = compare_step(
        Circuit(torch.tensor(A)[None], torch.tensor(B)[None]),
        Circuit(torch.tensor(after)[None]),
        torch.tensor(G)[None],
        rate,
    )
    C = A @ B
    left, s, right = np.linalg.svd(C, full_matrices=False)
    omega = (left * s) @ left.T @ G + G @ (right.T * s) @ right
    exact = A @ A.T @ G + G @ B.T @ B
    taken = after - C
    assert figures["gradient_cosine"] == pytest.approx(
        np.sum(-G * taken) / np.linalg.norm(G) / np.linalg.norm(taken), rel=1e-10
    )
    best = np.sum(G * taken) / np.sum(G * G)
    assert figures["gradient_error"] == pytest.approx(
        np.linalg.norm(taken - best * G) / np.linalg.norm(taken), rel=1e-8
    )
    for name, step in (("omega", -rate * omega), ("exact", -rate * exact)):
        cosine = np.sum(step * taken) / np.linalg.norm(step) / np.linalg.norm(taken)
        np.testing.assert_allclose(figures[f"{name}_cosine"], cosine, rtol=1e-10)
        error = np.linalg.norm(taken - step) / np.linalg.norm(taken)
        np.testing.assert_allclose(figures[f"{name}_error"], error, rtol=1e-10)
