"""A matrix that LAPACK cannot decompose, or that is not finite, is NaN and flagged; the rest of the batch stands."""

import numpy as np
import pytest
import torch
from qkov.analyses.trajectories import circuit_table, track
from qkov.circuits import AttentionWeights, Circuit, measure
from qkov.circuits.algebra.spectrum import matrix_by_matrix, matrix_singular_values, matrix_svd
from qkov.circuits.reading.saved_format import save_checkpoint

LinAlgError = torch.linalg.LinAlgError  # pyright: ignore[reportPrivateImportUsage]
DECOMPOSITIONS = ("svd", "svdvals", "eigvals", "eigvalsh")


def refusing_large(real):
    """LAPACK does not converge for batches with a large matrix, as it does not for a few matrices by chance."""

    def decompose(matrices, *arguments, **options):
        if (matrices.abs().amax((-2, -1)) > 1e3).any():
            raise LinAlgError("the algorithm failed to converge")
        return real(matrices, *arguments, **options)

    return decompose


@pytest.fixture(params=[(name,) for name in DECOMPOSITIONS] + [DECOMPOSITIONS], ids="+".join)
def refusing(request, monkeypatch):
    for name in request.param:
        monkeypatch.setattr(torch.linalg, name, refusing_large(getattr(torch.linalg, name)))
    return request.param


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_only_the_matrix_without_convergence_is_missing():
    matrices = drawn(2, 3, 4, 5)
    matrices[1, 2] *= 1e6

    def decompose(some):
        if (some.abs().amax((-2, -1)) > 1e3).any():
            raise LinAlgError
        return torch.linalg.svdvals(some), some.sum(-1)

    values, sums = matrix_by_matrix(decompose, matrices)
    expected = np.linalg.svd(matrices.numpy(), compute_uv=False)
    expected[1, 2] = np.nan
    np.testing.assert_allclose(values, expected, rtol=1e-12)
    assert sums[1, 2].isnan().all()
    assert sums.isfinite().sum() == 20


def test_the_only_matrix_may_be_the_one_without_convergence():
    def decompose(some):
        if (some.abs().amax((-2, -1)) > 1e3).any():
            raise LinAlgError
        return (torch.linalg.svdvals(some),)

    (values,) = matrix_by_matrix(decompose, 1e6 * drawn(1, 4, 5))
    assert values.shape == (1, 4)
    assert values.isnan().all()


def test_singular_values_and_vectors_of_the_rest(refusing):
    matrices = drawn(3, 6, 4)
    matrices[1] *= 1e6
    values, whole = matrix_singular_values(matrices), matrix_svd(matrices)
    expected = np.linalg.svd(matrices.numpy(), compute_uv=False)
    for shown, name in ((values, "svdvals"), (whole.values, "svd")):
        stated = expected.copy()
        if name in refusing:
            stated[1] = np.nan
        np.testing.assert_allclose(shown, stated, rtol=1e-12)
    again = whole.left * whole.values[:, None] @ whole.right
    np.testing.assert_allclose(again[[0, 2]], matrices[[0, 2]], atol=1e-12)


def test_the_quantities_of_a_head_are_missing_and_those_of_others_are_as_without_it(monkeypatch):
    left, right = drawn(3, 8, 2), drawn(3, 2, 8, seed=1)
    undisturbed = measure(Circuit(left, right), reference=Circuit(right.mT, left.mT))
    for name in ("svd", "eigvals"):
        real, calls = getattr(torch.linalg, name), []

        def decompose(matrices, *arguments, real=real, calls=calls, **options):
            calls.append(len(matrices))
            # The whole batch fails, and then its second matrix.
            if calls in ([3], [3, 1, 1]):
                raise LinAlgError("the algorithm failed to converge")
            return real(matrices, *arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(torch.linalg, name, decompose)
            values = measure(Circuit(left, right), reference=Circuit(right.mT, left.mT))
        for quantity, expected in undisturbed.items():
            assert values[quantity][1].isnan().all(), (name, quantity)
            torch.testing.assert_close(values[quantity][[0, 2]], expected[[0, 2]], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_head_that_is_not_finite_is_missing(bad):
    left, right = drawn(3, 8, 2), drawn(3, 2, 8, seed=1)
    undisturbed = measure(Circuit(left, right))
    left[1, 0, 0] = bad
    values = measure(Circuit(left, right))
    for quantity, expected in undisturbed.items():
        assert values[quantity][1].isnan().all(), quantity
        torch.testing.assert_close(values[quantity][[0, 2]], expected[[0, 2]], rtol=1e-12, atol=0, equal_nan=True)


def test_a_run_goes_on_and_flags_the_head(tmp_path, monkeypatch):
    for step in (1, 2):
        weights = [drawn(2, *shape, seed=step) for shape in ((6, 3), (6, 3), (6, 3), (3, 6))]
        weights[2][1] *= 1e5 if step == 2 else 1
        save_checkpoint(tmp_path / "run", step, [AttentionWeights(0, *weights)], {}, {})
    expected = circuit_table(tmp_path / "run" / "step_000000001.safetensors")

    monkeypatch.setattr(torch.linalg, "eigvals", refusing_large(torch.linalg.eigvals))
    table = track(tmp_path / "run", tmp_path / "store").store.table()
    flagged = table[~table["finite"]][["step", "head", "circuit"]].to_numpy().tolist()
    assert flagged == [[2, 1, "OV"]]
    missing = table[~table["finite"]]
    assert missing[["frobenius_norm", "effective_rank", "copying_score", "omega_self"]].isna().all(axis=None)
    first = table[table["step"] == 1].reset_index(drop=True)
    for name in ("frobenius_norm", "effective_rank", "copying_score", "omega_self"):
        np.testing.assert_allclose(first[name], expected[name], rtol=1e-12)
    assert table[(table["step"] == 2) & table["finite"]]["frobenius_norm"].notna().all()
