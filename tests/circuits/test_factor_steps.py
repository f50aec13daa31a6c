"""A training step seen through the gradients of the factors, compared with dense matrices and with autograd."""

import numpy as np
import pytest
import torch
from qkov.circuits import CallError, Circuit
from qkov.circuits.algebra import factor_steps
from qkov.circuits.algebra.factor_steps import (
    LARGEST_DISAGREEMENT,
    OMEGA_QUANTITIES,
    STEP_QUANTITIES,
    exact_step_of,
    gradient_disagreement,
    measure_step,
    omega_factors,
)

RATE = 1e-3


def drawn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def low_rank(rows, columns, rank):
    return drawn(2, rows, rank) @ drawn(2, rank, columns)


def factors(kind):
    torch.manual_seed(0)
    return {
        "ordinary": lambda: (drawn(2, 12, 4), drawn(2, 4, 9)),
        "one singular": lambda: (low_rank(12, 4, 2), drawn(2, 4, 9)),
        "both singular": lambda: (low_rank(12, 4, 3), low_rank(4, 9, 2)),
        "one zero": lambda: (torch.zeros(2, 12, 4, dtype=torch.float64), drawn(2, 4, 9)),
        "wider inside": lambda: (drawn(2, 3, 6), drawn(2, 6, 5)),
        "badly scaled": lambda: (drawn(2, 12, 4) * torch.tensor([1, 1e-3, 1e-6, 1e-9]), drawn(2, 4, 9)),
        "of two sizes": lambda: (1e6 * drawn(2, 12, 4), 1e-6 * drawn(2, 4, 9)),
    }[kind]()


KINDS = ("ordinary", "one singular", "both singular", "one zero", "wider inside", "badly scaled", "of two sizes")


def loss_of(C):
    torch.manual_seed(1)
    read = drawn(7, C.shape[-1])
    return (C @ read.mT).tanh().square().sum() + (drawn(*C.shape) * C).sum()


def gradients_of(A, B):
    """Return the gradients of the factors, and of the product as a leaf, by autograd."""
    A, B = A.clone().requires_grad_(), B.clone().requires_grad_()
    C = (A @ B).detach().requires_grad_()
    (G,) = torch.autograd.grad(loss_of(C), C)
    return *torch.autograd.grad(loss_of(A @ B), (A, B)), G


def dense_omega(C, G):
    """Return Omega(C) G from the dense singular value decomposition C = U S V."""
    U, S, V = (torch.from_numpy(part) for part in np.linalg.svd(C.numpy(), full_matrices=False))
    return (U * S[:, None]) @ U.mT @ G + G @ V.mT @ (S[..., None] * V)


def dense_exact(A, B, G):
    return A @ A.mT @ G + G @ B.mT @ B


@pytest.mark.parametrize("kind", KINDS)
def test_both_steps_equal_those_of_the_dense_gradient(kind):
    A, B = factors(kind)
    G_A, G_B, G = gradients_of(A, B)
    circuit, gradients = Circuit(A, B), Circuit(G_A, G_B)
    exact = dense_exact(A, B, G)
    torch.testing.assert_close(exact_step_of(circuit, gradients).dense(), exact, rtol=0, atol=1e-13 * exact.norm())
    omega = dense_omega(A @ B, G)
    found = exact_step_of(omega_factors(circuit), gradients).dense()
    torch.testing.assert_close(found, omega, rtol=0, atol=1e-13 * A.norm() * B.norm() * G.norm())
    assert (gradient_disagreement(circuit, gradients) < 1e-12).all()


@pytest.mark.parametrize("kind", KINDS)
def test_quantities_equal_those_of_the_dense_steps(kind):
    A, B = factors(kind)
    G_A, G_B, G = gradients_of(A, B)
    after = A - RATE * (G_A + 0.3 * drawn(*A.shape)), B - RATE * (G_B + 0.3 * drawn(*B.shape))
    figures = measure_step(Circuit(A, B), Circuit(G_A, G_B), Circuit(*after))
    assert tuple(figures) == STEP_QUANTITIES
    exact, omega = dense_exact(A, B, G), dense_omega(A @ B, G)
    taken = after[0] @ after[1] - A @ B
    flat = {"exact": exact.flatten(1), "omega": omega.flatten(1), "taken": taken.flatten(1)}
    sizes = {name: step.norm(dim=1) for name, step in flat.items()}

    def cosine(one, other):
        return (flat[one] * flat[other]).sum(1) / (sizes[one] * sizes[other])

    expected = {
        "exact_step_norm": sizes["exact"],
        "omega_step_norm": sizes["omega"],
        "omega_cosine": cosine("omega", "exact"),
        "omega_relative_error": (flat["omega"] - flat["exact"]).norm(dim=1) / sizes["exact"],
        "taken_step_norm": sizes["taken"],
        "taken_exact_cosine": -cosine("taken", "exact"),
        "taken_omega_cosine": -cosine("taken", "omega"),
        "taken_rate": -(flat["taken"] * flat["exact"]).sum(1) / sizes["exact"].square(),
    }
    for name, value in expected.items():
        torch.testing.assert_close(figures[name], value, rtol=1e-6, atol=1e-12, equal_nan=True, msg=name)
    assert (kind == "one zero") == bool(figures["omega_cosine"].isnan().all())


@pytest.mark.parametrize("size", [1.0, 1e-5, 1e-9])
def test_omega_is_the_exact_step_for_balanced_factors(size):
    torch.manual_seed(0)
    left, right = (torch.linalg.qr(drawn(2, rows, 4)).Q for rows in (12, 9))
    rotation = torch.linalg.qr(drawn(4, 4)).Q
    scale = size * torch.tensor([1.0, 0.5, 0.1, 0.01], dtype=torch.float64).diag().sqrt()
    A, B = left @ scale @ rotation, rotation.mT @ scale @ right.mT
    G_A, G_B, _ = gradients_of(A, B)
    figures = measure_step(Circuit(A, B), Circuit(G_A, G_B), Circuit(A - RATE * G_A, B - RATE * G_B))
    torch.testing.assert_close(figures["omega_cosine"], torch.ones(2, dtype=torch.float64), rtol=0, atol=1e-10)
    assert (figures["omega_relative_error"] < 1e-10).all()


def test_gradient_descent_takes_the_exact_step_up_to_second_order():
    A, B = factors("ordinary")
    G_A, G_B, _ = gradients_of(A, B)
    circuit, gradients = Circuit(A, B), Circuit(G_A, G_B)
    after = Circuit(A - RATE * G_A, B - RATE * G_B)
    exact = exact_step_of(circuit, gradients).dense()
    expected = -RATE * exact + RATE**2 * G_A @ G_B
    torch.testing.assert_close((after - circuit).dense(), expected, rtol=1e-11, atol=1e-12)
    rate = measure_step(circuit, gradients, after)["taken_rate"]
    second = (G_A @ G_B * exact).sum((1, 2)) / exact.square().sum((1, 2))
    torch.testing.assert_close(rate, RATE - RATE**2 * second, rtol=1e-11, atol=0)


def test_the_smallest_steps_are_measured():
    """With whole multiples of powers of two the factors after the step are exact; the products would not be."""
    A, B = factors("ordinary")
    A, D = ((1024 * matrix).round() / 1024 for matrix in (A, drawn(*A.shape)))
    small = 2.0**-29
    figures = measure_step(Circuit(A, B), Circuit(D @ B @ B.mT, A.mT @ D @ B), Circuit(A + small * D, B))
    torch.testing.assert_close(figures["taken_step_norm"], small * (D @ B).flatten(1).norm(dim=1), rtol=1e-12, atol=0)


@pytest.mark.parametrize(("of_factors", "of_loss"), [(2.0**330, 1.0), (2.0**-330, 1.0), (1.0, 2.0**-600)])
def test_units_do_not_matter(of_factors, of_loss):
    """Powers of two scale exactly, and the squares of these leave the range of float64."""
    A, B = factors("ordinary")
    G_A, G_B, _ = gradients_of(A, B)
    after = A - RATE * G_A * (1 + 0.3 * drawn(*A.shape)), B - RATE * G_B
    wanted = measure_step(Circuit(A, B), Circuit(G_A, G_B), Circuit(*after))
    of_gradients = of_factors * of_loss
    found = measure_step(
        Circuit(of_factors * A, of_factors * B),
        Circuit(of_gradients * G_A, of_gradients * G_B),
        Circuit(of_factors * after[0], of_factors * after[1]),
    )
    units = {
        "exact_step_norm": of_factors * of_gradients,
        "omega_step_norm": of_factors * of_gradients,
        "taken_step_norm": of_factors * of_factors,
        "taken_rate": 1 / of_loss,
    }
    for name in STEP_QUANTITIES:
        torch.testing.assert_close(found[name] / units.get(name, 1.0), wanted[name], rtol=1e-11, atol=1e-15, msg=name)


def test_noise_of_gradients_in_null_directions_is_left_out():
    """C = a y' has one direction; B is large in another, which would carry noise of G_B into Omega's step."""
    torch.manual_seed(0)
    a, z = drawn(12), drawn(9)
    x, y = torch.linalg.qr(drawn(9, 2)).Q.mT
    # (1, 0.7) B is y, so the large part of B is in a direction that C does not have.
    A = a[:, None] * torch.tensor([1.0, 0.7], dtype=torch.float64)
    B = torch.stack([y + 700 * x, -1000 * x])
    G = drawn(12, 9)
    noise = 1e-5 * torch.stack([0.7 * z, -z])
    (omega,) = dense_omega((A @ B)[None], G)
    found = exact_step_of(omega_factors(Circuit(A, B)), Circuit(G @ B.mT, A.mT @ G + noise)).dense()
    assert (found - omega).norm() < 1e-5 * omega.norm()


def test_omega_is_nan_if_the_gradients_are_not_those_of_a_product():
    A, B = factors("ordinary")
    G_A, G_B, _ = gradients_of(A, B)
    circuit, after = Circuit(A, B), Circuit(A - G_A, B - G_B)
    apart = Circuit(G_A + 0.1 * G_A.norm() / A.norm() * A, G_B)
    disagreeing = measure_step(circuit, apart, after)
    assert (disagreeing["gradient_disagreement"] > LARGEST_DISAGREEMENT).all()
    told = measure_step(circuit, Circuit(G_A, G_B), after, of_product=False)
    for figures in (disagreeing, told):
        for name in STEP_QUANTITIES:
            assert bool(figures[name].isnan().all()) == (name in OMEGA_QUANTITIES), name
    torch.testing.assert_close(
        disagreeing["exact_step_norm"], (A @ G_B + apart.left @ B).flatten(1).norm(dim=1), rtol=1e-12, atol=0
    )


@pytest.mark.parametrize("where", ["factors", "gradients", "after"])
def test_a_matrix_that_is_not_finite_does_not_affect_its_neighbours(where):
    A, B = factors("ordinary")
    G_A, G_B, _ = gradients_of(A, B)
    given = {"factors": [A, B], "gradients": [G_A, G_B], "after": [A - G_A, B - G_B]}
    wanted = measure_step(*(Circuit(*pair) for pair in given.values()))
    given[where][1] = given[where][1].clone()
    given[where][1][0, 0, 0] = torch.nan
    found = measure_step(*(Circuit(*pair) for pair in given.values()))
    of_step_alone = {name for name in STEP_QUANTITIES if name.startswith("taken_")}
    missing = {
        "factors": set(STEP_QUANTITIES),
        "gradients": set(STEP_QUANTITIES) - {"taken_step_norm"},
        "after": of_step_alone,
    }
    for name in STEP_QUANTITIES:
        torch.testing.assert_close(found[name][1], wanted[name][1], rtol=1e-9, atol=0)
        assert bool(found[name][0].isnan()) == (name in missing[where]), name


def test_single_precision_factors_are_not_rounded_further():
    A, B = factors("ordinary")
    G_A, G_B, _ = gradients_of(A, B)
    pairs = [(A, B), (G_A, G_B), (A - RATE * G_A, B - RATE * G_B)]
    single = [Circuit(left.float(), right.float()) for left, right in pairs]
    same = [Circuit(left.float().double(), right.float().double()) for left, right in pairs]
    for name, figure in measure_step(*single).items():
        torch.testing.assert_close(figure, measure_step(*same)[name], rtol=1e-12, atol=0)


def test_collapsed_circuits_and_other_shapes_are_refused():
    A, B = factors("ordinary")
    circuit = Circuit(A, B)
    with pytest.raises(CallError, match="needs a circuit with factors, got a collapsed one"):
        measure_step(circuit, Circuit(A @ B), circuit)
    with pytest.raises(CallError, match=r"the gradients must have the factors' shapes: left is \[2, 12, 4\], got"):
        measure_step(circuit, Circuit(A[:, 1:], B), circuit)


def test_a_factor_without_gradient_takes_no_part_in_the_exact_step():
    """E = A G_B + G_A B, of which one term is zero."""
    A, B = factors("ordinary")
    G_A, G_B, _ = gradients_of(A, B)
    circuit = Circuit(A, B)
    for of_left, of_right, wanted in (
        (torch.zeros_like(G_A), G_B, A @ G_B),
        (G_A, torch.zeros_like(G_B), G_A @ B),
    ):
        exact = exact_step_of(circuit, Circuit(of_left, of_right))
        torch.testing.assert_close(exact.dense(), wanted, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(exact.frobenius_norm(), torch.linalg.matrix_norm(wanted))


@pytest.mark.parametrize("size", [1e-6, 1e-3, 1.0, 1e5])
def test_both_products_of_the_exact_step_have_factors_of_equal_norm(size):
    """So the norm of their sum needs no QR decomposition."""
    A, B = factors("ordinary")
    G_A, G_B, _ = gradients_of(A, B)
    exact = exact_step_of(Circuit(size * A, B), Circuit(G_A, 1e-4 * G_B))
    assert exact.right is not None
    lefts, rights = exact.left.split(4, dim=-1), exact.right.split(4, dim=-2)
    for left, right in zip(lefts, rights, strict=True):
        torch.testing.assert_close(torch.linalg.matrix_norm(left), torch.linalg.matrix_norm(right), rtol=1e-13, atol=0)
    for left, right, wanted in zip(lefts, rights, (1e-4 * size * A @ G_B, G_A @ B), strict=True):
        torch.testing.assert_close(left @ right, wanted, rtol=1e-12, atol=1e-13 * float(wanted.norm()))


def test_factors_are_used_only_where_gram_matrices_are_not_accurate(monkeypatch: pytest.MonkeyPatch):
    heads = []

    def counted(pairs):
        heads.append(len(pairs[0][0]))
        return by_factors(pairs)

    by_factors = factor_steps._measured_by_factors
    monkeypatch.setattr(factor_steps, "_measured_by_factors", counted)
    A, B = factors("ordinary")
    G_A, G_B, _ = gradients_of(A, B)
    after = Circuit(A - RATE * G_A, B - RATE * G_B)
    measure_step(Circuit(A, B), Circuit(G_A, G_B), after)
    measure_step(Circuit(A, B), Circuit(torch.nan * G_A, torch.nan * G_B), Circuit(A, B))
    assert heads == []
    # Heads whose factor lacks a rank, or whose gradient is aligned with next to nothing of the other factor.
    A[0, :, 1:] = 0
    measure_step(Circuit(A, B), Circuit(G_A, G_B), after)
    assert heads == [1]
    A, B = factors("ordinary")
    turned = torch.linalg.svd(B[1])
    A[1] = A[1] @ (turned.U * torch.tensor([1, 1, 1, 0.01])) @ turned.U.mT
    weak = turned.U[:, 3:] @ drawn(1, 9)
    G_B = torch.stack([G_B[0], weak])
    G_A = torch.stack([G_A[0], 1e-6 * G_A[1]])
    figures = measure_step(Circuit(A, B), Circuit(G_A, G_B), after)
    assert heads == [1, 1]
    exact = (A @ G_B + G_A @ B).flatten(1).norm(dim=1)
    torch.testing.assert_close(figures["exact_step_norm"], exact, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_factors_of_any_type_and_layout_have_the_figures_of_float64(dtype, is_transposed):
    torch.manual_seed(0)
    A, B, G_A, G_B = drawn(5, 40, 6), drawn(5, 6, 30), drawn(5, 40, 6), drawn(5, 6, 30)
    pairs = [(A, B), (G_A, G_B), (A + 1e-2 * drawn(5, 40, 6), B + 1e-2 * drawn(5, 6, 30))]
    stored = [tuple(each.to(dtype) for each in pair) for pair in pairs]
    if is_transposed:
        stored = [tuple(each.mT.contiguous().mT for each in pair) for pair in stored]
    found = measure_step(*(Circuit(*pair) for pair in stored))
    (A, B), (G_A, G_B), (A_after, B_after) = ([each.double() for each in pair] for pair in stored)
    exact, taken = (A @ G_B + G_A @ B).flatten(1), (A_after @ B_after - A @ B).flatten(1)
    first, second = A.mT @ G_A, G_B @ B.mT
    along = -(exact * taken).sum(dim=1) / exact.norm(dim=1)
    wanted = {
        "gradient_disagreement": torch.linalg.matrix_norm(first - second)
        / (torch.linalg.matrix_norm(first) + torch.linalg.matrix_norm(second)),
        "exact_step_norm": exact.norm(dim=1),
        "taken_step_norm": taken.norm(dim=1),
        "taken_exact_cosine": along / taken.norm(dim=1),
        "taken_rate": along / exact.norm(dim=1),
    }
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-13, msg=name)
    assert found["omega_step_norm"].isnan().all()
