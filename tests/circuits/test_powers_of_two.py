"""Circuits at the ends of float64's range, compared with the circuit of ordinary size times the right power."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from qkov.circuits import Circuit, Preconditioner, agreement, imbalance, measure
from qkov.circuits.algebra.exponents import in_range, is_in_range, times_power_of_two
from qkov.circuits.algebra.preconditioner import largest_rate, mean_rate, self_rate
from torch import Tensor

SIZES = {
    *("singular_values", "frobenius_norm", "spectral_norm", "nuclear_norm"),
    *("omega_largest", "omega_mean", "omega_self"),
}
OF_FACTORS = (
    "imbalance",
    *("agreement_rows_cosine", "agreement_rows_difference", "agreement_columns_cosine", "agreement_columns_difference"),
)
#: Powers of ten by which the left factor and the right one are multiplied.
STRETCHES = [
    *((power, 0) for power in (-200, -170, -162, -160, -158, -154, -120, -60, 60, 120, 154, 160, 200)),
    *((0, power) for power in (-200, -160, 160, 200)),
    *((power, power) for power in (-100, -80, 80, 100)),
    *((power, -power) for power in (-300, -200, -150, -75, 75, 150, 200, 300)),
    *((-200, -200), (200, 200), (160, 160), (-130, 280)),
]
TOLERANCE = 1e-9


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def wide(tensor: Tensor, power: int = 0) -> Any:
    """Return the values times a power of ten, in a type whose range is 1e-4932 to 1e4932."""
    return tensor.numpy().astype(np.longdouble) * np.longdouble(10) ** power


def norm(matrix: Any) -> Any:
    return np.sqrt((matrix**2).sum((-2, -1)))


def values_of_factors(left: Tensor, right: Tensor, of_left: int, of_right: int) -> dict[str, Any]:
    """Evaluate the formulas on dense matrices, with the roots (CC')^{1/2} and (C'C)^{1/2} at ordinary size."""
    first, second = wide(left.mT @ left, 2 * of_left), wide(right @ right.mT, 2 * of_right)
    found = {"imbalance": norm(first - second) / (norm(first) + norm(second))}
    U, s, Vh = torch.linalg.svd(left @ right, full_matrices=False)
    sides = {
        "rows": (U @ (s[..., None] * U.mT), wide(left @ left.mT, 2 * of_left)),
        "columns": (Vh.mT @ (s[..., None] * Vh), wide(right.mT @ right, 2 * of_right)),
    }
    for side, (root, exact) in sides.items():
        omega = wide(root, of_left + of_right)
        found[f"agreement_{side}_cosine"] = (omega * exact).sum((-2, -1)) / norm(omega) / norm(exact)
        found[f"agreement_{side}_difference"] = norm(omega - exact) / norm(exact)
    return found


def assert_close(found: Tensor, expected: Any, name: str) -> None:
    with np.errstate(over="ignore", under="ignore"):
        narrowed = np.asarray(expected).astype(np.float64)
    np.testing.assert_allclose(found.numpy(), narrowed, rtol=TOLERANCE, atol=0, err_msg=name)


@pytest.mark.parametrize(("of_left", "of_right"), STRETCHES)
@pytest.mark.parametrize("columns", [12, 9], ids=["square", "oblong"])
def test_every_quantity_of_a_factored_circuit(of_left: int, of_right: int, columns: int) -> None:
    left, right = random(2, 12, 4), random(2, 4, columns, seed=1)
    reference = Circuit(random(12, 2, seed=2), random(2, columns, seed=3))
    usual = measure(Circuit(left, right), reference)
    found = measure(Circuit(left * 10.0**of_left, right * 10.0**of_right), reference)
    of_factors = values_of_factors(left, right, of_left, of_right)
    for name, figure in found.items():
        power = of_left + of_right if name in SIZES or name == "reference_scale" else 0
        assert_close(figure, of_factors.get(name, wide(usual[name], power)), name)
    circuit = Circuit(left * 10.0**of_left, right * 10.0**of_right)
    for name, figure in zip(OF_FACTORS, (imbalance(circuit), *agreement(circuit)), strict=True):
        assert_close(figure, of_factors[name], name)


@pytest.mark.parametrize("power", [-290, -200, -160, -154, 154, 160, 200, 290])
@pytest.mark.parametrize("columns", [12, 9], ids=["square", "oblong"])
def test_every_quantity_of_a_collapsed_circuit(power: int, columns: int) -> None:
    matrix, reference = random(3, 12, columns), Circuit(random(12, columns, seed=2))
    usual = measure(Circuit(matrix), reference)
    for name, figure in measure(Circuit(matrix * 10.0**power), reference).items():
        times = power if name in SIZES or name == "reference_scale" else 0
        assert_close(figure, wide(usual[name], times), name)


@pytest.mark.parametrize("collapsed", [False, True])
@pytest.mark.parametrize(("of_circuit", "of_reference"), [(0, -200), (0, 200), (200, 200), (-200, -200), (150, -150)])
def test_a_reference_of_any_size(of_circuit: int, of_reference: int, collapsed: bool) -> None:
    circuit, reference = Circuit(random(8, 3), random(3, 8, seed=1)), Circuit(random(8, 2), random(2, 8, seed=1))
    usual = measure(circuit, reference)
    factors = (reference.dense(),) if collapsed else (reference.left, reference.right)
    stretched = Circuit(factors[0] * 10.0**of_reference, *factors[1:])
    found = measure(Circuit(circuit.left * 10.0**of_circuit, circuit.right), stretched)
    assert_close(found["reference_cosine"], usual["reference_cosine"], "cosine")
    assert_close(found["reference_scale"], wide(usual["reference_scale"], of_circuit - of_reference), "scale")


def test_each_matrix_of_a_batch_has_its_own_size() -> None:
    left, right = random(6, 8, 3), random(6, 3, 8, seed=1)
    usual = measure(Circuit(left, right))
    powers = [0, 200, -200, 0, 0, 160]
    stretched = left * 10.0 ** torch.tensor(powers, dtype=torch.float64)[:, None, None]
    stretched[3, 2, 1] = torch.nan
    stretched[4] = 0
    found = measure(Circuit(stretched, right))
    for name, figure in found.items():
        assert figure[3].isnan().all(), name
        if name in SIZES:
            assert (figure[4] == 0).all(), name
            for at in (0, 1, 2, 5):
                assert_close(figure[at], wide(usual[name][at], powers[at]), name)
        elif name not in OF_FACTORS:
            assert figure[4].isnan(), name
            np.testing.assert_allclose(figure[[0, 1, 2, 5]], usual[name][[0, 1, 2, 5]], rtol=TOLERANCE, err_msg=name)


def test_factors_that_are_broadcast_keep_their_sizes() -> None:
    left, right = random(2, 1, 8, 3), random(3, 3, 8, seed=1)
    usual = measure(Circuit(left, right))
    powers = torch.tensor([200.0, 0.0])[:, None, None, None]
    found = measure(Circuit(left * 10.0 ** powers.double(), right * 10.0**-100))
    for name in SIZES:
        assert found[name].shape == usual[name].shape
        for at, power in enumerate((100, -100)):
            assert_close(found[name][at], wide(usual[name][at], power), name)


@pytest.mark.parametrize("collapsed", ["neither", "one", "other", "both"])
@pytest.mark.parametrize(("one", "other"), [(200, 100), (-200, 200), (-160, 0), (0, 200), (-100, -160), (250, -250)])
def test_inner_products(one: int, other: int, collapsed: str) -> None:
    first, second = Circuit(random(5, 9, 3), random(5, 3, 7, seed=1)), Circuit(random(9, 2), random(2, 7, seed=1))
    usual = first.inner(second)
    first = Circuit(first.dense()) if collapsed in ("one", "both") else first
    second = Circuit(second.dense()) if collapsed in ("other", "both") else second
    stretched = [
        Circuit(circuit.left * 10.0**power, circuit.right) for circuit, power in ((first, one), (second, other))
    ]
    assert_close(stretched[0].inner(stretched[1]), wide(usual, one + other), "inner")


def test_an_inner_product_through_factors_whose_own_products_leave_the_range() -> None:
    left, right = random(9, 3), random(3, 7, seed=1)
    usual = Circuit(left, right).inner(Circuit(left, right))
    far = Circuit(left * 1e-158, right * 1e158)
    assert_close(far.inner(far), wide(usual), "inner")


@pytest.mark.parametrize("power", [-300, -200, -160, 160, 200, 300])
def test_rates_of_a_preconditioner(power: int) -> None:
    matrix = random(6, 4)
    usual, found = Preconditioner(Circuit(matrix)), Preconditioner(Circuit(matrix * 10.0**power))
    for name in ("largest", "mean_rate", "self_rate", "trace"):
        assert_close(getattr(found, name), wide(getattr(usual, name), power), name)


def test_rates_are_finite_even_if_intermediate_sums_are_not() -> None:
    values = torch.full((4,), 1.7e308, dtype=torch.float64)
    assert mean_rate(values, torch.Size((8, 8))).item() == pytest.approx(1.7e308, rel=1e-14)
    assert largest_rate(values).isinf()
    values = 1.7e308 * torch.tensor([1.0, *[0.4] * 60], dtype=torch.float64)
    assert self_rate(values).item() == pytest.approx(1.7e308 * (2 * (1 + 60 * 0.4**3) / (1 + 60 * 0.4**2)), rel=1e-14)


@pytest.mark.parametrize(("power", "stays"), [(149, True), (-151, True), (150, False), (-152, False)])
def test_factors_leave_the_range_above_an_exponent_of_150_and_below_one_of_minus_150(power: int, stays: bool) -> None:
    """frexp's exponent of 2^n is n + 1; one matrix of the batch is of ordinary size."""
    matrices = torch.eye(3, dtype=torch.float64) * torch.tensor([2.0**power, 1.0], dtype=torch.float64)[:, None, None]
    scaled, exponent = in_range(matrices)
    assert is_in_range(matrices) is stays
    assert torch.equal(scaled, matrices) is stays
    if isinstance(exponent, int):
        assert (exponent, stays) == (0, True)
        return
    assert exponent.tolist() == [power + 1, 0]
    assert torch.equal(times_power_of_two(scaled, exponent[:, None, None]), matrices)


@pytest.mark.parametrize("power", [1600, -1600])
def test_a_power_of_two_beyond_the_range_is_multiplied_in_two_halves(power: int) -> None:
    """2^1600 has no float64, while 2^-800 times it has; a third of the power would leave 2^1067 for the other step."""
    value = torch.tensor([2.0 ** (-power // 2)], dtype=torch.float64)
    assert times_power_of_two(value, torch.tensor([power])).item() == 2.0 ** (power // 2)


@pytest.mark.parametrize("entry", [0.0, math.inf, -math.inf, math.nan])
def test_a_matrix_of_zeros_or_one_that_is_not_finite_is_not_in_range_and_not_scaled(entry: float) -> None:
    matrices = torch.stack([torch.eye(3, dtype=torch.float64), torch.full((3, 3), entry, dtype=torch.float64)])
    assert not is_in_range(matrices)
    same, exponent = in_range(matrices)
    assert (same.data_ptr(), exponent) == (matrices.data_ptr(), 0)


def test_factors_in_range_are_not_scaled() -> None:
    for factor in (random(3, 4, 5), random(3, 4, 5).float(), torch.zeros(3, 4, 5, dtype=torch.float64)):
        same, exponent = in_range(factor)
        assert isinstance(exponent, int)
        assert exponent == 0
        assert same.data_ptr() == factor.data_ptr()
    circuit = Circuit(random(4, 2), random(2, 4))
    assert circuit.in_range()[0] is circuit


@pytest.mark.parametrize("power", [-1074, -1000, -600, -200, 200, 600, 1000])
def test_powers_of_two_are_exact(power: int) -> None:
    matrix = torch.tensor([[math.ldexp(-1.0, power), 0.0], [math.ldexp(1.0, power - 1), 0.0]], dtype=torch.float64)
    scaled, exponent = in_range(matrix)
    assert isinstance(exponent, Tensor)
    # Half of the smallest number that there is rounds to zero.
    assert scaled.tolist() == [[-0.5, 0.0], [0.25 if power > -1074 else 0.0, 0.0]]
    assert torch.equal(times_power_of_two(scaled, exponent), matrix)
