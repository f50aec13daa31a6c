"""Products with the transpose, by panels and by numpy alone, compared with sums written out in einsum."""

import numpy as np
import pytest
from qkov.circuits.algebra import blas as symmetric_products
from qkov.circuits.algebra.blas import PANEL, SMALL_PRODUCT, _pieces, multiply_by_transpose

SHAPES = [
    (3, 1, 5),
    (3, 8, 50),
    (3, 9, 50),
    (2, 20, 64),
    (2, 64, 1000),
    (2, 64, 4096),
    (1, 128, 4100),
    (1, 128, 8191),
    (2, 130, 300),
]


@pytest.fixture(params=[True, False], ids=["panels", "whole"])
def has_small_products(request, monkeypatch):
    monkeypatch.setattr(symmetric_products, "_has_small_products", lambda: request.param)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("long_together", [True, False])
def test_products_are_those_of_einsum_and_symmetric(has_small_products, shape, long_together):
    wide = np.random.default_rng(0).standard_normal(shape)
    if not long_together:
        wide = np.ascontiguousarray(wide.swapaxes(1, 2)).swapaxes(1, 2)
    before = wide.copy()
    out = np.full((*shape[:2], shape[1]), np.nan)
    multiply_by_transpose(wide, out)
    wanted = np.einsum("hik,hjk->hij", wide, wide)
    np.testing.assert_allclose(out, wanted, rtol=1e-12, atol=1e-14 * shape[2])
    assert np.array_equal(out, out.swapaxes(1, 2))
    assert np.array_equal(wide, before)


def test_only_the_given_slice_of_a_larger_array_is_written(has_small_products):
    wide, out = np.ones((4, 10, 30)), np.zeros((4, 10, 10))
    multiply_by_transpose(wide[1:3], out[1:3])
    assert out[1:3].min() == out[1:3].max() == 30
    assert not out[[0, 3]].any()


def test_an_empty_batch_writes_nothing(has_small_products):
    wide, out = np.ones((2, 10, 30)), np.full((2, 10, 10), np.nan)
    multiply_by_transpose(wide[1:1], out[1:1])
    assert np.isnan(out).all()


def test_panels_are_small_products_of_equal_pieces(monkeypatch):
    monkeypatch.setattr(symmetric_products, "_has_small_products", lambda: True)
    for rank in (9, 20, 64, 80, 96, 128):
        for long in (1, 97, 768, 1024, 2048, 2560, 4096, 4097, 8191, 8192, 14336):
            pieces = _pieces(rank, long)
            assert pieces == 0 or (long % pieces == 0 and PANEL * rank * long / pieces <= SMALL_PRODUCT)
    assert (_pieces(64, 1024), _pieces(64, 2048), _pieces(128, 4096)) == (1, 2, 8)
    assert _pieces(8, 1024) == _pieces(129, 1024) == _pieces(128, 8191) == 0
