"""GGUF files: the weights and facts are those of the model from which the file was written."""

import builtins
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from qkov.analyses.trajectories import RunStore, track
from qkov.circuits import QkovError, inspect_checkpoint, open_checkpoint, open_model
from torch import Tensor

WIDTH, HEADS, KEY_VALUE_HEADS, D_HEAD = 64, 4, 2, 16
MODULES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_1": "attn_norm",
}
SMALL = {
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEY_VALUE_HEADS,
    "head_dim": D_HEAD,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "vocab_size": 40,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


def config_of(architecture: str) -> Any:
    classes = {
        "llama": transformers.LlamaConfig,
        "qwen2": transformers.Qwen2Config,
        "qwen3": transformers.Qwen3Config,
        "gemma2": transformers.Gemma2Config,
        "gemma3": transformers.Gemma3TextConfig,
        "starcoder2": transformers.Starcoder2Config,
        "phi3": transformers.Phi3Config,
    }
    if architecture == "gpt2":
        return transformers.GPT2Config(n_embd=WIDTH, n_head=HEADS, n_layer=2, n_positions=64, vocab_size=40)
    changes = {"query_pre_attn_scalar": D_HEAD} if architecture.startswith("gemma") else {}
    return classes[architecture](**SMALL, **changes)


def model_of(architecture: str) -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_of(architecture))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def permuted(weight: Tensor, heads: int) -> Tensor:
    """As llama.cpp's converter orders the rows of LLaMA's queries and keys."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def converted(architecture: str, module: str, part: str, tensor: Tensor) -> Tensor:
    if architecture == "llama" and module in ("attn_q", "attn_k"):
        return permuted(tensor, HEADS if module == "attn_q" else KEY_VALUE_HEADS)
    if architecture.startswith("gemma") and module.endswith("norm"):
        return tensor + 1
    if architecture == "gpt2" and part == "weight" and module in ("attn_qkv", "attn_output"):
        return tensor.T
    return tensor


def write(
    path: Path,
    architecture: str,
    state: dict[str, Tensor],
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    **metadata: Any,
) -> Path:
    """Write the attention of a model as llama.cpp's converter does; `metadata` are further entries."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(2)
    writer.add_head_count(HEADS)
    writer.add_context_length(64)
    if architecture == "gpt2":
        writer.add_layer_norm_eps(1e-5)
    else:
        writer.add_head_count_kv(KEY_VALUE_HEADS)
        writer.add_rope_freq_base(5000.0)
        writer.add_rope_dimension_count(D_HEAD)
        (writer.add_layer_norm_eps if architecture == "starcoder2" else writer.add_layer_norm_rms_eps)(1e-6)
        if architecture in ("qwen3", "gemma2", "gemma3"):
            writer.add_key_length(D_HEAD)
    for key, value in metadata.items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        add(f"{architecture}.{key.replace('__', '.')}", value)
    for name, tensor in state.items():
        values = tensor.float().contiguous().numpy()
        if kind != gguf.GGMLQuantizationType.F32 and values.ndim == 2:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def attention_of(model: Any, architecture: str) -> dict[str, Tensor]:
    state = {}
    for name, tensor in model.state_dict().items():
        layer = next((part for part in name.split(".") if part.isdigit()), None)
        module = next((gguf_name for hf, gguf_name in MODULES.items() if f".{hf}." in name), None)
        if layer is not None and module is not None:
            part = name.rpartition(".")[2]
            state[f"blk.{layer}.{module}.{part}"] = converted(architecture, module, part, tensor)
        elif name.endswith("wpe.weight"):
            state["position_embd.weight"] = tensor
    return state


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "starcoder2", "phi3", "gpt2"])
def test_a_converted_model_is_read_as_it_was(architecture: str, tmp_path: Path) -> None:
    model = model_of(architecture)
    path = write(tmp_path / "model.gguf", architecture, attention_of(model, architecture))
    opened = open_checkpoint(path)
    assert opened.config_origin == "the metadata of the GGUF file"
    layers = list(opened.layers())
    expected = list(open_model(model).layers())
    assert len(layers) == len(expected) == 2
    for read, told in zip(layers, expected, strict=True):
        for name in ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O"):
            one, other = getattr(read, name), getattr(told, name)
            assert (one is None) == (other is None), name
            assert one is None or torch.equal(one, other), name
        assert read.norm is not None
        assert told.norm is not None
        assert read.norm.kind == told.norm.kind
        torch.testing.assert_close(read.norm.gain.double(), told.norm.gain.double(), rtol=1e-6, atol=1e-6)
        assert (read.facts.rotary is None) == (told.facts.rotary is None)
        if read.facts.rotary is not None and architecture != "gemma3":
            assert read.facts.rotary.pairing == told.facts.rotary.pairing
            expected_frequencies = [5000.0 ** (-2 * i / D_HEAD) for i in range(D_HEAD // 2)]
            assert read.facts.rotary.frequencies == pytest.approx(expected_frequencies, rel=1e-6)
        scales = [facts.score_scale or D_HEAD**-0.5 for facts in (read.facts, told.facts)]
        assert scales[0] == pytest.approx(scales[1])
        assert not read.facts.unknown
    assert inspect_checkpoint(opened)["recognised"].startswith("as ")


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "F16"])
def test_quantised_weights_are_those_that_the_formula_gives(kind: str, tmp_path: Path) -> None:
    """Q8_0 and Q4_0: blocks of 32 numbers with one half-precision scale, computed here from the bytes."""
    state = attention_of(model_of("qwen2"), "qwen2")
    path = write(tmp_path / "model.gguf", "qwen2", state, gguf.GGMLQuantizationType[kind])
    weight = state["blk.1.attn_q.weight"].float().numpy()
    if kind == "F16":
        expected = weight.astype(np.float16).astype(np.float32)
    else:
        raw = gguf.quants.quantize(weight, gguf.GGMLQuantizationType[kind]).reshape(-1, 34 if kind == "Q8_0" else 18)
        scale = raw[:, :2].copy().view(np.float16).astype(np.float32)
        if kind == "Q8_0":
            expected = (scale * raw[:, 2:].view(np.int8)).reshape(weight.shape)
        else:
            numbers = np.concatenate([raw[:, 2:] & 15, raw[:, 2:] >> 4], axis=1).astype(np.float32) - 8
            expected = (scale * numbers).reshape(weight.shape)
    read = list(open_checkpoint(path).layers())[1].W_Q
    assert torch.equal(read.transpose(1, 2).flatten(0, 1), torch.from_numpy(expected))


def test_the_packaged_model_is_read_as_transformers_reads_it(smollm2_gguf: Path, smollm2: Path) -> None:
    from_gguf, from_transformers = open_checkpoint(smollm2_gguf), open_checkpoint(smollm2)
    for read, told in zip(from_gguf.layers(), from_transformers.layers(), strict=True):
        for name in ("W_Q", "W_K", "W_V", "W_O"):
            assert torch.equal(getattr(read, name).to(torch.bfloat16), getattr(told, name)), (read.layer, name)
        assert read.facts.rotary == told.facts.rotary
        assert read.group_size == told.group_size


def test_divisors_of_the_frequencies_are_in_the_file(tmp_path: Path) -> None:
    divisors = torch.linspace(1, 8, D_HEAD // 2)
    state = attention_of(model_of("llama"), "llama") | {"rope_freqs.weight": divisors}
    rotary = next(iter(open_checkpoint(write(tmp_path / "model.gguf", "llama", state)).layers())).facts.rotary
    assert rotary is not None
    expected = [5000.0 ** (-2 * i / D_HEAD) / float(divisors[i]) for i in range(D_HEAD // 2)]
    assert rotary.frequencies == pytest.approx(expected, rel=1e-6)
    assert rotary.amplitude == 1.0


def test_linear_scaling_is_read(tmp_path: Path) -> None:
    state = attention_of(model_of("llama"), "llama")
    path = write(tmp_path / "model.gguf", "llama", state, rope__scaling__type="linear", rope__scaling__factor=4.0)
    rotary = next(iter(open_checkpoint(path).layers())).facts.rotary
    assert rotary is not None
    assert rotary.frequencies == pytest.approx([5000.0 ** (-2 * i / D_HEAD) / 4 for i in range(D_HEAD // 2)], rel=1e-6)


def test_an_architecture_that_is_not_known_and_damaged_files(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", "llama", attention_of(model_of("llama"), "llama"))
    other = write(tmp_path / "other.gguf", "mamba", {"blk.0.ssm_a.weight": torch.ones(4, 4)})
    with pytest.raises(QkovError, match=r"holds the architecture 'mamba' of GGUF; known are llama, .*as safetensors"):
        open_checkpoint(other)
    content = path.read_bytes()
    for length in (3, 20, 200, len(content) // 2, len(content) - 5):
        (tmp_path / "cut.gguf").write_bytes(content[:length])
        with pytest.raises(QkovError, match=r"cut\.gguf cannot be read as a GGUF file .*; copy it again") as caught:
            list(open_checkpoint(tmp_path / "cut.gguf").layers())
        assert "\n" not in str(caught.value)


def test_without_the_package_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "model.gguf", "llama", attention_of(model_of("llama"), "llama"))
    real = builtins.__import__

    def absent(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "gguf":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(QkovError, match=r"is a GGUF file, which needs the package gguf: pip install 'qkov\[gguf\]'"):
        open_checkpoint(path)


def test_a_folder_with_one_gguf_file_is_a_checkpoint(tmp_path: Path) -> None:
    write(tmp_path / "model-q8.gguf", "llama", attention_of(model_of("llama"), "llama"))
    assert len(list(open_checkpoint(tmp_path).layers())) == 2


def test_a_run_of_gguf_files_is_tracked(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for step in (10, 20):
        state = {name: tensor * step for name, tensor in attention_of(model_of("llama"), "llama").items()}
        write(tmp_path / "run" / f"step_{step}.gguf", "llama", state)
    track(tmp_path / "run", tmp_path / "store")
    norms = {
        row["step"]: row["frobenius_norm"]
        for row in RunStore(tmp_path / "store").table().to_dict("records")
        if (row["layer"], row["head"], row["circuit"]) == (1, 2, "QK")
    }
    assert norms[20] / norms[10] == pytest.approx(4, rel=1e-6)
