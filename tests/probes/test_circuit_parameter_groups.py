"""Parameter groups of the two circuits: which parameters, at which rate, and what is refused."""

import re
import warnings
from typing import Any

import pytest
import torch
import transformers
from qkov.analyses.dynamics import Parameterization, SingleLayerAttention
from qkov.circuits import CallError, QkovError
from qkov.circuits.architectures.mapping import parse_mapping
from qkov.probes import circuit_parameter_groups
from qkov.probes.rates.entries import circuit_entries
from torch import nn
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.model_bridge import TransformerBridge

from ..circuits.family_proof import small
from .fused_models import BY_NAME, FUSED, HEADS

LR = 1e-3


def llama(**changes) -> Any:
    return transformers.LlamaForCausalLM(small("LlamaConfig", num_key_value_heads=2, attention_bias=True, **changes))


def bert() -> Any:
    return transformers.BertModel(small("BertConfig"))


def t5() -> Any:
    settings = {"d_model": 48, "d_kv": 12, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 50}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**settings))


def albert() -> Any:
    return transformers.AlbertModel(small("AlbertConfig", embedding_size=16))


def vit() -> Any:
    return transformers.ViTModel(small("ViTConfig", image_size=8, patch_size=4))


def bridge() -> Any:
    config = {"d_model": 48, "d_head": 12, "n_heads": 4, "n_layers": 2, "n_ctx": 16, "d_vocab": 30, "act_fn": "gelu"}
    kind: Any = TransformerBridge
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return kind.boot_native(TransformerBridgeConfig(**config, d_mlp=64, device="cpu"))


def torch_widths() -> nn.Module:
    return nn.MultiheadAttention(24, 3, kdim=20, vdim=28)


#: For each model the names of what W_Q, W_K and W_V, W_O are, as patterns, and how many there are of each.
SPLIT: dict[str, Any] = {
    "LLaMA": (llama, r"self_attn\.[qk]_proj\.weight", r"self_attn\.[vo]_proj\.weight", 4, 4),
    "BERT": (bert, r"self\.(query|key)\.weight", r"(self\.value|attention\.output\.dense)\.weight", 4, 4),
    # Two layers each of the encoder, of the decoder, and of the decoder's attention to the encoder.
    "T5": (t5, r"Attention\.[qk]\.weight", r"Attention\.[vo]\.weight", 12, 12),
    "ALBERT, one layer shared by two": (
        albert,
        r"attention\.(query|key)\.weight",
        r"attention\.(value|dense)\.weight",
        2,
        2,
    ),
    "ViT": (vit, r"attention\.[qk]_proj\.weight", r"attention\.[vo]_proj\.weight", 4, 4),
    "TransformerBridge": (
        bridge,
        r"attn\._original_component\.[qk]\._original_component\.weight",
        r"attn\._original_component\.[vo]\._original_component\.weight",
        4,
        4,
    ),
    "torch, three widths": (torch_widths, r"[qk]_proj_weight", r"(v_proj_|out_proj\.)weight", 2, 2),
}


def named_groups(model, groups) -> dict[str, list[str]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {group["name"]: [names[id(parameter)] for parameter in group["params"]] for group in groups}


def assert_each_once(model, groups):
    held = sorted(id(parameter) for group in groups for parameter in group["params"])
    assert held == sorted(id(parameter) for parameter in model.parameters() if parameter.requires_grad)


@pytest.mark.parametrize("name", SPLIT)
def test_split_weights_are_in_the_group_of_their_circuit(name):
    make, of_qk, of_ov, qk_count, ov_count = SPLIT[name]
    model = make()
    groups = circuit_parameter_groups(model, LR, 30.0, 3.0)
    assert_each_once(model, groups)
    assert {group["name"]: group["lr"] for group in groups} == {"QK": 30 * LR, "OV": 3 * LR, "rest": LR}
    found = named_groups(model, groups)
    assert (len(found["QK"]), len(found["OV"])) == (qk_count, ov_count)
    assert all(re.search(of_qk, one) for one in found["QK"])
    assert not any(re.search(of_qk, one) for one in (*found["OV"], *found["rest"]))
    assert all(re.search(of_ov, one) for one in found["OV"])
    assert not any(re.search(of_ov, one) for one in (*found["QK"], *found["rest"]))
    torch.optim.AdamW(groups, weight_decay=0.1)


def test_biases_have_the_base_rate_unless_asked():
    model = llama()
    assert all("weight" in name for name in named_groups(model, circuit_parameter_groups(model, LR))["QK"])
    found = named_groups(model, circuit_parameter_groups(model, LR, biases=True))
    assert sorted(found["QK"]) == sorted(
        f"model.layers.{layer}.self_attn.{side}_proj.{kind}"
        for layer in (0, 1)
        for side in "qk"
        for kind in ("weight", "bias")
    )
    assert not any("self_attn" in name for name in found["rest"])


@pytest.mark.parametrize("parameterization", Parameterization)
def test_collapsed_circuits_have_rates_too(parameterization):
    model = SingleLayerAttention(4, 3, parameterization, heads=2, runs=5)
    groups = circuit_parameter_groups(model, LR, 20.0)
    assert named_groups(model, groups) == {"QK": list(model.attention_names), "OV": list(model.output_names)}
    collapsed = nn.ParameterDict({"W_QK": torch.zeros(2, 4, 4), "W_OV": torch.zeros(2, 3, 4), "bias": torch.zeros(3)})
    mapping = parse_mapping(
        {
            "tensors": {"QK": "W_QK", "OV": "W_OV"},
            "layout": {"QK": "head key query", "OV": "head write read"},
        },
        "a mapping",
    )
    found = named_groups(collapsed, circuit_parameter_groups(collapsed, LR, mapping=mapping))
    assert found == {"QK": ["W_QK"], "OV": ["W_OV"], "rest": ["bias"]}


def test_groups_with_options_of_their_own_are_taken_apart():
    model = llama()
    decaying = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    other = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    given = [
        {"params": iter(decaying), "weight_decay": 0.1, "name": "decaying"},
        {"params": [("of some name", parameter) for parameter in other], "weight_decay": 0.0, "lr": 0.5},
    ]
    groups = circuit_parameter_groups(model, LR, 30.0, biases=True, groups=given)
    assert_each_once(model, groups)
    told = {group["name"]: (group["lr"], group["weight_decay"]) for group in groups}
    assert told == {
        "decaying QK": (30 * LR, 0.1),
        "decaying OV": (LR, 0.1),
        "decaying rest": (LR, 0.1),
        "1 QK": (15.0, 0.0),
        "1 OV": (0.5, 0.0),
        "1 rest": (0.5, 0.0),
    }
    for group in groups:
        assert all((parameter.ndim > 1) == (group["weight_decay"] > 0) for parameter in group["params"])


def test_groups_of_an_optimizer_with_a_schedule_give_their_options_and_no_old_rate():
    model = llama()
    old = torch.optim.AdamW(model.parameters(), lr=0.5, betas=(0.8, 0.9))
    torch.optim.lr_scheduler.LambdaLR(old, lambda _: 1.0)
    given = [{key: value for key, value in group.items() if key != "lr"} for group in old.param_groups]
    optimizer = torch.optim.AdamW(circuit_parameter_groups(model, LR, 30.0, groups=given))
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    assert [group["lr"] for group in optimizer.param_groups] == [30 * LR, LR, LR]
    assert all(group["betas"] == (0.8, 0.9) for group in optimizer.param_groups)


def test_frozen_parameters_are_left_out_and_said():
    model = llama()
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    groups = circuit_parameter_groups(model, LR)
    assert_each_once(model, groups)
    assert len(named_groups(model, groups)["QK"]) == 2
    *_, last = groups.describe().splitlines()
    assert last.startswith("left out because they are frozen: model.embed_tokens.weight, model.layers.0.")
    training = [{"params": [parameter for parameter in model.parameters() if parameter.requires_grad]}]
    assert_each_once(model, circuit_parameter_groups(model, LR, groups=training))


def test_the_groups_are_described_in_words():
    lines = circuit_parameter_groups(llama(), LR, 30.0).describe().splitlines()
    # Queries have 4 heads of 12, keys 2, read from 48: (48 + 24) 48 entries a layer.
    assert lines[0] == (
        "QK: rate 0.03 (30 times the base), 6,912 entries in "
        "model.layers.*.self_attn.q_proj.weight (2), model.layers.*.self_attn.k_proj.weight (2)"
    )
    assert [line.partition(":")[0] for line in lines] == ["QK", "OV", "rest"]


@pytest.mark.parametrize("fused", FUSED, ids=lambda fused: fused.name)
def test_fused_projections_are_refused_with_the_way_out(fused):
    name = re.escape(fused.projection.format(layer=0))
    with pytest.raises(CallError, match=rf"^{name} holds W_QK fused.*use CircuitRates"):
        circuit_parameter_groups(fused.model(torch.float32), LR, **dict(fused.options))


def test_a_twin_of_split_parameters_is_read_by_a_mapping():
    fused = BY_NAME["GPT-NeoX"]
    twin = fused.twin(fused.model(torch.float32))
    found = named_groups(twin, circuit_parameter_groups(twin, LR, mapping=fused.mapping()))
    path = "gpt_neox.layers.{}.attention.query_key_value.parametrizations.weight.original{}"
    assert found["QK"] == [path.format(layer, part) for layer in (0, 1) for part in (0, 1)]


def shared() -> nn.ParameterDict:
    weight = nn.Parameter(torch.randn(12, 12))
    return nn.ParameterDict({"q": weight, "k": torch.randn(12, 12), "v": weight, "o": torch.randn(12, 12)})


SHARED = parse_mapping(
    {"tensors": {role: role.lower() for role in "QKVO"}, "layout": "linear", "heads": 3}, "a mapping"
)


@pytest.mark.parametrize("multiplier", [0.0, -1.0, float("nan"), float("inf")])
def test_multipliers_that_are_none_are_refused(multiplier):
    with pytest.raises(CallError, match="the multiplier qk should be a finite number above 0, got"):
        circuit_parameter_groups(llama(), LR, multiplier)
    with pytest.raises(CallError, match="the multiplier ov should be"):
        circuit_parameter_groups(llama(), LR, 1.0, multiplier)


def test_a_base_rate_of_zero_is_one_with_which_a_schedule_may_begin():
    assert [group["lr"] for group in circuit_parameter_groups(llama(), 0.0)] == [0, 0, 0]
    for rate in (-1e-3, float("inf")):
        with pytest.raises(CallError, match="the base rate lr should be a finite number of at least 0, got"):
            circuit_parameter_groups(llama(), rate)


def test_what_has_no_attention_or_no_rate_is_refused():
    with pytest.raises(QkovError, match="are not recognised"):
        circuit_parameter_groups(nn.Linear(3, 3), LR)
    with pytest.raises(CallError, match="the base rate lr should be a finite number of at least 0, got nan"):
        circuit_parameter_groups(llama(), float("nan"))
    with pytest.raises(CallError, match="entries of q belong to both the QK circuit and the OV circuit"):
        circuit_parameter_groups(shared(), LR, mapping=SHARED)


def test_weights_in_buffers_are_refused():
    model: Any = nn.Module()
    for role in "qkvo":
        model.register_parameter(role, nn.Parameter(torch.randn(12, 12)))
    del model.k
    model.register_buffer("k", torch.zeros(12, 12))
    with pytest.raises(QkovError, match="W_K of layer 0 is kept in a buffer, not in a parameter"):
        circuit_parameter_groups(model, LR, mapping=SHARED)


def test_rates_that_would_change_nothing_are_refused():
    model = llama().requires_grad_(False)
    model.lm_head.requires_grad_(True)
    with pytest.raises(
        CallError, match=r"no parameter of the QK circuit is trained, so 30 times the rate has no effect: .*q_proj"
    ):
        circuit_parameter_groups(model, LR)
    assert [group["name"] for group in circuit_parameter_groups(model, LR, 1.0)] == ["rest"]


def test_places_next_to_each_other_are_one_range():
    """GPT-2's c_attn: queries and keys in the columns before the values; NeoX's rows: q, k and v of each head."""
    for name, dimension, blocks in (("GPT-2", 1, 1), ("GPT-NeoX", 0, HEADS)):
        fused = BY_NAME[name]
        model = fused.model(torch.float32)
        weight = fused.projection.format(layer=0)
        found = {one.circuit: one for one in circuit_entries(model, None, biases=False) if one.name == weight}
        size = model.get_parameter(weight).shape[dimension]
        assert found["QK"].dimension == found["OV"].dimension == dimension
        block = size // blocks
        third, starts = block // 3, range(0, size, block)
        assert found["QK"].ranges == tuple(range(start, start + 2 * third) for start in starts)
        assert found["OV"].ranges == tuple(range(start + 2 * third, start + block) for start in starts)


def test_groups_that_are_not_those_of_the_model_are_refused():
    model = llama()
    parameters = list(model.parameters())
    with pytest.raises(CallError, match=r"the groups lack parameters that are trained: model\.embed_tokens\.weight$"):
        circuit_parameter_groups(model, LR, groups=[{"params": parameters[1:]}])
    with pytest.raises(CallError, match=r"the groups hold model\.embed_tokens\.weight twice"):
        circuit_parameter_groups(model, LR, groups=[{"params": parameters}, {"params": parameters[0]}])
    with pytest.raises(
        CallError, match=r"the groups hold a tensor of shape \(2,\) that is not a parameter of the model"
    ):
        circuit_parameter_groups(model, LR, groups=[{"params": [*parameters, torch.ones(2)]}])
    with pytest.raises(CallError, match="a parameter group should have the key 'params', got one with lr"):
        circuit_parameter_groups(model, LR, groups=[{"lr": 0.1}])
