"""Composition scores, compared with dense float64, TransformerLens, cases by hand and simulated chance levels."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from qkov.circuits import AttentionFacts, AttentionWeights, CallError, Norm, QkovError, Rotary, composition_scores
from qkov.circuits.weights.composition import _normalized


def drawn_layers(layers=3, heads=4, key_value_heads=4, d_model=12, d_head=3, seed=0, **more) -> list[AttentionWeights]:
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape):
        return torch.randn(*shape, generator=generator)

    return [
        AttentionWeights(
            layer=layer,
            W_Q=drawn(heads, d_model, d_head),
            W_K=drawn(key_value_heads, d_model, d_head),
            W_V=drawn(key_value_heads, d_model, d_head),
            W_O=drawn(heads, d_head, d_model),
            **more,
        )
        for layer in range(layers)
    ]


def numpy_circuits(weights: AttentionWeights, head: int) -> dict[str, np.ndarray]:
    """W_QK and W_OV of a query head, formed."""
    W_Q, W_K, W_V, W_O = factors(weights)
    of_keys = head // (len(W_Q) // len(W_K))
    return {"QK": W_K[of_keys] @ W_Q[head].T, "OV": W_O[head].T @ W_V[of_keys].T}


def factors(weights: AttentionWeights) -> list[np.ndarray]:
    return [getattr(weights, name).double().numpy() for name in ("W_Q", "W_K", "W_V", "W_O")]


def dense_score(kind: str, later: dict[str, np.ndarray], earlier: dict[str, np.ndarray]) -> float:
    reader = {"Q": later["QK"], "K": later["QK"].T, "V": later["OV"]}[kind]
    sizes = np.linalg.norm(reader) * np.linalg.norm(earlier["OV"])
    return float(np.linalg.norm(reader @ earlier["OV"]) / sizes)


@pytest.mark.parametrize(("heads", "key_value_heads"), [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("d_head", [3, 20])
def test_scores_of_every_pair_of_heads_equal_dense_algebra(heads, key_value_heads, d_head):
    layers = drawn_layers(heads=heads, key_value_heads=key_value_heads, d_head=d_head)
    found = composition_scores(layers)
    assert [(pair.earlier, pair.later) for pair in found] == [(0, 1), (0, 2), (1, 2)]
    for pair in found:
        assert list(pair.scores) == ["Q", "K", "V"]
        for kind, scores in pair.scores.items():
            expected = [
                [
                    dense_score(
                        kind, numpy_circuits(layers[pair.later], later), numpy_circuits(layers[pair.earlier], head)
                    )
                    for later in range(heads)
                ]
                for head in range(heads)
            ]
            np.testing.assert_allclose(scores, expected, rtol=1e-12)


def test_scores_equal_those_of_transformer_lens():
    from transformer_lens.model_bridge.sources import native

    torch.manual_seed(0)
    shape = {"d_model": 16, "d_head": 4, "n_heads": 4, "n_layers": 3}
    model = native.boot(shape | {"n_ctx": 8, "d_vocab": 11, "act_fn": "gelu"}).double()
    layers = []
    for layer, block in enumerate(model.blocks):
        attention: Any = block.attn
        W_Q, W_K, W_V, W_O = (getattr(attention, name).detach() for name in ("W_Q", "W_K", "W_V", "W_O"))
        layers.append(AttentionWeights(layer=layer, W_Q=W_Q, W_K=W_K, W_V=W_V, W_O=W_O))
    found = {(pair.earlier, pair.later): pair.scores for pair in composition_scores(layers)}
    for kind in "QKV":
        theirs = model.all_composition_scores(kind).scores
        for (earlier, later), scores in found.items():
            torch.testing.assert_close(scores[kind], theirs[earlier, :, later].double(), rtol=1e-9, atol=0)


def rank_one(layer: int, W_Q, W_K, W_V, W_O) -> AttentionWeights:
    """One head with d_head = 1, of four vectors."""
    W_Q, W_K, W_V = (vector.reshape(1, -1, 1) for vector in (W_Q, W_K, W_V))
    return AttentionWeights(layer=layer, W_Q=W_Q, W_K=W_K, W_V=W_V, W_O=W_O.reshape(1, 1, -1))


def test_a_head_that_reads_what_another_writes_scores_one():
    x, y, z = torch.eye(5)[:3]
    first = rank_one(0, W_Q=z, W_K=z, W_V=z, W_O=2 * x)
    second = rank_one(1, W_Q=3 * x, W_K=y, W_V=(x + y), W_O=z)
    (pair,) = composition_scores([first, second])
    assert pair.scores["Q"].item() == pytest.approx(1, abs=1e-15)
    assert pair.scores["K"].item() == 0
    assert pair.scores["V"].item() == pytest.approx(0.5**0.5, abs=1e-15)


def test_small_scores_keep_their_digits():
    # The second reads almost at a right angle to what the first writes, where squares of norms would cancel.
    first, second = drawn_layers(layers=2, heads=1, key_value_heads=1, d_model=40, d_head=4)
    basis = torch.linalg.qr(torch.randn(40, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))[0]
    writes, reads = basis[:, :4], basis[:, 4:] + 1e-9 * basis[:, :4]
    first, second = replace(first, W_O=writes.T[None]), replace(second, W_Q=reads[None])
    (pair,) = composition_scores([first, second])
    expected = dense_score("Q", numpy_circuits(second, 0), numpy_circuits(first, 0))
    assert expected < 1e-9
    assert pair.scores["Q"].item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("rank", [1, 4, 64])
@pytest.mark.parametrize("outlying", [False, True])
def test_at_full_width_the_error_is_below_a_millionth(rank, outlying):
    # Where float32 is used: heads of any rank, some dimensions of the stream far larger than others, and scores that
    # go down to nothing.
    heads, d_model, d_head = 4, 768, 64
    generator = torch.Generator().manual_seed(rank)
    layers = []
    for weights in drawn_layers(2, heads, heads, d_model, d_head, seed=rank):
        mixing = torch.randn(heads, rank, d_head, generator=generator) / 8
        scale = torch.exp(2 * torch.randn(d_model, 1, generator=generator)) if outlying else torch.ones(d_model, 1)
        W_Q, W_K, W_V, W_O = (torch.from_numpy(factor) for factor in factors(weights))
        W_Q, W_K, W_V, written = (scale * side[..., :rank] @ mixing.double() for side in (W_Q, W_K, W_V, W_O.mT))
        layers.append(AttentionWeights(layer=weights.layer, W_Q=W_Q, W_K=W_K, W_V=W_V, W_O=written.mT))
    # Half of the second layer's queries hardly read what the first layer writes.
    written = torch.linalg.qr(layers[0].W_O.flatten(0, 1).T)[0]
    W_Q = layers[1].W_Q
    W_Q[: heads // 2] -= (1 - 1e-3) * (written @ (written.T @ W_Q[: heads // 2]))
    (pair,) = composition_scores(layers)
    formed = [{name: circuit.dense() for name, circuit in weights.circuits().items()} for weights in layers]
    readers = {"Q": formed[1]["QK"], "K": formed[1]["QK"].mT, "V": formed[1]["OV"]}
    writers = formed[0]["OV"] / torch.linalg.matrix_norm(formed[0]["OV"])[:, None, None]
    for kind, reader in readers.items():
        reader = reader / torch.linalg.matrix_norm(reader)[:, None, None]
        expected = torch.stack([torch.linalg.matrix_norm(reader @ writer) for writer in writers])
        torch.testing.assert_close(pair.scores[kind], expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("rank", "dtype"), [(31, torch.float64), (32, torch.float32)])
def test_products_are_in_single_precision_where_32_squared_errors_average_out(rank, dtype):
    side = _normalized(torch.ones(2, rank, 5, dtype=torch.float64))
    assert side.fast.dtype == dtype
    assert side.exact.dtype == torch.float64
    torch.testing.assert_close(side.exact, torch.full((2, rank, 5), (5 * rank) ** -0.5, dtype=torch.float64))


def test_collapsed_circuits_compose_too():
    layers = drawn_layers(layers=2)
    dense = [
        AttentionWeights(layer=weights.layer, W_QK=weights.qk().dense(), W_OV=weights.ov().dense())
        for weights in layers
    ]
    (factored,), (collapsed,) = composition_scores(layers), composition_scores(dense)
    for kind, scores in factored.scores.items():
        torch.testing.assert_close(collapsed.scores[kind], scores, rtol=1e-12, atol=0)


def test_basis_and_rotary_offset_are_those_of_the_circuits():
    norm = Norm("layer_norm", gain=torch.linspace(0.5, 2, 12))
    facts = AttentionFacts(rotary=Rotary.of_base(2))
    layers = drawn_layers(layers=2, norm=norm, facts=facts)
    (pair,) = composition_scores(layers, "folded_centred", rotary_offset=5)
    formed = [
        {"QK": weights.qk("folded_centred", 5).dense().numpy(), "OV": weights.ov("folded_centred").dense().numpy()}
        for weights in layers
    ]
    for kind, scores in pair.scores.items():
        for earlier in range(4):
            for later in range(4):
                expected = dense_score(
                    kind,
                    {name: matrix[later] for name, matrix in formed[1].items()},
                    {name: matrix[earlier] for name, matrix in formed[0].items()},
                )
                assert scores[earlier, later].item() == pytest.approx(expected, rel=1e-11)
    assert pair.chance == pytest.approx(11**-0.5)
    assert composition_scores(layers, "folded")[0].chance == pytest.approx(12**-0.5)
    with pytest.raises(CallError, match="no rotary positions"):
        composition_scores(drawn_layers(), rotary_offset=3)


def test_zero_and_damaged_heads_have_no_score_and_do_not_disturb_the_others():
    whole, layers = drawn_layers(), drawn_layers()
    layers[0].ov().left[1] = 0
    layers[1].qk().left[2, 0, 0] = torch.nan
    layers[2].ov().mT.left[3, 4, 1] = torch.inf
    for pair, expected in zip(composition_scores(layers), composition_scores(whole), strict=True):
        for kind, scores in pair.scores.items():
            missing = torch.zeros(4, 4, dtype=torch.bool)
            missing[1] |= pair.earlier == 0
            missing[:, 2] |= pair.later == 1 and kind in "QK"
            missing[:, 3] |= pair.later == 2 and kind == "V"
            assert torch.equal(scores.isnan(), missing)
            assert torch.equal(scores[~missing], expected.scores[kind][~missing])


def test_stacks_are_separate_and_cross_attention_is_left_out():
    encoder, decoder = (
        [replace(weights, stack=stack) for weights in drawn_layers(layers=2, seed=seed)]
        for seed, stack in enumerate(("encoder", "decoder"))
    )
    cross = [
        replace(weights, stack="decoder cross", facts=AttentionFacts(cross=True)) for weights in drawn_layers(layers=2)
    ]
    found = composition_scores([*encoder, decoder[0], cross[0], decoder[1], cross[1]])
    assert [(pair.stack, pair.earlier, pair.later) for pair in found] == [("encoder", 0, 1), ("decoder", 0, 1)]


def test_streams_of_different_width_are_refused():
    layers = [drawn_layers(layers=1)[0], replace(drawn_layers(d_model=8)[1])]
    with pytest.raises(QkovError, match="layer 1 reads a stream of width 8, but layer 0 writes one of width 12"):
        composition_scores(layers)


@pytest.mark.parametrize("d_head", [1, 4])
@pytest.mark.parametrize("basis", ["raw", "folded_centred"])
def test_chance_is_the_root_mean_square_of_independent_gaussian_factors(d_head, basis):
    heads = 100
    layers = drawn_layers(2, heads, heads, d_model=10, d_head=d_head, norm=Norm("layer_norm"))
    (pair,) = composition_scores(layers, basis)
    for scores in pair.scores.values():
        squares = scores.square()
        # Pairs that share a head are uncorrelated: given one circuit, the mean over the other is the same for all.
        error = squares.std().item() / heads
        assert squares.mean().item() == pytest.approx(pair.chance**2, abs=4 * error)
        assert 4 * error < 1 / 9 - 1 / 10
