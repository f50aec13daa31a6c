"""Models in memory as a source: the same weights as from their files, and modules whose heads no file tells."""

import copy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from qkov.circuits import CallError, QkovError, open_checkpoint, open_model
from qkov.circuits.architectures.mapping import parse_mapping
from qkov.circuits.live.parameters import LiveParameters
from qkov.circuits.weights.attention_weights import BIASES
from torch import nn

from .decoders import FAMILIES as DECODERS
from .encoder_decoders import FAMILIES as ENCODER_DECODERS
from .encoders import FAMILIES as ENCODERS
from .family_proof import build, small
from .forward_pass import attend

WEIGHTS = ("W_Q", "W_K", "W_V", "W_O")
LENGTH = 10


def assert_equal_layers(found, wanted):
    found, wanted = list(found), list(wanted)
    assert [(layer.stack, layer.layer) for layer in found] == [(layer.stack, layer.layer) for layer in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert one.facts == other.facts
        norms = [(one.norm, other.norm), (one.query_norm, other.query_norm), (one.key_norm, other.key_norm)]
        pairs = [(getattr(one, name), getattr(other, name)) for name in (*WEIGHTS, *BIASES)]
        for first, second in norms:
            assert (first is None) == (second is None)
            if first is not None:
                assert (first.kind, first.eps) == (second.kind, second.eps)
                pairs += [(first.gain, second.gain), (first.bias, second.bias)]
        for first, second in pairs:
            assert (first is None) == (second is None)
            assert first is None or torch.equal(first, second)


FAMILIES = [*DECODERS, *ENCODERS, *ENCODER_DECODERS]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: f"{family.name} {family.stack}")
def test_a_transformers_model_is_read_as_its_saved_files_are(family, tmp_path):
    model: Any = build(family)
    model.save_pretrained(tmp_path)
    assert_equal_layers(open_model(model).layers(), open_checkpoint(tmp_path).layers())


def llama(**changes) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(small("LlamaConfig", num_key_value_heads=2, **changes))


def test_reading_changes_nothing_and_shares_the_memory_of_the_model():
    model = llama()
    model(torch.randint(0, 50, (1, LENGTH))).logits.sum().backward()
    before = copy.deepcopy(model.state_dict())
    layers = list(open_model(model).layers())
    assert not any(getattr(layer, name).requires_grad for layer in layers for name in WEIGHTS)
    assert all(parameter.requires_grad and parameter.grad is not None for parameter in model.model.layers.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.mul_(3)
    expected = 3 * before["model.layers.0.self_attn.q_proj.weight"].unflatten(0, (4, 12)).mT
    torch.testing.assert_close(layers[0].W_Q, expected, rtol=0, atol=0)


def test_what_is_read_after_a_step_is_what_the_step_left():
    model = llama().bfloat16()
    opened = open_model(model)
    layer: Any = next(opened.layers())
    before = layer.W_Q.clone()
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.add_(1)
    after = next(opened.layers()).W_Q
    assert before.dtype == torch.bfloat16
    torch.testing.assert_close(after, before + 1, rtol=0, atol=0)


def layers_compiled(model):
    for at, layer in enumerate(model.model.layers):
        model.model.layers[at] = torch.compile(layer, backend="eager")
    return model


@pytest.mark.parametrize(
    "wrap",
    [
        lambda model: nn.ModuleDict({"module": model}),
        lambda model: nn.ModuleDict({"encoder": model, "head": nn.Linear(48, 2)}),
        lambda model: torch.compile(model, backend="eager"),
        lambda model: model.model,
        layers_compiled,
    ],
    ids=["parallel", "part of another", "compiled", "without its head", "its layers compiled"],
)
def test_a_model_inside_another_is_found_with_its_config(wrap):
    expected = list(open_model(llama()).layers())
    assert_equal_layers(open_model(wrap(llama())).layers(), expected)


def test_two_models_with_configs_of_their_own_are_not_mixed():
    with pytest.raises(
        QkovError, match="contains several models that have their own config, student, teacher; open one"
    ):
        open_model(nn.ModuleDict({"student": llama(), "teacher": llama()}))


def test_options_and_mappings_read_modules_that_nothing_recognises():
    model: Any = nn.Module()
    for name in "qkvo":
        model.add_module(name, nn.Linear(12, 12, bias=False))
    with pytest.raises(QkovError, match="are not recognised"):
        open_model(model)
    tensors = {role: f"{role.lower()}.weight" for role in "QKVO"}
    mapping = parse_mapping({"tensors": tensors, "layout": "linear", "heads": 3}, "a mapping")
    described = open_model(model, mapping)
    assert (described.config_origin, open_model(llama()).config_origin) == (None, "the model's config")
    (layer,) = described.layers()
    assert layer.W_K is not None
    torch.testing.assert_close(layer.W_K[1], model.k.weight[4:8].T, rtol=0, atol=0)
    with pytest.raises(CallError, match="a mapping states family, prefix and heads itself"):
        open_model(model, mapping, heads=3)
    anonymous = llama()
    anonymous.config = None
    found = next(open_model(anonymous, family="llama", heads=4).layers())
    torch.testing.assert_close(found.W_K, next(open_model(llama()).layers()).W_K, rtol=0, atol=0)


def test_a_small_config_of_the_model_s_own_tells_its_heads():
    @dataclass
    class Config:
        model_type: str = "llama"
        num_attention_heads: int = 4

    model = llama()
    model.config = Config()
    assert next(open_model(model).layers()).heads == 4


def test_weights_that_are_not_in_memory_are_refused():
    with torch.device("meta"):
        model = llama()
    with pytest.raises(QkovError, match=r"q_proj\.weight of the model LlamaForCausalLM has no values in memory"):
        next(open_model(model).layers())


def test_adapters_are_refused_with_the_way_out():
    model = llama()
    model.model.layers[0].self_attn.q_proj.lora_A = nn.Linear(48, 2, bias=False)
    with pytest.raises(QkovError, match=r"holds LoRA adapters.*merge_and_unload"):
        open_model(model)


def test_what_is_no_model_is_refused():
    with pytest.raises(CallError, match=r"expected a torch\.nn\.Module, or a model whose blocks.*got dict"):
        open_model({"a": torch.ones(2)})
    with pytest.raises(CallError, match="got SimpleNamespace"):
        open_model(SimpleNamespace(cfg=None, blocks=[]))


# torch.nn.MultiheadAttention


def ordinary(module) -> Any:
    """Weights of ordinary size everywhere, biases and gains among them."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return module.double().eval()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "widths", [{}, {"kdim": 20, "vdim": 20}, {"kdim": 20, "vdim": 28}], ids=["joined", "separate", "all different"]
)
def test_multihead_attention_gives_what_torch_computes(bias, widths):
    module = ordinary(nn.MultiheadAttention(24, 3, bias=bias, batch_first=True, **widths))
    (layer,) = open_model(module).layers()
    assert layer.heads == 3
    query = torch.randn(1, LENGTH, 24, dtype=torch.float64)
    read = {width: torch.randn(1, LENGTH, width, dtype=torch.float64) for width in widths.values()} | {24: query}
    keys, values = read[module.kdim], read[module.vdim]
    output, pattern = module(query, keys, values, average_attn_weights=False)
    attended = attend(layer, query[0], keys[0], values=values[0])
    torch.testing.assert_close(attended.pattern, pattern[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(attended.output, output[0], rtol=1e-12, atol=1e-12)
    assert layer.facts.unknown >= {"causal", "positions", "norm"}


@pytest.mark.parametrize("norm_first", [True, False])
def test_an_encoder_of_torch_tells_its_heads_and_its_norm(norm_first):
    block = nn.TransformerEncoderLayer(24, 3, 32, norm_first=norm_first, batch_first=True, layer_norm_eps=1e-3)
    model = ordinary(nn.TransformerEncoder(block, 2, enable_nested_tensor=False))
    layers = list(open_model(model).layers())
    assert [layer.layer for layer in layers] == [0, 1]
    x = torch.randn(1, LENGTH, 24, dtype=torch.float64)
    for layer, module in zip(layers, model.layers, strict=True):
        assert (layer.norm is not None) == norm_first
        read = module.norm1(x) if norm_first else x
        output, pattern = module.self_attn(read, read, read, average_attn_weights=False)
        attended = attend(layer, x[0])
        torch.testing.assert_close(attended.pattern, pattern[0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(attended.output, output[0], rtol=1e-12, atol=1e-12)


def test_encoder_and_decoder_of_torch_are_stacks_of_their_own():
    encoder = nn.TransformerEncoderLayer(24, 3, 32, norm_first=True, batch_first=True)
    decoder = nn.TransformerDecoderLayer(24, 3, 32, norm_first=True, batch_first=True)
    stacks = {
        "encoder": nn.TransformerEncoder(encoder, 2, enable_nested_tensor=False),
        "decoder": nn.TransformerDecoder(decoder, 2),
    }
    model = ordinary(nn.ModuleDict(stacks))
    opened = open_model(model)
    assert opened.recognised == "by its torch.nn.MultiheadAttention modules"
    layers = {(layer.stack, layer.layer): layer for layer in opened.layers()}
    stacks = ("encoder.layers.self_attn", "decoder.layers.self_attn", "decoder.layers.multihead_attn")
    assert set(layers) == {(stack, number) for stack in stacks for number in (0, 1)}
    cross, block = layers["decoder.layers.multihead_attn", 1], model["decoder"].layers[1]
    assert cross.facts.cross
    assert cross.norm is not None
    torch.testing.assert_close(cross.norm.gain, block.norm2.weight.detach(), rtol=0, atol=0)
    x, memory = torch.randn(2, 1, LENGTH, 24, dtype=torch.float64)
    output, _ = block.multihead_attn(block.norm2(x), memory, memory)
    torch.testing.assert_close(attend(cross, x[0], memory[0]).output, output[0], rtol=1e-12, atol=1e-12)


def test_attention_modules_that_differ_from_layer_to_layer_are_refused():
    model = nn.Sequential(nn.MultiheadAttention(24, 3), nn.MultiheadAttention(24, 4))
    with pytest.raises(QkovError, match=r"the attention modules \{layer\} differ from layer to layer"):
        open_model(model)


def test_gradients_are_read_as_the_weights_are():
    """What belongs to a fused projection comes apart as it does itself: against autograd through the split weights."""
    torch.manual_seed(0)
    attention = torch.nn.MultiheadAttention(8, 2, batch_first=True).double()
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    attention(x, x, x, need_weights=False)[0].square().sum().backward()
    (gradient,) = LiveParameters(attention).read(lambda parameter: parameter.grad).layers()
    (weights,) = LiveParameters(attention).read(lambda parameter: parameter).layers()

    split = {name: getattr(weights, name).clone().requires_grad_() for name in ("W_Q", "W_K", "W_V", "W_O")}
    biases = {name: getattr(weights, name).clone().requires_grad_() for name in ("b_Q", "b_K", "b_V", "b_O")}
    queries, keys, values = (
        torch.einsum("bpd,hde->bhpe", x, split[f"W_{side}"]) + biases[f"b_{side}"][:, None] for side in "QKV"
    )
    pattern = (queries @ keys.mT / 2).softmax(dim=-1)
    written = torch.einsum("bhpe,hed->bpd", pattern @ values, split["W_O"]) + biases["b_O"]
    written.square().sum().backward()
    for name, tensor in (split | biases).items():
        torch.testing.assert_close(getattr(gradient, name), tensor.grad, rtol=1e-10, atol=1e-12)


def test_parameters_of_a_model_that_keeps_its_attention_elsewhere_are_refused():
    class Blocks(torch.nn.Module):
        """Weights that no parameter of a known name holds."""

        def __init__(self) -> None:
            super().__init__()
            self.cfg = SimpleNamespace(n_heads=1)
            self.shared = torch.nn.Parameter(torch.randn(4, 1, 3, 3))
            attention = SimpleNamespace(**dict(zip(("W_Q", "W_K", "W_V", "W_O"), self.shared, strict=True)))
            self.blocks = [SimpleNamespace(attn=attention)]

    with pytest.raises(QkovError, match="are not parameters with known names"):
        LiveParameters(Blocks())
