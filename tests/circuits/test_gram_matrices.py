"""Gram matrices and folded circuits, compared with numpy in float64 and with explicitly folded factors."""

import numpy as np
import pytest
import torch
from qkov.circuits import AttentionWeights, Circuit, Norm
from qkov.circuits.algebra.circuit import FoldedCircuit
from qkov.circuits.algebra.gram import Folded, _Blocks, _of_thread, gram
from qkov.circuits.algebra.products import SCRATCH_ELEMENTS

LAYOUTS = {
    "rows together": lambda W: W.contiguous(),
    "columns together": lambda W: W.mT.contiguous().mT,
    "neither": lambda W: torch.stack([W, W], dim=-1).flatten(-2)[..., ::2],
    "heads inside": lambda W: W.permute(1, 0, 2).contiguous().permute(1, 0, 2) if W.ndim == 3 else W,
}


def by_hand(W, gain, centred):
    dense = np.asarray(W.double()) * (1 if gain is None else np.asarray(gain.double())[:, None])
    return dense - dense.mean(axis=-2, keepdims=True) if centred else dense


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("has_gain", [True, False])
@pytest.mark.parametrize("centred", [True, False])
def test_gram_matrices_are_those_of_the_folded_factor(layout, dtype, has_gain, centred):
    torch.manual_seed(0)
    W = LAYOUTS[layout]((torch.randn(3, 50, 7) + 0.3).to(dtype))
    gain = (1 + 0.3 * torch.randn(50)).to(dtype) if has_gain else None
    before = W.clone()
    folded = Folded(W, gain, centred)
    dense = by_hand(W, gain, centred)
    wanted = np.einsum("hik,hil->hkl", dense, dense)
    np.testing.assert_allclose(gram(folded).numpy(), wanted, rtol=1e-13, atol=1e-13 * np.abs(wanted).max())
    np.testing.assert_allclose(folded.dense.numpy(), dense, rtol=1e-14, atol=1e-15)
    assert torch.equal(W, before)


@pytest.mark.parametrize("layout", ["rows together", "columns together"])
def test_blocks_are_read_in_the_order_in_which_they_are_stored(layout):
    """Which is as fast as memory."""
    assert _Blocks(LAYOUTS[layout](torch.randn(3, 50, 7)), None).matrices.is_contiguous()


@pytest.mark.parametrize("mean", [0.0, 1.0, 30.0, 1e4, 1e6])
def test_centring_is_exact_however_large_the_mean(mean):
    """If the mean makes up most of the weights, the product is computed from centred weights instead of corrected."""
    torch.manual_seed(0)
    W = torch.randn(2, 200, 5, dtype=torch.float64)
    W[1] += mean
    dense = by_hand(W, None, centred=True)
    found, wanted = gram(Folded(W, None, centred=True)).numpy(), np.einsum("hik,hil->hkl", dense, dense)
    np.testing.assert_allclose(found, wanted, rtol=1e-13, atol=1e-12 * np.trace(wanted[1]))


@pytest.mark.parametrize("shape", [(50, 7), (1, 50, 7), (2, 3, 50, 7), (0, 50, 7), (9000, 3, 2)])
def test_any_batch(shape):
    W = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    wanted = np.einsum("...ik,...il->...kl", W.double().numpy(), W.double().numpy())
    assert gram(W).shape == (*shape[:-2], shape[-1], shape[-1])
    np.testing.assert_allclose(gram(W).numpy(), wanted, rtol=1e-13, atol=1e-12)


def test_scratch_memory_of_a_large_factor_is_not_kept():
    for shape in ((1, 50, 7), (1, 3 * SCRATCH_ELEMENTS // 4, 2), (2, 50, 7)):
        W = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        wanted = np.einsum("hik,hil->hkl", W.double().numpy(), W.double().numpy())
        np.testing.assert_allclose(gram(W).numpy(), wanted, rtol=1e-12, atol=1e-9)
    assert len(_of_thread.scratch) == SCRATCH_ELEMENTS


def test_a_matrix_that_is_not_finite_does_not_affect_its_neighbours():
    W = torch.randn(3, 20, 4)
    W[1, 2, 3] = torch.nan
    assert gram(W).isfinite().flatten(1).all(dim=1).tolist() == [True, False, True]
    W[1, 2, 3] = torch.inf
    assert gram(Folded(W, None, centred=True)).isfinite().flatten(1).all(dim=1).tolist() == [True, False, True]


@pytest.mark.parametrize("basis", ["folded", "folded_centred"])
@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("key_value_heads", [4, 2, 1])
def test_folded_circuits_are_those_of_the_folded_weights(basis, kind, key_value_heads):
    torch.manual_seed(0)
    d_model, d_head = 24, 5
    norm = Norm(kind, gain=1 + 0.3 * torch.randn(d_model), bias=torch.randn(d_model))
    weights = AttentionWeights(
        0,
        W_Q=torch.randn(4, d_model, d_head),
        W_K=torch.randn(key_value_heads, d_model, d_head),
        W_V=torch.randn(key_value_heads, d_model, d_head),
        W_O=torch.randn(4, d_head, d_model),
        norm=norm,
    )
    of_head = np.arange(4) // (4 // key_value_heads)
    read = {name: by_hand(getattr(weights, name), norm.gain, kind == "layer_norm") for name in ("W_Q", "W_K", "W_V")}
    centred = kind == "layer_norm" and basis == "folded_centred"
    written = by_hand(weights.W_O.mT, None, centred)
    wanted = {
        "QK": np.einsum("hik,hjk->hij", read["W_K"][of_head], read["W_Q"]),
        "OV": np.einsum("hik,hjk->hij", written, read["W_V"][of_head]),
    }
    for name, circuit in weights.circuits(basis).items():
        assert isinstance(circuit, FoldedCircuit)
        assert (circuit.shape, circuit.batch_shape, circuit.rank_bound) == ((4, d_model, d_model), (4,), d_head)
        values = np.linalg.svd(wanted[name], compute_uv=False)[:, :d_head]
        np.testing.assert_allclose(circuit.singular_values().numpy(), values, rtol=1e-10)
        np.testing.assert_allclose(circuit.dense().numpy(), wanted[name], rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(circuit.frobenius_norm(), np.linalg.norm(wanted[name], axis=(1, 2)), rtol=1e-12)
        np.testing.assert_allclose(circuit[1:3].dense().numpy(), wanted[name][1:3], rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(circuit.mT.dense().numpy(), wanted[name].swapaxes(1, 2), rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose((circuit - circuit).frobenius_norm(), 0, atol=1e-10)
    plain = weights.in_basis(basis).circuits(basis)
    assert all(type(circuit) is Circuit for circuit in plain.values())


def test_folded_circuits_of_few_dimensions_and_of_zeros():
    """Factors that are wider than long and rank-deficient ones do not go through Gram matrices."""
    torch.manual_seed(0)
    wide = FoldedCircuit(Folded(torch.randn(2, 3, 5), None, centred=True), Folded(torch.randn(2, 4, 5), None, False))
    wanted = np.linalg.svd(wide.dense().numpy(), compute_uv=False)
    assert wide.rank_bound == 3
    np.testing.assert_allclose(wide.singular_values().numpy(), wanted, atol=1e-13 * wanted.max())
    zero = FoldedCircuit(torch.ones(2, 9, 3), Folded(torch.ones(2, 8, 3), None, centred=True))
    assert zero.singular_values().abs().max() < 1e-13
