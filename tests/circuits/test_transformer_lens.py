"""TransformerLens' circuits and ours are the same matrices, transposed: every basis, from files and from its models."""

import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from qkov.analyses.attention import load_model
from qkov.circuits import CallError, QkovError, composition_scores, open_checkpoint, open_model
from qkov.circuits.live import hooked_blocks
from tokenizers import Tokenizer, models
from torch import nn
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.model_bridge import TransformerBridge

from .family_proof import small
from .forward_pass import attend

#: TransformerLens computes in float32, from entries of the order of 1.
assert_same = partial(torch.testing.assert_close, rtol=1e-6, atol=1e-6)
#: Its compatibility mode that gives each basis.
MODES = {
    "folded": {"fold_ln": True, "center_writing_weights": False},
    "folded_centred": {"fold_ln": True, "center_writing_weights": True},
}


@dataclass(frozen=True)
class Example:
    model: str
    config: Any

    @property
    def is_rms(self) -> bool:
        return hasattr(self.config(), "rms_norm_eps")


def gpt2() -> Any:
    settings: Any = {"n_embd": 48, "n_head": 4, "n_layer": 2, "n_positions": 32, "n_ctx": 32, "vocab_size": 50}
    return transformers.GPT2Config(**settings)


GROUPED = {"num_key_value_heads": 2, "head_dim": 16}
EXAMPLES = [
    Example("GPT2LMHeadModel", gpt2),
    Example("GPTNeoXForCausalLM", lambda: small("GPTNeoXConfig", num_attention_heads=3)),
    Example("LlamaForCausalLM", lambda: small("LlamaConfig", num_key_value_heads=2)),
    Example("GemmaForCausalLM", lambda: small("GemmaConfig", **GROUPED)),
    Example("Gemma2ForCausalLM", lambda: small("Gemma2Config", **GROUPED)),
    Example("Qwen3ForCausalLM", lambda: small("Qwen3Config", **GROUPED)),
]


@pytest.fixture(params=EXAMPLES, ids=lambda example: example.model)
def example(request):
    return request.param


def build(example) -> Any:
    """A model with gains and biases that matter, and circuits with entries of the order of 1."""
    torch.manual_seed(0)
    model = getattr(transformers, example.model)(example.config())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def save(model, folder):
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(folder)


def bridge_of(model, folder, **mode) -> Any:
    """Boot offline from the saved files; the model itself becomes part of the bridge."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(model, folder)
        bridge: Any = TransformerBridge.boot_transformers(str(folder), hf_model=model, device="cpu")
        if mode:
            bridge.enable_compatibility_mode(disable_warnings=True, **mode)
    return bridge


def assert_same_circuits(layers, bridge, basis):
    """Ours against `.QK` and `.OV`, and those against products in float64, key and value heads repeated by hand."""
    layers = list(layers)
    QK, OV = bridge.QK.AB.double(), bridge.OV.AB.double()
    assert len(layers) == len(QK)
    for number, layer in enumerate(layers):
        attention = bridge.blocks[number].attn
        W_Q, W_K, W_V, W_O = (getattr(attention, name).detach().double() for name in ("W_Q", "W_K", "W_V", "W_O"))
        group = len(W_Q) // len(W_K)
        for head in range(len(W_Q)):
            qk, ov = layer.qk(basis).dense()[head], layer.ov(basis).dense()[head]
            assert_same(QK[number, head], W_Q[head] @ W_K[head // group].T)
            assert_same(OV[number, head], W_V[head // group] @ W_O[head])
            assert_same(qk.T, QK[number, head])
            assert_same(ov.T, OV[number, head])


def test_raw_circuits_from_files_and_from_the_bridge(example, tmp_path):
    bridge = bridge_of(build(example), tmp_path)
    assert_same_circuits(open_checkpoint(tmp_path).layers(), bridge, "raw")
    live = list(open_model(bridge).layers())
    assert {layer.stored_basis for layer in live} == {"raw"}
    assert_same_circuits(live, bridge, "raw")


@pytest.mark.parametrize("basis", MODES)
def test_folded_circuits_from_files_and_from_the_bridge(example, basis, tmp_path):
    model = build(example)
    bridge = bridge_of(model, tmp_path, **MODES[basis])
    saved = list(open_checkpoint(tmp_path).layers())
    assert_same_circuits(saved, bridge, basis)
    live = list(open_model(bridge).layers())
    # Only LayerNorm lets the written side be centred.
    stored = "folded" if example.is_rms else basis
    assert {layer.stored_basis for layer in live} == {stored}
    assert_same_circuits(live, bridge, basis)
    with pytest.raises(CallError, match=f"in the basis {stored}; they cannot be converted to raw"):
        live[0].qk("raw")
    # The bases do differ, by far more than the tolerance.
    assert (saved[0].qk("raw").dense() - saved[0].qk(basis).dense()).abs().max() > 0.05
    centred = (saved[0].ov("folded").dense() - saved[0].ov("folded_centred").dense()).abs().max()
    assert (centred > 0.05) != example.is_rms


@pytest.mark.parametrize("basis", MODES)
def test_a_raw_bridge_is_folded_as_its_compatibility_mode_would(example, basis, tmp_path):
    raw = list(open_model(bridge_of(build(example), tmp_path / "raw")).layers())
    assert_same_circuits(raw, bridge_of(build(example), tmp_path / "folded", **MODES[basis]), basis)


@pytest.mark.parametrize("basis", MODES)
def test_biases_are_folded_too(basis, tmp_path):
    example = EXAMPLES[0]
    bridge = bridge_of(build(example), tmp_path, fold_value_biases=False, **MODES[basis])
    for number, layer in enumerate(open_checkpoint(tmp_path).layers()):
        folded, attention = layer.in_basis(basis), bridge.blocks[number].attn
        for name in ("b_Q", "b_K", "b_V", "b_O"):
            assert_same(getattr(folded, name).double(), getattr(attention, name).double())


def test_facts_and_norms_of_a_bridge_are_those_of_the_model_in_it(example, tmp_path):
    bridge = bridge_of(build(example), tmp_path)
    for live, saved in zip(open_model(bridge).layers(), open_checkpoint(tmp_path).layers(), strict=True):
        assert live.facts == saved.facts
        for name in ("norm", "query_norm", "key_norm"):
            one, other = getattr(live, name), getattr(saved, name)
            assert (one is None) == (other is None)
            assert one is None or (one.kind, one.eps) == (other.kind, other.eps)
            assert one is None or torch.equal(one.gain, other.gain)


def test_a_bridge_in_training_is_read_where_it_trains(tmp_path):
    """It takes the fused projection of GPT-2 apart, and trains the parts."""
    bridge = bridge_of(build(EXAMPLES[0]), tmp_path)
    before = [layer.W_K.clone() for layer in open_model(bridge).layers()]
    optimizer = torch.optim.SGD(bridge.parameters(), lr=0.01)
    bridge(torch.randint(0, 50, (2, 9)), return_type="logits").square().mean().backward()
    optimizer.step()
    after = list(open_model(bridge).layers())
    assert all((layer.W_K - old).abs().max() > 1e-4 for layer, old in zip(after, before, strict=True))
    assert_same_circuits(after, bridge, "raw")


def test_weights_in_no_basis_are_refused(tmp_path):
    bridge = bridge_of(build(EXAMPLES[0]), tmp_path, fold_ln=False, center_writing_weights=True)
    with pytest.raises(QkovError, match=r"W_O centred and no norm folded.*fold_ln"):
        next(open_model(bridge).layers())


def test_bert_has_nothing_to_fold_and_is_refused_where_its_written_side_was_centred(tmp_path):
    bert = Example("BertForMaskedLM", lambda: small("BertConfig"))
    bridge = bridge_of(build(bert), tmp_path / "raw")
    live = list(open_model(bridge).layers())
    assert_same_circuits(live, bridge, "raw")
    assert all(layer.norm is None and layer.facts.causal is False for layer in live)
    with pytest.raises(QkovError, match="W_O centred and no norm folded"):
        next(open_model(bridge_of(build(bert), tmp_path / "centred", fold_ln=True)).layers())


def test_stacks_of_an_encoder_and_decoder(tmp_path):
    config: Any = {"d_model": 48, "d_kv": 12, "num_heads": 4, "num_layers": 2, "d_ff": 64, "vocab_size": 50}
    config["decoder_start_token_id"] = 0
    t5 = Example("T5ForConditionalGeneration", lambda: transformers.T5Config(**config))
    bridge = bridge_of(build(t5), tmp_path)
    saved = {(layer.stack, layer.layer): layer for layer in open_checkpoint(tmp_path).layers()}
    live = {(layer.stack, layer.layer): layer for layer in open_model(bridge).layers()}
    assert set(live) == set(saved)
    for key, layer in live.items():
        assert layer.facts == saved[key].facts
        assert torch.equal(layer.norm.gain, saved[key].norm.gain)
        assert all(
            torch.equal(getattr(layer, name), getattr(saved[key], name)) for name in ("W_Q", "W_K", "W_V", "W_O")
        )


def test_a_bridge_over_an_architecture_that_is_not_known_has_its_raw_circuits_alone(tmp_path, monkeypatch):
    bridge = bridge_of(build(EXAMPLES[2]), tmp_path)
    monkeypatch.setattr(transformers.LlamaConfig, "model_type", "llama-of-tomorrow")
    opened = open_model(bridge)
    assert "is unknown" in opened.recognised
    layers = list(opened.layers())
    assert_same_circuits(layers, bridge, "raw")
    with pytest.raises(CallError, match="the norm in front of layer 0 is not known"):
        layers[0].qk("folded")
    with pytest.raises(CallError, match="whether positions rotate queries and keys in layer 0 is not known"):
        layers[0].qk(rotary_offset=1)


# TransformerLens' own models, which no other library describes.

NATIVE = {
    "d_model": 48,
    "d_head": 12,
    "n_heads": 4,
    "n_layers": 2,
    "n_ctx": 16,
    "d_vocab": 50,
    "act_fn": "gelu",
    "attn_only": True,
    "init_weights": False,
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"normalization_type": "LNPre", "attention_dir": "bidirectional"},
        {"normalization_type": None, "attn_scale": 2.0},
        {"attn_scale": 0.5, "attn_scores_soft_cap": 0.5},
        {"normalization_type": "RMS", "n_key_value_heads": 2, "attn_scores_soft_cap": 5.0},
        {"normalization_type": "RMSPre", "positional_embedding_type": "rotary"},
        {"positional_embedding_type": "rotary", "rotary_dim": 4, "rotary_base": 100},
    ],
    ids=lambda changes: " ".join(map(str, changes.values())) or "plain",
)
def test_a_native_bridge_attends_as_its_weights_and_config_say(changes):
    torch.manual_seed(0)
    kind: Any = TransformerBridge
    bridge = kind.boot_native(TransformerBridgeConfig(**(NATIVE | changes))).double()
    with torch.no_grad():
        for parameter in bridge.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    _, cache = bridge.run_with_cache(torch.randint(0, 50, (1, 9)))
    # Tables of rotation, and what is capped, stay in float32.
    layers = list(open_model(bridge).layers())
    assert [layer.stored_basis for layer in layers] == ["raw", "raw"]
    for number, layer in enumerate(layers):
        attended = attend(layer, cache[f"blocks.{number}.hook_resid_pre"][0])
        at = f"blocks.{number}.attn"
        torch.testing.assert_close(attended.pattern, cache[f"{at}.hook_pattern"][0].double(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(attended.output, cache[f"{at}.hook_out"][0].double(), rtol=1e-6, atol=1e-6)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        for name, shape in (("W_Q", (2, 6, 3)), ("W_K", (2, 6, 3)), ("W_V", (2, 6, 3)), ("W_O", (2, 3, 6))):
            setattr(self, name, nn.Parameter(torch.randn(*shape)))


def test_a_model_with_weights_of_that_shape_is_read_and_what_its_cfg_lacks_is_not_known():
    block: Any = nn.Module()
    attention: Any = Attention()
    block.attn = attention
    model: Any = nn.Module()
    model.blocks, model.cfg = nn.ModuleList([block]), {"n_heads": 2}
    (layer,) = open_model(model).layers()
    assert_same(layer.qk().dense(), (attention.W_K @ attention.W_Q.mT).double())
    assert layer.facts.unknown >= {"norm", "causal", "rotary", "positions"}
    assert not any(getattr(layer, name).requires_grad for name in ("W_Q", "W_K", "W_V", "W_O"))
    with pytest.raises(CallError, match="the norm in front of layer 0 is not known"):
        layer.ov("folded")
    block.attn.W_Q = nn.Parameter(torch.randn(3, 6, 3))
    with pytest.raises(QkovError, match="W_Q has heads = 3 and W_O has 2"):
        next(open_model(model).layers())


def test_errors_name_a_weight_as_transformer_lens_does():
    block: Any = nn.Module()
    block.attn = Attention()
    block.attn.W_V = nn.Parameter(torch.empty(2, 6, 3, device="meta"))
    model: Any = nn.Module()
    model.blocks, model.cfg = nn.ModuleList([block]), {"n_heads": 2}
    with pytest.raises(QkovError, match=r"blocks\.0\.attn\.W_V"):
        next(open_model(model).layers())


def test_models_of_an_older_transformer_lens_are_refused_in_one_line(monkeypatch, tmp_path):
    model = bridge_of(build(EXAMPLES[0]), tmp_path)
    for supported in ("3.10.0", "0.0.0"):
        monkeypatch.setattr(hooked_blocks, "version", {"transformer-lens": supported}.__getitem__)
        assert open_model(model).layer_keys == [("", 0), ("", 1)]
    monkeypatch.setattr(hooked_blocks, "version", {"transformer-lens": "3.2.1"}.__getitem__)
    message = (
        r"^TransformerBridge comes from TransformerLens 3\.2\.1, but its models are read from version 3\.9 on; "
        r"run: pip install -U 'transformer-lens>=3\.9' 'transformers>=5\.9'$"
    )
    with pytest.raises(CallError, match=message):
        open_model(model)
    with pytest.raises(CallError, match=message):
        load_model(model)
    hooked_blocks.demand_known_interface(nn.Linear(2, 2))


@pytest.mark.parametrize("basis", ["raw", *MODES])
def test_patterns_from_the_weights_are_those_that_run_with_cache_gives(example, basis, tmp_path):
    bridge = bridge_of(build(example), tmp_path, **MODES.get(basis, {}))
    with torch.no_grad():
        _, cache = bridge.run_with_cache(torch.randint(0, 50, (1, 9), generator=torch.Generator().manual_seed(1)))
        for number, layer in enumerate(open_model(bridge).layers()):
            attended = attend(layer, cache[f"blocks.{number}.hook_resid_pre"][0])
            pattern = cache[f"blocks.{number}.attn.hook_pattern"][0].double()
            torch.testing.assert_close(attended.pattern, pattern, rtol=1e-4, atol=1e-4)


def test_circuits_inside_a_hook_are_those_of_the_weights_that_the_model_has_then(tmp_path):
    bridge = bridge_of(build(EXAMPLES[0]), tmp_path)
    before = {layer.layer: layer.qk().dense().clone() for layer in open_model(bridge).layers()}
    opened, seen = open_model(bridge), {}

    def look(pattern, hook):
        weights = {layer.layer: layer for layer in opened.layers()}[hook.layer()]
        seen[hook.layer()] = weights.qk().dense().clone()

    hooks = [(f"blocks.{layer}.attn.hook_pattern", look) for layer in (0, 1)]
    tokens = torch.randint(0, 50, (1, 9))
    bridge.run_with_hooks(tokens, fwd_hooks=hooks)
    assert all(torch.equal(seen[layer], before[layer]) for layer in (0, 1))
    with torch.no_grad():
        bridge.blocks[1].attn.q.weight.mul_(2.0)
    bridge.run_with_hooks(tokens, fwd_hooks=hooks)
    assert torch.equal(seen[0], before[0])
    torch.testing.assert_close(seen[1], 2 * before[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("basis", ["raw", *MODES])
@pytest.mark.parametrize("plain", EXAMPLES[:2], ids=lambda plain: plain.model)
def test_composition_scores_are_those_of_the_bridge(plain, basis, tmp_path):
    bridge = bridge_of(build(plain), tmp_path, **MODES.get(basis, {}))
    pairs = list(composition_scores(open_model(bridge).layers(), basis))
    for kind in "QKV":
        theirs = bridge.all_composition_scores(kind).scores
        for pair in pairs:
            scores = theirs[pair.earlier, :, pair.later].double()
            torch.testing.assert_close(pair.scores[kind], scores, rtol=1e-5, atol=1e-6)
