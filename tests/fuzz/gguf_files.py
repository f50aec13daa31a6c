"""GGUF files of every architecture that is read: wrong metadata, tensors that are not what they say, wrong bytes."""

import random
import struct
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from qkov.circuits.checkpoints.gguf.architectures import Converted, architectures

from .inputs import Input
from .mutations import NUMBERS, SPECIAL, STRINGS, mutated_bytes, mutated_table

_HEADS, _LAYERS = 2, 2
_PLAIN = GGMLQuantizationType.F32
#: The numbers of GGUF for the types of metadata, with struct's codes.
_BOOLEAN, _TEXT, _LIST = 7, 8, 9
_RARE = (
    *("attention.scale", "attention.causal", "attention.sliding_window_pattern", "attention.value_length"),
    *("rope.dimension_sections", "rope.freq_base_swa", "rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"),
    *(
        "rope.scaling.original_context_length",
        "rope.scaling.yarn_beta_fast",
        "rope.scale_linear",
        "decoder_block_count",
    ),
)


def whole_gguf() -> Input:
    """An undamaged file."""
    return Input("checkpoint", {"model.gguf": _file(*_model("llama", random.Random(0), _PLAIN))})


def gguf_input(order: random.Random) -> Input:
    """A file that is wrong, now and then with a config beside it."""
    kind = _PLAIN if order.random() < 0.6 else order.choice(list(GGML_QUANT_SIZES))
    entries, tensors = _model(order.choice(list(architectures())), order, kind)
    match order.randrange(5):
        case 0:
            content = mutated_bytes(_file(entries, tensors), order)
        case 1:
            changed = mutated_table(entries, order)
            content = _file(changed if isinstance(changed, dict) else {}, tensors)
        case 2:
            for key in order.sample(list(entries), min(3, len(entries))):
                entries[key] = order.choice((*NUMBERS, *SPECIAL, *STRINGS, [2, 0], [], [1.5], True, None))
            content = _file(entries, tensors)
        case 3:
            for position, tensor in enumerate(tensors):
                if order.random() < 0.2:
                    tensors[position] = _mutated(tensor, order)
            content = _file(entries, tensors, order)
        case _:
            architecture = entries["general.architecture"]
            for key in order.sample(_RARE, 3):
                entries[f"{architecture}.{key}"] = order.choice((0, 2, 3.5, -1, True, False, [1, 0, 1], "a", 2**40))
            entries[f"{architecture}.rope.scaling.type"] = order.choice(
                ("none", "linear", "yarn", "longrope", "spiral")
            )
            entries[f"{architecture}.rope.scaling.factor"] = order.choice((2.0, 0.0, -3.0, float("nan")))
            content = _file(entries, tensors)
    files = {order.choice(("model.gguf", "step_7.gguf")): content}
    if order.random() < 0.1:
        files["config.json"] = b'{"model_type": "llama", "num_attention_heads": 2}'
    return Input("checkpoint", files)


#: The name, the type, the shape as GGUF lists it, and the bytes of a tensor.
_Tensor = tuple[bytes, int, list[int], bytes]


def _model(architecture: str, order: random.Random, kind: GGMLQuantizationType) -> tuple[dict[str, Any], list[_Tensor]]:
    """The metadata and the attention of a small model."""
    converted = architectures()[architecture]
    width = max(16, GGML_QUANT_SIZES[kind][0])
    entries: dict[str, Any] = {
        "general.architecture": architecture,
        "general.name": order.choice(("a", "Mistral")),
        "tokenizer.ggml.tokens": ["a", "b", "c"],
        f"{architecture}.embedding_length": width,
        f"{architecture}.block_count": _LAYERS,
        f"{architecture}.context_length": 64,
        f"{architecture}.attention.head_count": order.choice((_HEADS, [_HEADS] * _LAYERS)),
        f"{architecture}.attention.head_count_kv": _HEADS,
        f"{architecture}.attention.layer_norm_epsilon": 1e-5,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
    }
    if order.random() < 0.5:
        entries[f"{architecture}.rope.dimension_count"] = width // _HEADS
        entries[f"{architecture}.attention.key_length"] = width // _HEADS
        entries[f"{architecture}.attention.sliding_window"] = order.choice((0, 4))
    return entries, [_tensor(*named, kind, order) for named in _named(converted, width)]


def _named(converted: Converted, width: int) -> list[tuple[str, list[int]]]:
    named = []
    for name in converted.names:
        for layer in range(_LAYERS if "{layer}" in name else 1):
            other = "other" if name.replace("*", "q_norm") in converted.names else "q_norm"
            stored = name.replace("{layer}", str(layer)).replace("*", other)
            if name.endswith(("norm", "*")) or "norm_" in name:
                named.append((f"{stored}.weight", [width]))
                continue
            rows = 3 * width if name.endswith("qkv") else width
            named.append((f"{stored}.weight", [width, rows]))
            named.append((f"{stored}.bias", [rows]))
    return [*named, ("rope_freqs.weight", [width // _HEADS // 2])]


def _tensor(name: str, shape: list[int], kind: GGMLQuantizationType, order: random.Random) -> _Tensor:
    if len(shape) < 2:
        kind = _PLAIN
    elements, size = GGML_QUANT_SIZES[kind]
    count = int(np.prod(shape)) // elements * size
    values = np.random.default_rng(order.randrange(1000))
    content = values.normal(size=count // 4).astype(np.float32).tobytes() if kind is _PLAIN else values.bytes(count)
    return name.encode(), int(kind), shape, content


def _mutated(tensor: _Tensor, order: random.Random) -> _Tensor:
    name, kind, shape, content = tensor
    match order.randrange(5):
        case 0:
            name = order.choice((name.replace(b"0", order.choice((b"1", b"99", b"9" * 12, b"-1", b""))), b"\xff", b""))
        case 1:
            kind = order.choice((*map(int, GGML_QUANT_SIZES), 99, 2**31))
        case 2:
            shape = [order.choice((0, 1, *shape, 10**7, 2**40, 2**63)) for _ in shape]
        case 3:
            shape = order.choice(([], [*shape, 1], [1] * 5, shape[::-1], [0, 2**40]))
        case 4:
            content = order.choice((b"", content[:-1], content * 2))
    return name, kind, shape, content


def _file(entries: dict[str, Any], tensors: list[_Tensor], order: random.Random | None = None) -> bytes:
    """The bytes of a file; an order damages what it says of its tensors."""
    metadata = b"".join(
        part for key, value in entries.items() for part in (_text(str(key)), _entry(value)) if value is not None
    )
    count = sum(value is not None for value in entries.values())
    described, data = b"", b""
    for name, kind, shape, content in tensors:
        offset = len(data)
        if order is not None and order.random() < 0.05:
            offset = order.choice((0, 1, 2**32, 2**63))
        described += struct.pack("<Q", len(name)) + name + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        described += struct.pack("<IQ", kind, offset)
        data += content + bytes(-len(content) % 32)
    counts = [len(tensors), count]
    if order is not None and order.random() < 0.1:
        counts[order.randrange(2)] = order.choice((0, 1, 60_000, 2**32, 2**64 - 1))
    header = b"GGUF" + struct.pack("<IQQ", 3, *counts) + metadata + described
    return header + bytes(-len(header) % 32) + data


def _text(value: str) -> bytes:
    content = value.encode(errors="surrogatepass")
    return struct.pack("<Q", len(content)) + content


def _entry(value: Any) -> bytes:
    """The type and the value of an entry; what GGUF has no type for becomes text."""
    if isinstance(value, list):
        kinds = [_kind(each) for each in value] or [4]
        kind = kinds[0] if set(kinds) == {kinds[0]} else _TEXT
        return struct.pack("<IIQ", _LIST, kind, len(value)) + b"".join(_value(kind, each) for each in value)
    kind = _kind(value)
    return struct.pack("<I", kind) + _value(kind, value)


def _kind(value: Any) -> int:
    if isinstance(value, bool):
        return _BOOLEAN
    if isinstance(value, int):
        return 4 if 0 <= value < 2**32 else 10 if 0 <= value < 2**64 else 11 if -(2**63) <= value < 0 else _TEXT
    return 12 if isinstance(value, float) else _TEXT


def _value(kind: int, value: Any) -> bytes:
    codes = {4: "<I", 10: "<Q", 11: "<q", 12: "<d", _BOOLEAN: "<?"}
    return _text(str(value)) if kind == _TEXT else struct.pack(codes[kind], value)
