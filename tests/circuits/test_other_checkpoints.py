"""Checkpoints of other codes: what is read of them attends as those codes do."""

import json
from typing import Any

import pytest
import torch
import yaml
from qkov.circuits import CallError, QkovError, open_checkpoint, read_mapping
from torch import Tensor
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from .family_proof import Family, assert_same, build, run, small
from .forward_pass import attend

WIDTH, HEADS, D_HEAD, LENGTH = 48, 4, 12, 10
TOLERANCE = 1e-6


def numbers(*shape: int, seed: int = 0, scale: float = 0.3) -> Tensor:
    return scale * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def stream(seed: int = 9) -> Tensor:
    return numbers(LENGTH, WIDTH, seed=seed, scale=1.0)


def assert_output(weights, residual: Tensor, expected: Tensor):
    torch.testing.assert_close(attend(weights, residual).output, expected, rtol=TOLERANCE, atol=TOLERANCE)


def assert_other_output(weights, residual: Tensor, expected: Tensor):
    assert (attend(weights, residual).output - expected).abs().max() > 0.01


def layer_norm(x: Tensor, state, name: str, eps: float = 1e-5) -> Tensor:
    return functional.layer_norm(x, (WIDTH,), state[f"{name}.weight"], state.get(f"{name}.bias"), eps)


def rms_norm(x: Tensor, gain: Tensor, eps: float = 1e-5) -> Tensor:
    return functional.rms_norm(x, (WIDTH,), gain, eps)


def heads_first(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(0, 1)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The heads' outputs joined, [position, (head d_head)]."""
    groups = len(q) // len(k)
    k, v = k.repeat_interleave(groups, dim=0), v.repeat_interleave(groups, dim=0)
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)


# nanoGPT and minGPT


def gpt_state(width: int = WIDTH, bias: bool = True) -> dict[str, Tensor]:
    """One layer under GPT-2's names, as torch.nn.Linear stores it."""
    shapes = {
        "attn.c_attn.weight": (3 * width, width),
        "attn.c_proj.weight": (width, width),
        "ln_1.weight": (width,),
        **({"attn.c_attn.bias": (3 * width,), "attn.c_proj.bias": (width,), "ln_1.bias": (width,)} if bias else {}),
    }
    return {f"transformer.h.0.{name}": numbers(*shape, seed=at) for at, (name, shape) in enumerate(shapes.items())}


def nanogpt_attention(x: Tensor, state) -> Tensor:
    at = "transformer.h.0."
    x = layer_norm(x, state, f"{at}ln_1")
    joined = functional.linear(x, state[f"{at}attn.c_attn.weight"], state.get(f"{at}attn.c_attn.bias"))
    attended = causal(*(heads_first(part, HEADS) for part in joined.split(WIDTH, dim=-1)))
    return functional.linear(attended, state[f"{at}attn.c_proj.weight"], state.get(f"{at}attn.c_proj.bias"))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("wrapper", ["", "_orig_mod.", "module._orig_mod."])
def test_nanogpt_with_the_numbers_in_the_file(bias, wrapper, tmp_path):
    state = gpt_state(bias=bias)
    state["transformer.wpe.weight"] = numbers(16, WIDTH, seed=30)
    model_args = {"n_layer": 1, "n_head": HEADS, "n_embd": WIDTH, "block_size": 16, "bias": bias, "vocab_size": None}
    saved = {
        "model": {wrapper + name: tensor for name, tensor in state.items()},
        "model_args": model_args,
        "iter_num": 5,
    }
    torch.save(saved, tmp_path / "ckpt.pt")
    checkpoint = open_checkpoint(tmp_path / "ckpt.pt")
    assert checkpoint.recognised == "as nanoGPT, minGPT by its tensor names, with the values of model_args in the file"
    (weights,) = checkpoint.layers()
    assert_output(weights, stream(), nanogpt_attention(stream(), state))


def test_nanogpt_without_its_numbers_asks_for_the_heads(tmp_path):
    torch.save(gpt_state(), tmp_path / "ckpt.pt")
    with pytest.raises(QkovError, match=r"is nanoGPT.*give --heads"):
        open_checkpoint(tmp_path / "ckpt.pt")
    (weights,) = open_checkpoint(tmp_path / "ckpt.pt", heads=HEADS).layers()
    assert_output(weights, stream(), nanogpt_attention(stream(), gpt_state()))


def test_gpt2_s_own_layout_is_another(tmp_path):
    state = gpt_state()
    transposed = {name: tensor.T.contiguous() if tensor.ndim == 2 else tensor for name, tensor in state.items()}
    torch.save(transposed, tmp_path / "gpt2.pt")
    checkpoint = open_checkpoint(tmp_path / "gpt2.pt", heads=HEADS)
    assert checkpoint.recognised == "as GPT, GPT-2 by its tensor names"
    (weights,) = checkpoint.layers()
    torch.save(state, tmp_path / "nano.pt")
    (other,) = open_checkpoint(tmp_path / "nano.pt", heads=HEADS).layers()
    torch.testing.assert_close(weights.qk().dense(), other.qk().dense(), rtol=0, atol=0)
    torch.testing.assert_close(weights.ov().dense(), other.ov().dense(), rtol=0, atol=0)


def test_mingpt_of_2020(tmp_path):
    state = {f"blocks.0.ln1.{name}": numbers(WIDTH, seed=at) for at, name in enumerate(("weight", "bias"))}
    for at, name in enumerate(("query", "key", "value", "proj")):
        state[f"blocks.0.attn.{name}.weight"] = numbers(WIDTH, WIDTH, seed=10 + at)
        state[f"blocks.0.attn.{name}.bias"] = numbers(WIDTH, seed=20 + at)
    torch.save(state, tmp_path / "model.pt")
    (weights,) = open_checkpoint(tmp_path / "model.pt", heads=HEADS).layers()

    def linear(x: Tensor, name: str) -> Tensor:
        return functional.linear(x, state[f"blocks.0.attn.{name}.weight"], state[f"blocks.0.attn.{name}.bias"])

    x = layer_norm(stream(), state, "blocks.0.ln1")
    attended = causal(*(heads_first(linear(x, name), HEADS) for name in ("query", "key", "value")))
    assert_output(weights, stream(), linear(attended, "proj"))


# LitGPT


def halves_rotated(x: Tensor, dims: int, base: float) -> Tensor:
    """Rotary positions by halves on the first dims of [head, position, d_head], with cosine and sine tables."""
    frequencies = base ** (-torch.arange(0, dims, 2, dtype=torch.float64) / dims)
    angles = torch.outer(torch.arange(x.shape[1], dtype=torch.float64), frequencies).repeat(1, 2)
    turning, rest = x[..., :dims], x[..., dims:]
    first, second = turning.chunk(2, dim=-1)
    return torch.cat([turning * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin(), rest], dim=-1)


LITGPT = {
    "name": "tiny",
    "n_layer": 1,
    "n_head": HEADS,
    "n_embd": WIDTH,
    "head_size": D_HEAD,
    "n_query_groups": 2,
    "norm_class_name": "RMSNorm",
    "norm_eps": 1e-5,
    "rotary_percentage": 0.5,
    "rope_base": 5000,
    "rope_condense_ratio": 1,
}


def litgpt_attention(x: Tensor, state, alternating: bool) -> Tensor:
    at, groups = "transformer.h.0", 2
    x = rms_norm(x, state[f"{at}.norm_1.weight"])
    joined = functional.linear(x, state[f"{at}.attn.{'attn' if alternating else 'qkv'}.weight"])
    if alternating:
        by_group = joined.view(LENGTH, groups, HEADS // groups + 2, D_HEAD).permute(1, 2, 0, 3)
        q, k, v = by_group.split((HEADS // groups, 1, 1), dim=1)
        q, k, v = (part.reshape(-1, LENGTH, D_HEAD) for part in (q, k, v))
    else:
        sizes = (HEADS * D_HEAD, groups * D_HEAD, groups * D_HEAD)
        q, k, v = (heads_first(part, part.shape[-1] // D_HEAD) for part in joined.split(sizes, dim=-1))
    q, k = (halves_rotated(part, D_HEAD // 2, 5000.0) for part in (q, k))
    return functional.linear(causal(q, k, v), state[f"{at}.attn.proj.weight"])


@pytest.mark.parametrize("alternating", [False, True])
def test_litgpt_old_and_new(alternating, tmp_path):
    fused = "attn" if alternating else "qkv"
    state = {
        f"transformer.h.0.attn.{fused}.weight": numbers((HEADS + 4) * D_HEAD, WIDTH),
        "transformer.h.0.attn.proj.weight": numbers(WIDTH, WIDTH, seed=1),
        "transformer.h.0.norm_1.weight": numbers(WIDTH, seed=2),
    }
    torch.save(state, tmp_path / "lit_model.pth")
    (tmp_path / "model_config.yaml").write_text(yaml.safe_dump(LITGPT))
    # What LitGPT downloads lies beside it, and is of another form.
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_neox", "num_attention_heads": 3}))
    checkpoint = open_checkpoint(tmp_path)
    assert "LitGPT" in checkpoint.recognised or "lit-gpt" in checkpoint.recognised
    assert checkpoint.recognised.endswith("by its tensor names, with the values of model_config.yaml")
    (weights,) = checkpoint.layers()
    assert weights.group_size == 2
    assert weights.facts.unknown == frozenset()
    assert_output(weights, stream(), litgpt_attention(stream(), state, alternating))
    # The other order of queries, keys and values is another attention.
    other = {name.replace(f"attn.{fused}", f"attn.{'qkv' if alternating else 'attn'}"): state[name] for name in state}
    torch.save(other, tmp_path / "lit_model.pth")
    (weights,) = open_checkpoint(tmp_path).layers()
    assert_other_output(weights, stream(), litgpt_attention(stream(), state, alternating))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_condense_ratio": 4}, [5000 ** (-i / 3) / 4 for i in range(3)]),
        ({"rope_adjustments": {"factor": 8.0}}, [5000 ** (-i / 3) / 8 for i in range(3)]),
        ({"rope_adjustments": {"factor": 8.0, "beta_fast": 32.0, "original_max_seq_len": 64}}, None),
    ],
)
def test_litgpt_s_stretched_positions(changes, expected, tmp_path):
    state = {
        "transformer.h.0.attn.qkv.weight": numbers((HEADS + 4) * D_HEAD, WIDTH),
        "transformer.h.0.attn.proj.weight": numbers(WIDTH, WIDTH, seed=1),
        "transformer.h.0.norm_1.weight": numbers(WIDTH, seed=2),
    }
    torch.save(state, tmp_path / "lit_model.pth")
    (tmp_path / "model_config.yaml").write_text(yaml.safe_dump(LITGPT | changes))
    (weights,) = open_checkpoint(tmp_path).layers()
    assert weights.facts.rotary is not None
    found = weights.facts.rotary.frequencies
    assert found is None if expected is None else found == pytest.approx(expected, rel=1e-12)


# Meta's LLaMA

LLAMA = Family(
    "llama",
    lambda: small("LlamaConfig", num_key_value_heads=2, rope_theta=5000.0, rms_norm_eps=1e-5),
    "LlamaForCausalLM",
    "model.layers.{layer}",
    "model.layers.{layer}.self_attn",
)
PARAMS = {"dim": 48, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "norm_eps": 1e-5, "rope_theta": 5000.0}


def as_meta_saves(model: Any) -> dict[str, Tensor]:
    """transformers' LLaMA with each head's rotary dimensions put back beside their partners."""

    def adjacent(weight: Tensor, heads: int) -> Tensor:
        return weight.view(heads, 2, -1, WIDTH).transpose(1, 2).reshape(-1, WIDTH)

    saved = {}
    for layer in range(2):
        given = {name: parameter.detach() for name, parameter in model.model.layers[layer].named_parameters()}
        saved[f"layers.{layer}.attention.wq.weight"] = adjacent(given["self_attn.q_proj.weight"], 4)
        saved[f"layers.{layer}.attention.wk.weight"] = adjacent(given["self_attn.k_proj.weight"], 2)
        saved[f"layers.{layer}.attention.wv.weight"] = given["self_attn.v_proj.weight"]
        saved[f"layers.{layer}.attention.wo.weight"] = given["self_attn.o_proj.weight"]
        saved[f"layers.{layer}.attention_norm.weight"] = given["input_layernorm.weight"]
    return saved


def test_meta_s_llama_is_transformers_llama_permuted(tmp_path):
    model: Any = build(LLAMA)
    model.save_pretrained(tmp_path / "transformers")
    (tmp_path / "meta").mkdir()
    torch.save(as_meta_saves(model), tmp_path / "meta" / "consolidated.00.pth")
    (tmp_path / "meta" / "params.json").write_text(json.dumps(PARAMS))
    ours: list[Any] = list(open_checkpoint(tmp_path / "transformers").layers())
    metas: list[Any] = list(open_checkpoint(tmp_path / "meta").layers())
    seen = run(LLAMA, model)
    assert (ours[0].W_Q - metas[0].W_Q).abs().max() > 0.1
    for one, other in zip(ours, metas, strict=True):
        assert_same(other, LLAMA, model, seen[other.layer])
        torch.testing.assert_close(other.ov("folded").dense(), one.ov("folded").dense())
        for offset in (0, 1, 7):
            torch.testing.assert_close(
                other.qk("folded", offset).dense(), one.qk("folded", offset).dense(), rtol=1e-9, atol=1e-9
            )


@pytest.mark.parametrize(
    ("changes", "known"),
    [
        ({"rope_theta": None}, 10000.0),
        ({"rope_theta": None, "head_dim": 12, "sliding_window": 4096}, 10000.0),
        ({"rope_theta": None, "head_dim": 12}, None),
        ({"use_scaled_rope": False}, 5000.0),
        ({"use_scaled_rope": True}, None),
    ],
)
def test_what_meta_s_numbers_leave_open_is_not_guessed(changes, known, tmp_path):
    torch.save(as_meta_saves(build(LLAMA)), tmp_path / "consolidated.00.pth")
    params = {name: value for name, value in (PARAMS | changes).items() if value is not None}
    (tmp_path / "params.json").write_text(json.dumps(params))
    weights = next(open_checkpoint(tmp_path).layers())
    rotary: Any = weights.facts.rotary
    assert rotary.pairing == "adjacent"
    assert weights.facts.window == params.get("sliding_window")
    if known is None:
        with pytest.raises(CallError, match="frequencies of this model are not known"):
            weights.qk(rotary_offset=1)
    else:
        assert rotary.frequencies[1] == pytest.approx(known ** (-1 / 6), rel=1e-12)


def test_meta_s_stretched_positions_are_transformers_llama3(tmp_path):
    torch.save(as_meta_saves(build(LLAMA)), tmp_path / "consolidated.00.pth")
    params = PARAMS | {"use_scaled_rope": True, "rope_scaling_factor": 32.0, "rope_theta": 500000.0}
    (tmp_path / "params.json").write_text(json.dumps(params))
    config = small(
        "LlamaConfig",
        rope_theta=500000.0,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )
    expected = LlamaRotaryEmbedding(config).inv_freq.tolist()
    rotary: Any = next(open_checkpoint(tmp_path).layers()).facts.rotary
    assert rotary.frequencies == pytest.approx(expected, rel=1e-6)


# Checkpoints of strangers


@pytest.mark.parametrize(
    ("file", "layers", "heads"),
    [("brackets/brackets_model_state_dict.pt", 3, 2), ("induction/induction_head_infinite.pth", 2, 4)],
)
def test_a_stranger_s_checkpoint_is_read_as_its_mapping_says(file, layers, heads, strangers, request):
    path = strangers / file
    mapping = read_mapping(request.config.rootpath / "tests" / "data" / f"{path.parent.name}.toml")
    found, told = list(open_checkpoint(path).layers()), list(open_checkpoint(path, mapping).layers())
    assert [(weights.layer, weights.heads) for weights in found] == [(layer, heads) for layer in range(layers)]
    for one, other in zip(found, told, strict=True):
        assert one.stored_basis == "raw"
        torch.testing.assert_close(one.qk().dense(), other.qk().dense(), rtol=0, atol=0)
        torch.testing.assert_close(one.ov().dense(), other.ov().dense(), rtol=0, atol=0)
