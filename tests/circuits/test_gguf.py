"""GGUF files: quantised tensors, what the metadata leave open, and files that are damaged or not known."""

import json
import struct
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from qkov.analyses.trajectories import RunStore, track
from qkov.circuits import AttentionWeights, QkovError, inspect_checkpoint, open_checkpoint
from qkov.circuits.checkpoints.gguf.header import LARGEST_COUNT
from qkov.reports.commands.main import run
from torch import Tensor

from .decoders import _GROUPED, BY_NAME, falcon, like_llama
from .family_proof import Family, build
from .gguf_writing import PARAMETERS, convert, converted, write

D_HEAD = 12
LLAMA = like_llama("llama", "LlamaForCausalLM", hidden_size=4 * D_HEAD, rope_theta=5000.0, **_GROUPED)


def llama(path: Path, family: Family = LLAMA, architecture: str = "llama", **entries: Any) -> Path:
    return convert(build(family), path, architecture, **entries)


def with_tensors(path: Path, tensors: dict[str, Tensor], architecture: str = "llama") -> Path:
    """A file of the small LLaMA with other tensors beside its own, or in their place."""
    model = build(LLAMA)
    return write(
        path,
        architecture,
        lambda writer: PARAMETERS["llama"](writer, model.config.to_dict()),
        converted(model, "llama") | tensors,
    )


def layers_of(path: Path) -> list[AttentionWeights]:
    return list(open_checkpoint(path).layers())


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "F16", "BF16"])
def test_quantised_weights_are_those_that_the_formula_gives(kind: str, tmp_path: Path) -> None:
    """Q8_0 and Q4_0: blocks of 32 numbers with one half-precision scale, computed here from the bytes."""
    model = build(like_llama("qwen2", "Qwen2ForCausalLM", hidden_size=64, **_GROUPED))
    path = convert(model, tmp_path / "model.gguf", "qwen2", Kind[kind])
    weight = converted(model, "qwen2")["blk.1.attn_q.weight"].float().numpy()
    if kind == "F16":
        expected = weight.astype(np.float16).astype(np.float32)
    elif kind == "BF16":
        expected = torch.from_numpy(weight).bfloat16().float().numpy()
    else:
        raw = gguf.quants.quantize(weight, Kind[kind]).reshape(-1, 34 if kind == "Q8_0" else 18)
        scale = raw[:, :2].copy().view(np.float16).astype(np.float32)
        if kind == "Q8_0":
            expected = (scale * raw[:, 2:].view(np.int8)).reshape(weight.shape)
        else:
            numbers = np.concatenate([raw[:, 2:] & 15, raw[:, 2:] >> 4], axis=1).astype(np.float32) - 8
            expected = (scale * numbers).reshape(weight.shape)
    read = layers_of(path)[1].W_Q
    assert torch.equal(read.transpose(1, 2).flatten(0, 1), torch.from_numpy(expected))


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0])
@pytest.mark.parametrize("architecture", ["llama", "falcon"])
def test_what_is_quantised_is_put_back_in_order_as_well(architecture: str, kind: Kind, tmp_path: Path) -> None:
    """The values are those of gguf's own dequantize, in the order of the model."""
    family = like_llama("llama", "LlamaForCausalLM", hidden_size=64, **_GROUPED)
    if architecture == "falcon":
        family = falcon("falcon", new_decoder_architecture=True, num_kv_heads=2, hidden_size=64)
    path = convert(build(family), tmp_path / "model.gguf", architecture, kind)
    reader = gguf.GGUFReader(path)
    values = {each.name: gguf.quants.dequantize(each.data, each.tensor_type) for each in reader.tensors}
    weights = layers_of(path)[1]
    q, k = weights.W_Q.transpose(1, 2).flatten(0, 1), weights.W_K.transpose(1, 2).flatten(0, 1)
    if architecture == "falcon":
        expected = torch.from_numpy(values["blk.1.attn_qkv.weight"].copy())
        assert torch.equal(torch.cat((q, k)), expected[: len(q) + len(k)])
        return
    stored_q, stored_k = (torch.from_numpy(values[f"blk.1.attn_{side}.weight"].copy()) for side in "qk")
    # Rows 2i and 2i + 1 of a head in the file are rows i and i + 8 of the model.
    order = torch.tensor([*range(0, 16, 2), *range(1, 16, 2)])
    assert torch.equal(q, stored_q.reshape(4, 16, 64)[:, order].flatten(0, 1))
    assert torch.equal(k, stored_k.reshape(2, 16, 64)[:, order].flatten(0, 1))


def test_the_packaged_model_is_read_as_transformers_reads_it(smollm2_gguf: Path, smollm2: Path) -> None:
    from_gguf, from_transformers = open_checkpoint(smollm2_gguf), open_checkpoint(smollm2)
    for read, told in zip(from_gguf.layers(), from_transformers.layers(), strict=True):
        for name in ("W_Q", "W_K", "W_V", "W_O"):
            assert torch.equal(getattr(read, name).to(torch.bfloat16), getattr(told, name)), (read.layer, name)
        assert read.facts == told.facts
        assert read.group_size == told.group_size


def frequencies(path: Path) -> tuple[float, ...]:
    rotary = layers_of(path)[0].facts.rotary
    assert rotary is not None
    assert rotary.amplitude == 1.0
    assert rotary.frequencies is not None
    return rotary.frequencies


PLAIN = [5000.0 ** (-2 * pair / D_HEAD) for pair in range(D_HEAD // 2)]


def test_divisors_of_the_frequencies_are_in_the_file(tmp_path: Path) -> None:
    divisors = torch.linspace(1, 8, D_HEAD // 2)
    path = with_tensors(tmp_path / "model.gguf", {"rope_freqs.weight": divisors})
    expected = [plain / float(divisor) for plain, divisor in zip(PLAIN, divisors, strict=True)]
    assert frequencies(path) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    "entries",
    [
        {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0},
        # What the first files said.
        {"rope__scale_linear": 4.0},
    ],
)
def test_linear_scaling_is_read(entries: dict[str, Any], tmp_path: Path) -> None:
    path = llama(tmp_path / "model.gguf", **entries)
    assert frequencies(path) == pytest.approx([plain / 4 for plain in PLAIN], rel=1e-6)


def test_a_base_that_is_not_stated_is_that_of_llama_cpp(tmp_path: Path) -> None:
    model = build(BY_NAME["cohere"])

    def without_base(writer: gguf.GGUFWriter) -> None:
        PARAMETERS["command-r"](writer, model.config.to_dict() | {"rope_parameters": {}, "rope_theta": None})

    path = write(tmp_path / "model.gguf", "command-r", without_base, converted(model, "command-r"))
    # transformers would take 500000 for this family.
    assert frequencies(path) == pytest.approx([10000.0 ** (-2 * pair / D_HEAD) for pair in range(D_HEAD // 2)])


@pytest.mark.parametrize(
    ("entries", "facts"),
    [
        ({"attention__scale": 0.25}, {"score_scale"}),
        ({"attention__temperature_scale": 0.5}, {"score_scale"}),
        ({"attn_logit_softcapping": 30.0}, {"soft_cap"}),
        ({"attention__clamp_kqv": 8.0}, {"clip_qkv"}),
        ({"attention__sliding_window": 128}, {"window"}),
        ({"attention__causal": False}, {"causal"}),
        ({"attention__max_alibi_bias": 8.0}, {"positions", "rotary"}),
        ({"rope__dimension_sections": [4, 1, 1, 0]}, {"rotary"}),
        ({"rope__dimension_count": 6}, {"rotary"}),
        ({"rope__freq_base_swa": 10.0}, {"rotary"}),
        ({"rope__scaling__attn_factor": 1.2}, {"rotary"}),
        ({"rope__scaling__type": "longrope"}, {"rotary"}),
        ({"rope__scaling__type": "spiral", "rope__scaling__factor": 2.0}, {"rotary"}),
        ({"rope__scaling__yarn_log_multiplier": 1.0}, {"rotary"}),
        ({"general__name": "Mistral 7B Instruct v0.1"}, {"window"}),
        ({"general__base_model__0__name": "Mistral-7B-v0.1"}, {"window"}),
        ({"general__name": "Mixtral 8x7B of Mistral"}, set()),
        ({"general__description": "as good as mistral"}, set()),
        ({"attention__causal": True, "attention__scale": 0.0, "attn_logit_softcapping": 0.0}, set()),
    ],
)
def test_what_the_metadata_say_and_the_family_has_not_is_unknown(
    entries: dict[str, Any], facts: set[str], tmp_path: Path
) -> None:
    opened = open_checkpoint(llama(tmp_path / "model.gguf", **entries))
    assert {weights.facts.unknown for weights in opened.layers()} == {frozenset(facts)}
    assert len(opened.doubts) == bool(facts)
    assert all("metadata" in f"{what} {why}" or "converter" in why for what, why in opened.doubts.items())


def test_a_tensor_that_the_family_has_not_is_evidence(tmp_path: Path) -> None:
    path = with_tensors(tmp_path / "model.gguf", {"blk.1.attn_sinks.weight": torch.ones(4)})
    assert layers_of(path)[0].facts.unknown == {"sinks"}


@pytest.mark.parametrize(("architecture", "name"), [("phi3", "phi3"), ("gpt-oss", "gpt_oss")])
def test_a_window_that_is_not_stated_is_unknown(architecture: str, name: str, tmp_path: Path) -> None:
    """The first files of Phi-3 did not state it; transformers would take 128 tokens for gpt-oss."""
    model = build(BY_NAME[name])

    def parameters(writer: gguf.GGUFWriter) -> None:
        PARAMETERS[architecture](writer, model.config.to_dict())
        del writer.kv_data[0][f"{architecture}.attention.sliding_window"]

    path = write(tmp_path / "model.gguf", architecture, parameters, converted(model, architecture))
    assert {(weights.facts.window, weights.facts.unknown) for weights in layers_of(path)} == {
        (None, frozenset({"window"}))
    }


@pytest.mark.parametrize(
    ("name", "architecture", "tensor", "parts"),
    [
        ("llama", "llama", "blk.0.attn_q.weight", 8),
        ("bloom 4 heads", "bloom", "blk.0.attn_qkv.weight", 12),
    ],
)
def test_rows_that_are_not_those_of_so_many_heads(
    name: str, architecture: str, tensor: str, parts: int, tmp_path: Path
) -> None:
    model = build(BY_NAME[name])
    tensors = {key: value[:-1] if key == tensor else value for key, value in converted(model, architecture).items()}
    parameters = PARAMETERS[architecture]
    path = write(tmp_path / "m.gguf", architecture, lambda writer: parameters(writer, model.config.to_dict()), tensors)
    refused(path, rf"{tensor} of shape \[\d+, 48\] does not consist of {parts} equal parts")


def test_a_window_in_every_other_layer(tmp_path: Path) -> None:
    """A period of the file's own, in place of the architecture's."""
    family = like_llama("olmo3", "Olmo3ForCausalLM", sliding_window=5, num_hidden_layers=5, **_GROUPED)
    path = convert(build(family), tmp_path / "model.gguf", "olmo2", attention__sliding_window_pattern=2)
    assert [weights.facts.window for weights in layers_of(path)] == [5, None, 5, None, 5]


def test_multi_query_attention_is_not_taken_for_one_head_each(tmp_path: Path) -> None:
    """The converter says that a StarCoder has one key-value head, whatever the model has."""
    path = convert(build(BY_NAME["gpt_bigcode"]), tmp_path / "model.gguf", "starcoder")
    with pytest.raises(QkovError, match="says num_key_value_heads = 1, but the shapes of the weights say 4"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("config", "origin"),
    [
        ({"model_type": "llama"}, "the metadata of the GGUF file"),
        ({"model_type": "mistral", "num_attention_heads": 4, "sliding_window": 5}, "config.json"),
    ],
)
def test_a_config_beside_the_file_counts_if_it_states_the_heads(
    config: dict[str, Any], origin: str, tmp_path: Path
) -> None:
    path = llama(tmp_path / "model.gguf", general__name="mistral")
    (tmp_path / "config.json").write_text(json.dumps(config))
    opened = open_checkpoint(path)
    facts = next(iter(opened.layers())).facts
    assert opened.config_origin == origin
    assert (facts.window, facts.unknown) == (
        config.get("sliding_window"),
        frozenset() if "heads" in str(config) else {"window"},
    )


def test_one_part_of_several_is_named(tmp_path: Path) -> None:
    """As llama-gguf-split writes them, only the first part says what model it is."""
    first = llama(tmp_path / "model-00001-of-00003.gguf", split__count=3, split__no=0)
    sentence = "this file is one of 3 parts of a model; join them with llama-gguf-split --merge"
    assert open_checkpoint(first).skipped == {"other files": sentence}
    numbers = [text(key) + struct.pack("<IH", 2, value) for key, value in ((b"split.no", 1), (b"split.count", 3))]
    second = header(tmp_path / "model-00002-of-00003.gguf", 0, 2, b"".join(numbers))
    refused(second, f"{sentence}, since part 1 does not say which model it is")
    with pytest.raises(QkovError, match=r"a model in 2 parts .*llama-gguf-split --merge model-00001-of-00003\.gguf"):
        open_checkpoint(tmp_path)


def swapped(path: Path, kind: Kind) -> Path:
    model = build(LLAMA)
    writer = gguf.GGUFWriter(path, "llama", endianess=gguf.GGUFEndian.BIG)
    PARAMETERS["llama"](writer, model.config.to_dict())
    for name, tensor in converted(model, "llama").items():
        writer.add_tensor(name, gguf.quants.quantize(tensor.float().contiguous().numpy(), kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16])
def test_the_byte_order_of_other_machines(kind: Kind, tmp_path: Path) -> None:
    read, expected = layers_of(swapped(tmp_path / "big.gguf", kind)), layers_of(llama(tmp_path / "little.gguf"))
    for one, other in zip(read, expected, strict=True):
        for name in ("W_Q", "W_K", "W_V", "W_O"):
            right = getattr(other, name)
            assert torch.equal(getattr(one, name), right if kind == Kind.F32 else right.half().float())
        assert one.facts == other.facts


def test_types_that_are_not_read(tmp_path: Path) -> None:
    """An unknown type matters only where it is that of attention."""
    path = with_tensors(tmp_path / "model.gguf", {"a.weight": torch.ones(32)})
    content = path.read_bytes()
    unknown = struct.pack("<I", 99)

    def with_type(name: bytes, dimensions: int) -> Path:
        at = content.index(name) + len(name) + 4 + 8 * dimensions
        (tmp_path / "other.gguf").write_bytes(content[:at] + unknown + content[at + 4 :])
        return tmp_path / "other.gguf"

    assert len(layers_of(with_type(b"a.weight", 1))) == 2
    with pytest.raises(QkovError, match=r"attn_q\.weight of .*other\.gguf has the type 99, .* update it"):
        layers_of(with_type(b"blk.0.attn_q.weight", 2))


def test_an_architecture_that_is_not_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = write(tmp_path / "other.gguf", "mamba", lambda _: None, {"blk.0.ssm_a.weight": torch.ones(4, 4)})
    with pytest.raises(QkovError, match=r"holds the architecture 'mamba' of GGUF; known are llama, .*as safetensors"):
        open_checkpoint(other)
    assert run(["inspect", str(other)]) == 1
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def refused(path: Path, message: str) -> None:
    with pytest.raises(QkovError, match=message) as caught:
        layers_of(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_file_that_was_cut_short(tmp_path: Path) -> None:
    content = llama(tmp_path / "model.gguf").read_bytes()
    for length in (3, 20, 200, len(content) // 2, len(content) - 5):
        (tmp_path / "cut.gguf").write_bytes(content[:length])
        refused(tmp_path / "cut.gguf", r"cut\.gguf cannot be read as a GGUF file .*; copy it again")


def header(path: Path, tensors: int, entries: int, rest: bytes = b"", version: int = 3) -> Path:
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", version, tensors, entries) + rest)
    return path


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


NAME = text(b"general.architecture") + struct.pack("<I", 8) + text(b"llama")
NUMBERS = text(b"llama.attention.head_count") + struct.pack("<IIQ", 9, 4, 2**62)
TEXTS = text(b"tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2**62)
NESTED = text(b"llama.a") + struct.pack("<IIQ", 9, 9, 1)
EVERYTHING = text(b"a") + struct.pack("<IQQIQ", 2, 2**32, 2**32, 0, 0)
NOTHING = text(b"a") + struct.pack("<IQQIQ", 2, 0, 2**40, 0, 0)


@pytest.mark.parametrize(
    ("tensors", "entries", "rest", "message"),
    [
        (2**63, 1, NAME, f"would hold {2**63} tensors and 1 entries"),
        (0, LARGEST_COUNT + 1, NAME, "would hold 0 tensors"),
        (0, 2, NAME + NUMBERS, "ends within its header"),
        (0, 2, NAME + TEXTS, "ends within its header"),
        (0, 2, NAME + NESTED, "values of the unknown type 9"),
        (0, 2, NAME + NAME, "states general.architecture twice"),
        (1, 1, NAME + EVERYTHING + bytes(64), r"a tensor has shape \[4294967296, 4294967296\]"),
        (1, 1, NAME + NOTHING + bytes(64), r"a tensor has shape \[1099511627776, 0\]"),
        (0, 1, text(b"\xff") + struct.pack("<IB", 0, 1), "a name in its header is not text"),
        (0, 0, b"", "names no architecture"),
    ],
)
def test_what_a_header_states_is_bounded_by_the_bytes(
    tensors: int, entries: int, rest: bytes, message: str, tmp_path: Path
) -> None:
    refused(header(tmp_path / "stated.gguf", tensors, entries, rest), message)


def test_tensors_that_share_their_bytes_are_refused(tmp_path: Path) -> None:
    described = [text(b"a%d" % number) + struct.pack("<IQIQ", 1, 64, 0, 0) for number in range(9)]
    path = header(tmp_path / "shared.gguf", 9, 1, NAME + b"".join(described) + bytes(32 + 4 * 64))
    refused(path, "its tensors would have 2304 bytes")


@pytest.mark.parametrize("version", [0, 1, 4])
def test_other_versions_are_refused(version: int, tmp_path: Path) -> None:
    refused(header(tmp_path / "version.gguf", 0, 1, NAME, version), f"its version is {version}; known are 2, 3")


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"attention__head_count": "many"}, r"states llama\.attention\.head_count = 'many', where a whole number"),
        ({"attention__head_count": 2.5}, "where a whole number, or one for each layer"),
        ({"attention__head_count": 0}, "heads should be at least 1, got 0"),
        ({"attention__head_count_kv": 3}, "says num_key_value_heads = 3, but the shapes of the weights say 2"),
        ({"embedding_length": [48]}, r"states llama\.embedding_length = \[48\], where a whole number"),
        ({"attention__head_count": 10_001 * [4]}, r"llama\.attention\.head_count lists 10001 values"),
        ({"rope__freq_base": "high"}, r"states llama\.rope\.freq_base = 'high', where a number"),
    ],
)
def test_metadata_of_another_type_are_named(entries: dict[str, Any], message: str, tmp_path: Path) -> None:
    refused(llama(tmp_path / "model.gguf", **entries), message)


def test_without_the_package_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = llama(tmp_path / "model.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(QkovError, match=r"is a GGUF file, which needs the package gguf: pip install 'qkov\[gguf\]'"):
        open_checkpoint(path)


def test_a_folder_with_one_gguf_file_is_a_checkpoint(tmp_path: Path) -> None:
    llama(tmp_path / "model-q8.gguf")
    assert len(layers_of(tmp_path)) == 2
    assert inspect_checkpoint(open_checkpoint(tmp_path))["recognised"].startswith("as LLaMA")


def test_a_run_of_gguf_files_is_tracked(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    model = build(LLAMA)
    for step in (10, 20):
        tensors = {name: tensor * step for name, tensor in converted(model, "llama").items()}
        with_tensors(tmp_path / "run" / f"step_{step}.gguf", tensors)
    track(tmp_path / "run", tmp_path / "store")
    norms = {
        row["step"]: row["frobenius_norm"]
        for row in RunStore(tmp_path / "store").table().to_dict("records")
        if (row["layer"], row["head"], row["circuit"]) == (1, 2, "QK")
    }
    assert norms[20] / norms[10] == pytest.approx(4, rel=1e-6)
