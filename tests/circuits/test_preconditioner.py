"""Omega and the exact operator, compared with dense (pq) x (pq) Kronecker sums."""

import numpy as np
import pytest
import torch
from qkov.circuits import CallError, Circuit, Preconditioner, agreement, exact_step, imbalance
from scipy.linalg import sqrtm
from torch import Tensor


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def root(matrix: np.ndarray) -> np.ndarray:
    """Square root of a positive semidefinite matrix, from its own eigenvectors."""
    values, vectors = np.linalg.eigh(matrix)
    return (vectors * np.sqrt(values.clip(0))) @ vectors.T


def kronecker_sum(rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """The operator G -> rows G + G columns on vec(G), columns stacked."""
    return np.kron(np.eye(len(columns)), rows) + np.kron(columns, np.eye(len(rows)))


def omega(circuit: Circuit) -> np.ndarray:
    matrix = circuit.dense().numpy()
    return kronecker_sum(root(matrix @ matrix.T), root(matrix.T @ matrix))


def exact(circuit: Circuit) -> np.ndarray:
    assert circuit.right is not None
    left, right = circuit.left.numpy(), circuit.right.numpy()
    return kronecker_sum(left @ left.T, right.T @ right)


def on(operator: np.ndarray, gradient: Tensor) -> np.ndarray:
    flat = operator @ gradient.numpy().ravel(order="F")
    return flat.reshape(gradient.shape, order="F")


def balanced(rows: int, columns: int, rank: int, seed: int = 0) -> Circuit:
    matrix = random(rows, rank, seed=seed).numpy() @ random(rank, columns, seed=seed + 1).numpy()
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    scale = np.sqrt(values[:rank])
    return Circuit(torch.tensor(left[:, :rank] * scale), torch.tensor(scale[:, None] * right[:rank]))


CIRCUITS = {
    "tall": Circuit(random(6, 3), random(3, 4, seed=1)),
    "wide": Circuit(random(3, 2), 5 * random(2, 5, seed=1)),
    "rank beyond size": Circuit(random(3, 7), random(7, 4, seed=1)),
    "rank-deficient": Circuit(random(5, 1) * torch.ones(3), random(3, 5, seed=1)),
    "collapsed": Circuit(random(5, 4)),
}
FACTORED = {name: circuit for name, circuit in CIRCUITS.items() if name != "collapsed"}


@pytest.mark.parametrize("circuit", CIRCUITS.values(), ids=CIRCUITS)
def test_apply_and_rates_are_those_of_the_kronecker_sum(circuit: Circuit) -> None:
    operator, gradient, preconditioner = omega(circuit), random(*circuit.shape, seed=9), Preconditioner(circuit)
    # The dense root of a singular matrix is good to the root of the machine's precision only.
    np.testing.assert_allclose(preconditioner.apply(gradient), on(operator, gradient), rtol=0, atol=2e-6)
    spectrum = np.linalg.eigvalsh(operator)
    values, counts = preconditioner.eigenvalues
    assert counts.sum().item() == len(operator)
    repeated = np.sort(np.repeat(values.numpy(), counts.numpy()))
    np.testing.assert_allclose(repeated, spectrum, rtol=0, atol=2e-6)
    assert preconditioner.largest.item() == pytest.approx(spectrum[-1], rel=1e-9)
    assert preconditioner.trace.item() == pytest.approx(np.trace(operator), rel=1e-6)
    assert preconditioner.mean_rate.item() == pytest.approx(np.trace(operator) / len(operator), rel=1e-6)
    along = circuit.dense().numpy().ravel(order="F")
    quotient = along @ operator @ along / (along @ along)
    assert preconditioner.self_rate.item() == pytest.approx(quotient, rel=1e-9)


def test_apply_agrees_with_the_principal_square_root() -> None:
    circuit, gradient = Circuit(random(4, 4), random(4, 4, seed=1)), random(4, 4, seed=2)
    matrix = circuit.dense().numpy()
    expected = sqrtm(matrix @ matrix.T) @ gradient.numpy() + gradient.numpy() @ sqrtm(matrix.T @ matrix)
    np.testing.assert_allclose(Preconditioner(circuit).apply(gradient), expected, rtol=1e-9)


@pytest.mark.parametrize("circuit", FACTORED.values(), ids=FACTORED)
def test_exact_step_is_its_kronecker_sum(circuit: Circuit) -> None:
    gradient = random(*circuit.shape, seed=9)
    np.testing.assert_allclose(exact_step(circuit, gradient), on(exact(circuit), gradient), rtol=0, atol=1e-12)


def test_exact_step_is_the_velocity_of_gradient_descent_on_the_factors() -> None:
    left, right, gradient = random(5, 2), random(2, 4, seed=1), random(5, 4, seed=2)
    rate = 1e-6
    moved = (left - rate * gradient @ right.mT) @ (right - rate * left.mT @ gradient)
    back = (left + rate * gradient @ right.mT) @ (right + rate * left.mT @ gradient)
    velocity = (back - moved) / (2 * rate)
    np.testing.assert_allclose(exact_step(Circuit(left, right), gradient), velocity, rtol=1e-7, atol=1e-8)


def test_omega_is_exact_only_for_balanced_factors() -> None:
    circuit, gradient = balanced(6, 5, 3), random(6, 5, seed=9)
    assert circuit.right is not None
    step = exact_step(circuit, gradient)
    np.testing.assert_allclose(Preconditioner(circuit).apply(gradient), step, rtol=0, atol=1e-13)
    assert imbalance(circuit).item() < 1e-15
    rows_cosine, rows_difference, columns_cosine, columns_difference = agreement(circuit)
    assert max(rows_difference.item(), columns_difference.item()) < 1e-14
    assert min(rows_cosine.item(), columns_cosine.item()) > 1 - 1e-14

    stretched = Circuit(2 * circuit.left, circuit.right / 2)
    np.testing.assert_allclose(stretched.dense(), circuit.dense(), rtol=0, atol=1e-14)
    difference = (exact_step(stretched, gradient) - Preconditioner(stretched).apply(gradient)).norm() / step.norm()
    assert difference > 0.1
    # A A' is 4 times (CC')^{1/2} and B'B a quarter of (C'C)^{1/2}.
    assert imbalance(stretched).item() == pytest.approx((4 - 1 / 4) / (4 + 1 / 4), rel=1e-12)
    assert agreement(stretched).rows_difference.item() == pytest.approx(3 / 4, rel=1e-12)
    assert agreement(stretched).columns_difference.item() == pytest.approx(3, rel=1e-12)
    assert agreement(stretched).rows_cosine.item() == pytest.approx(1, rel=1e-14)


def test_balanced_factors_in_another_basis_stay_balanced_to_the_last_digits() -> None:
    circuit = balanced(60, 80, 16)
    assert circuit.right is not None
    turn = torch.linalg.qr(random(16, 16, seed=5)).Q
    turned = Circuit(circuit.left @ turn, turn.mT @ circuit.right)
    assert imbalance(turned).item() < 1e-14
    assert agreement(turned).rows_difference.item() < 1e-13
    assert agreement(turned).columns_difference.item() < 1e-13


@pytest.mark.parametrize("circuit", FACTORED.values(), ids=FACTORED)
def test_agreement_and_imbalance_against_dense_matrices(circuit: Circuit) -> None:
    assert circuit.right is not None
    left, right, matrix = circuit.left.numpy(), circuit.right.numpy(), circuit.dense().numpy()
    sides = [(root(matrix @ matrix.T), left @ left.T), (root(matrix.T @ matrix), right.T @ right)]
    expected = []
    for side, operator in sides:
        norms = np.linalg.norm(side) * np.linalg.norm(operator)
        expected += [(side * operator).sum() / norms, np.linalg.norm(side - operator) / np.linalg.norm(operator)]
    np.testing.assert_allclose(torch.stack(list(agreement(circuit))), expected, rtol=1e-6)
    first, second = left.T @ left, right @ right.T
    size = np.linalg.norm(first) + np.linalg.norm(second)
    assert imbalance(circuit).item() == pytest.approx(np.linalg.norm(first - second) / size, rel=1e-12)


def test_a_batch_gives_the_results_of_its_matrices() -> None:
    left, right, gradient = random(2, 1, 5, 3), random(4, 3, 6, seed=1), random(4, 5, 6, seed=2)
    circuit = Circuit(left, right)
    applied, stepped = Preconditioner(circuit).apply(gradient), exact_step(circuit, gradient)
    values = Preconditioner(circuit).eigenvalues.values
    agreed, imbalanced = agreement(circuit), imbalance(circuit)
    for i in range(2):
        for j in range(4):
            one = Circuit(left[i, 0], right[j])
            np.testing.assert_allclose(applied[i, j], on(omega(one), gradient[j]), rtol=0, atol=1e-6)
            np.testing.assert_allclose(stepped[i, j], on(exact(one), gradient[j]), rtol=0, atol=1e-12)
            np.testing.assert_allclose(values[i, j].max(), np.linalg.eigvalsh(omega(one))[-1], rtol=1e-9)
            for batched, single in zip(agreed, agreement(one), strict=True):
                np.testing.assert_allclose(batched[i, j], single, rtol=1e-12)
            np.testing.assert_allclose(imbalanced[i, j], imbalance(one), rtol=1e-12)


def test_zero_factors() -> None:
    zero, some = torch.zeros(4, 2, dtype=torch.float64), random(2, 5)
    both = Circuit(zero, 0 * some)
    assert Preconditioner(both).self_rate.item() == Preconditioner(both).trace.item() == 0
    assert (Preconditioner(both).apply(random(4, 5)) == 0).all()
    assert imbalance(both).item() == 0
    agreed = agreement(both)
    assert agreed.rows_difference.item() == agreed.columns_difference.item() == 0
    assert agreed.rows_cosine.isnan()
    assert agreed.columns_cosine.isnan()

    one = Circuit(zero, some)
    assert imbalance(one).item() == pytest.approx(1, rel=1e-15)
    assert agreement(one).rows_difference.item() == 0
    assert agreement(one).columns_difference.item() == pytest.approx(1, rel=1e-15)
    np.testing.assert_allclose(exact_step(one, random(4, 5)), random(4, 5) @ (some.mT @ some), rtol=1e-12)


def test_small_circuits_have_a_self_rate() -> None:
    circuit = Circuit(random(6, 3), random(3, 4, seed=1))
    small = Circuit(1e-120 * random(6, 3), random(3, 4, seed=1))
    expected = 1e-120 * Preconditioner(circuit).self_rate.item()
    assert Preconditioner(small).self_rate.item() == pytest.approx(expected, rel=1e-12)


def test_no_square_matrix_of_a_side_is_formed() -> None:
    # (CC')^{1/2} alone would take 320 gigabytes.
    left = torch.eye(200_000, 2, dtype=torch.float64)
    circuit, gradient = Circuit(left, random(2, 3)), torch.ones(200_000, 3, dtype=torch.float64)
    small = Circuit(left[:2], random(2, 3))
    np.testing.assert_allclose(
        Preconditioner(circuit).apply(gradient)[:2], Preconditioner(small).apply(gradient[:2]), rtol=1e-12
    )
    np.testing.assert_allclose(exact_step(circuit, gradient)[:2], exact_step(small, gradient[:2]), rtol=1e-12)
    assert Preconditioner(circuit).eigenvalues.multiplicities.sum().item() == 600_000
    assert agreement(circuit).rows_difference.item() == pytest.approx(agreement(small).rows_difference.item())


def test_wrong_calls_are_refused_by_name() -> None:
    collapsed, circuit = Circuit(random(4, 5)), Circuit(random(4, 2), random(2, 5))
    with pytest.raises(CallError, match=r"exact_step.*collapsed circuit has no factors"):
        exact_step(collapsed, random(4, 5))
    with pytest.raises(CallError, match=r"agreement.*collapsed circuit has no factors"):
        agreement(collapsed)
    with pytest.raises(CallError, match=r"imbalance.*collapsed circuit has no factors"):
        imbalance(collapsed)
    for gradient in (random(5, 4), random(2, 4, 5), random(1, 5)):
        with pytest.raises(CallError, match=r"shape \[4, 5\]"):
            exact_step(circuit, gradient)
        with pytest.raises(CallError, match=r"shape \[4, 5\]"):
            Preconditioner(circuit).apply(gradient)


def test_the_rates_of_a_batch_are_those_of_its_circuits() -> None:
    left, right = random(3, 5, 2), random(3, 2, 4, seed=1)
    batch = Preconditioner(Circuit(left, right))
    alone = [omega(Circuit(left[number], right[number])) for number in range(3)]
    np.testing.assert_allclose(batch.trace, [np.trace(operator) for operator in alone], rtol=1e-6)
    np.testing.assert_allclose(batch.mean_rate, [np.trace(operator) / 20 for operator in alone], rtol=1e-6)
