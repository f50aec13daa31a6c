"""Every key that a family file or a mapping file may hold.

The same tables check the files and, in a test, `families/README.md`, which describes each key.
"""

from collections.abc import Callable, Iterator
from collections.abc import Mapping as Dictionary
from dataclasses import dataclass
from typing import Any

from ..errors import CallError
from .named_layouts import TARGETS

#: Tensors that may exist or not: biases, the norm in front of attention, the norms of queries and keys, and the tables
#: [position, dims] by which positions rotate.
OPTIONAL = (
    *("b_Q", "b_K", "b_V", "b_QKV", "b_O", "norm_gain", "norm_bias"),
    *("query_norm_gain", "query_norm_bias", "key_norm_gain", "key_norm_bias"),
    *("rotary_sin", "rotary_cos"),
)

_NUMBER = (int, float)
#: Each fact with the types that its value may have, and for tables the keys with theirs.
FACTS: dict[str, tuple[type, ...] | dict[str, tuple[type, ...]]] = {
    "rotary": {
        "pairing": (str,),
        "dims": (int,),
        "fraction": _NUMBER,
        "base": _NUMBER,
        "scaling": (dict,),
        "max_positions": (int,),
        "trained_positions": (int,),
    },
    "norm": {"kind": (str,), "eps": _NUMBER, "gain_offset": _NUMBER},
    "query_key_norm": {"kind": (str,), "eps": _NUMBER, "gain_offset": _NUMBER, "over": (str,)},
    "score_scale": _NUMBER,
    "divide_scores_by_layer": (bool,),
    "soft_cap": _NUMBER,
    "clip_qkv": _NUMBER,
    "sinks": (bool,),
    "window": (int,),
    "causal": (bool,),
    "positions": (str,),
    "cross": (bool,),
    "used_by": (int,),
}
#: The values that a fact, or a key of its table, may have.
CHOICES = {
    "pairing": ("halves", "adjacent"),
    "kind": ("layer_norm", "rms_norm"),
    "over": ("head", "all"),
    "positions": ("alibi", "relative", "absolute", "none"),
}

Table = dict[str, "Key"]


@dataclass(frozen=True)
class Key:
    """The type of a key's value, and the keys of the tables in it.

    Attributes:
        types: The types of its value, in the words of `families/README.md`.
        keys: The keys of the table, or of each table in the list, under it; None if any key may stand there.
    """

    types: tuple[str, ...]
    keys: Table | None = None


def _is_list_of(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(_is(entry, kind) for entry in value)


def _is(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


#: How a value of each type is recognised. "look-up" is a table with the key config.
_TYPES: dict[str, Callable[[Any], bool]] = {
    "anything": lambda _: True,
    "boolean": lambda value: _is(value, bool),
    "true": lambda value: value is True,
    "false": lambda value: value is False,
    "string": lambda value: _is(value, str),
    "integer": lambda value: _is(value, int),
    "number": lambda value: _is(value, int) or _is(value, float),
    "table": lambda value: isinstance(value, dict),
    "look-up": lambda value: isinstance(value, dict) and "config" in value,
    "list of strings": _is_list_of(str),
    "list of integers": _is_list_of(int),
    "list of numbers": lambda value: isinstance(value, list) and all(_TYPES["number"](entry) for entry in value),
    "list of tables": _is_list_of(dict),
}
_WORDS: dict[type, str] = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "table"}

_STRING, _STRINGS = Key(("string",)), Key(("list of strings",))
_INTEGERS = Key(("list of integers",))

LOOK_UP: Table = {
    "config": Key(("string", "list of strings")),
    "default": Key(("anything",)),
    "power": Key(("number",)),
    "divided_by": Key(("integer", "look-up")),
    "times": Key(("number", "look-up")),
    "plus": Key(("number",)),
}
SCALING: Table = {
    "rope_type": Key(("string", "look-up")),
    "type": Key(("string", "look-up")),
    "factor": Key(("number", "look-up")),
    "original_max_position_embeddings": Key(("integer", "look-up")),
    "low_freq_factor": Key(("number", "look-up")),
    "high_freq_factor": Key(("number", "look-up")),
    "attention_factor": Key(("number", "look-up")),
    "beta_fast": Key(("number", "look-up")),
    "beta_slow": Key(("number", "look-up")),
    "truncate": Key(("boolean", "look-up")),
    "mscale": Key(("number", "look-up")),
    "mscale_all_dim": Key(("number", "look-up")),
    "short_factor": Key(("list of numbers", "look-up")),
    "long_factor": Key(("list of numbers", "look-up")),
}
TENSORS: Table = dict.fromkeys((*TARGETS, *OPTIONAL), _STRING)
LAYOUT: Table = dict.fromkeys(TARGETS, _STRING)


def _fact(types: tuple[type, ...]) -> Key:
    words = ("number",) if types == _NUMBER else tuple(_WORDS[kind] for kind in types)
    return Key((*words, "look-up"), SCALING if dict in types else None)


def _facts() -> Iterator[tuple[str, Key]]:
    """Yield each fact; false removes one that other cases, or the stack, state."""
    for name, types in FACTS.items():
        if isinstance(types, dict):
            table = {key: _fact(of_key) for key, of_key in types.items()}
            stands_alone = ("true",) if name == "rotary" else ()
            yield name, Key(("table", "look-up", *stands_alone, "false"), table)
        else:
            fact = _fact(types)
            yield name, fact if bool in types else Key((*fact.types, "false"))


FACT_KEYS: Table = dict(_facts())
LAYERS: Table = {
    "config": Key(("string", "list of strings")),
    "is": Key(("anything",)),
    "every": Key(("integer", "look-up")),
    "at": _INTEGERS,
    "except": _INTEGERS,
    "from": Key(("integer", "look-up")),
    "only": _INTEGERS,
}
CONDITIONS: Table = {
    "when": Key(("table",)),
    "unless": Key(("table",)),
    "stated": _STRINGS,
    "missing": _STRINGS,
    "not_null": _STRINGS,
    "has": _STRINGS,
    "layers": Key(("table",), LAYERS),
}
EVIDENCE: Table = dict.fromkeys(FACTS, _STRINGS)
_MAPPED: Table = {
    "stack": _STRING,
    "tensors": Key(("table",), TENSORS),
    "layout": Key(("string", "table"), LAYOUT),
    "heads": Key(("integer", "look-up")),
    "d_head": Key(("integer", "look-up")),
    "number_of_layers": Key(("integer", "look-up")),
    "evidence": Key(("table",), EVIDENCE),
}
STACK: Table = {
    **_MAPPED,
    "config_in": _STRING,
    "not_under": _STRINGS,
    "beside": Key(("table",)),
    "cases": Key(("list of tables",), CONDITIONS | _MAPPED | FACT_KEYS),
}
#: What a stack's table says that is not part of its mapping.
OF_RECOGNITION = ("cases", "config_in", "beside", "not_under", "number_of_layers", "heads", "d_head", "evidence")
FAMILY: Table = {
    "title": _STRING,
    "model_types": _STRINGS,
    "by_names": Key(("boolean",)),
    "marks": _STRINGS,
    "needs_config": _STRINGS,
    "undetermined": _STRINGS,
    "config_keys": _STRINGS,
    "own_keys": _STRINGS,
    "stacks": Key(("list of tables",), STACK | FACT_KEYS),
}
UNSUPPORTED: Table = {
    "title": _STRING,
    "reason": _STRING,
    "model_types": _STRINGS,
    "tensors": _STRINGS,
    "whole": Key(("boolean",)),
}
MAPPING: Table = {
    "tensors": Key(("table",), TENSORS),
    "layout": Key(("string", "table"), LAYOUT),
    "heads": Key(("integer", "list of integers")),
    "d_head": Key(("integer", "list of integers")),
    "d_value": Key(("integer",)),
    "prefix": _STRING,
    "step": Key(("string", "list of strings")),
    "steps": _STRING,
    "stack": _STRING,
    "scalars": Key(("table",)),
}


def check_family(table: dict[str, Any], origin: str) -> None:
    """Refuse a family file that holds an unknown key, or a value of the wrong type.

    Args:
        table: The file as TOML gives it.
        origin: Name of the file, for messages.

    Raises:
        CallError: The message names the key, the table that it is in, and the known keys.
    """
    _check(table, FAMILY, (), origin)


def check_unsupported(table: dict[str, Any], origin: str) -> None:
    """Refuse an unknown key, or a value of the wrong type, in the file of unsupported architectures.

    Args:
        table: The file as TOML gives it.
        origin: Name of the file, for messages.

    Raises:
        CallError: The message names the key, the table that it is in, and the known keys.
    """
    _check(table, {"unsupported": Key(("list of tables",), UNSUPPORTED)}, (), origin)


def check_mapping(table: dict[str, Any], origin: str) -> None:
    """Refuse a mapping file that holds an unknown key at any level, or a value of the wrong type.

    Args:
        table: The file as TOML gives it.
        origin: Name of the file, for messages.

    Raises:
        CallError: The message names the key, the table that it is in, and the known keys.
    """
    _check(table, _without_look_ups(MAPPING | FACT_KEYS), (), origin)


def _without_look_ups(keys: Table) -> Table:
    """Return the keys of a mapping file, which has no config beside it."""
    return {
        name: Key(
            tuple(kind for kind in key.types if kind != "look-up"),
            None if key.keys is None else _without_look_ups(key.keys),
        )
        for name, key in keys.items()
    }


def _check(table: Dictionary[str, Any], keys: Table, path: tuple[str, ...], origin: str) -> None:
    where = f"{', '.join(path)} of {origin}" if path else origin
    for name, value in table.items():
        if name not in keys:
            raise CallError(f"{where} has the unknown key {name!r}; known are {', '.join(keys)}")
        key = keys[name]
        if not any(_TYPES[kind](value) for kind in key.types):
            raise CallError(f"{name} of {where} should be of type {' or '.join(key.types)}, got {value!r}")
        if isinstance(value, dict) and "config" in value and "look-up" in key.types:
            _check(value, LOOK_UP, (*path, f"[{name}]"), origin)
        elif isinstance(value, dict) and key.keys is not None:
            _check(value, key.keys, (*path, f"[{name}]"), origin)
        elif isinstance(value, list) and key.keys is not None:
            for number, entry in enumerate(value, start=1):
                _check(entry, _of_case(entry, key.keys), (*path, f"[[{name}]] {number}"), origin)


def _of_case(table: Dictionary[str, Any], keys: Table) -> Table:
    """Return the keys of a case: one that holds for some layers only can change facts, but not names or layouts."""
    if "layers" not in table or "layers" not in keys:
        return keys
    return {name: key for name, key in keys.items() if name not in _MAPPED}
