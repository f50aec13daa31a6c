"""Rotary positions, compared with dense rotation matrices and with the scores of real models."""

import math

import pytest
import torch
from qkov.circuits import AttentionFacts, AttentionWeights, CallError, Rotary

from .decoders import BY_NAME, like_llama
from .family_proof import build, read, run
from .forward_pass import normalised

D_HEAD, BASE = 12, 100.0
ROTARIES = [
    Rotary.of_base(12, BASE, "halves"),
    Rotary.of_base(12, BASE, "adjacent"),
    Rotary.of_base(8, BASE, "halves"),
    Rotary.of_base(4, BASE, "adjacent", factor=2.0),
]


def dense(rotary: Rotary, offset: int, d_head: int = D_HEAD) -> torch.Tensor:
    """R(offset), written out pair by pair."""
    matrix = torch.eye(d_head, dtype=torch.float64)
    for pair, frequency in enumerate(rotary.frequencies):
        angle = offset * frequency
        one, other = (2 * pair, 2 * pair + 1) if rotary.pairing == "adjacent" else (pair, pair + rotary.dims // 2)
        matrix[one, one] = matrix[other, other] = math.cos(angle)
        matrix[one, other], matrix[other, one] = -math.sin(angle), math.sin(angle)
    return matrix


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("offset", [0, 1, 7, -3, 1000])
@pytest.mark.parametrize("rotary", ROTARIES)
def test_rotating_rows_is_multiplying_with_the_dense_matrix(rotary, offset):
    rows = draw(2, 5, D_HEAD)
    torch.testing.assert_close(rotary.rotate(rows, offset), rows @ dense(rotary, offset).mT, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rotary", ROTARIES)
def test_norms_at_many_offsets_are_those_of_the_dense_products(rotary):
    W_K, W_Q = draw(3, 20, D_HEAD), draw(3, 24, D_HEAD)
    offsets = [0, 1, 2, 50, -4]
    products = torch.stack([W_K @ dense(rotary, offset) @ W_Q.mT for offset in offsets])
    torch.testing.assert_close(rotary.norms(W_K, W_Q, offsets), torch.linalg.matrix_norm(products), rtol=1e-13, atol=0)


@pytest.mark.parametrize("basis", ["raw", "folded"])
@pytest.mark.parametrize("name", ["llama", "gptj", "cohere", "phi"])
def test_norms_at_many_offsets_are_those_of_the_circuits(name, basis, tmp_path):
    offsets = [0, 1, 5, 17]
    for weights in read(build(BY_NAME[name]), tmp_path, ""):
        norms = torch.stack([weights.qk(basis, offset).frobenius_norm() for offset in offsets])
        torch.testing.assert_close(weights.rotary_norms(offsets, basis), norms, rtol=1e-10, atol=0)


def test_one_pair_in_closed_form():
    """W_K and W_Q of one row each: W_K R(offset) W_Q' is 1.5 cos(offset pi/2)."""
    rotary = Rotary(dims=2, frequencies=(math.pi / 2,))
    W_K, W_Q = torch.tensor([[[3.0, 0.0]]]), torch.tensor([[[0.5, 0.0]]])
    scores = [(W_K.double() @ rotary.rotate(W_Q, offset).mT).item() for offset in (0, 1, 2)]
    assert scores == pytest.approx([1.5, 0.0, -1.5], abs=1e-15)
    # The norm is the root of a square that cancels, so of rounding 1e-16 remains its root.
    assert rotary.norms(W_K, W_Q, [0, 1, 2]).flatten().tolist() == pytest.approx([1.5, 0.0, 1.5], abs=1e-7)


def test_frequencies_of_a_base_in_closed_form():
    assert Rotary.of_base(6, 1000.0).frequencies == pytest.approx((1.0, 0.1, 0.01), rel=1e-15)
    assert Rotary.of_base(4, 100.0, factor=2.0).frequencies == pytest.approx((0.5, 0.05), rel=1e-15)


_PARTIAL = like_llama("partial", "StableLmForCausalLM", partial_rotary_factor=1 / 3, num_key_value_heads=2)


@pytest.mark.parametrize(
    "family", [BY_NAME["llama"], BY_NAME["gptj"], BY_NAME["cohere"], _PARTIAL], ids=lambda family: family.name
)
def test_w_qk_at_the_offset_gives_the_scores_of_the_model(family, tmp_path):
    """Scores differ as the logarithms of the pattern do: x_j' W_QK(i - j) x_i - x_0' W_QK(i) x_i for query i."""
    model = build(family)
    extracted = read(model, tmp_path, "")
    seen = run(family, model)
    for weights in extracted:
        read_there = normalised(seen[weights.layer].residual.double(), weights.norm)
        scale = weights.W_Q.shape[-1] ** -0.5
        logarithms = seen[weights.layer].pattern.double().log()
        for query in (1, 4, 9):
            scores = torch.stack(
                [
                    torch.einsum(
                        "k,hkq,q->h",
                        read_there[key],
                        weights.qk(rotary_offset=query - key).dense(),
                        read_there[query],
                    )
                    for key in range(query + 1)
                ],
                dim=-1,
            )
            differences = scale * (scores - scores[:, :1])
            expected = logarithms[:, query, : query + 1] - logarithms[:, query, :1]
            torch.testing.assert_close(differences, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("rotary", "told"),
    [
        (Rotary(pairing="halves"), "the rotary frequencies of this model are not known"),
        (Rotary.of_base(14, BASE), "14 dimensions should rotate, but a head has only 12"),
    ],
)
def test_an_unknown_or_unfitting_rotation_is_refused(rotary, told):
    weights = AttentionWeights(0, W_Q=draw(2, 20, 12), W_K=draw(2, 20, 12), facts=AttentionFacts(rotary=rotary))
    assert weights.qk(rotary_offset=0).shape == (2, 20, 20)
    with pytest.raises(CallError, match=told):
        weights.qk(rotary_offset=1)


@pytest.mark.parametrize("dims", [0, 3, -2])
def test_dimensions_come_in_pairs(dims):
    with pytest.raises(CallError, match=f"rotary dimensions must come in pairs, got {dims}"):
        Rotary(dims=dims)


def test_one_frequency_a_pair():
    with pytest.raises(CallError, match="4 rotary dimensions need half as many frequencies, got 3"):
        Rotary(dims=4, frequencies=(1.0, 0.1, 0.01))


def test_frequencies_are_finite():
    with pytest.raises(CallError, match=r"rotary frequencies must be finite, got \(1\.0, nan\)"):
        Rotary(dims=4, frequencies=(1.0, math.nan))


def test_an_offset_is_refused_if_it_is_unknown_whether_positions_rotate():
    facts = AttentionFacts(unknown=frozenset({"rotary"}))
    weights = AttentionWeights(0, W_Q=draw(2, 20, 12), W_K=draw(2, 20, 12), facts=facts)
    with pytest.raises(CallError, match="whether positions rotate queries and keys in layer 0 is not known"):
        weights.qk(rotary_offset=1)


@pytest.mark.parametrize("rotary", ROTARIES[:3], ids=("halves", "adjacent", "some dimensions"))
def test_tables_of_sines_and_cosines_give_the_rotation_back(rotary):
    frequencies = torch.tensor(rotary.frequencies, dtype=torch.float64)
    pairs = frequencies.repeat(2) if rotary.pairing == "halves" else frequencies.repeat_interleave(2)
    angles = torch.arange(2, dtype=torch.float64)[:, None] * pairs
    of_tables = Rotary.of_tables(angles.sin(), angles.cos())
    assert (of_tables.dims, of_tables.pairing) == (rotary.dims, rotary.pairing)
    assert of_tables.frequencies == pytest.approx(rotary.frequencies, rel=1e-15)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("rotary", ROTARIES[:3], ids=("halves", "adjacent", "some dimensions"))
def test_tables_that_are_rounded_in_their_last_digit_pair_all_the_same(rotary, dtype):
    frequencies = torch.tensor(rotary.frequencies, dtype=torch.float64)
    pairs = frequencies.repeat(2) if rotary.pairing == "halves" else frequencies.repeat_interleave(2)
    sine, cosine = (table.to(dtype).repeat(2, 1) for table in (pairs.sin(), pairs.cos()))
    sine[1, -1] = torch.nextafter(sine[1, -1], torch.ones((), dtype=dtype))
    of_tables = Rotary.of_tables(sine, cosine)
    assert (of_tables.dims, of_tables.pairing) == (rotary.dims, rotary.pairing)
    assert of_tables.frequencies == pytest.approx(rotary.frequencies, rel=100 * torch.finfo(dtype).eps)
    sine[1, -1] += 1e-3
    with pytest.raises(CallError, match="neither by halves nor by neighbours"):
        Rotary.of_tables(sine, cosine)


@pytest.mark.parametrize("shape", [(1, 4), (2, 3), (0, 4)], ids=str)
def test_tables_of_other_shapes_are_refused(shape):
    with pytest.raises(CallError, match=r"must have the same shape, at least two positions and an even number"):
        Rotary.of_tables(torch.zeros(shape), torch.ones(shape))


def test_tables_that_pair_in_another_way_are_refused():
    angles = torch.tensor([[0.0] * 4, [0.1, 0.2, 0.3, 0.4]])
    with pytest.raises(CallError, match="neither by halves nor by neighbours"):
        Rotary.of_tables(angles.sin(), angles.cos())
