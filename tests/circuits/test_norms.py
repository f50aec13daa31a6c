"""Norms and their folding, compared with torch's LayerNorm and RMSNorm."""

from functools import partial
from typing import Any

import pytest
import torch
from qkov.circuits import Norm
from qkov.circuits.weights.norms import is_centred

HEADS, D_MODEL, D_HEAD, TOKENS = 3, 16, 5, 7
#: Sums of 16 products in float64.
assert_exact = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def torch_norm(kind, gain, bias, eps) -> Any:
    module: Any = torch.nn.LayerNorm(D_MODEL, eps=eps) if kind == "layer_norm" else torch.nn.RMSNorm(D_MODEL, eps=eps)
    module = module.double()
    with torch.no_grad():
        module.weight.copy_(gain)
        if bias is not None:
            module.bias.copy_(bias)
    return module


@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
def test_folded_weights_read_the_plain_norm_as_the_raw_ones_read_the_whole(kind):
    torch.manual_seed(0)
    x, W, b, gain = 3 + draw(TOKENS, D_MODEL), draw(HEADS, D_MODEL, D_HEAD), draw(HEADS, D_HEAD), draw(D_MODEL)
    bias = draw(D_MODEL) if kind == "layer_norm" else None
    norm = Norm(kind, gain, bias, 1e-5)
    ones, zeros = torch.ones(D_MODEL), None if bias is None else torch.zeros(D_MODEL)
    whole, plain = torch_norm(kind, gain, bias, 1e-5)(x), torch_norm(kind, ones, zeros, 1e-5)(x)
    folded = plain @ norm.fold(W).dense + norm.fold_bias(b, W)[:, None]
    assert_exact(folded, whole @ W + b[:, None])


def test_a_bias_of_the_norm_alone_becomes_a_bias_of_the_weights():
    torch.manual_seed(0)
    W, bias = draw(HEADS, D_MODEL, D_HEAD), draw(D_MODEL)
    assert_exact(Norm("layer_norm", None, bias).fold_bias(None, W), bias @ W)
    assert Norm("rms_norm", draw(D_MODEL)).fold_bias(None, W) is None


def test_folding_layer_norm_subtracts_the_mean_over_the_read_side_and_rms_norm_does_not():
    torch.manual_seed(0)
    W = draw(HEADS, D_MODEL, D_HEAD)
    assert Norm("layer_norm").fold(W).dense.mean(dim=1).abs().max() < 1e-15
    assert torch.equal(Norm("rms_norm").fold(W).dense, W)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("d_model", [32, 4096])
def test_centred_weights_are_recognised_in_every_precision(dtype, d_model):
    torch.manual_seed(0)
    W = torch.randn(2, d_model, 8)
    centred = (W - W.mean(dim=1, keepdim=True)).to(dtype)
    assert is_centred(centred, dim=1)
    assert not is_centred(W.to(dtype), dim=1)
    assert not is_centred(centred, dim=2)
    assert not is_centred(torch.zeros(2, d_model, 8, dtype=dtype), dim=1)


@pytest.mark.parametrize(("d_model", "share"), [(64, 0.05), (4096, 0.01)])
def test_a_mean_above_a_tenth_of_that_of_random_numbers_is_none_of_rounding_in_bfloat16(d_model, share):
    """Random numbers have a mean of about d_model^-1/2 of their size, and rounding one of 2^-9 of that."""
    assert share > 0.1 * d_model**-0.5
    torch.manual_seed(0)
    W = torch.randn(1, d_model, 1)
    W = W - W.mean(dim=1, keepdim=True)
    assert is_centred(W.bfloat16(), dim=1)
    assert not is_centred((W + share).bfloat16(), dim=1)


@pytest.mark.parametrize("d_model", [32, 4096])
def test_a_small_mean_is_told_from_rounding_in_float32(d_model):
    """Rounding leaves means of about 1e-8 of the size of the numbers, so one of 1e-4 was there before."""
    torch.manual_seed(0)
    W = torch.randn(2, d_model, 8, dtype=torch.float64)
    centred = W - W.mean(dim=1, keepdim=True)
    assert is_centred(centred.float(), dim=1)
    assert not is_centred((centred + 1e-4).float(), dim=1)


@pytest.mark.parametrize("size", [2.0**-20, 2.0**20])
def test_whether_weights_are_centred_does_not_depend_on_their_size(size):
    torch.manual_seed(0)
    W = torch.randn(2, 64, 8, dtype=torch.float64)
    centred = W - W.mean(dim=1, keepdim=True)
    assert is_centred((centred * size).float(), dim=1)
    assert not is_centred(((centred + 1e-4) * size).float(), dim=1)


def test_a_column_of_zeros_among_centred_ones_is_centred():
    torch.manual_seed(0)
    W = torch.randn(2, 64, 8)
    W[1, :, 3] = 0
    assert is_centred(W - W.mean(dim=1, keepdim=True), dim=1)
    W[1, 5, 3] = 1
    assert not is_centred(torch.where(W == 1, W, W - W.mean(dim=1, keepdim=True)), dim=1)


@pytest.mark.parametrize("size", [1e-300, 1e300])
def test_whether_weights_are_centred_is_seen_up_to_the_ends_of_float64(size):
    torch.manual_seed(0)
    W = torch.randn(2, 64, 8, dtype=torch.float64)
    assert is_centred((W - W.mean(dim=1, keepdim=True)) * size, dim=1)
    assert not is_centred(W * size, dim=1)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_weights_that_are_not_finite_are_not_centred(value):
    W = torch.zeros(2, 64, 8)
    W[0, 0, 0] = value
    assert not is_centred(W, dim=1)
