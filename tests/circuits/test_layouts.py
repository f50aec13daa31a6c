"""Layouts: every one is proved by a forward pass of a module that has it, or element by element."""

import numpy as np
import pytest
import torch
from qkov.circuits import QkovError
from qkov.circuits.architectures.head_counts import count_heads
from qkov.circuits.architectures.layouts import HeadCounts, arrange, arrange_bias, arrange_layer
from qkov.circuits.architectures.mapping import parse_mapping
from torch import nn

HEADS, D_MODEL, D_HEAD = 3, 12, 4


def table(**changes):
    base = {
        "heads": HEADS,
        "layout": "linear",
        "tensors": {"Q": "q.weight", "K": "k.weight", "V": "v.weight", "O": "o.weight"},
    }
    return {key: value for key, value in (base | changes).items() if value is not None}


def arranged(mapping, role, tensor):
    roles = [role] if "QKV" in mapping.layouts else mapping.layouts
    counts = count_heads(dict.fromkeys(roles, tuple(tensor.shape)), mapping.layouts, mapping.heads.query)
    return arrange(role, tensor, mapping.layouts[role], counts, "w", mapping.origin)


def test_linear_layout_gives_the_heads_of_torchs_own_attention():
    torch.manual_seed(0)
    module = nn.MultiheadAttention(D_MODEL, HEADS, bias=False, batch_first=True).double()
    x = torch.randn(1, 5, D_MODEL, dtype=torch.float64)
    output, attention = module(x, x, x, average_attn_weights=False)
    mapping = parse_mapping(
        table(
            tensors={"QKV": "in_proj_weight", "O": "out_proj.weight"},
            layout={"QKV": "(qkv head d_head) d_model", "O": "d_model (head d_head)"},
        ),
        "a test",
    )
    weights = {}
    for role, name in mapping.tensors.items():
        weights |= arranged(mapping, role, module.get_parameter(name).detach())
    scores = torch.einsum("ihd,jhd->hij", *(torch.einsum("im,hmd->ihd", x[0], weights[role]) for role in "QK"))
    expected = torch.softmax(scores / D_HEAD**0.5, dim=-1)
    torch.testing.assert_close(expected, attention[0], rtol=1e-12, atol=1e-14)
    read = torch.einsum("hij,jm,hmd,hdn->in", expected, x[0], weights["V"], weights["O"])
    torch.testing.assert_close(read, output[0].detach(), rtol=1e-12, atol=1e-13)


def test_a_flipped_layout_gives_another_attention():
    """The proof above fails when a square tensor is read the wrong way round."""
    matrix = torch.randn(D_MODEL, D_MODEL, generator=torch.Generator().manual_seed(0))
    linear = arranged(parse_mapping(table(), "a test"), "Q", matrix)["Q"]
    conv1d = arranged(parse_mapping(table(layout="conv1d"), "a test"), "Q", matrix)["Q"]
    assert linear.shape == conv1d.shape == (HEADS, D_MODEL, D_HEAD)
    assert not torch.equal(linear, conv1d)
    assert torch.equal(conv1d, arranged(parse_mapping(table(), "a test"), "Q", matrix.T)["Q"])


@pytest.mark.parametrize(
    ("layout", "role", "shape", "index"),
    [
        ("linear", "Q", (12, 12), lambda t, h, m, d: t[4 * h + d, m]),
        ("linear", "O", (12, 12), lambda t, h, m, d: t[m, 4 * h + d]),
        ("conv1d", "K", (12, 12), lambda t, h, m, d: t[m, 4 * h + d]),
        ("conv1d", "O", (12, 12), lambda t, h, m, d: t[4 * h + d, m]),
        ("transformer_lens", "V", (3, 12, 4), lambda t, h, m, d: t[h, m, d]),
        ("transformer_lens", "O", (3, 4, 12), lambda t, h, m, d: t[h, d, m]),
        ({"Q": "head d_head d_model"}, "Q", (3, 4, 12), lambda t, h, m, d: t[h, d, m]),
        ({"Q": "(d_head head) d_model"}, "Q", (12, 12), lambda t, h, m, d: t[3 * d + h, m]),
    ],
)
def test_layouts_element_by_element(layout, role, shape, index):
    tensor = torch.arange(float(np.prod(shape))).reshape(shape)
    other = {"Q": "K", "K": "Q", "V": "O", "O": "V"}[role]
    layout = layout if isinstance(layout, str) else {other: "head d_model d_head", **layout}
    mapping = parse_mapping(table(layout=layout, tensors={role: "w", other: "x"}), "a test")
    weight = arranged(mapping, role, tensor)[role]
    for head in range(HEADS):
        for model in range(D_MODEL):
            for inner in range(D_HEAD):
                place = (head, inner, model) if role == "O" else (head, model, inner)
                assert weight[place] == index(tensor, head, model, inner)


def test_a_fused_tensor_interleaved_by_head_is_split_where_it_lies():
    tensor = torch.arange(36.0 * 12).reshape(36, 12)
    mapping = parse_mapping(table(tensors={"QKV": "w"}, layout={"QKV": "(head qkv d_head) d_model"}), "a test")
    parts = arranged(mapping, "QKV", tensor)
    for position, role in enumerate("QKV"):
        for head in range(HEADS):
            rows = slice(12 * head + 4 * position, 12 * head + 4 * position + 4)
            assert torch.equal(parts[role][head], tensor[rows].T)


def test_one_head_needs_no_axis_for_it():
    tensor = torch.randn(4, 12)
    layout = {"Q": "d_head d_model", "K": "d_model d_head"}
    mapping = parse_mapping(table(tensors={"Q": "w", "K": "x"}, layout=layout, heads=None), "a test")
    assert torch.equal(arranged(mapping, "Q", tensor)["Q"], tensor.T[None])


@pytest.mark.parametrize(
    ("layout", "shape", "rows"),
    [
        # Six query heads and two of keys and values: one after another, and group by group.
        ("(qkv head d_head) d_model", (40, 12), {"Q": range(6), "K": (6, 7), "V": (8, 9)}),
        ("d_model (qkv head d_head)", (12, 40), {"Q": range(6), "K": (6, 7), "V": (8, 9)}),
        ("(head qkv d_head) d_model", (40, 12), {"Q": (0, 1, 2, 5, 6, 7), "K": (3, 8), "V": (4, 9)}),
    ],
)
def test_a_fused_tensor_with_grouped_heads(layout, shape, rows):
    tensor = torch.arange(float(np.prod(shape))).reshape(shape)
    counts = count_heads({"QKV": shape, "O": (12, 24)}, {"QKV": layout, "O": "d_model (head d_head)"}, 6)
    assert counts == HeadCounts(query=6, key_value=2, d_head=4)
    parts = arrange("QKV", tensor, layout, counts, "w", "a test")
    upright = tensor if shape[0] == 40 else tensor.T
    bias = arrange_bias("QKV", upright[:, 0], layout, counts, "b", "a test")
    for role, places in rows.items():
        assert parts[role].shape == (len(places), 12, 4)
        for head, place in enumerate(places):
            assert torch.equal(parts[role][head], upright[4 * place : 4 * place + 4].T)
            assert torch.equal(bias[role][head], upright[4 * place : 4 * place + 4, 0])


@pytest.mark.parametrize(
    ("shapes", "layouts", "heads", "expected"),
    [
        ({"Q": (12, 8), "K": (4, 8)}, dict.fromkeys("QK", "(head d_head) d_model"), 3, (3, 1, 4)),
        ({"Q": (3, 8, 4), "K": (1, 8, 4)}, dict.fromkeys("QK", "head d_model d_head"), None, (3, 1, 4)),
        ({"V": (2, 8, 4), "O": (8, 24)}, {"V": "head d_model d_head", "O": "d_model (head d_head)"}, 6, (6, 2, 4)),
        ({"QKV": (36, 12)}, {"QKV": "(qkv head d_head) d_model"}, 3, (3, 3, 4)),
        ({"Q": (12, 8)}, {"Q": "(head d_head) d_model"}, None, None),
        ({"Q": (12, 8)}, {"Q": "(head d_head) d_model"}, 5, None),
        ({"QK": (2, 8, 8)}, {"QK": "head key query"}, None, None),
    ],
)
def test_heads_are_counted_from_shapes(shapes, layouts, heads, expected):
    assert count_heads(shapes, layouts, heads) == (None if expected is None else HeadCounts(*expected))


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(5, 12), r"w has shape \(5, 12\), which does not fit the layout"),
        (torch.zeros(12, 12, dtype=torch.int8), r"w holds torch.int8 numbers; expected floating-point numbers"),
        (torch.zeros(0, 12), r"w has shape \(0, 12\), which holds nothing"),
    ],
)
def test_what_does_not_fit_is_named(tensor, message):
    with pytest.raises(QkovError, match=message):
        arranged(parse_mapping(table(), "a test"), "Q", tensor)


def test_a_fused_tensor_of_the_wrong_size_is_named():
    counts = HeadCounts(query=6, key_value=2, d_head=4)
    with pytest.raises(QkovError, match=r"w has shape \(41, 12\), which does not fit .* with 6 heads"):
        arrange("QKV", torch.zeros(41, 12), "(qkv head d_head) d_model", counts, "w", "a test")


def test_a_joined_bias_belongs_to_queries_keys_and_values_that_are_stored_apart():
    torch.manual_seed(0)
    roles = {role: f"{role.lower()}.weight" for role in "QKVO"}
    mapping = parse_mapping(table(tensors=roles | {"b_QKV": "bias"}), "a test")
    tensors = {role: torch.randn(D_MODEL, D_MODEL) for role in "QKVO"} | {"b_QKV": torch.randn(3 * D_MODEL)}
    names = {role: (name,) for role, name in mapping.tensors.items()}
    layer = arrange_layer(tensors, mapping.layouts, HeadCounts(HEADS, HEADS, D_HEAD), names, mapping.origin)
    assert sorted(layer) == ["W_K", "W_O", "W_Q", "W_V", "b_K", "b_Q", "b_V"]
    for part, role in enumerate("QKV"):
        wanted = tensors["b_QKV"][part * D_MODEL : (part + 1) * D_MODEL].reshape(HEADS, D_HEAD)
        assert torch.equal(layer[f"b_{role}"], wanted)


def test_one_head_may_stand_in_a_dimension_of_its_own():
    tensor = torch.randn(D_HEAD, D_MODEL, generator=torch.Generator().manual_seed(0))
    for stored in (tensor, tensor[None]):
        assert torch.equal(arrange("Q", stored, "d_head d_model", None, "w", "a test")["Q"], tensor.mT[None])
    with pytest.raises(QkovError, match=r"w has shape \(2, 4, 12\)"):
        arrange("Q", tensor.expand(2, -1, -1), "d_head d_model", None, "w", "a test")
