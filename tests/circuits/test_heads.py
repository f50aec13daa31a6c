"""Heads in every layer: their number times their width is the joined width, or the layer is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from qkov.circuits import OpenCheckpoint, QkovError, open_checkpoint, open_model
from qkov.circuits.architectures.mapping import parse_mapping
from safetensors.torch import save_file
from torch import Tensor

from .family_proof import small

WIDTH, D_HEAD = 32, 8


def llama(**changes: Any) -> Any:
    torch.manual_seed(0)
    settings = {"hidden_size": WIDTH, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 50}
    config = small("LlamaConfig", **{**settings, "num_key_value_heads": 4, "head_dim": D_HEAD, **changes})
    return transformers.LlamaForCausalLM(config)


def pruned(model: Any, layer: int, kept: int = 16) -> dict[str, Tensor]:
    """The weights with only the first heads of one layer."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    at = f"model.layers.{layer}.self_attn."
    for name in ("q_proj", "k_proj", "v_proj"):
        state[f"{at}{name}.weight"] = state[f"{at}{name}.weight"][:kept].clone()
    state[f"{at}o_proj.weight"] = state[f"{at}o_proj.weight"][:, :kept].clone()
    return state


def saved(folder: Path, state: dict[str, Tensor], config: dict[str, Any] | None) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def widths(opened: OpenCheckpoint) -> list[tuple[int, int, int, int]]:
    return [(w.layer, w.heads, w.heads // w.group_size, w.W_Q.shape[-1]) for w in opened.layers()]


def assert_scores(opened: OpenCheckpoint, state: dict[str, Tensor], layer: int, head: int) -> None:
    """W_QK of a head of a plain LLaMA is W_K' W_Q of its rows."""
    rows = slice(head * D_HEAD, (head + 1) * D_HEAD)
    query, key = (state[f"model.layers.{layer}.self_attn.{part}_proj.weight"][rows].double() for part in "qk")
    weights = next(weights for weights in opened.layers() if weights.layer == layer)
    torch.testing.assert_close(weights.qk().dense()[head].double(), key.T @ query, rtol=1e-6, atol=1e-6)


def test_a_layer_with_pruned_heads_has_fewer_of_the_stated_width(tmp_path: Path) -> None:
    model = llama()
    state = pruned(model, 1)
    opened = open_checkpoint(saved(tmp_path, state, model.config.to_dict()))
    assert widths(opened) == [(0, 4, 4, 8), (1, 2, 2, 8)]
    assert_scores(opened, state, 1, 1)


def test_a_live_model_with_pruned_heads(tmp_path: Path) -> None:
    model = llama()
    attention = model.model.layers[1].self_attn
    for name in ("q_proj", "k_proj", "v_proj"):
        module = getattr(attention, name)
        module.weight = torch.nn.Parameter(module.weight[:16].clone())
    attention.o_proj.weight = torch.nn.Parameter(attention.o_proj.weight[:, :16].clone())
    assert widths(open_model(model)) == [(0, 4, 4, 8), (1, 2, 2, 8)]


@pytest.mark.parametrize("layer", [0, 1])
def test_the_config_lists_pruned_heads(layer: int, tmp_path: Path) -> None:
    """Without head_dim, only `pruned_heads` distinguishes two heads of width 8 from four of width 4."""
    model = llama()
    config = {**model.config.to_dict(), "head_dim": None}
    state = pruned(model, layer)
    saved(tmp_path, state, config)
    with pytest.raises(QkovError, match=rf"layers\.{layer}\.self_attn\.q_proj.*\(16, 32\).* 4 heads of width 8"):
        widths(open_checkpoint(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({**config, "pruned_heads": {str(layer): [2, 3]}}))
    expected = [(0, 4, 4, 8), (1, 4, 4, 8)]
    expected[layer] = (layer, 2, 2, 8)
    opened = open_checkpoint(tmp_path)
    assert widths(opened) == expected
    assert_scores(opened, state, layer, 1)
    (tmp_path / "config.json").write_text(json.dumps({**config, "pruned_heads": {str(layer): [3]}}))
    with pytest.raises(QkovError, match=r"which does not fit 3 heads of width 8"):
        widths(open_checkpoint(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({**config, "pruned_heads": {str(layer): [0, 1, 2, 3]}}))
    with pytest.raises(QkovError, match=rf"pruned_heads leave no head of 4 in layer {layer}"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, "pruned_heads": 3}))
    with pytest.raises(QkovError, match=r"says pruned_heads = 3, where a list of heads for each layer is expected"):
        open_checkpoint(tmp_path)


def test_pruned_heads_of_a_fused_weight(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=32, n_head=4, n_layer=2, n_positions=16, vocab_size=20)
    model = transformers.GPT2Model(config)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    kept = torch.arange(8, 24)
    fused = state["h.1.attn.c_attn.weight"].unflatten(1, (3, 32))[:, :, kept]
    state["h.1.attn.c_attn.weight"] = fused.flatten(1)
    state["h.1.attn.c_attn.bias"] = state["h.1.attn.c_attn.bias"].unflatten(0, (3, 32))[:, kept].flatten()
    state["h.1.attn.c_proj.weight"] = state["h.1.attn.c_proj.weight"][kept]
    saved(tmp_path, state, config.to_dict() | {"pruned_heads": {"1": [0, 3]}})
    opened = open_checkpoint(tmp_path)
    assert widths(opened) == [(0, 4, 4, 8), (1, 2, 2, 8)]
    second: Any = list(opened.layers())[1]
    expected = fused[:, 1, 8:].double() @ fused[:, 0, 8:].double().T
    torch.testing.assert_close(second.qk().dense()[1].double(), expected, rtol=1e-6, atol=1e-6)
    saved(tmp_path, state, config.to_dict())
    with pytest.raises(QkovError, match=r"h\.1\.attn.* 4 heads of width 8 \(d_model divided by their number\)"):
        widths(open_checkpoint(tmp_path))


def growing(seed: int = 0) -> dict[str, Tensor]:
    """Two layers of 4 and 8 heads, in pairs that share a key."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {0: (32, 16), 1: (64, 32)}
    state = {}
    for layer, (query, key) in shapes.items():
        for part, shape in (("q", (query, 32)), ("k", (key, 32)), ("v", (key, 32)), ("o", (32, query))):
            state[f"model.layers.{layer}.self_attn.{part}_proj.weight"] = torch.randn(*shape, generator=generator)
    return state


def test_heads_that_grow_with_the_layer(tmp_path: Path) -> None:
    config = llama(num_key_value_heads=2).config.to_dict()
    opened = open_checkpoint(saved(tmp_path, growing(), config))
    assert widths(opened) == [(0, 4, 2, 8), (1, 8, 4, 8)]
    with pytest.raises(QkovError, match=r"layers\.1\.self_attn\.q_proj.* does not fit 4 heads of width 8"):
        widths(open_checkpoint(tmp_path, heads=4))


def test_a_config_whose_heads_no_layer_has_is_refused(tmp_path: Path) -> None:
    config = llama(num_attention_heads=16, num_key_value_heads=4).config.to_dict()
    with pytest.raises(QkovError, match="says num_key_value_heads = 4, but the shapes of the weights say 2"):
        open_checkpoint(saved(tmp_path, growing(), config))
    config |= {"num_key_value_heads": None}
    with pytest.raises(QkovError, match="says the number of heads = 16, but the shapes of the weights say 4"):
        open_checkpoint(saved(tmp_path, growing(), config))


def test_a_config_that_lists_the_heads_of_each_layer(tmp_path: Path) -> None:
    config = llama().config.to_dict() | {"num_key_value_heads": None, "num_attention_heads": [4, 8]}
    assert widths(open_checkpoint(saved(tmp_path, growing(), config))) == [(0, 4, 2, 8), (1, 8, 4, 8)]
    config |= {"head_dim": None}
    assert widths(open_checkpoint(saved(tmp_path, growing(), config))) == [(0, 4, 2, 8), (1, 8, 4, 8)]
    config |= {"num_attention_heads": [4]}
    with pytest.raises(QkovError, match="heads states 1 layer, and layer 1 is not among them"):
        widths(open_checkpoint(saved(tmp_path, growing(), config)))
    config |= {"num_attention_heads": [4, 4]}
    with pytest.raises(QkovError, match="does not fit 4 heads of width 8"):
        widths(open_checkpoint(saved(tmp_path, growing(), config)))


NAMES = {role: f"model.layers.{{layer}}.self_attn.{role.lower()}_proj.weight" for role in "QKVO"}


def mapping(**stated: Any) -> Any:
    return parse_mapping({"tensors": NAMES, "layout": "linear", **stated}, "the mapping")


@pytest.mark.parametrize(
    "stated", [{"d_head": 8}, {"heads": [4, 8]}, {"d_head": [8, 8]}, {"heads": [4, 8], "d_head": 8}]
)
def test_a_mapping_states_heads_by_layer_or_their_width(stated: dict[str, Any], tmp_path: Path) -> None:
    folder = saved(tmp_path, growing(), None)
    assert widths(open_checkpoint(folder, mapping(**stated))) == [(0, 4, 2, 8), (1, 8, 4, 8)]


@pytest.mark.parametrize(
    ("stated", "told"),
    [
        ({"heads": 4}, r"q_proj.weight has shape \(64, 32\), .* 4 heads of width 8 \(the width in the first layer\)"),
        ({"heads": 4, "d_head": 8}, r"does not fit 4 heads of width 8 \(d_head of the mapping\)"),
        ({"heads": [4, 3]}, r"does not fit 3 heads"),
        ({"d_head": 6}, r"does not fit heads of width 6"),
        ({"heads": [4]}, r"heads states 1 layer, and layer 1 is not among them"),
    ],
)
def test_a_mapping_that_the_shapes_contradict(stated: dict[str, Any], told: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, growing(), None)
    with pytest.raises(QkovError, match=told) as caught:
        widths(open_checkpoint(folder, mapping(**stated)))
    assert "\n" not in str(caught.value)


def test_a_fused_weight_whose_heads_grow_with_the_layer(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    state = {}
    for layer, heads in enumerate((4, 8)):
        state[f"l.{layer}.qkv"] = torch.randn(3 * heads * 8, 32, generator=generator)
        state[f"l.{layer}.o"] = torch.randn(32, heads * 8, generator=generator)
    table = {
        "tensors": {"QKV": "l.{layer}.qkv", "O": "l.{layer}.o"},
        "layout": {"QKV": "(qkv head d_head) d_model", "O": "d_model (head d_head)"},
    }
    folder = saved(tmp_path, state, None)
    with pytest.raises(
        QkovError, match=r"l\.1\.o has shape \(32, 64\), which does not fit 4 heads of width 8 .*l\.1\.qkv 192"
    ):
        widths(open_checkpoint(folder, parse_mapping({**table, "heads": 4}, "the mapping")))
    by_width = open_checkpoint(folder, parse_mapping({**table, "d_head": 8}, "the mapping"))
    assert widths(by_width) == [(0, 4, 4, 8), (1, 8, 8, 8)]
    first, last = (list(by_width.layers())[1].W_Q[head] for head in (0, 7))
    assert torch.equal(first.T, state["l.1.qkv"][:8])
    assert torch.equal(last.T, state["l.1.qkv"][56:64])


def test_the_width_of_a_head_differs_from_layer_to_layer(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    state = {}
    for layer, width in enumerate((16, 48)):
        for part, shape in (("q", (width, 32)), ("k", (width, 32)), ("v", (width, 32)), ("o", (32, width))):
            state[f"model.layers.{layer}.self_attn.{part}_proj.weight"] = torch.randn(*shape, generator=generator)
    folder = saved(tmp_path, state, None)
    with pytest.raises(QkovError, match=r"does not fit 4 heads of width 4 .* heads = \[4, 2, \.\.\.\] or d_head = 8"):
        widths(open_checkpoint(folder, mapping(heads=4)))
    for stated in ({"heads": [4, 2]}, {"d_head": [4, 24]}):
        assert widths(open_checkpoint(folder, mapping(**stated))) == [(0, 4, 4, 4), (1, 2, 2, 24)]


def test_values_of_another_width_than_queries(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (32, 32), "k": (16, 32), "v": (24, 32), "o": (32, 48)}
    state = {
        f"model.layers.0.self_attn.{part}_proj.weight": torch.randn(*shape, generator=generator)
        for part, shape in shapes.items()
    }
    folder = saved(tmp_path, state, None)
    with pytest.raises(QkovError, match="does not fit 4 heads of width 8"):
        widths(open_checkpoint(folder, mapping(heads=4, d_head=8)))
    with pytest.raises(QkovError, match="does not fit 4 heads"):
        widths(open_checkpoint(folder, mapping(heads=4)))
    for stated in ({"heads": 4}, {"heads": 4, "d_head": 8}, {"d_head": 8}):
        (weights,) = open_checkpoint(folder, mapping(**stated, d_value=12)).layers()
        assert weights.W_Q.shape == (4, 32, 8)
        assert weights.W_K.shape == (2, 32, 8)
        assert weights.W_V.shape == (2, 32, 12)
        assert weights.W_O.shape == (4, 12, 32)
        value = state["model.layers.0.self_attn.v_proj.weight"][12:]
        output = state["model.layers.0.self_attn.o_proj.weight"][:, 36:]
        torch.testing.assert_close(weights.ov().dense()[3].float(), output @ value, rtol=1e-5, atol=1e-5)


def test_one_key_for_all_heads(tmp_path: Path) -> None:
    model = llama(num_key_value_heads=1)
    assert widths(open_checkpoint(saved(tmp_path, model.state_dict(), model.config.to_dict()))) == [
        (0, 4, 1, 8),
        (1, 4, 1, 8),
    ]


def test_the_caller_states_heads_and_no_layer_differs(tmp_path: Path) -> None:
    state = pruned(llama(), 1)
    saved(tmp_path, state, None)
    with pytest.raises(QkovError, match=r"layers\.1\..* does not fit 4 heads of width 8 \(the width in the first"):
        widths(open_checkpoint(tmp_path, heads=4))
    saved(tmp_path, llama().state_dict(), None)
    assert widths(open_checkpoint(tmp_path, heads=2)) == [(0, 2, 2, 16), (1, 2, 2, 16)]


def test_a_tensor_for_each_head(tmp_path: Path) -> None:
    """The tensors of single heads are those of a torch.nn.Linear each, with the joined projection behind them."""
    generator = torch.Generator().manual_seed(0)
    state = {
        f"blocks.0.sa.heads.{head}.{part}.weight": torch.randn(8, 32, generator=generator)
        for head in range(4)
        for part in ("key", "query", "value")
    }
    state["blocks.0.sa.proj.weight"] = torch.randn(32, 32, generator=generator)
    heads = "blocks.{layer}.sa.heads.{head}."
    table = {
        "tensors": {
            "Q": f"{heads}query.weight",
            "K": f"{heads}key.weight",
            "V": f"{heads}value.weight",
            "O": "blocks.{layer}.sa.proj.weight",
        }
    }
    folder = saved(tmp_path, state, None)
    of_one = dict.fromkeys("QKV", "d_head d_model") | {"O": "d_model (head d_head)"}
    stacked = dict.fromkeys("QKV", "head d_head d_model") | {"O": "d_model (head d_head)"}
    for layout in ("linear", of_one, stacked):
        (weights,) = open_checkpoint(folder, parse_mapping({**table, "layout": layout}, "the mapping")).layers()
        for head in range(4):
            query, key, value = (
                state[f"blocks.0.sa.heads.{head}.{part}.weight"].double() for part in ("query", "key", "value")
            )
            output = state["blocks.0.sa.proj.weight"][:, 8 * head : 8 * head + 8].double()
            torch.testing.assert_close(weights.qk().dense()[head].double(), key.T @ query, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(weights.ov().dense()[head].double(), output @ value, rtol=1e-5, atol=1e-5)
    linear = parse_mapping({**table, "layout": "linear"}, "the mapping")
    for head in (1, 2):
        odd = state | {f"blocks.0.sa.heads.{head}.query.weight": torch.randn(6, 32)}
        refusal = rf"heads\.0\.query.* shape \(8, 32\) and .*heads\.{head}\.query.* shape \(6, 32\)"
        with pytest.raises(QkovError, match=refusal):
            list(open_checkpoint(saved(tmp_path, odd, None), linear).layers())
    del state["blocks.0.sa.heads.1.key.weight"]
    with pytest.raises(QkovError, match=r"numbered 0, 2, 3, so head 1 is missing"):
        open_checkpoint(saved(tmp_path, state, None), linear)


def test_the_shape_in_a_message_is_that_of_the_tensor(tmp_path: Path) -> None:
    table: dict[str, Any] = {"tensors": {"Q": "a.{head}.q", "K": "a.{head}.k"}, "layout": "linear"}
    saved(tmp_path, {f"a.{head}.{part}": torch.randn(8, 32) for head in range(4) for part in "qk"}, None)
    with pytest.raises(QkovError, match=r"a\.0\.q and its like are 4 heads, and 3 are stated"):
        list(open_checkpoint(tmp_path, parse_mapping({**table, "heads": 3}, "the mapping")).layers())
    saved(tmp_path, {f"a.{head}.{part}": torch.randn(8, 32, 1) for head in range(4) for part in "qk"}, None)
    with pytest.raises(QkovError, match=r"a\.0\.q has shape \(8, 32, 1\), .* layout 'd_head d_model' of one head"):
        list(open_checkpoint(tmp_path, parse_mapping(table, "the mapping")).layers())


@pytest.mark.parametrize("layout", ["linear", {"OV": "write read"}])
def test_values_without_an_output_projection(layout: Any, tmp_path: Path) -> None:
    """What a torch.nn.Linear of one head's values writes is W_OV itself: one row of the output is W_V x."""
    state = {"l.0.v": torch.randn(32, 32), "l.1.v": torch.randn(32, 32)}
    saved(tmp_path, state, None)
    one = parse_mapping({"tensors": {"OV": "l.{layer}.v"}, "layout": layout, "heads": 1}, "the mapping")
    for layer, weights in enumerate(open_checkpoint(tmp_path, one).layers()):
        torch.testing.assert_close(weights.ov().dense()[0].float(), state[f"l.{layer}.v"], rtol=0, atol=0)


def test_values_of_several_heads_without_an_output_projection(tmp_path: Path) -> None:
    saved(tmp_path, {"l.0.v": torch.randn(32, 32)}, None)
    for stated in ({"heads": 4}, {}, {"heads": 1, "layout": "conv1d"}):
        table = {"tensors": {"OV": "l.{layer}.v"}, "layout": "linear", **stated}
        with pytest.raises(
            QkovError, match=r"for the matrix of one head, state heads = 1 and \[layout\] OV = 'write read'"
        ):
            list(open_checkpoint(tmp_path, parse_mapping(table, "the mapping")).layers())
