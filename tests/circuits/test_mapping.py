"""Mappings: which layers they find, and the message of every mistake."""

import pytest
import torch
from qkov.circuits import CallError, QkovError, ReadingOptions, open_checkpoint, read_mapping
from qkov.circuits.architectures.mapping import parse_mapping

HEADS = 3
QK = {"Q": "q", "K": "k"}


def table(**changes):
    base = {
        "heads": HEADS,
        "layout": "linear",
        "tensors": {"Q": "q.weight", "K": "k.weight", "V": "v.weight", "O": "o.weight"},
    }
    return {key: value for key, value in (base | changes).items() if value is not None}


def test_layers_are_found_in_numerical_order():
    mapping = parse_mapping(table(tensors={"Q": "layers.{layer}.q", "K": "layers.{layer}.k"}, prefix="model"), "a test")
    names = {f"model.layers.{layer}.{part}" for layer in ("00", "2", "10") for part in "qk"}
    found = mapping.layers(names | {"model.layers.x.q", "other"})
    assert sorted(found) == [0, 2, 10]
    assert found[0] == {"Q": ("model.layers.00.q",), "K": ("model.layers.00.k",)}


def test_a_tensor_without_a_layer_serves_all_of_them():
    mapping = parse_mapping(table(tensors={"Q": "layers.{layer}.q", "K": "shared.k"}), "a test")
    found = mapping.layers({"layers.0.q", "layers.1.q", "shared.k"})
    assert found == {layer: {"Q": (f"layers.{layer}.q",), "K": ("shared.k",)} for layer in (0, 1)}
    assert parse_mapping(table(), "a test").layers({f"{part}.weight" for part in "qkvo"}).keys() == {0}


def test_a_layer_s_number_may_stand_twice_in_a_name():
    tensors = {"Q": "layers.{layer}.q.{layer}", "K": "layers.{layer}.k"}
    names = {"layers.3.q.3", "layers.3.q.4", "layers.3.k"}
    assert parse_mapping(table(tensors=tensors), "a test").layers(names) == {
        3: {"Q": ("layers.3.q.3",), "K": ("layers.3.k",)}
    }


def test_a_norm_of_queries_that_is_named_and_not_described_is_there(tmp_path):
    widths = {"q.weight": (6, 5), "k.weight": (6, 5), "norm": (2,), "wrong": (5,)}
    torch.save({name: torch.ones(shape) for name, shape in widths.items()}, tmp_path / "a.pt")
    tensors = {"Q": "q.weight", "K": "k.weight", "query_norm_gain": "norm"}
    (weights,) = open_checkpoint(tmp_path / "a.pt", parse_mapping(table(tensors=tensors), "a test")).layers()
    assert weights.query_norm is not None
    assert weights.query_norm.kind is None
    assert weights.key_norm is None
    wrong = parse_mapping(table(tensors=tensors | {"query_norm_gain": "wrong"}), "a test")
    with pytest.raises(
        QkovError, match="the norm of queries or keys has 5 entries, which is not a multiple of d_head = 2"
    ):
        next(open_checkpoint(tmp_path / "a.pt", wrong).layers())


@pytest.mark.parametrize("width", [1, 4])
def test_the_norm_of_queries_in_a_layer_without_queries_keeps_its_gain(tmp_path, width):
    gain = torch.arange(1.0, width + 1)
    torch.save({"v": torch.ones(6, 5), "o": torch.ones(5, 6), "norm": gain}, tmp_path / "a.pt")
    tensors = {"V": "v", "O": "o", "query_norm_gain": "norm"}
    layouts = {"V": "(head d_head) d_model", "O": "d_model (head d_head)"}
    mapping = parse_mapping({"tensors": tensors, "layout": layouts, "heads": 3}, "a test")
    (weights,) = open_checkpoint(tmp_path / "a.pt", mapping).layers()
    assert weights.query_norm is not None
    assert weights.query_norm.over == "all"
    assert torch.equal(weights.query_norm.gain, gain)


def test_what_a_file_lacks_is_named():
    mapping = parse_mapping(table(tensors={"Q": "layers.{layer}.q", "K": "layers.{layer}.k"}), "a test")
    with pytest.raises(
        QkovError, match=r"a test names no tensor of the file.*layers.\{layer\}.q.*; the file holds a, b"
    ):
        mapping.layers({"a", "b"})
    with pytest.raises(QkovError, match=r"the file has them with prefix = \"model\.net\"; the file holds model"):
        mapping.layers({"model.net.layers.0.q", "model.net.layers.0.k", "other.layers.0.k"})
    with pytest.raises(QkovError, match=r"layer 1 lacks layers.1.k"):
        mapping.layers({"layers.0.q", "layers.0.k", "layers.1.q"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head": 3}, "unknown key 'head'; known are tensors, layout, heads"),
        ({"tensors": {"X": "w"}}, "has the unknown key 'X'; known are Q, K, V, O, QKV"),
        ({"tensors": {}}, "names no tensor; it needs a table"),
        ({"tensors": {"Q": 3}}, "should be a table of strings"),
        ({"tensors": {"Q": "q", "QKV": "w"}}, "both QKV and one of Q, K, V"),
        (
            {"heads": "three"},
            "heads of a test should be of type int, or a list of them with one for each layer, got 'three'",
        ),
        ({"heads": True}, "heads of a test should be of type int"),
        ({"heads": 0}, "should be at least 1, got 0"),
        ({"heads": [4, "2"]}, "heads of a test should be of type int, or a list"),
        ({"heads": []}, "heads of a test should be of type int, or a list"),
        ({"heads": [4, 0]}, "heads of a test should be at least 1, got 0"),
        ({"d_head": 8.0}, "d_head of a test should be of type int, or a list"),
        ({"d_value": [8]}, r"d_value of a test should be of type int, got \[8\]"),
        ({"heads": None}, "gives no number of heads"),
        ({"layout": "sideways"}, "layout of a test is 'sideways'; expected one of linear, conv1d"),
        ({"layout": {"Q": "(head d_head) d_model"}}, "gives no layout for K"),
        ({"layout": None}, "gives no layout for Q"),
        ({"tensors": {"Q": "q"}}, "has Q, which do not form a circuit; W_QK needs Q and K"),
        ({"tensors": {"Q": "q", "V": "v"}}, "do not form a circuit"),
        ({"tensors": {"Q": "q", "K": "k", "QK": "w"}}, "has both QK and its factors"),
        ({"tensors": {"QKV": "q", "OV": "w"}}, "has both OV and its factors"),
        ({"tensors": QK, "layout": {"Q": "d_head d_modle"}}, "expected the axes head, d_model, d_head"),
        ({"tensors": QK, "layout": dict.fromkeys(QK, "d_head d_model")}, "has no axis head, and heads is 3"),
        ({"scalars": {"loss": 1}}, r"\[scalars\] of a test should be a table of strings"),
        ({"tensors": {**QK, "b_V": "v.bias"}}, "has b_V without V, whose bias it is"),
        ({"rotary": {"pairing": "thirds"}}, "rotary.pairing of a test should be one of halves, adjacent"),
        ({"rotary": {"speed": 1}}, r"\[rotary\] of a test has the unknown key 'speed'; known are pairing"),
        ({"rotary": 3}, "rotary of a test should be a table with pairing"),
        ({"norm": {"kind": "batch_norm"}}, "norm.kind of a test should be one of layer_norm, rms_norm"),
        ({"norm": {"eps": 1e-5}}, r"\[norm\] of a test lacks kind: one of layer_norm, rms_norm"),
        ({"query_key_norm": {"eps": 1e-5}}, r"\[query_key_norm\] of a test lacks kind"),
        ({"window": "wide"}, "window of a test should be of type int, got 'wide'"),
        ({"causal": 1}, "causal of a test should be of type bool, got 1"),
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
        read_mapping(str(broken))
    broken.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CallError, match="cannot be read as TOML"):
        read_mapping(broken)
    with pytest.raises(CallError, match="is not a regular file"):
        read_mapping(tmp_path)


SEVERAL_STACKS = """
layout = "linear"
heads = 4

[[stacks]]
stack = "encoder"
prefix = "encoder.layers"
[stacks.tensors]
QKV = "{layer}.self_attn.in_proj_weight"
O = "{layer}.self_attn.out_proj.weight"

[[stacks]]
stack = "decoder"
prefix = "decoder.layers"
causal = true
[stacks.tensors]
QKV = "{layer}.self_attn.in_proj_weight"
O = "{layer}.self_attn.out_proj.weight"

[[stacks]]
stack = "decoder cross"
prefix = "decoder.layers"
cross = true
[stacks.tensors]
QKV = "{layer}.multihead_attn.in_proj_weight"
O = "{layer}.multihead_attn.out_proj.weight"
"""


def test_several_stacks_in_one_mapping(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Transformer(32, 4, 2, 1, 64, batch_first=True)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    (tmp_path / "map.toml").write_text(SEVERAL_STACKS)
    stated = open_checkpoint(tmp_path / "model.pt", mapping=read_mapping(tmp_path / "map.toml"))
    found = open_checkpoint(tmp_path / "model.pt", heads=4)
    assert stated.recognised == f"by the mapping {tmp_path / 'map.toml'}"
    assert stated.layer_keys == [("encoder", 0), ("encoder", 1), ("decoder", 0), ("decoder cross", 0)]
    for one, other in zip(stated.layers(), found.layers(), strict=True):
        assert (one.stack, one.layer, one.facts.cross) == (other.stack, other.layer, other.facts.cross)
        assert torch.equal(one.qk().dense(), other.qk().dense())
        assert torch.equal(one.ov().dense(), other.ov().dense())
    settings = ReadingOptions(mapping=read_mapping(tmp_path / "map.toml")).settings()["mapping"]
    assert [stack["stack"] for stack in (settings, *settings["stacks"])] == ["encoder", "decoder", "decoder cross"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('stack = "decoder"', 'stack = "encoder"'), "give each its own stack"),
        (("cross = true", "crossing = true"), r"\[\[stacks\]\] 3 of the mapping .* has the unknown key 'crossing'"),
        (("causal = true", "heads = 0"), r"\[\[stacks\]\] 2 of the mapping"),
    ],
)
def test_a_fault_in_one_of_several_stacks_is_placed(tmp_path, change, message):
    (tmp_path / "map.toml").write_text(SEVERAL_STACKS.replace(*change))
    with pytest.raises(CallError, match=message):
        read_mapping(tmp_path / "map.toml")
    (tmp_path / "map.toml").write_text("stacks = 3")
    with pytest.raises(CallError, match=r"should be tables \[\[stacks\]\]"):
        read_mapping(tmp_path / "map.toml")
