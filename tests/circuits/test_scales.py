"""Every quantity of `measure`, compared with its formula on a dense float64 matrix."""

import math

import numpy as np
import pytest
import torch
from qkov.circuits import CallError, Circuit, agreement, imbalance, measure
from torch import Tensor

OF_THE_SPECTRUM = [
    "frobenius_norm",
    "spectral_norm",
    "nuclear_norm",
    "stable_rank",
    "effective_rank",
    "omega_largest",
    "omega_mean",
    "omega_self",
]
OF_THE_FACTORS = [
    "imbalance",
    "agreement_rows_cosine",
    "agreement_rows_difference",
    "agreement_columns_cosine",
    "agreement_columns_difference",
]
OF_SYMMETRY = ["symmetric_share", "antisymmetric_share"]
OF_EIGENVALUES = ["copying_score", "positive_eigenvalue_share"]
OF_A_REFERENCE = ["reference_scale", "reference_cosine"]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def expected_figures(matrix: np.ndarray, rank: int, reference: np.ndarray) -> dict[str, float]:
    s = np.linalg.svd(matrix, compute_uv=False)[:rank]
    weights = s / s.sum()
    figures = {
        "frobenius_norm": np.linalg.norm(matrix),
        "spectral_norm": np.linalg.norm(matrix, 2),
        "nuclear_norm": np.linalg.norm(matrix, "nuc"),
        "stable_rank": np.linalg.norm(matrix) ** 2 / s[0] ** 2,
        "effective_rank": math.exp(-sum(w * math.log(w) for w in weights)),
        "omega_largest": 2 * s[0],
        "omega_mean": (1 / matrix.shape[0] + 1 / matrix.shape[1]) * s.sum(),
        "omega_self": 2 * (s**3).sum() / (s**2).sum(),
        "reference_scale": (matrix * reference).sum() / (reference**2).sum(),
        "reference_cosine": (matrix * reference).sum() / np.linalg.norm(matrix) / np.linalg.norm(reference),
    }
    if matrix.shape[0] == matrix.shape[1]:
        total, eigenvalues = np.linalg.norm(matrix) ** 2, np.linalg.eigvals(matrix)
        real = eigenvalues.real
        figures |= {
            "symmetric_share": np.linalg.norm((matrix + matrix.T) / 2) ** 2 / total,
            "antisymmetric_share": np.linalg.norm((matrix - matrix.T) / 2) ** 2 / total,
            "copying_score": real.sum() / np.abs(eigenvalues).sum(),
            "positive_eigenvalue_share": real[real > 0].sum() / np.abs(real).sum(),
        }
    return figures


@pytest.mark.parametrize("columns", [12, 9], ids=["square", "oblong"])
@pytest.mark.parametrize("rank", [4, None, 15], ids=["factored", "collapsed", "rank beyond size"])
def test_every_quantity_of_every_matrix(columns: int, rank: int | None) -> None:
    if rank is None:
        circuit = Circuit(random(2, 3, 12, columns))
    else:
        circuit = Circuit(random(2, 1, 12, rank), random(3, rank, columns, seed=1))
    reference = Circuit(random(3, 12, 2, seed=2), random(2, columns, seed=3))
    figures = measure(circuit, reference)
    names = OF_THE_SPECTRUM + OF_THE_FACTORS + OF_SYMMETRY + OF_EIGENVALUES + OF_A_REFERENCE
    assert sorted(figures) == sorted([*names, "singular_values"])
    dense, direction = circuit.dense().numpy(), np.broadcast_to(reference.dense().numpy(), circuit.shape)
    bound = circuit.rank_bound
    np.testing.assert_allclose(
        figures["singular_values"], np.linalg.svd(dense, compute_uv=False)[..., :bound], rtol=1e-10
    )
    for name in names:
        assert figures[name].shape == (2, 3), name
        assert figures[name].dtype == torch.float64, name
    for i in np.ndindex(2, 3):
        for name, value in expected_figures(dense[i], bound, direction[i]).items():
            assert figures[name][i].item() == pytest.approx(value, rel=1e-9, abs=1e-12), name
    if rank is not None:
        expected = (imbalance(circuit), *agreement(circuit))
        for name, value in zip(OF_THE_FACTORS, expected, strict=True):
            np.testing.assert_allclose(figures[name], value, rtol=1e-12)


def test_the_arguments_decide_which_quantities_are_returned() -> None:
    square = Circuit(random(6, 2), random(2, 6))
    plain = measure(square, eigenvalues=False)
    assert sorted(plain) == sorted([*OF_THE_SPECTRUM, *OF_THE_FACTORS, *OF_SYMMETRY, "singular_values"])
    oblong, collapsed = measure(Circuit(random(6, 2), random(2, 5))), measure(Circuit(random(6, 6)))
    assert oblong.keys() == collapsed.keys() == measure(square).keys()
    assert all(oblong[name].isnan() for name in OF_SYMMETRY + OF_EIGENVALUES)
    assert all(collapsed[name].isnan() for name in OF_THE_FACTORS)


def test_quantities_of_matrices_computed_by_hand() -> None:
    identity, turn = torch.eye(4, dtype=torch.float64), torch.tensor([[0.0, 1.0], [-1.0, 0.0]])
    copying = measure(Circuit(3 * identity, identity), Circuit(identity))
    for name, value in {
        "frobenius_norm": 6, "spectral_norm": 3, "nuclear_norm": 12, "stable_rank": 4, "effective_rank": 4,
        "omega_largest": 6, "omega_mean": 6, "omega_self": 6, "symmetric_share": 1, "antisymmetric_share": 0,
        "copying_score": 1, "positive_eigenvalue_share": 1, "reference_scale": 3, "reference_cosine": 1,
        "imbalance": 0.8, "agreement_rows_difference": 2 / 3, "agreement_columns_difference": 2,
        "agreement_rows_cosine": 1,
    }.items():  # fmt: skip
        assert copying[name].item() == pytest.approx(value, rel=1e-14, abs=1e-14), name
    rotation = measure(Circuit(turn))
    assert rotation["antisymmetric_share"].item() == pytest.approx(1, rel=1e-14)
    assert rotation["copying_score"].item() == pytest.approx(0, abs=1e-14)
    assert measure(Circuit(-identity))["copying_score"].item() == -1
    assert measure(Circuit(-identity))["positive_eigenvalue_share"].item() == 0


@pytest.mark.parametrize("collapsed", [False, True])
def test_bad_matrices_are_flagged_and_the_others_measured(collapsed: bool) -> None:
    left, right = random(5, 8, 3), random(5, 3, 8, seed=1)
    left[1, 2, 0] = torch.nan
    right[3, 0, 4] = torch.inf
    left[4] = 0
    circuit, reference = Circuit(left @ right) if collapsed else Circuit(left, right), Circuit(random(8, 8, seed=2))
    figures = measure(circuit, reference)
    alone = [measure(circuit[i], reference) for i in (0, 2)]
    for name, figure in figures.items():
        assert figure[1].isnan().all(), name
        assert figure[3].isnan().all(), name
        if collapsed and name in OF_THE_FACTORS:
            continue
        assert figure[[0, 2]].isfinite().all(), name
        for i, single in zip((0, 2), alone, strict=True):
            np.testing.assert_allclose(figure[i], single[name], rtol=1e-9, atol=1e-12)


def test_a_zero_matrix_has_norms_and_rates_and_no_shares() -> None:
    figures = measure(Circuit(torch.zeros(6, 2), torch.zeros(2, 6)), Circuit(torch.eye(6)))
    none = {"stable_rank", "effective_rank", "reference_cosine", "agreement_rows_cosine", "agreement_columns_cosine"}
    none |= {*OF_SYMMETRY, *OF_EIGENVALUES}
    for name, figure in figures.items():
        assert figure.isnan().all() if name in none else (figure == 0).all(), name


def test_a_reference_of_zero_has_no_scale() -> None:
    figures = measure(Circuit(random(4, 4)), Circuit(torch.zeros(4, 4)))
    assert figures["reference_scale"].isnan()
    assert figures["reference_cosine"].isnan()


def test_large_circuits_are_measured_from_small_matrices() -> None:
    # Dense, the circuit would take 320 gigabytes.
    left = torch.eye(200_000, 2) * torch.tensor([3.0, 1.0])
    figures = measure(Circuit(left, left.mT), Circuit(left, left.mT))
    assert figures["nuclear_norm"].item() == pytest.approx(10, rel=1e-12)
    assert figures["copying_score"].item() == pytest.approx(1, rel=1e-12)
    assert figures["reference_cosine"].item() == pytest.approx(1, rel=1e-12)
    assert figures["imbalance"].item() == 0


def test_a_reference_of_another_shape_is_refused() -> None:
    circuit = Circuit(random(2, 4, 5))
    for reference in (Circuit(random(5, 4)), Circuit(random(3, 4, 5)), Circuit(random(3, 2, 4, 5))):
        with pytest.raises(CallError, match=r"reference.*\[2, 4, 5\]"):
            measure(circuit, reference)


def test_circuits_of_rank_one_are_measured_from_their_two_vectors() -> None:
    left, right = random(3, 9, 1).double(), random(3, 1, 7, seed=1).double()
    values = measure(Circuit(left, right))
    norm = torch.linalg.vector_norm(left, dim=(-2, -1)) * torch.linalg.vector_norm(right, dim=(-2, -1))
    torch.testing.assert_close(values["frobenius_norm"], norm)
    torch.testing.assert_close(values["spectral_norm"], norm)
    for name in ("stable_rank", "effective_rank"):
        torch.testing.assert_close(values[name], torch.ones(3, dtype=torch.float64))
