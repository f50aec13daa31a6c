"""Every architecture of GGUF is read as the model from which it was converted, bit for bit."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from qkov.circuits import AttentionFacts, AttentionWeights, open_checkpoint, open_model
from qkov.circuits.checkpoints.gguf.architectures import architectures

from .decoders import _GROUPED, _WIDE, BY_NAME, like_llama
from .family_proof import Family, build, small
from .gguf_writing import PARAMETERS, convert, converted, write

WEIGHTS = ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O")


def mistral() -> Family:
    return like_llama("mistral", "MistralForCausalLM", sliding_window=None, **_GROUPED)


def deep(name: str, model: str, config: str | None = None, **changes: Any) -> Family:
    """A model of seven layers, so that the period of windows shows."""
    return like_llama(name, model, config, num_hidden_layers=7, **changes)


def bert() -> Family:
    return Family("bert", lambda: small("BertConfig"), "BertForMaskedLM", "", "")


def t5(model: str, config: str = "T5Config", num_layers: int = 3) -> Family:
    sizes = {"d_model": 48, "d_kv": 8, "num_heads": 4, "num_layers": num_layers, "num_decoder_layers": 2, "d_ff": 64}
    return Family(model, lambda: getattr(transformers, config)(**sizes, vocab_size=50), model, "", "")


YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
    "rope_theta": 5000.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
#: Of layers with a window, and of all others.
LOCAL = {"rope_type": "default", "rope_theta": 700.0}
LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}
WINDOW: Any = frozenset({"window"})
#: The architecture in GGUF, the model, and the facts that the file leaves open.
CASES: list[tuple[str, Family, frozenset[str]]] = [
    ("llama", BY_NAME["llama"], frozenset()),
    ("llama", BY_NAME["llama biases, wide heads"], frozenset()),
    ("llama", mistral(), frozenset()),
    ("llama", like_llama("llama yarn", "LlamaForCausalLM", rope_parameters=YARN, **_GROUPED), frozenset()),
    ("llama", like_llama("llama 3", "LlamaForCausalLM", rope_parameters=LLAMA3, head_dim=32, **_GROUPED), frozenset()),
    ("llama", like_llama("mixtral", "MixtralForCausalLM", num_local_experts=2, **_GROUPED), frozenset()),
    ("arcee", BY_NAME["arcee"], frozenset()),
    ("granite", BY_NAME["granite"], frozenset()),
    ("granitemoe", BY_NAME["granitemoe"], frozenset()),
    ("smollm3", deep("smollm3", "SmolLM3ForCausalLM", pad_token_id=0, **_GROUPED), frozenset()),
    ("olmo", BY_NAME["olmo"], frozenset()),
    ("olmo", BY_NAME["olmo clipped"], frozenset()),
    ("olmo2", BY_NAME["olmo2"], frozenset()),
    ("olmo2", deep("olmo3", "Olmo3ForCausalLM", sliding_window=5, **_GROUPED), frozenset()),
    (
        "olmo2",
        deep(
            "olmo3 yarn",
            "Olmo3ForCausalLM",
            sliding_window=5,
            rope_parameters={"full_attention": YARN, "sliding_attention": LOCAL},
            **_GROUPED,
        ),
        frozenset(),
    ),
    ("olmoe", like_llama("olmoe", "OlmoeForCausalLM", num_experts=4, num_experts_per_tok=2, **_GROUPED), frozenset()),
    ("qwen2", BY_NAME["qwen2"], frozenset()),
    ("qwen2moe", BY_NAME["qwen2_moe"], frozenset()),
    ("qwen3", BY_NAME["qwen3"], frozenset()),
    ("qwen3moe", BY_NAME["qwen3_moe"], frozenset()),
    ("gemma", BY_NAME["gemma"], frozenset()),
    (
        "gemma2",
        deep("gemma2", "Gemma2ForCausalLM", sliding_window=5, query_pre_attn_scalar=16, **_WIDE),
        frozenset(),
    ),
    (
        "gemma3",
        deep("gemma3", "Gemma3ForCausalLM", "Gemma3TextConfig", sliding_window=5, query_pre_attn_scalar=16, **_WIDE),
        frozenset(),
    ),
    (
        "gemma3",
        deep(
            "gemma3 linear",
            "Gemma3ForCausalLM",
            "Gemma3TextConfig",
            sliding_window=5,
            query_pre_attn_scalar=16,
            rope_parameters={"full_attention": LINEAR, "sliding_attention": LOCAL},
            **_WIDE,
        ),
        frozenset(),
    ),
    (
        "exaone4",
        deep("exaone4", "Exaone4ForCausalLM", sliding_window=5, sliding_window_pattern=4, **_GROUPED),
        frozenset(),
    ),
    (
        "exaone4",
        deep(
            "exaone4 without windows",
            "Exaone4ForCausalLM",
            sliding_window=None,
            layer_types=7 * ["full_attention"],
            **_GROUPED,
        ),
        frozenset(),
    ),
    ("gpt-oss", BY_NAME["gpt_oss"], frozenset()),
    ("command-r", BY_NAME["cohere"], frozenset()),
    ("command-r", BY_NAME["cohere query-key norm"], frozenset()),
    ("cohere2", deep("cohere2", "Cohere2ForCausalLM", sliding_window=5, **_GROUPED), frozenset()),
    ("glm4", BY_NAME["glm4"], frozenset()),
    ("starcoder2", BY_NAME["starcoder2"], WINDOW),
    ("stablelm", BY_NAME["stablelm"], frozenset()),
    ("stablelm", BY_NAME["stablelm query-key norm"], frozenset()),
    ("nemotron", like_llama("nemotron", "NemotronForCausalLM", attention_bias=True, **_GROUPED), frozenset()),
    ("phi2", like_llama("phi", "PhiForCausalLM"), frozenset()),
    ("phi3", BY_NAME["phi3"], frozenset()),
    ("phi3", BY_NAME["phi3 longrope"], frozenset()),
    ("phi3", like_llama("phi3 without windows", "Phi3ForCausalLM", pad_token_id=0, **_GROUPED), frozenset()),
    ("falcon", BY_NAME["falcon multi-query"], frozenset()),
    ("falcon", BY_NAME["falcon new, two norms"], frozenset()),
    ("falcon", BY_NAME["falcon new, one norm"], frozenset()),
    ("falcon", BY_NAME["falcon per head"], frozenset({"positions", "rotary"})),
    ("gptneox", BY_NAME["gpt_neox"], frozenset()),
    ("bloom", BY_NAME["bloom 4 heads"], frozenset()),
    ("bloom", BY_NAME["bloom 6 heads"], frozenset()),
    ("mpt", BY_NAME["mpt 4 heads"], frozenset()),
    ("mpt", BY_NAME["mpt clipped"], frozenset()),
    ("gpt2", BY_NAME["gpt2"], frozenset()),
    ("starcoder", BY_NAME["gpt_bigcode multi-query"], frozenset()),
    ("bert", bert(), frozenset()),
    ("t5", t5("T5ForConditionalGeneration"), frozenset()),
    ("t5", t5("UMT5ForConditionalGeneration", "UMT5Config"), frozenset()),
    ("t5encoder", t5("T5EncoderModel"), frozenset()),
]


def assert_same(one: AttentionWeights, other: AttentionWeights, gains: float) -> None:
    """Weights and biases to the bit; `gains` is the tolerance of the gains of norms."""
    assert (one.layer, one.stack, one.group_size) == (other.layer, other.stack, other.group_size)
    for name in WEIGHTS:
        read, expected = getattr(one, name), getattr(other, name)
        assert (read is None) == (expected is None), name
        assert read is None or torch.equal(read.double(), expected.double()), name
    for read, expected in ((one.norm, other.norm), (one.query_norm, other.query_norm), (one.key_norm, other.key_norm)):
        assert (read is None) == (expected is None)
        if read is None or expected is None:
            continue
        assert read.kind == expected.kind
        assert getattr(read, "over", None) == getattr(expected, "over", None)
        assert read.eps == pytest.approx(expected.eps, rel=1e-6)
        for part in ("gain", "bias"):
            values, right = getattr(read, part), getattr(expected, part)
            assert (values is None) == (right is None), part
            if right is not None:
                torch.testing.assert_close(values.double(), right.double(), rtol=gains, atol=0)


def assert_same_facts(read: AttentionFacts, expected: AttentionFacts, left_open: frozenset[str]) -> None:
    assert read.unknown == left_open
    for field in fields(AttentionFacts):
        if field.name in (*left_open, "unknown", "rotary"):
            continue
        value, right = getattr(read, field.name), getattr(expected, field.name)
        # The metadata hold numbers in float32.
        assert value == (pytest.approx(right, rel=1e-6) if isinstance(right, float) else right), field.name
    if "rotary" in left_open:
        return
    assert (read.rotary is None) == (expected.rotary is None)
    if read.rotary is not None and expected.rotary is not None:
        assert (read.rotary.dims, read.rotary.pairing) == (expected.rotary.dims, expected.rotary.pairing)
        assert read.rotary.frequencies == pytest.approx(expected.rotary.frequencies, rel=1e-6)
        assert read.rotary.amplitude == pytest.approx(expected.rotary.amplitude, rel=1e-6)


@pytest.mark.parametrize(("architecture", "family", "left_open"), CASES, ids=[f"{a}: {f.name}" for a, f, _ in CASES])
def test_a_converted_model_is_read_as_it_was(
    architecture: str, family: Family, left_open: frozenset[str], tmp_path: Path
) -> None:
    model = build(family)
    model.save_pretrained(tmp_path / "saved")
    read = open_checkpoint(convert(model, tmp_path / "model.gguf", architecture))
    expected = open_checkpoint(tmp_path / "saved")
    assert read.config_origin == "the metadata of the GGUF file"
    assert not read.skipped
    # 1 + gain, which these files hold, is rounded to float32.
    gains = 2.0**-23 if "gains plus one" in architectures()[architecture].undo else 0.0
    pairs = list(zip(read.layers(), expected.layers(), strict=True))
    assert pairs
    for one, other in pairs:
        assert_same(one, other, gains)
        assert_same_facts(one.facts, other.facts, left_open)


def test_every_architecture_is_tested() -> None:
    assert {architecture for architecture, *_ in CASES} | {"deci"} == set(architectures()) == set(PARAMETERS)


def test_the_page_on_formats_lists_every_architecture() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "formats.md").read_text(encoding="utf-8")
    (listed,) = re.findall(r"The architectures that are read, by llama\.cpp's names: (.+?)\. Any other", page)
    assert listed == ", ".join(f"`{name}`" for name in sorted(architectures()))


#: Of the models that transformers' own reader of GGUF reads, those whose config its defaults complete: it takes neither
#: biases, nor groups of falcon's heads, nor the scaling of gpt-oss from the file.
READ_BY_TRANSFORMERS = [
    ("llama", BY_NAME["llama"]),
    ("llama", mistral()),
    ("qwen2", BY_NAME["qwen2"]),
    ("qwen2moe", BY_NAME["qwen2_moe"]),
    ("qwen3", like_llama("qwen3", "Qwen3ForCausalLM", head_dim=128, **_GROUPED)),
    ("qwen3moe", BY_NAME["qwen3_moe"]),
    ("gemma2", BY_NAME["gemma2"]),
    ("gemma3", BY_NAME["gemma3"]),
    (
        "gpt-oss",
        like_llama(
            "gpt-oss",
            "GptOssForCausalLM",
            num_local_experts=2,
            num_experts_per_tok=1,
            pad_token_id=0,
            head_dim=64,
            rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
            **_GROUPED,
        ),
    ),
    ("starcoder2", BY_NAME["starcoder2"]),
    ("stablelm", like_llama("stablelm", "StableLmForCausalLM", use_qkv_bias=True, hidden_size=64, **_GROUPED)),
    ("nemotron", like_llama("nemotron", "NemotronForCausalLM", **_GROUPED)),
    ("phi3", BY_NAME["phi3"]),
    ("falcon", BY_NAME["falcon multi-query"]),
    ("bloom", BY_NAME["bloom 6 heads"]),
    ("gpt2", BY_NAME["gpt2"]),
    ("t5", t5("T5ForConditionalGeneration", num_layers=2)),
    ("t5", t5("UMT5ForConditionalGeneration", "UMT5Config", num_layers=2)),
    ("t5encoder", t5("T5EncoderModel")),
]


@pytest.mark.parametrize(
    ("architecture", "family"), READ_BY_TRANSFORMERS, ids=[f"{a}: {f.name}" for a, f in READ_BY_TRANSFORMERS]
)
def test_transformers_reads_the_same_weights_from_the_same_file(
    architecture: str, family: Family, tmp_path: Path
) -> None:
    entries = {"vocab_size": 50, "tokenizer__ggml__padding_token_id": 0, "general__name": f"{family.name.lower()} 7b"}
    path = convert(build(family), tmp_path / "model.gguf", architecture, **entries)
    # Mistral's files are LLaMA's.
    as_class = transformers.LlamaForCausalLM if architecture == "llama" else getattr(transformers, family.model)
    loaded = as_class.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32, ignore_mismatched_sizes=True)
    pairs = list(zip(open_checkpoint(path).layers(), open_model(loaded).layers(), strict=True))
    assert pairs
    for one, other in pairs:
        for name in WEIGHTS:
            read, expected = getattr(one, name), getattr(other, name)
            assert (read is None) == (expected is None), name
            assert read is None or torch.equal(read, expected), name


def test_layers_with_other_numbers_of_heads_and_layers_without_attention(tmp_path: Path) -> None:
    """DeciLM: two layers of LLaMA with 2 and 1 key-value heads, and one with a linear layer in place of attention."""
    layers = {}
    for layer, groups in enumerate((2, 1)):
        model = build(like_llama("llama", "LlamaForCausalLM", num_key_value_heads=groups))
        layers[layer] = model, groups
    tensors = {
        name.replace("blk.0.", f"blk.{layer}."): tensor
        for layer, (model, _) in layers.items()
        for name, tensor in converted(model, "llama").items()
        if name.startswith("blk.0.")
    }
    tensors["blk.2.attn_output.weight"] = torch.ones(48, 48)
    tensors["blk.2.attn_norm.weight"] = torch.ones(48)

    def parameters(writer: gguf.GGUFWriter) -> None:
        writer.add_block_count(3)
        writer.add_embedding_length(48)
        writer.add_head_count([4, 4, 0])
        writer.add_head_count_kv([2, 1, 0])
        writer.add_key_length(12)
        writer.add_layer_norm_rms_eps(1e-6)

    read = open_checkpoint(write(tmp_path / "model.gguf", "deci", parameters, tensors))
    assert [*read.skipped] == ["layer 2"]
    for layer, weights in enumerate(read.layers()):
        model, groups = layers[layer]
        expected = next(iter(open_model(model).layers()))
        assert weights.group_size == 4 // groups
        for name in WEIGHTS[:4]:
            assert torch.equal(getattr(weights, name).double(), getattr(expected, name))
