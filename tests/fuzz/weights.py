"""Small weights under the names of every family, as safetensors, and configs with the keys that the families read."""

import json
import random
import re
import struct
from typing import Any

import numpy as np
import torch
from qkov.circuits.architectures.families import Architecture, architectures
from qkov.circuits.architectures.layouts import axes
from qkov.circuits.architectures.named_layouts import LAYOUTS, TARGETS

from .inputs import Input
from .mutations import NUMBERS, STRINGS, as_json, junk, mutated_bytes, mutated_table

_SIZES = {"head": 2, "d_head": 4, "d_model": 8, "d_mlp": 16, "qkv": 3, "d_source": 8}
_LAYERS = 2
_DTYPES = ("F32", "F16", "BF16", "F64", "F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL", "C64", "F4", "F6_E2M3", "I4", "")
_PREFIXES = ("", "", "", "model.", "transformer.", "_orig_mod.", "module.", "a.b.c.")


def safetensors_bytes(header: dict[str, Any], data: bytes) -> bytes:
    """Return a safetensors file with a header that may be wrong."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensors_of(family: Architecture, order: random.Random) -> dict[str, np.ndarray]:
    """Return the attention tensors of a small model of a family."""
    stack = order.choice(family.stacks)
    layouts = LAYOUTS[stack["layout"]] if isinstance(stack["layout"], str) else stack["layout"]
    values = np.random.default_rng(order.randrange(1000))
    tensors, prefix = {}, order.choice(_PREFIXES)
    for layer in range(_LAYERS):
        for role, template in stack["tensors"].items():
            name = template.replace("{layer}", str(layer)).replace("{inner}", "0").replace("{head}", "0")
            tensors[prefix + name] = values.normal(size=_shape(role, layouts)).astype(np.float32)
        for mark in family.marks:
            tensors.setdefault(prefix + mark.replace("{layer}", str(layer)), np.ones((16, 8), np.float32))
    return tensors


def plain_file(tensors: dict[str, np.ndarray]) -> tuple[dict[str, Any], bytes]:
    """Return the header and the data of tensors in float32."""
    header: dict[str, Any] = {}
    data = b""
    for name, tensor in tensors.items():
        start, data = len(data), data + tensor.tobytes()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [start, len(data)]}
    return header, data


def safetensors_input(order: random.Random) -> Input:
    """A safetensors file whose header, names, values or bytes are wrong."""
    family = order.choice(list(architectures().values()))
    tensors = tensors_of(family, order)
    for name in list(tensors):
        if order.random() < 0.1:
            tensors[name].flat[order.randrange(tensors[name].size)] = order.choice((np.nan, np.inf, 0, 3e38, 1e-45))
        if order.random() < 0.05:
            tensors[_renamed(name, order)] = tensors.pop(name)
    header, data = plain_file(tensors)
    content = safetensors_bytes(header, data)
    match order.randrange(6):
        case 0:
            content = mutated_bytes(content, order)
        case 1 | 2:
            content = _with_header(as_json(mutated_table(header, order), order), data, order)
        case 3:
            for entry in header.values():
                if order.random() < 0.3:
                    _resize(entry, order)
            content = safetensors_bytes(header, data)
        case 4:
            settings = {"format": "qkov checkpoint 1", "step": 3, "scalars": {"loss": 1.0}, "settings": {"r": 1}}
            header["__metadata__"] = {"qkov": json.dumps(mutated_table(settings, order))}
            content = safetensors_bytes(header, data)
    files = {order.choice(("model.safetensors", "step_7.safetensors")): content}
    if order.random() < 0.8:
        files["config.json"] = as_json(config_of(family, order), order)
    if order.random() < 0.1:
        state = {"global_step": 7, "log_history": [{"step": 5, "loss": 1.5, "learning_rate": 0.1}, {"step": 7}]}
        files["trainer_state.json"] = as_json(mutated_table(state, order), order)
    return Input("checkpoint", files)


def config_input(order: random.Random) -> Input:
    """Whole weights of a family with a config whose values are wrong."""
    family = order.choice(list(architectures().values()))
    header, data = plain_file(tensors_of(family, order))
    config = config_of(family, order)
    if order.random() < 0.9:
        config = mutated_table(config, order)
    name, content = "config.json", as_json(config, order)
    if order.random() < 0.1:
        # JSON is YAML as well.
        name = "model_config.yaml"
    weights = "lit_model.pth" if name == "model_config.yaml" and order.random() < 0.5 else "model.safetensors"
    return Input("checkpoint", {weights: safetensors_bytes(header, data), name: content})


def index_input(order: random.Random) -> Input:
    """An index of shards that is wrong, or whose shards are."""
    family = order.choice(list(architectures().values()))
    tensors = tensors_of(family, order)
    names = list(tensors)
    halves = names[: len(names) // 2], names[len(names) // 2 :]
    files, weight_map = {}, {}
    for number, half in enumerate(halves, 1):
        shard = f"model-0000{number}-of-00002.safetensors"
        files[shard] = safetensors_bytes(*plain_file({name: tensors[name] for name in half}))
        weight_map |= dict.fromkeys(half, shard)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    if order.random() < 0.2:
        shard = order.choice(list(files))
        files[shard] = mutated_bytes(files[shard], order)
    if order.random() < 0.1:
        del files[order.choice(list(files))]
    if order.random() < 0.3:
        weight_map[order.choice(names)] = order.choice((*STRINGS, "model.safetensors.index.json"))
    files["model.safetensors.index.json"] = as_json(
        mutated_table(index, order) if order.random() < 0.4 else index, order
    )
    if order.random() < 0.8:
        files["config.json"] = as_json(config_of(family, order), order)
    return Input("checkpoint", files)


def torch_tensors(tensors: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Return the tensors as torch's."""
    return {name: torch.from_numpy(tensor) for name, tensor in tensors.items()}


def config_of(family: Architecture, order: random.Random) -> dict[str, Any]:
    """Return a config with values for the keys that a family looks up, mostly likely ones."""
    config: dict[str, Any] = {"model_type": order.choice(family.model_types)} if family.model_types else {}
    for key in (*config_keys(family), *family.config_keys):
        inner, parts = config, key.split(".")
        for part in parts[:-1]:
            following = inner.setdefault(part, {})
            inner = following if isinstance(following, dict) else inner.setdefault(f"{part} too", {})
        inner.setdefault(parts[-1], _likely(parts[-1], order))
    if order.random() < 0.3:
        config["rope_scaling"] = _scaling(order)
    if order.random() < 0.1:
        config["quantization_config"] = order.choice(({"quant_method": "fp8"}, junk(order)))
    return config


def config_keys(family: Architecture) -> tuple[str, ...]:
    """Return the keys of a config that a family looks up, anywhere in its stacks."""
    keys: dict[str, None] = {}

    def gather(value: Any) -> None:
        if isinstance(value, dict):
            stated = value.get("config")
            for key in [stated] if isinstance(stated, str) else stated or ():
                keys[key] = None
            for name in ("when", "unless"):
                keys.update(dict.fromkeys(value.get(name, ())))
            for entry in value.values():
                gather(entry)
        elif isinstance(value, list):
            for entry in value:
                gather(entry)

    gather(list(family.stacks))
    return tuple(keys)


def _likely(key: str, order: random.Random) -> Any:
    if order.random() < 0.1:
        return order.choice((None, order.choice(NUMBERS), junk(order)))
    for pattern, values in (
        (r"layer_types|layers_block_type|attention_layers", [["full_attention", "sliding_attention"], ["attention"]]),
        (r"attention_types", [[[["global", "local"], 1]], [[["global"], 10**9]]]),
        (r"eps|epsilon|theta|base|factor|scal|multiplier|softcap|pct", [1e-5, 10000.0, 0.5, 1, 10**6]),
        (r"kv|group", [1, 2]),
        (r"head_dim|d_kv|rotary_dim", [4, 2]),
        (r"head", [2]),
        (r"layer", [2, 1, 10**9]),
        (r"hidden|d_model|n_embd|dim$|width", [8]),
        (r"window|positions|length|every|interval|period|offset|pattern", [2, 4, 128]),
        (r"rope|rotary", [True, {"rope_type": "default"}, {"rope_theta": 1e4}]),
        (r"type|kind|norm|act", ["layer_norm", "rope", "rms_norm", "absolute"]),
    ):
        if re.search(pattern, key):
            return order.choice(values)
    return order.choice((True, False, 1, "a"))


def _scaling(order: random.Random) -> dict[str, Any]:
    kind = order.choice(("default", "linear", "dynamic", "llama3", "longrope", "yarn", "su", "proportional", "spiral"))
    numbers = ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor", "attention_factor")
    stated: dict[str, Any] = {"rope_type" if order.random() < 0.7 else "type": kind}
    stated |= {name: order.choice((2.0, 4, 64, order.choice(NUMBERS))) for name in numbers if order.random() < 0.6}
    for name in ("short_factor", "long_factor"):
        if order.random() < 0.4:
            stated[name] = order.choice(([1.0, 2.0], [1.0], 1, "a", [0, 0], junk(order)))
    return stated


def _shape(role: str, layouts: dict[str, str]) -> tuple[int, ...]:
    if role not in TARGETS:
        return (24,) if role == "b_QKV" else (8,)
    groups = re.findall(r"\([^)]*\)|\w+", layouts[role])
    return tuple(int(np.prod([_SIZES[axis] for axis in axes(group)])) for group in groups)


def _with_header(text: bytes, data: bytes, order: random.Random) -> bytes:
    length = len(text) if order.random() < 0.9 else order.choice((0, 1, len(text) + 1, 10**9, 2**63))
    return struct.pack("<Q", length) + text + data


def _resize(entry: dict[str, Any], order: random.Random) -> None:
    entry["dtype"] = order.choice(_DTYPES)
    entry["shape"] = [order.choice((0, 1, 8, 10**7, 3 * 10**7 + 1, 10**9, 2**40)) for _ in entry["shape"]]
    if order.random() < 0.5:
        entry["data_offsets"] = [0, 0]


def _renamed(name: str, order: random.Random) -> str:
    return order.choice(
        (
            name.replace("0", order.choice(("1", "99", "9" * 12, "9" * 5000, "٣", "-1", ""))),
            name + order.choice(("_scale_inv", "_scale", ".lora_A.weight", "\n", "\x1b[2J", "$")),
            order.choice(STRINGS) + name,
            name.replace(".", order.choice(("..", "/", " "))),
        )
    )
