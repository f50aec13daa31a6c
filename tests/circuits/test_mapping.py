"""Mappings: every layout is proved by a forward pass of the module that has it, and every mistake has its message."""

import numpy as np
import pytest
import torch
from qkov.circuits.errors import CallError, QkovError
from qkov.circuits.mapping import parse_mapping, read_mapping
from torch import nn

HEADS, D_MODEL, D_HEAD = 3, 12, 4
QK = {"Q": "q", "K": "k"}


def table(**changes):
    base = {
        "heads": HEADS,
        "layout": "linear",
        "tensors": {"Q": "q.weight", "K": "k.weight", "V": "v.weight", "O": "o.weight"},
    }
    return {key: value for key, value in (base | changes).items() if value is not None}


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
        weights |= mapping.arrange(role, module.get_parameter(name).detach(), name)
    scores = torch.einsum("ihd,jhd->hij", *(torch.einsum("im,hmd->ihd", x[0], weights[role]) for role in "QK"))
    expected = torch.softmax(scores / D_HEAD**0.5, dim=-1)
    torch.testing.assert_close(expected, attention[0], rtol=1e-12, atol=1e-14)
    read = torch.einsum("hij,jm,hmd,hdn->in", expected, x[0], weights["V"], weights["O"])
    torch.testing.assert_close(read, output[0].detach(), rtol=1e-12, atol=1e-13)


def test_a_flipped_layout_gives_another_attention():
    """The proof above fails when a square tensor is read the wrong way round."""
    matrix = torch.randn(D_MODEL, D_MODEL, generator=torch.Generator().manual_seed(0))
    linear = parse_mapping(table(), "a test").arrange("Q", matrix, "q")["Q"]
    conv1d = parse_mapping(table(layout="conv1d"), "a test").arrange("Q", matrix, "q")["Q"]
    assert linear.shape == conv1d.shape == (HEADS, D_MODEL, D_HEAD)
    assert not torch.equal(linear, conv1d)
    assert torch.equal(conv1d, parse_mapping(table(), "a test").arrange("Q", matrix.T, "q")["Q"])


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
    arranged = mapping.arrange(role, tensor, "w")[role]
    for head in range(HEADS):
        for model in range(D_MODEL):
            for inner in range(D_HEAD):
                place = (head, inner, model) if role == "O" else (head, model, inner)
                assert arranged[place] == index(tensor, head, model, inner)


def test_a_fused_tensor_interleaved_by_head_is_split_where_it_lies():
    tensor = torch.arange(36.0 * 12).reshape(36, 12)
    mapping = parse_mapping(table(tensors={"QKV": "w"}, layout={"QKV": "(head qkv d_head) d_model"}), "a test")
    parts = mapping.arrange("QKV", tensor, "w")
    for position, role in enumerate("QKV"):
        for head in range(HEADS):
            rows = slice(12 * head + 4 * position, 12 * head + 4 * position + 4)
            assert torch.equal(parts[role][head], tensor[rows].T)


def test_one_head_needs_no_axis_for_it():
    tensor = torch.randn(4, 12)
    layout = {"Q": "d_head d_model", "K": "d_model d_head"}
    mapping = parse_mapping(table(tensors={"Q": "w", "K": "x"}, layout=layout, heads=None), "a test")
    assert torch.equal(mapping.arrange("Q", tensor, "w")["Q"], tensor.T[None])


def test_layers_are_found_in_numerical_order():
    mapping = parse_mapping(table(tensors={"Q": "layers.{layer}.q", "K": "layers.{layer}.k"}, prefix="model"), "a test")
    names = {f"model.layers.{layer}.{part}" for layer in ("00", "2", "10") for part in "qk"}
    found = mapping.layers(names | {"model.layers.x.q", "other"})
    assert sorted(found) == [0, 2, 10]
    assert found[0] == {"Q": "model.layers.00.q", "K": "model.layers.00.k"}


def test_a_tensor_without_a_layer_serves_all_of_them():
    mapping = parse_mapping(table(tensors={"Q": "layers.{layer}.q", "K": "shared.k"}), "a test")
    found = mapping.layers({"layers.0.q", "layers.1.q", "shared.k"})
    assert found == {layer: {"Q": f"layers.{layer}.q", "K": "shared.k"} for layer in (0, 1)}
    assert parse_mapping(table(), "a test").layers({f"{part}.weight" for part in "qkvo"}).keys() == {0}


def test_what_a_file_lacks_is_named():
    mapping = parse_mapping(table(tensors={"Q": "layers.{layer}.q", "K": "layers.{layer}.k"}), "a test")
    with pytest.raises(QkovError, match=r"a test names no tensor of the file.*layers.\{layer\}.q.*file holds a, b"):
        mapping.layers({"a", "b"})
    with pytest.raises(QkovError, match=r"layer 1 lacks layers.1.k"):
        mapping.layers({"layers.0.q", "layers.0.k", "layers.1.q"})
    with pytest.raises(QkovError, match=r"w has shape \(5, 12\), which does not fit the layout"):
        parse_mapping(table(), "a test").arrange("Q", torch.zeros(5, 12), "w")
    with pytest.raises(QkovError, match=r"w holds torch.int8 numbers; expected floating ones"):
        parse_mapping(table(), "a test").arrange("Q", torch.zeros(12, 12, dtype=torch.int8), "w")
    with pytest.raises(QkovError, match=r"w has shape \(0, 12\), which holds nothing"):
        parse_mapping(table(), "a test").arrange("Q", torch.zeros(0, 12), "w")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head": 3}, "unknown key 'head'; known are heads"),
        ({"tensors": {"X": "w"}}, "has 'X'; known are Q, K, V, O, QKV"),
        ({"tensors": {}}, "names no tensor; it needs a table"),
        ({"tensors": {"Q": 3}}, "should be a table of strings"),
        ({"tensors": {"Q": "q", "QKV": "w"}}, "both QKV and one of Q, K, V"),
        ({"heads": "three"}, "heads of a test should be of type int, got 'three'"),
        ({"heads": True}, "heads of a test should be of type int"),
        ({"heads": 0}, "should be at least 1, got 0"),
        ({"heads": None}, "gives no number of heads"),
        ({"layout": "sideways"}, "layout of a test is 'sideways'; expected one of linear, conv1d"),
        ({"layout": {"Q": "(head d_head) d_model"}}, "gives no layout for K"),
        ({"layout": None}, "gives no layout for Q"),
        ({"tensors": {"Q": "q"}}, "has Q, which make up no circuit; W_QK takes Q and K"),
        ({"tensors": {"Q": "q", "V": "v"}}, "make up no circuit"),
        ({"tensors": {"Q": "q", "K": "k", "QK": "w"}}, "has both QK and its factors"),
        ({"tensors": {"QKV": "q", "OV": "w"}}, "has both OV and its factors"),
        ({"tensors": QK, "layout": {"Q": "d_head d_modle"}}, "expected the axes head, d_model, d_head"),
        ({"tensors": QK, "layout": {"Q": "d_head d_model"}}, "has no axis head, and heads is 3"),
        ({"scalars": {"loss": 1}}, r"\[scalars\] of a test should be a table of strings"),
    ],
)
def test_mistakes_have_their_message(changes, message):
    with pytest.raises(CallError, match=message):
        parse_mapping(table(**changes), "a test")


def test_a_file_that_is_missing_or_no_toml(tmp_path):
    with pytest.raises(CallError, match="does not exist"):
        read_mapping(tmp_path / "none.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("heads = = 3")
    with pytest.raises(CallError, match="cannot be read as TOML"):
        read_mapping(broken)
    broken.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CallError, match="cannot be read as TOML"):
        read_mapping(broken)
    with pytest.raises(CallError, match="cannot be read as TOML"):
        read_mapping(tmp_path)
