"""The change of a circuit: closed forms, dense matrices, and a rank that rounding does not raise."""

import math
from typing import Any

import pytest
import torch
from qkov.circuits import CallError, Circuit, measure_change
from qkov.circuits.algebra.change import CHANGE_QUANTITIES


def factors(rows: int = 12, columns: int = 10, rank: int = 5, dtype: torch.dtype = torch.float64) -> Circuit:
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(3, *shape, generator=generator) for shape in ((rows, rank), (rank, columns)))
    return Circuit(left.to(dtype), right.to(dtype))


def low_rank(like: torch.Tensor, rank: int, size: float, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    first = torch.randn(*like.shape[:-1], rank, generator=generator, dtype=torch.float64)
    second = torch.randn(*like.shape[:-2], rank, like.shape[-1], generator=generator, dtype=torch.float64)
    return size * first @ second


@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-8])
@pytest.mark.parametrize("ranks", [(0, 2), (1, 0), (2, 1)])
def test_every_quantity_is_that_of_the_dense_difference(size, ranks):
    base: Any = factors()
    of_left, of_right = low_rank(base.left, ranks[0], size), low_rank(base.right, ranks[1], size, 2)
    values = measure_change(Circuit(base.left + of_left, base.right + of_right), base)
    assert tuple(values) == CHANGE_QUANTITIES
    # Without cancellation, from the changes of the factors as they are stored.
    left, right = (base.left + of_left) - base.left, (base.right + of_right) - base.right
    dense = left @ (base.right + right) + base.left @ right
    s = torch.linalg.svdvals(dense)
    w = s / s.sum(-1, keepdim=True)
    expected = {
        "change_norm": dense.norm(dim=(-2, -1)),
        "relative_change": dense.norm(dim=(-2, -1)) / base.dense().norm(dim=(-2, -1)),
        "spectral_norm": s[:, 0],
        "rank": torch.full((3,), float(sum(ranks))),
        "stable_rank": s.square().sum(-1) / s[:, 0].square(),
        "effective_rank": torch.special.entr(w).sum(-1).exp(),
    }
    for name, value in expected.items():
        # A stored sum rounds a change of 1e-8 by 1e-8 of itself, which the effective rank takes as further directions.
        tolerance = 1e-6 if name == "effective_rank" and size == 1e-8 else 1e-10
        torch.testing.assert_close(values[name], value.double(), rtol=tolerance, atol=0, msg=name)
    torch.testing.assert_close(values["singular_values"][:, : sum(ranks)], s[:, : sum(ranks)], rtol=1e-8, atol=0)


def test_no_change_has_size_and_rank_0():
    values = measure_change(factors(), factors())
    for name in ("change_norm", "relative_change", "spectral_norm", "rank"):
        assert (values[name] == 0).all(), name
    assert values["stable_rank"].isnan().all()
    assert values["effective_rank"].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_to_the_type_of_the_factors_does_not_raise_the_rank(dtype):
    base = factors(200, 180, 20, dtype)
    right = (base.right.double() + low_rank(base.right, 2, 1.0)).to(dtype)
    values = measure_change(Circuit(base.left, right), base)
    assert (values["rank"] == 2).all()
    # The precision can be stated where the types no longer show it.
    wide = Circuit(base.left.double(), right.double()), Circuit(base.left.double(), base.right.double())
    assert (measure_change(*wide)["rank"] == 20).all()
    assert (measure_change(*wide, precision=torch.finfo(dtype).eps)["rank"] == 2).all()


def test_factors_that_did_not_change_say_nothing_about_precision():
    base = factors(40, 30, 10)
    low = Circuit(base.left.bfloat16(), base.right)
    small = low_rank(base.right, 1, 1e-6)
    assert (measure_change(Circuit(low.left, base.right + small), low)["rank"] == 1).all()


def test_what_is_zero_or_not_finite_is_missing():
    base = factors()
    zero = Circuit(torch.zeros_like(base.left), base.right)
    values = measure_change(base, zero)
    assert values["relative_change"].isnan().all()
    assert (values["change_norm"] > 0).all()
    left = base.left.clone()
    left[1, 0, 0] = math.nan
    values = measure_change(Circuit(left, base.right), base)
    for name in CHANGE_QUANTITIES:
        assert values[name][1].isnan().all(), name
    assert not values["rank"][0].isnan()
    with pytest.raises(CallError, match="difference needs two circuits of one shape"):
        measure_change(base, factors(rows=11))


def test_collapsed_circuits_have_a_change_too():
    base = factors()
    matrix = base.dense()
    values = measure_change(Circuit(matrix + low_rank(matrix, 1, 0.5)), Circuit(matrix))
    assert (values["rank"] == 1).all()


@pytest.mark.parametrize(("precision", "rank"), [(1 / 24.5, 1), (1 / 23.5, 0), (1 / 32, 1)])
def test_singular_values_count_above_four_roundings_of_the_factors(precision, rank):
    """With A = 2 and B = 3, what rounding can make is 24 e."""
    left = torch.tensor([[2.0]], dtype=torch.float64)
    circuit, base = (Circuit(left, torch.tensor([[right]], dtype=torch.float64)) for right in (3.0, 2.5))
    assert float(measure_change(circuit, base, precision)["rank"]) == rank
    # A change of 24/32 is no more than what rounding of 1/32 can make.
    at_limit = Circuit(left, torch.tensor([[2.625]], dtype=torch.float64))
    assert float(measure_change(circuit, at_limit, 1 / 32)["rank"]) == 0


@pytest.mark.parametrize("batch", [(), (3, 1), (1, 3)])
def test_batches_of_any_shape_are_measured_alike(batch):
    base = factors()
    changed = Circuit(base.left + low_rank(base.left, 2, 0.3), base.right)
    expected, count = measure_change(changed, base), math.prod(batch)
    circuits = []
    for one in (changed, base):
        left, right = (factor[:count].reshape(*batch, *factor.shape[1:]) for factor in (one.left, one.right))
        circuits.append(Circuit(left, right))
    values = measure_change(*circuits)
    for name in CHANGE_QUANTITIES:
        assert values[name].shape == (*batch, *expected[name].shape[1:]), name
        torch.testing.assert_close(values[name].reshape(count, -1), expected[name][:count].reshape(count, -1), msg=name)
