"""A model with a family's names is that family only as far as its tensors and its config agree."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from qkov.circuits import CallError, inspect_checkpoint, open_checkpoint
from qkov.circuits.architectures.families import architectures
from qkov.circuits.architectures.mapping import parse_mapping
from safetensors.torch import load_file, save_file
from torch import Tensor

from .family_proof import small

WIDTH, HEADS = 64, 4
ARGS = {"n_layer": 1, "n_head": HEADS, "n_embd": WIDTH, "bias": False}
NAMES = {
    "QKV": "model.transformer.h.{layer}.attn.c_attn.weight",
    "O": "model.transformer.h.{layer}.attn.c_proj.weight",
    "norm_gain": "model.transformer.h.{layer}.ln_1.weight",
}


def fork(**more: Tensor) -> dict[str, Tensor]:
    """nanoGPT's names, with a mean in the queries and keys that LayerNorm would take away."""
    torch.manual_seed(0)
    direction = torch.ones(WIDTH) / 8
    names = {
        "transformer.wte.weight": torch.randn(10, WIDTH),
        "transformer.h.0.ln_1.weight": torch.ones(WIDTH),
        "transformer.h.0.attn.c_attn.weight": torch.randn(3 * WIDTH, WIDTH) * 0.02
        + 2 * torch.randn(3 * WIDTH, 1) * direction,
        "transformer.h.0.attn.c_proj.weight": torch.randn(WIDTH, WIDTH),
    }
    return names | {name.replace("__", "."): tensor for name, tensor in more.items()}


def saved(folder: Path, state: dict[str, Tensor], args: dict[str, Any]) -> Path:
    torch.save({"model": state, "model_args": args}, folder / "fork.pt")
    return folder / "fork.pt"


def the_layer(path: Path, *options: Any, **reading: Any) -> Any:
    (weights,) = open_checkpoint(path, *options, **reading).layers()
    return weights


WPE = {"transformer__wpe__weight": torch.randn(16, WIDTH)}


def test_a_fork_of_nanogpt_is_not_taken_for_it(tmp_path: Path) -> None:
    path = saved(tmp_path, fork(), ARGS)
    weights = the_layer(path)
    assert weights.heads == HEADS
    assert {"norm", "positions", "rotary"} <= weights.facts.unknown
    assert weights.facts.positions is None
    with pytest.raises(CallError, match=r"the norm in front of layer 0 is not known.*\[norm\] in a mapping file"):
        weights.qk("folded")
    doubts = inspect_checkpoint(open_checkpoint(path))["doubts"]
    assert set(doubts) == {"wpe.weight", "h.{layer}.ln_1.bias"}


def test_a_mapping_states_the_norm_of_the_fork(tmp_path: Path) -> None:
    """The values are those of W_K' W_Q with the gain of 1, centred for LayerNorm and not for RMSNorm."""
    path = saved(tmp_path, fork(), ARGS)
    query, key, _ = fork()["transformer.h.0.attn.c_attn.weight"].double().unflatten(0, (3, HEADS, -1))
    for kind, expected in (("rms_norm", 23.96), ("layer_norm", 0.104)):
        table = {"tensors": NAMES, "layout": "linear", "heads": HEADS, "norm": {"kind": kind, "eps": 1e-5}}
        norm = the_layer(path, parse_mapping(table, "the mapping")).qk("folded").frobenius_norm()[0]
        mean = 1 if kind == "layer_norm" else 0
        folded = [part[0] - mean * part[0].mean(dim=-1, keepdim=True) for part in (query, key)]
        torch.testing.assert_close(norm.double(), torch.linalg.norm(folded[1].T @ folded[0]), rtol=1e-9, atol=0)
        assert norm == pytest.approx(expected, rel=5e-3)


def test_nanogpt_without_biases_is_still_nanogpt(tmp_path: Path) -> None:
    weights = the_layer(saved(tmp_path, fork(**WPE), ARGS))
    assert weights.norm.kind == "layer_norm"
    assert weights.facts.positions == "absolute"
    assert not weights.facts.unknown
    assert weights.qk("folded").frobenius_norm()[0] == pytest.approx(0.104, rel=5e-3)


@pytest.mark.parametrize(
    ("args", "unknown"),
    [
        ({**ARGS, "norm_type": "rmsnorm"}, {"norm"}),
        ({**ARGS, "use_rmsnorm": True}, {"norm"}),
        ({**ARGS, "use_rmsnorm": False, "norm": "layer_norm", "rope": None}, set()),
        ({**ARGS, "use_rope": True}, {"positions", "rotary"}),
        ({**ARGS, "pos_encoding": "learned", "max_position_embeddings": 16}, set()),
        ({**ARGS, "qk_norm": True}, {"query_key_norm"}),
        ({**ARGS, "window_size": 8}, {"window"}),
        ({**ARGS, "logit_softcap": 15.0}, {"soft_cap"}),
        ({**ARGS, "attn_scale": 0.5}, {"score_scale"}),
        ({**ARGS, "grad_norm_clip": 1.0, "lr_scale": 2.0, "init_scale": 0.02}, set()),
        ({**ARGS, "bias": True}, {"norm"}),
        ({"n_head": HEADS, "n_embd": WIDTH}, {"norm"}),
    ],
)
def test_keys_that_nanogpt_has_not_make_their_facts_unknown(
    args: dict[str, Any], unknown: set[str], tmp_path: Path
) -> None:
    assert the_layer(saved(tmp_path, fork(**WPE), args)).facts.unknown == unknown


def test_heads_are_read_beside_a_width_of_another_name(tmp_path: Path) -> None:
    assert the_layer(saved(tmp_path, fork(), {"n_head": 2, "n_embed": WIDTH})).heads == 2
    assert the_layer(saved(tmp_path, fork(), {"num_heads": 8, "d_model": WIDTH})).heads == 8


@pytest.mark.parametrize(
    ("tensor", "unknown"),
    [
        ("transformer__h__0__attn__q_norm__weight", {"query_key_norm"}),
        ("transformer__h__0__attn__rotary__inv_freq", {"positions", "rotary"}),
        ("transformer__h__0__attn__relative_attention_bias__weight", {"positions"}),
        ("transformer__h__0__attn__sinks", {"sinks"}),
        ("transformer__h__0__attn__bias", set()),
    ],
)
def test_tensors_that_nanogpt_has_not_make_their_facts_unknown(tensor: str, unknown: set[str], tmp_path: Path) -> None:
    state = fork(**WPE, **{tensor: torch.randn(8)})
    assert the_layer(saved(tmp_path, state, ARGS)).facts.unknown == unknown


def altered(folder: Path, model: Any, *without: str, **more: Tensor) -> Path:
    model.save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    state = {name: tensor for name, tensor in state.items() if not name.endswith(without or ("-",))}
    save_file(state | {name.replace("__", "."): tensor for name, tensor in more.items()}, folder / "model.safetensors")
    return folder


def facts(folder: Path) -> tuple[set[str], Any]:
    weights = next(iter(open_checkpoint(folder).layers()))
    return set(weights.facts.unknown), weights


def llama() -> Any:
    return transformers.LlamaForCausalLM(small("LlamaConfig"))


def test_llama_s_names_with_what_llama_has_not(tmp_path: Path) -> None:
    assert facts(altered(tmp_path, llama()))[0] == set()
    bias = {"model__layers__0__input_layernorm__bias": torch.zeros(48)}
    assert facts(altered(tmp_path, llama(), **bias))[0] == {"norm"}
    positions = {"model__embed_positions__weight": torch.randn(16, 48)}
    assert facts(altered(tmp_path, llama(), **positions))[0] == {"positions", "rotary"}
    norms = {f"model__layers__0__self_attn__{part}_norm__weight": torch.ones(12) for part in "qk"}
    unknown, weights = facts(altered(tmp_path, llama(), **norms))
    assert unknown == {"query_key_norm"}
    assert weights.query_norm.kind is None


def test_gpt2_s_names_without_what_gpt2_has(tmp_path: Path) -> None:
    config = transformers.GPT2Config(n_embd=32, n_head=4, n_layer=2, n_positions=16, vocab_size=20)
    model = transformers.GPT2LMHeadModel(config)
    assert facts(altered(tmp_path, model))[0] == set()
    assert facts(altered(tmp_path, model, "wpe.weight"))[0] == {"positions", "rotary"}
    assert facts(altered(tmp_path, model, "ln_1.bias"))[0] == {"norm"}


def test_bert_s_config_speaks_of_other_positions(tmp_path: Path) -> None:
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32, vocab_size=20
    )
    folder = altered(tmp_path, transformers.BertModel(config))
    assert facts(folder)[0] == set()
    stated = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(stated | {"position_embedding_type": "rotary"}))
    assert facts(folder)[0] == {"positions", "rotary"}
    (folder / "config.json").write_text(json.dumps(stated | {"position_embedding_type": "relative_key"}))
    unknown, weights = facts(folder)
    assert unknown == set()
    assert weights.facts.positions == "relative"


def test_biases_that_a_family_does_not_name_are_read(tmp_path: Path) -> None:
    state = {
        f"layers.0.attention.{name}": torch.randn(*shape)
        for name, shape in {
            "wq.weight": (32, 32),
            "wk.weight": (32, 32),
            "wv.weight": (32, 32),
            "wo.weight": (32, 32),
            "wq.bias": (32,),
        }.items()
    }
    torch.save(state, tmp_path / "model.pt")
    weights = the_layer(tmp_path / "model.pt", heads=4)
    assert torch.equal(weights.b_Q.flatten(), state["layers.0.attention.wq.bias"])
    assert weights.b_K is None


def test_a_shard_of_a_model_says_nothing_of_what_it_lacks(tmp_path: Path) -> None:
    config = transformers.GPT2Config(n_embd=32, n_head=4, n_layer=2, n_positions=16, vocab_size=20)
    folder = altered(tmp_path, transformers.GPT2LMHeadModel(config), "wpe.weight")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    weights = next(iter(open_checkpoint(folder / "model-00001-of-00002.safetensors").layers()))
    assert weights.facts.positions == "absolute"


def test_every_family_with_a_layer_norm_or_positions_says_by_what_they_are_shown() -> None:
    """Exceptions: norms without a bias, norms that cases choose, positions that are computed."""
    computed = {"mbart", "xglm", "mpt"}
    without_bias = {"mpt", "modernbert", "modernbert_decoder", "litgpt", "litgpt_alternating", "olmo_own"}
    for key, family in architectures().items():
        for stack in family.stacks:
            evidence, norm = stack.get("evidence", {}), stack.get("norm")
            if isinstance(norm, dict) and norm.get("kind") == "layer_norm" and "norm_bias" in stack["tensors"]:
                assert "norm" in evidence or key in without_bias, key
            if stack.get("positions") in ("absolute", "relative"):
                assert "positions" in evidence or key in computed, key


def test_an_unused_tensor_of_t5_s_cross_attention_says_nothing(tmp_path: Path) -> None:
    config = transformers.T5Config(d_model=32, d_kv=8, num_heads=4, num_layers=1, d_ff=32, vocab_size=20)
    name = "decoder__block__0__layer__1__EncDecAttention__relative_attention_bias__weight"
    folder = altered(tmp_path, transformers.T5Model(config), **{name: torch.randn(32, 4)})
    assert all(not weights.facts.unknown for weights in open_checkpoint(folder).layers())
