"""Singular values, vectors and norms, compared with constructed, 50-digit and dense float64 values."""

import math

import mpmath
import numpy as np
import pytest
import torch
from qkov.circuits import Circuit
from scipy.linalg import hadamard
from torch import Tensor

CONDITIONS = (1.0, 1e2, 1e3, 1e4)


def tolerance(condition: float) -> float:
    return 1e-6 if condition == 1e4 else 1e-7


def orthonormal(rows: int, columns: int, seed: int) -> np.ndarray:
    return np.linalg.qr(np.random.default_rng(seed).standard_normal((rows, columns)))[0]


def graded(condition: float, rank: int) -> np.ndarray:
    return np.geomspace(1.0, 1.0 / condition, rank)


def constructed(left_values: np.ndarray, right_values: np.ndarray, aligned: bool) -> tuple[Tensor, Tensor, np.ndarray]:
    """Factors of shapes 96 x k and k x 80 with the given singular values, and the k x k core of their product."""
    rank = len(left_values)
    inner = orthonormal(rank, rank, 1)
    other = inner if aligned else orthonormal(rank, rank, 2)
    left = (orthonormal(96, rank, 3) * left_values) @ inner.T
    right = (other * right_values) @ orthonormal(80, rank, 4).T
    rotation = np.eye(rank) if aligned else inner.T @ other
    return torch.tensor(left), torch.tensor(right), left_values[:, None] * rotation * right_values


def in_fifty_digits(matrix: np.ndarray) -> np.ndarray:
    with mpmath.workdps(50):
        values = mpmath.svd_r(mpmath.matrix(matrix.tolist()), compute_uv=False)
        return np.sort(np.array([float(value) for value in values]))[::-1]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def dense_values(left: Tensor, right: Tensor) -> np.ndarray:
    return np.linalg.svd(left.double().numpy() @ right.double().numpy(), compute_uv=False)


def largest_relative_error(values: Tensor, expected: np.ndarray) -> float:
    assert values.dtype == torch.float64
    return float(np.abs(values.numpy() / expected - 1).max())


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("reverse", [False, True], ids=["aligned", "opposed"])
def test_values_of_aligned_factors_are_products_of_theirs(condition: float, reverse: bool) -> None:
    left_values = graded(condition, 48)
    right_values = left_values[::-1] if reverse else left_values
    left, right, core = constructed(left_values, right_values, aligned=True)
    expected = np.sort(np.diag(core))[::-1]
    assert largest_relative_error(Circuit(left, right).singular_values(), expected) < tolerance(condition)
    assert largest_relative_error(Circuit(left, right).svd().values, expected) < tolerance(condition)
    norm = Circuit(left, right).frobenius_norm().item()
    assert norm == pytest.approx(np.linalg.norm(expected), rel=1e-10)


@pytest.mark.parametrize("condition", CONDITIONS)
def test_values_of_factors_at_random_angles(condition: float) -> None:
    left, right, core = constructed(graded(condition, 12), graded(condition, 12), aligned=False)
    expected = in_fifty_digits(core)
    assert largest_relative_error(Circuit(left, right).singular_values(), expected) < tolerance(condition)
    assert largest_relative_error(Circuit(left, right).svd().values, expected) < tolerance(condition)


@pytest.mark.parametrize("exponent", [0, 3, 6, 10, 13])
def test_values_of_float32_factors_built_exactly(exponent: int) -> None:
    # Sums of signed powers of two: these entries and singular values are exact in float32.
    steps = np.linspace(0, exponent, 16).round()
    tall, small = hadamard(128)[:, :16], hadamard(16)
    factor = torch.tensor((tall * 2.0**-steps) @ small, dtype=torch.float32)
    expected = 128 * 16 * 4.0**-steps
    error = largest_relative_error(Circuit(factor, factor.mT).singular_values(), expected)
    assert error < tolerance(1e4 if exponent == 13 else 1e3)


@pytest.mark.parametrize("left_rank", [0, 1, 5])
@pytest.mark.parametrize("right_rank", [1, 5, 8])
def test_values_of_rank_deficient_factors(left_rank: int, right_rank: int) -> None:
    left = random(40, left_rank) @ random(left_rank, 8, seed=1)
    right = random(8, right_rank, seed=2) @ random(right_rank, 30, seed=3)
    circuit, expected = Circuit(left, right), dense_values(left, right)[:8]
    bound = 1e-12 * expected[0]
    # Float32 rounding leaves the factors of rank 5 with three small singular values of their own.
    assert np.abs(circuit.singular_values().numpy() - expected).max() <= bound
    assert np.abs(circuit.svd().values.numpy() - expected).max() <= bound
    assert abs(circuit.frobenius_norm().item() - np.linalg.norm(expected)) <= bound


@pytest.mark.parametrize("small", [1e-5, 1e-8])
def test_frobenius_norm_where_the_trace_cancels(small: float) -> None:
    # The products of the large directions vanish: tr(G_left G_right) is about small**2 of its terms.
    values, inner = np.array([1.0, 1.0, 1.0, small, small, small]), orthonormal(6, 6, 7)
    left = (orthonormal(40, 6, 1) * values) @ inner
    right = inner.T @ (values[::-1, None] * orthonormal(30, 6, 2).T)
    circuit = Circuit(torch.tensor(left), torch.tensor(right))
    # The entries are rounded to 1e-16, and so are the products that vanish.
    assert circuit.frobenius_norm().item() == pytest.approx(math.sqrt(6) * small, rel=1e-14 / small, abs=0)


def mixed_batch() -> tuple[Tensor, Tensor]:
    """Well-conditioned, ill-conditioned, zero, rank one, and four matrices that are not finite."""
    left, right = random(8, 30, 6).double(), random(8, 6, 20, seed=1).double()
    left[1] *= torch.logspace(0, -6, 6)
    left[1] = left[1] @ torch.tensor(orthonormal(6, 6, 5))
    right[2] = 0
    left[3] = left[3, :, :1] * torch.ones(6)
    left[4, 3, 2] = torch.nan
    right[5, 0, 0] = torch.inf
    right[6] = -torch.inf
    left[7, 1, 1] = torch.inf
    return left, right


@pytest.mark.parametrize("collapsed", [False, True])
def test_one_bad_matrix_leaves_the_others_alone(collapsed: bool) -> None:
    left, right = mixed_batch()
    circuit = Circuit(left @ right) if collapsed else Circuit(left, right)
    values, (rows, svd_values, columns), norm = circuit.singular_values(), circuit.svd(), circuit.frobenius_norm()
    for figure in (values, rows, svd_values, columns, norm, circuit.nuclear_norm()):
        assert figure[4:].isnan().all()
        assert figure[:4].isfinite().all()
    expected = np.linalg.svd((left @ right)[:4].numpy(), compute_uv=False)[:, : values.shape[-1]]
    bound = 1e-12 * np.maximum(expected[:, :1], 1e-300)
    assert (np.abs(values[:4].numpy() - expected) <= bound).all()
    assert (np.abs(svd_values[:4].numpy() - expected) <= bound).all()
    np.testing.assert_allclose(norm[:4], np.linalg.norm(expected, axis=-1), rtol=1e-12)


@pytest.mark.parametrize("condition", [*CONDITIONS, 1e9, 1e300])
@pytest.mark.parametrize("aligned", [False, True])
def test_vectors_are_orthonormal_and_rebuild_the_matrix(condition: float, aligned: bool) -> None:
    left, right, _ = constructed(graded(condition, 24), graded(condition, 24), aligned)
    rows, values, columns = Circuit(left, right).svd()
    identity = torch.eye(24, dtype=torch.float64)
    assert (rows.mT @ rows - identity).abs().max() < 1e-9
    assert (columns @ columns.mT - identity).abs().max() < 1e-9
    np.testing.assert_allclose((rows * values) @ columns, left.numpy() @ right.numpy(), rtol=0, atol=1e-12)


def test_vectors_near_the_limit_of_cholesky_are_orthonormal() -> None:
    # The conditions on either side of the one at which the decomposition changes.
    left, right = random(60, 200, 32).double(), random(60, 32, 200, seed=1).double()
    spread = torch.logspace(0, 3.5, 60, dtype=torch.float64)[:, None] ** -torch.linspace(0, 1, 32)
    left = torch.linalg.qr(left).Q * spread[:, None, :] @ torch.tensor(orthonormal(32, 32, 6))
    rows, values, columns = Circuit(left, right).svd()
    assert (rows.mT @ rows - torch.eye(32)).abs().max() < 1e-9
    np.testing.assert_allclose((rows * values[:, None, :]) @ columns, left @ right, rtol=0, atol=1e-11)


def test_shared_factors_broadcast() -> None:
    # Grouped heads: one key for three queries; the keys of the second group are rank-deficient.
    keys, queries = random(2, 1, 40, 5), random(2, 3, 5, 30, seed=1)
    keys[1] = keys[1, :, :, :1]
    circuit = Circuit(keys, queries)
    dense = keys.double().numpy() @ queries.double().numpy()
    expected = np.linalg.svd(dense, compute_uv=False)[..., :5]
    rows, values, columns = circuit.svd()
    np.testing.assert_allclose(circuit.singular_values(), expected, rtol=0, atol=1e-12 * expected.max())
    np.testing.assert_allclose((rows * values[..., None, :]) @ columns, dense, rtol=0, atol=1e-12 * expected.max())
    np.testing.assert_allclose(circuit.frobenius_norm(), np.linalg.norm(dense, axis=(-2, -1)), rtol=1e-13)


@pytest.mark.parametrize("shared", ["left", "right"])
def test_a_factor_without_a_head_dimension_is_shared_by_all_heads(shared: str) -> None:
    left, right = random(3, 40, 5), random(3, 5, 30, seed=1)
    left, right = (left[0], right) if shared == "left" else (left, right[0])
    expected = np.linalg.svd(left.double().numpy() @ right.double().numpy(), compute_uv=False)[:, :5]
    np.testing.assert_allclose(Circuit(left, right).singular_values(), expected, rtol=1e-10)


@pytest.mark.parametrize(("rows", "rank", "columns"), [(4, 9, 30), (30, 9, 4), (5, 9, 6), (7, 7, 7), (1, 1, 1)])
def test_rank_beyond_the_size_of_the_matrix(rows: int, rank: int, columns: int) -> None:
    left, right = random(3, rows, rank), random(3, rank, columns, seed=1)
    circuit, dense = Circuit(left, right), left.double().numpy() @ right.double().numpy()
    expected = np.linalg.svd(dense, compute_uv=False)
    left_vectors, values, right_vectors = circuit.svd()
    assert circuit.singular_values().shape == (3, circuit.rank_bound) == (3, min(rows, columns))
    np.testing.assert_allclose(circuit.singular_values(), expected, rtol=1e-10)
    np.testing.assert_allclose((left_vectors * values[:, None, :]) @ right_vectors, dense, rtol=0, atol=1e-12)
    np.testing.assert_allclose(circuit.frobenius_norm(), np.linalg.norm(dense, axis=(1, 2)), rtol=1e-13)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_narrow_types_lose_no_further_accuracy(dtype: torch.dtype) -> None:
    left, right = random(12, 50, 8).to(dtype), random(12, 8, 40, seed=1).to(dtype)
    right[3] = 0
    circuit, dense = Circuit(left, right), left.double().numpy() @ right.double().numpy()
    expected = np.linalg.svd(dense, compute_uv=False)[:, :8]
    rows, values, columns = circuit.svd()
    np.testing.assert_allclose(circuit.singular_values(), expected, rtol=1e-10, atol=1e-30)
    np.testing.assert_allclose((rows * values[:, None, :]) @ columns, dense, rtol=0, atol=1e-11)
    np.testing.assert_allclose(circuit.frobenius_norm(), np.linalg.norm(dense, axis=(1, 2)), rtol=1e-13)


@pytest.mark.parametrize("scale", [1e-200, 1e-163, 1e-161, 1e-158, 1e-150, 1e-90, 1e90, 1e150, 1e200])
def test_units_do_not_matter(scale: float) -> None:
    left, right = random(20, 4).double(), random(4, 20, seed=1).double()
    values, expected = Circuit(scale * left, right).singular_values(), dense_values(left, right)[:4]
    np.testing.assert_allclose(values / scale, expected, rtol=1e-10)
    np.testing.assert_allclose(Circuit(left, scale * right).svd().values / scale, expected, rtol=1e-10)
    np.testing.assert_allclose(
        Circuit(scale * left, right).frobenius_norm() / scale, np.linalg.norm(expected), rtol=1e-12
    )


def test_many_matrices_are_converted_block_by_block() -> None:
    # 40 matrices of 500 x 30 fill several blocks, the last of them in part.
    left, right = random(40, 500, 30), random(40, 30, 300, seed=1)
    expected = np.linalg.norm(left.double().numpy() @ right.double().numpy(), axis=(1, 2))
    np.testing.assert_allclose(Circuit(left, right).frobenius_norm(), expected, rtol=1e-13)
    np.testing.assert_allclose(Circuit(right.mT, left.mT).frobenius_norm(), expected, rtol=1e-13)


def test_an_empty_batch_has_an_empty_spectrum() -> None:
    circuit = Circuit(torch.zeros(0, 20, 4), torch.zeros(0, 4, 10))
    assert circuit.singular_values().shape == (0, 4)
    assert circuit.svd().left.shape == (0, 20, 4)
    assert circuit.frobenius_norm().shape == (0,)


def test_results_carry_no_gradient() -> None:
    left = random(10, 3).requires_grad_()
    circuit = Circuit(left, left.mT)
    assert not any(
        figure.requires_grad for figure in (circuit.singular_values(), *circuit.svd(), circuit.frobenius_norm())
    )


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "shapes", [((7,), (7,)), ((7,), (1,)), ((7,), ()), ((1,), (7,)), ((2, 4), (4,)), ((7, 2), (7, 1))]
)
def test_heads_that_are_spread_over_threads_keep_their_own_values(three_threads, shapes):
    torch.manual_seed(0)
    left, right = torch.randn(*shapes[0], 12, 3), torch.randn(*shapes[1], 3, 9)
    wanted = np.linalg.svd(left.double().numpy() @ right.double().numpy(), compute_uv=False)[..., :3]
    found = Circuit(left, right).singular_values().numpy()
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=0)
