"""Rollout against dense float64 products, hand-computed cases and closed forms."""

import re
from fractions import Fraction
from functools import partial
from math import comb

import numpy as np
import pytest
import torch
from qkov.analyses.attention import FusedMaps, Rollout, rollout
from qkov.analyses.attention.measures.fusion import discard_smallest
from qkov.circuits import CallError, QkovError

from .toy_attention import ToyAttention, batch_of, kept_maps

#: Products of a few stochastic matrices in float64.
assert_exact = partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-14)


def one_map(rows, heads=1):
    """A map of one example: rows [query, key], the same in every head."""
    return torch.tensor(rows, dtype=torch.float64).expand(1, heads, -1, -1)


def rolled(maps, settings, mask=None):
    mask = torch.ones(1, maps[0].shape[-1], dtype=torch.bool) if mask is None else mask
    kept = FusedMaps(mask, settings)
    for layer, attention in enumerate(maps):
        kept(layer, attention)
    return kept


def dense_rollout(maps, length, residual, fuse):
    """The product of one example's maps over its own tokens, in numpy."""
    product = np.eye(length)
    for layer, attention in enumerate(maps):
        fused = fuse(attention[:, :length, :length].numpy(), layer)
        fused = fused / fused.sum(axis=-1, keepdims=True)
        share = residual[layer] if isinstance(residual, tuple) else residual
        product = ((1 - share) * fused + share * np.eye(length)) @ product
    return product


def mean_of_heads(heads, _):
    return heads.mean(axis=0)


FUSIONS = {
    "mean": ("mean", mean_of_heads),
    "max": ("max", lambda heads, _: heads.max(axis=0)),
    "min": ("min", lambda heads, _: heads.min(axis=0)),
    "weights": ((0.0, 2.0, 0.5, 1.0), lambda heads, _: np.einsum("h,hqk->qk", [0, 2, 0.5, 1], heads)),
    "weights by layer": (
        ((1.0, 0.0, 0.0, 0.0), (0.0, 1.0, 0.0, 0.0), (0.0, 0.0, 1.0, 0.0)),
        lambda heads, layer: heads[layer],
    ),
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("residual", [0.0, 0.3, 1.0, (0.1, 0.9, 0.0)])
@pytest.mark.parametrize("fusion", FUSIONS)
def test_row_and_matrix_are_the_dense_product_over_each_example_s_own_tokens(causal, residual, fusion):
    model, batch = ToyAttention(causal=causal), batch_of(7, 4, 1)
    heads, fuse = FUSIONS[fusion]
    settings = Rollout(residual=residual, heads=heads)
    maps = kept_maps(model, batch)
    kept = rolled(maps, settings, batch.mask)
    row, matrix, readout = rollout(model, batch, settings), kept.matrix(), model.readout(batch.mask)
    for example, length in enumerate((7, 4, 1)):
        expected = dense_rollout([attention[example] for attention in maps], length, residual, fuse)
        assert_exact(matrix[example, :length, :length], expected)
        assert_exact(row[example, :length], expected[readout[example]])
        assert matrix[example, length:].count_nonzero() == matrix[example, :, length:].count_nonzero() == 0
        assert row[example, length:].count_nonzero() == 0
        np.testing.assert_allclose(
            np.linalg.multi_dot([np.eye(length), *kept.mixed(example)[::-1]]), expected, atol=1e-14
        )


def test_rows_sum_to_one_whatever_the_settings():
    model, batch = ToyAttention(), batch_of(9, 5)
    for settings in (
        Rollout(),
        Rollout(heads="max", discard=0.6),
        Rollout(heads="min", residual=0.1, layers=range(1, 3)),
    ):
        kept = rolled(kept_maps(model, batch), settings, batch.mask)
        assert_exact(kept.row(model.readout(batch.mask)).sum(dim=1), 1.0)
        assert_exact(kept.matrix().sum(dim=2), batch.mask.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_maps_of_lower_precision_are_kept_so_and_summed_in_float64(dtype):
    maps = [attention.to(dtype) for attention in kept_maps(ToyAttention(), batch_of(9))]
    kept = rolled(maps, Rollout())
    exact = dense_rollout([attention[0].double() for attention in maps], 9, 0.5, mean_of_heads)
    row = kept.row(torch.tensor([8]))
    assert row.dtype == torch.float64
    assert_exact(row.sum(), 1.0)
    # Three layers, each entry rounded to float32 as heads are averaged.
    np.testing.assert_allclose(row[0], exact[8], rtol=3 * 4 * 2**-24)


def test_two_tokens_by_hand():
    # Half of the identity: A1 = [[1, 0], [1/4, 3/4]], A2 = [[1, 0], [1/2, 1/2]]; A2 A1 = [[1, 0], [5/8, 3/8]].
    kept = rolled([one_map([[1, 0], [0.5, 0.5]]), one_map([[1, 0], [1, 0]])], Rollout(residual=0.5))
    assert kept.matrix()[0].tolist() == [[1, 0], [0.625, 0.375]]
    assert kept.row(torch.tensor([1])).tolist() == [[0.625, 0.375]]


def test_three_tokens_by_hand_with_two_heads():
    # Heads [1, 0, 0] and [0, 0, 1] of the last query: mean [1/2, 0, 1/2], max [1, 0, 1], the same.
    heads = torch.tensor([[[[1, 0, 0], [1, 0, 0], [1, 0, 0]], [[1, 0, 0], [0, 1, 0], [0, 0, 1]]]], dtype=torch.float64)
    for fusion in ("mean", "max"):
        kept = rolled([heads, heads], Rollout(residual=0.0, heads=fusion))
        assert kept.matrix()[0].tolist() == [[1, 0, 0], [0.75, 0.25, 0], [0.75, 0, 0.25]]
    weighted = rolled([heads], Rollout(residual=0.0, heads=(1.0, 3.0)))
    assert weighted.matrix()[0].tolist() == [[1, 0, 0], [0.25, 0.75, 0], [0.25, 0, 0.75]]


def test_identity_attention_gives_the_identity():
    kept = rolled([torch.eye(5, dtype=torch.float64).expand(1, 2, 5, 5)] * 4, Rollout(residual=0.25, discard=0.9))
    assert torch.equal(kept.matrix()[0], torch.eye(5, dtype=torch.float64))


@pytest.mark.parametrize("residual", [0.0, 0.25])
@pytest.mark.parametrize("layers", [1, 2, 5])
def test_uniform_causal_attention_has_its_closed_form(residual, layers):
    # The Cesàro matrix has eigenvalues 1/(k+1), and a function f of it the entries
    # C(q,k) sum_m (-1)^m C(q-k,m) f(1/(k+m+1)): a Hausdorff matrix. Here f(x) = (residual + (1 - residual) x)^layers.
    length, share = 12, Fraction(residual)

    def entry(q, k):
        terms = ((-1) ** m * comb(q - k, m) * (share + (1 - share) / (k + m + 1)) ** layers for m in range(q - k + 1))
        return float(comb(q, k) * sum(terms)) if k <= q else 0.0

    uniform = torch.ones(length, length, dtype=torch.float64).tril()
    uniform = uniform / uniform.sum(dim=1, keepdim=True)
    kept = rolled([uniform.expand(1, 3, -1, -1)] * layers, Rollout(residual=residual))
    assert_exact(kept.matrix()[0], [[entry(q, k) for k in range(length)] for q in range(length)])
    assert_exact(kept.row(torch.tensor([7]))[0], [entry(7, k) for k in range(length)])


def test_uniform_attention_in_both_directions_stays_uniform():
    kept = rolled([torch.full((1, 2, 6, 6), 1 / 6, dtype=torch.float64)] * 3, Rollout(residual=0.0, discard=0.5))
    assert_exact(kept.matrix(), 1 / 6)


def test_the_smallest_share_of_a_query_s_keys_is_dropped_but_never_itself():
    rows = [[0.1, 0.2, 0.3, 0.4], [0.4, 0.1, 0.2, 0.3], [0.25, 0.75, 0, 0], [0.3, 0.3, 0.3, 0.1]]
    found = rolled([one_map(rows)], Rollout(residual=0.0, discard=0.5)).matrix()[0]
    expected = [
        [0.1 / 0.8, 0, 0.3 / 0.8, 0.4 / 0.8],  # its own .1 stays
        [0.4 / 0.8, 0.1 / 0.8, 0, 0.3 / 0.8],  # .1 and .2 are the smallest half, and .1 is its own
        [0, 1, 0, 0],  # of two keys one is dropped; those it does not see do not count
        [0.3, 0.3, 0.3, 0.1],  # three tie for the place at the cut: they stay, and so does its own
    ]
    assert_exact(found, expected)


def test_discarded_shares_are_counted_exactly():
    # 0.29 * 100 is 28.999999999999996.
    row = torch.arange(1.0, 101.0, dtype=torch.float64)
    kept = rolled([row.expand(1, 1, 100, 100)], Rollout(residual=0.0, discard=0.29))
    assert kept.row(torch.tensor([99])).count_nonzero() == 71


def test_a_range_of_layers_is_the_product_of_those_alone():
    model, batch = ToyAttention(layers=4), batch_of(6)
    maps = kept_maps(model, batch)
    settings = Rollout(residual=(0.9, 0.5, 0.25, 0.9), layers=range(1, 3))
    found = rollout(model, batch, settings)
    middle = [attention[0] for attention in maps[1:3]]
    expected = dense_rollout(middle, 6, (0.5, 0.25), mean_of_heads)
    assert_exact(found[0], expected[5])
    assert rolled(maps, settings).layers == (1, 2)


def test_padding_takes_no_part_even_where_the_model_attends_to_it():
    # A model without a padding mask: attention on tokens is brought to sum 1, and what padding does is not seen.
    attention = torch.full((1, 1, 4, 4), 0.25, dtype=torch.float64)
    attention[0, 0, 3] = torch.nan
    mask = torch.tensor([[True, True, False, False]])
    kept = rolled([attention, attention], Rollout(residual=0.0), mask)
    assert kept.row(torch.tensor([1])).tolist() == [[0.5, 0.5, 0, 0]]
    assert kept.matrix()[0, 2:].count_nonzero() == 0


def test_one_fused_map_a_layer_is_kept_and_the_heads_maps_are_not():
    import weakref

    kept = FusedMaps(torch.ones(2, 16, dtype=torch.bool))
    seen = []
    for layer in range(3):
        attention = torch.rand(2, 8, 16, 16)
        kept(layer, attention)
        seen.append(weakref.ref(attention))
        del attention
    assert all(reference() is None for reference in seen)
    assert [fused.weights.untyped_storage().nbytes() for fused in kept._kept] == [2 * 16 * 16 * 4] * 3


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"residual": 1.5}, "from 0 to 1, got 1.5"),
        ({"residual": (0.5, -0.1)}, "from 0 to 1, got -0.1"),
        ({"discard": 1.0}, "from 0 to less than 1, got 1.0"),
        ({"heads": ()}, "not all zero, got ()"),
        ({"heads": (0.0, 0.0)}, "not all zero, got (0.0, 0.0)"),
        ({"heads": ((1.0, 1.0), (1.0, -1.0))}, "none negative"),
        ({"layers": range(3, 3)}, "range of layer numbers"),
        ({"layers": range(-1, 2)}, "range of layer numbers"),
        ({"discard": -0.1}, "from 0 to less than 1, got -0.1"),
    ],
)
def test_settings_out_of_range_are_refused(settings, words):
    with pytest.raises(CallError, match=re.escape(words)):
        Rollout(**settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (Rollout(layers=range(2, 4)), "layers [2, 3] were requested; toy has layers 0 to 2"),
        (Rollout(residual=(0.5, 0.5)), "residual was given for 2 layers; toy has 3"),
        (Rollout(heads=((1.0,) * 4,) * 4), "heads was given for 4 layers; toy has 3"),
        (Rollout(heads=(1.0, 1.0)), "2 weights were given for the 4 heads"),
    ],
)
def test_settings_that_do_not_fit_the_model_are_refused(settings, words):
    with pytest.raises(CallError, match=re.escape(words)):
        rollout(ToyAttention(), batch_of(3), settings)


def test_what_is_no_map_of_the_batch_is_refused():
    kept = FusedMaps(torch.ones(1, 3, dtype=torch.bool))
    with pytest.raises(CallError, match="there is no attention map"):
        kept.matrix()
    with pytest.raises(CallError, match=r"shape \[1, 1, 2, 2\]; expected .* 1 examples and 3 positions"):
        kept(0, one_map([[1, 0], [0, 1]]))
    kept(1, torch.eye(3)[None, None])
    with pytest.raises(CallError, match="layer 1 came after that of layer 1"):
        kept(1, torch.eye(3)[None, None])
    with pytest.raises(QkovError, match="attention of layer 2 is not finite"):
        kept(2, torch.eye(3).mul(torch.inf)[None, None])
    with pytest.raises(CallError, match=r"position 3 of example 0 .* has 3 tokens"):
        kept.row(torch.tensor([3]))


def test_reading_at_padding_is_refused():
    mask = torch.tensor([[True, True, False]])
    with pytest.raises(CallError, match=r"position 2 of example 0 .* has 2 tokens"):
        rolled([torch.eye(3)[None, None]], Rollout(), mask).row(torch.tensor([2]))


def test_heads_that_attend_apart_have_no_min_and_only_where_it_is_needed():
    heads = torch.tensor([[[[1.0, 0], [1, 0]], [[1, 0], [0, 1]]]])
    kept = rolled([heads], Rollout(heads="min"))
    assert kept.row(torch.tensor([0])).tolist() == [[1, 0]]
    with pytest.raises(QkovError, match=r"layer 0: query 1 of example 0 .* fuse them by mean or max"):
        kept.row(torch.tensor([1]))
    with pytest.raises(QkovError, match="query 1 of example 0"):
        kept.matrix()


@pytest.mark.parametrize(
    ("share", "kept"),
    [
        (0.0, [[0, 1, 2], [0, 1, 2, 3], [], [0, 1, 2, 3]]),
        (0.3, [[0, 1, 2], [1, 2, 3], [], [0, 1, 2, 3]]),
        (0.5, [[0, 1], [1, 2, 3], [], [0, 1, 2, 3]]),
        (0.7, [[0], [1, 2, 3], [], [0, 1, 2, 3]]),
        (1 - 1e-12, [[0], [1, 3], [], [0, 1, 2, 3]]),
    ],
)
def test_the_smallest_are_dropped_of_each_query_and_never_all(share, kept):
    """Of 3, 4, 0 and 4 keys; a token's attention to itself stays, and so do ties."""
    rows = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.1, 0.2, 0.3, 0.4], [0.0] * 4, [0.25] * 4], dtype=torch.float64)
    found = discard_smallest(rows[None].clone(), share)[0]
    expected = torch.zeros_like(rows)
    for query, keys in enumerate(kept):
        expected[query, keys] = rows[query, keys]
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "settings",
    [{"residual": (0.0, 1.0)}, {"discard": 0.0}, {"heads": (0.0, 2.0)}, {"heads": ((0.0, 1.0),)}, {"layers": range(1)}],
)
def test_settings_at_the_ends_of_their_ranges_are_taken(settings):
    (name, value), *_ = settings.items()
    assert getattr(Rollout(**settings), name) == value
