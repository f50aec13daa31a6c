"""Families of other codes than transformers: each attends as a plain forward pass of its code does."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from qkov.circuits import CallError, QkovError, open_checkpoint
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from .forward_pass import attend

WIDTH, HEADS, D_HEAD, LENGTH = 32, 4, 8, 7


def numbers(*shape: int, seed: int) -> Tensor:
    return 0.4 * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def stream() -> Tensor:
    return numbers(LENGTH, WIDTH, seed=99) * 3


def of_heads(x: Tensor) -> Tensor:
    """[position, (head d_head)] as [head, position, d_head]."""
    return x.unflatten(-1, (-1, D_HEAD)).transpose(0, 1)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(len(q) // len(k), dim=0) for x in (k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)


def the_layer(path: Path, **reading: Any) -> Any:
    return next(iter(open_checkpoint(path, **reading).layers()))


def assert_output(weights: Any, expected: Tensor) -> None:
    torch.testing.assert_close(attend(weights, stream()).output, expected, rtol=1e-9, atol=1e-10)


def angles(dims: int, base: float) -> Tensor:
    frequencies = base ** (-torch.arange(0, dims, 2, dtype=torch.float64) / dims)
    return torch.arange(LENGTH, dtype=torch.float64)[:, None] * frequencies


def halves(x: Tensor, base: float) -> Tensor:
    """OLMo's and Qwen2's rotation, with a cosine and a sine table of the whole width."""
    table = torch.cat([angles(D_HEAD, base)] * 2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    return x * table.cos() + torch.cat([-second, first], dim=-1) * table.sin()


def neighbours(x: Tensor, base: float) -> Tensor:
    """torchtune's RotaryPositionalEmbeddings: pairs (2i, 2i + 1)."""
    turn, pairs = angles(D_HEAD, base), x.unflatten(-1, (-1, 2))
    one = pairs[..., 0] * turn.cos() - pairs[..., 1] * turn.sin()
    other = pairs[..., 1] * turn.cos() + pairs[..., 0] * turn.sin()
    return torch.stack([one, other], dim=-1).flatten(-2)


# One module for each head, as in lectures.


def lecture() -> dict[str, Tensor]:
    state = {
        f"blocks.0.sa.heads.{head}.{part}.weight": numbers(D_HEAD, WIDTH, seed=10 * head + at)
        for head in range(HEADS)
        for at, part in enumerate(("key", "query", "value"))
    }
    state |= {f"blocks.0.sa.heads.{head}.tril": torch.ones(LENGTH, LENGTH).tril() for head in range(HEADS)}
    state |= {
        "blocks.0.sa.proj.weight": numbers(WIDTH, WIDTH, seed=50),
        "blocks.0.sa.proj.bias": numbers(WIDTH, seed=51),
    }
    state |= {"blocks.0.ln1.weight": numbers(WIDTH, seed=52), "blocks.0.ln1.bias": numbers(WIDTH, seed=53)}
    return state | {"position_embedding_table.weight": numbers(LENGTH, WIDTH, seed=54)}


def test_a_module_for_each_head(tmp_path: Path) -> None:
    state = lecture()
    torch.save(state, tmp_path / "model.pt")
    weights = the_layer(tmp_path / "model.pt")
    x = functional.layer_norm(stream(), (WIDTH,), state["blocks.0.ln1.weight"], state["blocks.0.ln1.bias"])
    written = []
    for head in range(HEADS):
        key, query, value = (
            functional.linear(x, state[f"blocks.0.sa.heads.{head}.{part}.weight"]) for part in ("key", "query", "value")
        )
        scores = (query @ key.T / math.sqrt(D_HEAD)).masked_fill(torch.ones(LENGTH, LENGTH).tril() == 0, -torch.inf)
        written.append(scores.softmax(dim=-1) @ value)
    expected = functional.linear(torch.cat(written, dim=-1), state["blocks.0.sa.proj.weight"])
    assert_output(weights, expected + state["blocks.0.sa.proj.bias"])
    assert weights.facts.unknown == {"score_scale"}
    assert weights.facts.positions == "absolute"
    assert the_layer(tmp_path / "model.pt", family="lecture_gpt").facts.unknown == set()


def test_a_module_for_each_head_without_learned_positions_or_biases(tmp_path: Path) -> None:
    state = lecture()
    del state["position_embedding_table.weight"], state["blocks.0.ln1.bias"]
    torch.save(state, tmp_path / "model.pt")
    assert the_layer(tmp_path / "model.pt").facts.unknown == {"score_scale", "positions", "rotary", "norm"}


# Blocks with the commonest names, which say nothing of norms and positions.


@pytest.mark.parametrize(
    ("block", "output"),
    [("blocks.{}.attn", "out_proj"), ("model.blocks.{}.attention", "o_proj"), ("net.blocks.{}.self_attn", "out_proj")],
)
def test_blocks_with_common_names(block: str, output: str, tmp_path: Path) -> None:
    names = {part: f"{block.format(0)}.{part}_proj.weight" for part in "qkv"} | {
        "o": f"{block.format(0)}.{output}.weight"
    }
    shapes = {"q": (WIDTH, WIDTH), "k": (16, WIDTH), "v": (16, WIDTH), "o": (WIDTH, WIDTH)}
    state = {names[part]: numbers(*shape, seed=at) for at, (part, shape) in enumerate(shapes.items())}
    torch.save({"model": state, "config": {"n_heads": HEADS}}, tmp_path / "model.pt")
    weights = the_layer(tmp_path / "model.pt")
    q, k, v = (of_heads(stream() @ state[names[part]].T) for part in "qkv")
    scores = q @ k.repeat_interleave(2, dim=0).mT / math.sqrt(D_HEAD)
    expected = (scores.softmax(-1) @ v.repeat_interleave(2, dim=0)).transpose(0, 1).flatten(1) @ state[names["o"]].T
    assert_output(replace(weights, query_norm=None, key_norm=None), expected)
    assert {"norm", "positions", "rotary", "causal", "query_key_norm"} <= weights.facts.unknown
    with pytest.raises(CallError, match="the norm in front of layer 0 is not known"):
        weights.qk("folded")


# nanochat


def nanochat() -> dict[str, Tensor]:
    shapes = {"c_q": (WIDTH, WIDTH), "c_k": (16, WIDTH), "c_v": (16, WIDTH), "c_proj": (WIDTH, WIDTH)}
    return {
        f"transformer.h.0.attn.{name}.weight": numbers(*shape, seed=at)
        for at, (name, shape) in enumerate(shapes.items())
    }


NANOCHAT = {"sequence_len": 8, "vocab_size": 50, "n_layer": 1, "n_head": HEADS, "n_kv_head": 2, "n_embd": WIDTH}


def test_nanochat_without_rotation(tmp_path: Path) -> None:
    """The base is in the code alone, so the rotation is left out on both sides. The norms have no gain."""
    state = nanochat()
    torch.save({"model": state, "model_config": NANOCHAT}, tmp_path / "model.pt")
    weights = the_layer(tmp_path / "model.pt")
    x = functional.rms_norm(stream(), (WIDTH,))
    q, k, v = (of_heads(x @ state[f"transformer.h.0.attn.c_{part}.weight"].T) for part in "qkv")
    q, k = functional.rms_norm(q, (D_HEAD,)), functional.rms_norm(k, (D_HEAD,))
    expected = attention(q, k, v) @ state["transformer.h.0.attn.c_proj.weight"].T
    assert weights.facts.rotary.pairing == "halves"
    assert weights.facts.rotary.frequencies is None
    assert (weights.norm.kind, weights.norm.gain, weights.norm.eps) == ("rms_norm", None, None)
    assert (weights.query_norm.kind, weights.query_norm.over) == ("rms_norm", "head")
    plain = replace(
        weights,
        facts=replace(weights.facts, rotary=None),
        norm=replace(weights.norm, eps=torch.finfo(torch.float64).eps),
        query_norm=replace(weights.query_norm, eps=torch.finfo(torch.float64).eps),
        key_norm=replace(weights.key_norm, eps=torch.finfo(torch.float64).eps),
    )
    assert_output(plain, expected)
    assert torch.equal(weights.in_basis("folded").W_Q, weights.W_Q.double())


def test_nanochat_s_names_alone_and_its_later_settings(tmp_path: Path) -> None:
    torch.save(nanochat(), tmp_path / "model.pt")
    unknown = the_layer(tmp_path / "model.pt", heads=HEADS).facts.unknown
    assert {"norm", "query_key_norm", "rotary", "positions", "score_scale"} <= unknown
    torch.save({"model": nanochat(), "model_config": NANOCHAT | {"window_pattern": "SSSL"}}, tmp_path / "model.pt")
    assert the_layer(tmp_path / "model.pt").facts.unknown == {"window"}


# torchtune


def torchtune(bias: bool = False) -> dict[str, Tensor]:
    shapes = {"q_proj": (WIDTH, WIDTH), "k_proj": (16, WIDTH), "v_proj": (16, WIDTH), "output_proj": (WIDTH, WIDTH)}
    state = {
        f"layers.0.attn.{name}.weight": numbers(*shape, seed=at) for at, (name, shape) in enumerate(shapes.items())
    }
    if bias:
        state |= {
            f"layers.0.attn.{part}_proj.bias": numbers(16 if part != "q" else 32, seed=20 + ord(part)) for part in "qkv"
        }
    return state | {"layers.0.sa_norm.scale": numbers(WIDTH, seed=9)}


HF = {"num_attention_heads": HEADS, "num_key_value_heads": 2, "hidden_size": WIDTH, "num_hidden_layers": 1}


@pytest.mark.parametrize(
    ("model_type", "rotate", "offset"),
    [("llama", neighbours, 0), ("qwen2", halves, 0), ("phi3", halves, 0), ("gemma", neighbours, 1)],
)
def test_torchtune(model_type: str, rotate: Any, offset: int, tmp_path: Path) -> None:
    state = torchtune(bias=model_type == "qwen2")
    save_file(state, tmp_path / "model.safetensors")
    config = {**HF, "model_type": model_type, "rms_norm_eps": 1e-6, "rope_theta": 500.0, "head_dim": D_HEAD}
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = the_layer(tmp_path, family="torchtune")
    x = functional.rms_norm(stream(), (WIDTH,), state["layers.0.sa_norm.scale"] + offset, 1e-6)
    q, k, v = (
        of_heads(
            functional.linear(
                x, state[f"layers.0.attn.{part}_proj.weight"], state.get(f"layers.0.attn.{part}_proj.bias")
            )
        )
        for part in "qkv"
    )
    expected = attention(rotate(q, 500.0), rotate(k, 500.0), v) @ state["layers.0.attn.output_proj.weight"].T
    assert_output(weights, expected)


def test_torchtune_s_names_alone(tmp_path: Path) -> None:
    save_file(torchtune(), tmp_path / "model.safetensors")
    opened = open_checkpoint(tmp_path / "model.safetensors", heads=HEADS)
    assert opened.recognised == "as torchtune by its tensor names"
    assert {"norm", "rotary"} <= next(iter(opened.layers())).facts.unknown
    (tmp_path / "config.json").write_text(json.dumps({**HF, "model_type": "llama"}))
    with pytest.raises(QkovError, match="its names fit torchtune; to read it as that, give --family torchtune"):
        open_checkpoint(tmp_path)


# OLMo's own format


def olmo(config: dict[str, Any]) -> dict[str, Tensor]:
    at = "model.transformer.blocks.0."
    kv = D_HEAD * config.get("n_kv_heads", HEADS)
    state = {
        f"{at}att_proj.weight": numbers(WIDTH + 2 * kv, WIDTH, seed=1),
        f"{at}attn_out.weight": numbers(WIDTH, WIDTH, seed=2),
    }
    if not config.get("rope") and not config.get("alibi"):
        state["model.transformer.wpe.weight"] = numbers(LENGTH, WIDTH, seed=6)
    if config.get("layer_norm_with_affine", True):
        state[f"{at}attn_norm.weight"] = numbers(WIDTH, seed=3)
    if config.get("attention_layer_norm"):
        state |= {f"{at}q_norm.weight": numbers(WIDTH, seed=4), f"{at}k_norm.weight": numbers(kv, seed=5)}
    return state


OLMO = {"model_type": "hf_olmo", "d_model": WIDTH, "n_heads": HEADS, "n_layers": 1, "layer_norm_type": "default"}


@pytest.mark.parametrize(
    "changes",
    [
        {"rope": True, "layer_norm_with_affine": False, "clip_qkv": 0.7},
        {"rope": True, "rope_theta": 300, "n_kv_heads": 2},
        {"rope": True, "layer_norm_type": "rms", "attention_layer_norm": True, "norm_after": True},
        {"rope": True, "attention_layer_norm": True, "n_kv_heads": 2, "clip_qkv": 0.5},
        {"rope": False},
        {"alibi": True},
    ],
    ids=str,
)
def test_olmo_s_own_format(changes: dict[str, Any], tmp_path: Path) -> None:
    """As OLMoSequentialBlock computes it: the norm, the clip, the norms of queries and keys, the rotation."""
    config = OLMO | changes
    state = olmo(config)
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = the_layer(tmp_path)
    at = "model.transformer.blocks.0."
    normalise = functional.rms_norm if config["layer_norm_type"] == "rms" else functional.layer_norm

    def norm(x: Tensor, name: str) -> Tensor:
        gain = state.get(f"{at}{name}.weight")
        if normalise is functional.rms_norm:
            return functional.rms_norm(x, (x.shape[-1],), gain, 1e-5)
        return functional.layer_norm(x, (x.shape[-1],), gain, None, 1e-5)

    x = stream() if config.get("norm_after") else norm(stream(), "attn_norm")
    joined = x @ state[f"{at}att_proj.weight"].T
    if "clip_qkv" in config:
        joined = joined.clamp(-config["clip_qkv"], config["clip_qkv"])
    kv = (joined.shape[-1] - WIDTH) // 2
    q, k, v = joined.split([WIDTH, kv, kv], dim=-1)
    if config.get("attention_layer_norm"):
        q, k = norm(q, "q_norm"), norm(k, "k_norm")
    q, k, v = (of_heads(part) for part in (q, k, v))
    if config.get("rope"):
        q, k = (halves(part, config.get("rope_theta", 10_000)) for part in (q, k))
    k, v = (part.repeat_interleave(HEADS // len(part), dim=0) for part in (k, v))
    scores = q @ k.mT / math.sqrt(D_HEAD)
    if config.get("alibi"):
        back = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
        scores = scores - torch.tensor([2 ** (-8 * (head + 1) / HEADS) for head in range(HEADS)])[:, None, None] * back
    scores = scores.masked_fill(torch.ones(LENGTH, LENGTH).tril() == 0, -torch.inf)
    attended = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
    assert_output(weights, attended @ state[f"{at}attn_out.weight"].T)
    assert not weights.facts.unknown


# Codes whose layers differ in their heads


def test_openelm_lists_the_heads_of_each_layer(tmp_path: Path) -> None:
    """As OpenELM's attention computes it: queries, keys and values one after another, each head normalised, rotated."""
    counts = {0: (2, 1), 1: (4, 2)}
    state: dict[str, Tensor] = {}
    for layer, (heads, key_value) in counts.items():
        at = f"transformer.layers.{layer}."
        state[f"{at}attn.qkv_proj.weight"] = numbers((heads + 2 * key_value) * D_HEAD, WIDTH, seed=layer)
        state[f"{at}attn.out_proj.weight"] = numbers(WIDTH, heads * D_HEAD, seed=10 + layer)
        state[f"{at}attn_norm.weight"] = numbers(WIDTH, seed=20 + layer)
        state |= {f"{at}attn.{part}_norm.weight": numbers(D_HEAD, seed=30 + layer + ord(part)) for part in "qk"}
    config: dict[str, Any] = {
        "model_type": "openelm",
        "model_dim": WIDTH,
        "head_dim": D_HEAD,
        "num_transformer_layers": 2,
        "num_query_heads": [2, 4],
        "num_kv_heads": [1, 2],
        "rope_freq_constant": 300,
        "normalization_layer_name": "rms_norm",
    }
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    for weights in open_checkpoint(tmp_path).layers():
        at = f"transformer.layers.{weights.layer}."
        x = functional.rms_norm(stream(), (WIDTH,), state[f"{at}attn_norm.weight"], 1e-6)
        joined = of_heads(x @ state[f"{at}attn.qkv_proj.weight"].T)
        heads, key_value = counts[weights.layer]
        q, k, v = joined.split([heads, key_value, key_value])
        q, k = (
            functional.rms_norm(part, (D_HEAD,), state[f"{at}attn.{name}_norm.weight"], 1e-6)
            for name, part in (("q", q), ("k", k))
        )
        written = attention(halves(q, 300), halves(k, 300), v) @ state[f"{at}attn.out_proj.weight"].T
        assert_output(weights, written)
        assert not weights.facts.unknown
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_query_heads": [2, 3]}))
    with pytest.raises(QkovError, match="does not fit 3 heads of width 8"):
        list(open_checkpoint(tmp_path).layers())


@pytest.mark.parametrize("model_type", ["deci", "nemotron-nas"])
def test_decilm_shares_keys_among_other_numbers_of_heads_in_each_layer(model_type: str, tmp_path: Path) -> None:
    """Layer 1 of three has no attention; the config says the rest layer by layer, and the shapes show it."""
    state = {}
    for layer, key_value in ((0, 4), (2, 1)):
        shapes = {"q": (WIDTH, WIDTH), "k": (8 * key_value, WIDTH), "v": (8 * key_value, WIDTH), "o": (WIDTH, WIDTH)}
        state |= {
            f"model.layers.{layer}.self_attn.{part}_proj.weight": numbers(*shape, seed=10 * layer + at)
            for at, (part, shape) in enumerate(shapes.items())
        }
        state[f"model.layers.{layer}.input_layernorm.weight"] = numbers(WIDTH, seed=50 + layer)
    blocks = [
        {"attention": {"n_heads_in_group": 1}},
        {"attention": {"no_op": True}},
        {"attention": {"n_heads_in_group": 4}},
    ]
    config = {"model_type": model_type, "hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": 3}
    config |= {"num_key_value_heads": None, "rope_theta": 300.0, "rms_norm_eps": 1e-5, "block_configs": blocks}
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    opened = open_checkpoint(tmp_path)
    assert list(opened.skipped) == ["layer 1"]
    for weights in opened.layers():
        at = f"model.layers.{weights.layer}."
        x = functional.rms_norm(stream(), (WIDTH,), state[f"{at}input_layernorm.weight"], 1e-5)
        q, k, v = (of_heads(x @ state[f"{at}self_attn.{part}_proj.weight"].T) for part in "qkv")
        assert_output(weights, attention(halves(q, 300), halves(k, 300), v) @ state[f"{at}self_attn.o_proj.weight"].T)
