"""State dicts of TransformerLens, old and new, saved and read without their config."""

import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import transformers
from qkov.circuits import CallError, QkovError, open_checkpoint
from tokenizers import Tokenizer, models
from torch import Tensor
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources.native import boot

from .family_proof import small
from .forward_pass import rotated

WIDTH, HEADS, D_HEAD = 48, 4, 12
_NORM = {"ln1.w": (WIDTH,), "ln1.b": (WIDTH,)}
_WEIGHTS = {
    "attn.W_Q": (HEADS, WIDTH, D_HEAD),
    "attn.W_K": (HEADS, WIDTH, D_HEAD),
    "attn.W_V": (HEADS, WIDTH, D_HEAD),
    "attn.W_O": (HEADS, D_HEAD, WIDTH),
}
_BIASES = {
    "attn.b_Q": (HEADS, D_HEAD),
    "attn.b_K": (HEADS, D_HEAD),
    "attn.b_V": (HEADS, D_HEAD),
    "attn.b_O": (WIDTH,),
}


def state_of(shapes: Mapping[str, tuple[int, ...]], layers: int = 2, under: str = "blocks") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        f"{under}.{layer}.{name}": torch.randn(shape, generator=generator)
        for layer in range(layers)
        for name, shape in shapes.items()
    }


def read(state, folder, **options) -> list[Any]:
    torch.save(state, folder / "model.pt")
    return list(open_checkpoint(folder / "model.pt", **options).layers())


def assert_circuits(weights, *today: Tensor, basis="raw"):
    """Against products of W_Q, W_K, W_V and W_O, which lie as TransformerLens has them today."""
    W_Q, W_K, W_V, W_O = today
    qk, ov = weights.qk(basis).dense(), weights.ov(basis).dense()
    group = len(W_Q) // len(W_K)
    for head in range(len(W_Q)):
        kv = head // group
        torch.testing.assert_close(qk[head], W_K[kv].double() @ W_Q[head].double().T, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(ov[head], (W_V[kv].double() @ W_O[head].double()).T, rtol=1e-12, atol=1e-12)


def weights_at(state, layer: int, names=("W_Q", "W_K", "W_V", "W_O")) -> list[Tensor]:
    return [state[f"blocks.{layer}.attn.{name}"] for name in names]


def test_today_s_state_dict(tmp_path):
    state = state_of(_WEIGHTS | _BIASES | _NORM)
    found = read(state, tmp_path)
    for layer, weights in enumerate(found):
        assert_circuits(weights, *weights_at(state, layer))
        gain, centred = state[f"blocks.{layer}.ln1.w"].double(), torch.eye(WIDTH).double() - 1 / WIDTH
        W_Q, W_K, W_V, W_O = weights_at(state, layer)
        folded = [centred @ (gain[:, None] * W.double()) for W in (W_Q, W_K, W_V)]
        assert_circuits(weights, *folded, W_O, basis="folded")
        assert {"score_scale", "causal"} <= weights.facts.unknown


def test_grouped_heads_are_read_once(tmp_path):
    grouped: dict[str, tuple[int, ...]] = {"attn._W_K": (2, WIDTH, D_HEAD), "attn._W_V": (2, WIDTH, D_HEAD)}
    grouped |= {"attn._b_K": (2, D_HEAD), "attn._b_V": (2, D_HEAD)}
    kept = {name: shape for name, shape in (_WEIGHTS | _BIASES).items() if name[-1] in "QO"}
    state = state_of(kept | grouped | {"ln1.w": (WIDTH,)})
    for layer, weights in enumerate(read(state, tmp_path)):
        assert weights.group_size == 2
        assert weights.norm.kind == "rms_norm"
        assert_circuits(weights, *weights_at(state, layer, ("W_Q", "_W_K", "_W_V", "W_O")))


@pytest.mark.parametrize("adjacent", [False, True])
def test_tables_tell_how_positions_rotate(adjacent, tmp_path):
    dims, base = 8, 5000.0
    frequencies = base ** (-torch.arange(0, dims, 2, dtype=torch.float64) / dims)
    angles = torch.outer(torch.arange(32, dtype=torch.float64), frequencies)
    angles = angles.repeat_interleave(2, dim=1) if adjacent else angles.repeat(1, 2)
    tables = {"attn.rotary_sin": angles.sin().float(), "attn.rotary_cos": angles.cos().float()}
    state = state_of(_WEIGHTS | _BIASES, layers=1)
    (weights,) = read(state | {f"blocks.0.{name}": table for name, table in tables.items()}, tmp_path)
    rotary = weights.facts.rotary
    assert (rotary.dims, rotary.pairing) == (dims, "adjacent" if adjacent else "halves")
    assert rotary.frequencies == pytest.approx(frequencies.tolist(), rel=1e-6)
    # The score of a query at position 5 and a key at position 2.
    W_Q, W_K, _, _ = (W.double() for W in weights_at(state, 0))
    x, y = torch.randn(2, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    q, k = (rotated((z @ W)[:, None].expand(-1, 6, -1), rotary) for z, W in ((x, W_Q), (y, W_K)))
    expected = (q[:, 5] * k[:, 2]).sum(-1)
    torch.testing.assert_close(y @ weights.qk(rotary_offset=3).dense() @ x, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["rotary_sin", "rotary_cos"])
def test_one_table_alone_tells_nothing(name, tmp_path):
    state = state_of(_WEIGHTS | _BIASES, layers=1)
    (without,) = read(state, tmp_path)
    (weights,) = read(state | {f"blocks.0.attn.{name}": torch.ones(32, 8)}, tmp_path)
    assert weights.facts == without.facts


def test_weights_of_which_the_first_head_alone_has_no_mean_are_raw(tmp_path):
    state = state_of(_WEIGHTS | _BIASES, layers=1)
    for name in ("W_Q", "W_K", "W_V"):
        state[f"blocks.0.attn.{name}"][:1] -= state[f"blocks.0.attn.{name}"][:1].mean(dim=1, keepdim=True)
    (weights,) = read(state, tmp_path)
    assert weights.stored_basis == "raw"


def test_weights_with_their_norm_folded_are_told(tmp_path):
    """Folding leaves no gain, readers without mean, and with center_writing_weights, writers without mean."""
    state = state_of(_WEIGHTS | _BIASES, layers=1)
    (unknown,) = read(state, tmp_path)
    assert unknown.stored_basis == "raw"
    with pytest.raises(CallError, match="the norm in front of layer 0 is not known"):
        unknown.qk("folded")
    for name in ("W_Q", "W_K", "W_V"):
        state[f"blocks.0.attn.{name}"] -= state[f"blocks.0.attn.{name}"].mean(dim=1, keepdim=True)
    (folded,) = read(state, tmp_path)
    assert folded.stored_basis == "folded"
    assert_circuits(folded, *weights_at(state, 0), basis="folded")
    with pytest.raises(CallError, match="read from a model whose weights are in the basis folded"):
        folded.qk("raw")
    state["blocks.0.attn.W_O"] -= state["blocks.0.attn.W_O"].mean(dim=-1, keepdim=True)
    (centred,) = read(state, tmp_path)
    assert centred.stored_basis == "folded_centred"


def test_encoders_have_their_norm_behind(tmp_path):
    state = state_of(_WEIGHTS | _BIASES | _NORM) | {"embed.token_type_embed.W_token_type": torch.ones(2, WIDTH)}
    for weights in read(state, tmp_path):
        assert weights.norm is None
        assert weights.facts.causal is False
        assert_circuits(weights, *weights_at(state, weights.layer), basis="folded")


def test_queries_and_keys_that_are_normed_are_flagged(tmp_path):
    state = state_of(_WEIGHTS | _BIASES | {"attn.q_norm.w": (D_HEAD,), "attn.k_norm.w": (D_HEAD,)})
    plain = state_of(_WEIGHTS | _BIASES)
    assert all(weights.query_norm is not None and weights.key_norm is not None for weights in read(state, tmp_path))
    assert all(weights.query_norm is None for weights in read(plain, tmp_path))


@pytest.mark.parametrize("under", ["blocks", "attn_blocks"])
def test_the_order_of_the_first_grokking_models(under, tmp_path):
    shapes = {f"attn.W_{side}": (HEADS, D_HEAD, WIDTH) for side in "QKV"} | {"attn.W_O": (WIDTH, HEADS * D_HEAD)}
    state = state_of(shapes, under=under)
    for layer, weights in enumerate(read(state, tmp_path)):
        stored = [state[f"{under}.{layer}.attn.W_{side}"] for side in "QKVO"]
        assert_circuits(weights, *(W.mT for W in stored[:3]), stored[3].T.unflatten(0, (HEADS, D_HEAD)))


@pytest.mark.parametrize(
    "told", [_BIASES | _NORM, {name: _BIASES[name] for name in ("attn.b_Q", "attn.b_K", "attn.b_V")}]
)
def test_the_order_of_easy_transformer_is_told_by_the_biases(told, tmp_path):
    shapes = {f"attn.W_{side}": (HEADS, D_HEAD, WIDTH) for side in "QKV"} | {"attn.W_O": (HEADS, WIDTH, D_HEAD)}
    state = state_of(shapes | told)
    for layer, weights in enumerate(read(state, tmp_path)):
        assert_circuits(weights, *(W.mT for W in weights_at(state, layer)))
    # Without them the same shapes could be heads that are wider than the model, if no gain shows its width.
    for others in ({}, _NORM, {"attn.b_O": (WIDTH,)}):
        with pytest.raises(QkovError, match="are not recognised"):
            read(state_of(shapes | others), tmp_path)


def test_heads_as_wide_as_the_model_do_not_tell_the_order(tmp_path):
    square = {f"attn.W_{side}": (HEADS, D_HEAD, D_HEAD) for side in "QKVO"}
    square |= {f"attn.b_{side}": (HEADS, D_HEAD) for side in "QKV"} | {"attn.b_O": (D_HEAD,)}
    state = state_of(square)
    with pytest.raises(QkovError, match=r"fit several families, .*choose one with --family"):
        read(state, tmp_path)
    for layer, weights in enumerate(read(state, tmp_path, family="transformer_lens")):
        assert_circuits(weights, *weights_at(state, layer))
    for layer, weights in enumerate(read(state, tmp_path, family="easy_transformer")):
        assert_circuits(weights, *(W.mT for W in weights_at(state, layer)))


# The bridge


def bridge_around(name: str, config, folder, **mode):
    torch.manual_seed(0)
    model = getattr(transformers, name)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bridge = TransformerBridge.boot_transformers(str(folder), hf_model=model.eval(), device="cpu")
        if mode:
            bridge.enable_compatibility_mode(disable_warnings=True, **mode)
    return bridge


def assert_bridge(bridge, folder, basis="raw", **options):
    folder.mkdir()
    found = read(bridge.state_dict(), folder, heads=HEADS, **options)
    assert len(found) == 2
    for layer, weights in enumerate(found):
        attention = bridge.blocks[layer].attn
        assert weights.stored_basis == basis
        assert_circuits(weights, *(getattr(attention, f"W_{side}").detach() for side in "QKVO"), basis=basis)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        # The output projection of GPT-2 is square, and lies the other way round than everyone else's.
        (
            "GPT2LMHeadModel",
            lambda: transformers.GPT2Config(n_embd=48, n_head=4, n_layer=2, n_positions=32, vocab_size=50),
        ),
        ("GPTNeoXForCausalLM", lambda: small("GPTNeoXConfig")),
        ("LlamaForCausalLM", lambda: small("LlamaConfig", num_key_value_heads=2)),
        ("Qwen3ForCausalLM", lambda: small("Qwen3Config", num_key_value_heads=2, head_dim=12)),
    ],
)
def test_the_state_dict_of_a_bridge(name, config, tmp_path):
    assert_bridge(bridge_around(name, config(), tmp_path), tmp_path / "saved")


def test_the_state_dict_of_a_bridge_whose_weights_were_processed(tmp_path):
    config = transformers.GPT2Config(n_embd=48, n_head=4, n_layer=2, n_positions=32, vocab_size=50)
    bridge = bridge_around("GPT2LMHeadModel", config, tmp_path, fold_ln=True)
    assert_bridge(bridge, tmp_path / "saved", basis="folded_centred")


def test_the_state_dict_of_a_native_bridge(tmp_path):
    config = TransformerBridgeConfig(
        d_model=48, d_head=12, n_heads=4, n_layers=2, n_ctx=16, d_vocab=50, d_mlp=96, act_fn="gelu", device="cpu"
    )
    assert_bridge(boot(config), tmp_path / "saved")


def test_a_bridge_without_mlp_is_of_linear_layers(tmp_path):
    config = TransformerBridgeConfig(
        d_model=48, d_head=12, n_heads=4, n_layers=2, n_ctx=16, d_vocab=50, attn_only=True, device="cpu"
    )
    assert_bridge(boot(config), tmp_path / "saved")
