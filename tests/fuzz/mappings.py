"""Mapping files that are wrong, beside weights that they could describe."""

import json
import random
from typing import Any

import numpy as np

from .inputs import Input
from .mutations import STRINGS, mutated_bytes, mutated_table
from .weights import plain_file, safetensors_bytes

_WHOLE: dict[str, Any] = {
    "layout": "linear",
    "heads": 2,
    "prefix": "net",
    "stack": "",
    "causal": True,
    "window": 4,
    "score_scale": 0.5,
    "tensors": {
        "Q": "l.{layer}.q",
        "K": "l.{layer}.k",
        "V": "l.{layer}.v",
        "O": "l.{layer}.o",
        "norm_gain": "l.{layer}.g",
    },
    "norm": {"kind": "layer_norm", "eps": 1e-5},
    "rotary": {"pairing": "halves", "dims": 4, "base": 10000.0, "scaling": {"rope_type": "linear", "factor": 2.0}},
    "scalars": {},
}
_LAYOUTS = {"Q": "(head d_head) d_model", "K": "head d_head d_model", "V": "d_model", "O": "d_model (head d_head)"}


def mapping_input(order: random.Random) -> Input:
    """A mapping with wrong keys, values, names or layouts, or whose text is damaged."""
    table = dict(_WHOLE)
    if order.random() < 0.3:
        table["layout"] = dict(_LAYOUTS)
    table = mutated_table(table, order)
    if isinstance(table, dict) and isinstance(table.get("tensors"), dict) and order.random() < 0.4:
        role = order.choice(list(table["tensors"]) or ["Q"])
        table["tensors"][role] = order.choice(
            (*STRINGS, "l.{layer}.{layer}", "{layer}", "{head}.{inner}", "(", "[", ".*", "l.{layer}.q|", "(" * 500)
        )
    content = _toml(table, order).encode("utf-8", "surrogatepass")
    if order.random() < 0.1:
        content = mutated_bytes(content, order)
    return _beside_weights(content)


def whole_mapping() -> Input:
    """Return an undamaged mapping."""
    return _beside_weights("\n".join(_lines(_WHOLE)).encode())


def _beside_weights(content: bytes) -> Input:
    values = np.random.default_rng(0)
    tensors = {
        f"net.l.{layer}.{role}": values.normal(size=(8,) if role == "g" else (8, 8)).astype(np.float32)
        for layer in range(2)
        for role in "qkvog"
    }
    weights = safetensors_bytes(*plain_file(tensors))
    return Input("mapping", {"mapping.toml": content, "weights.safetensors": weights}, "mapping.toml")


def _toml(table: Any, order: random.Random) -> str:
    """Write a table as TOML, with numbers and nestings that JSON does not have."""
    if not isinstance(table, dict):
        return f"a = {_value(table)}"
    lines = _lines(table)
    odd = order.choice(
        (
            *[""] * 30,
            *("heads = 0x" + "f" * 5000, "a = " + "[" * 3000, "a" + ".a" * 3000 + " = 1", "heads = 1979-05-27"),
            *("eps = nan", "heads = inf", "a = '''", "[[tensors]]", "heads = 1\nheads = 2", "heads = 1e400"),
        )
    )
    return "\n".join([odd, *lines] if order.random() < 0.7 else [*lines, odd])


def _lines(table: dict[str, Any]) -> list[str]:
    plain = [f"{_key(key)} = {_value(value)}" for key, value in table.items() if not isinstance(value, dict)]
    tables = [
        line
        for key, value in table.items()
        if isinstance(value, dict)
        for line in (f"[{_key(key)}]", *(f"{_key(name)} = {_value(entry)}" for name, entry in value.items()))
    ]
    return plain + tables


def _key(key: str) -> str:
    return json.dumps(str(key), ensure_ascii=False)


def _value(value: Any) -> str:
    if value is None:
        return '"none"'
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)} = {_value(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    return str(value).lower() if isinstance(value, (bool, float)) else json.dumps(value, ensure_ascii=False)
