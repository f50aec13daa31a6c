"""What llama.cpp's converter does to the attention of each architecture, as data in architectures.toml."""

import tomllib
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

_FILE = files(__name__.rpartition(".")[0]).joinpath("architectures.toml")
#: The config's keys by those of the metadata, unless an architecture has others.
_KEYS = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
    "attention.key_length": "head_dim",
}


@dataclass(frozen=True)
class LeftOpen:
    """Facts that a file does not determine, if its model has a certain name, or has or lacks something.

    Attributes:
        facts: The names of the facts.
        reason: Why it does not.
        key: The key that the metadata lack.
        tensor: The tensor that the file has.
        name: A word in the names of the model.
        but_not: A word that is not in them.
    """

    facts: tuple[str, ...]
    reason: str
    key: str | None = None
    tensor: str | None = None
    name: str | None = None
    but_not: str | None = None


@dataclass(frozen=True)
class Converted:
    """How an architecture is stored in GGUF.

    Attributes:
        model_type: The architecture in transformers.
        names: The names of its tensors in transformers by those in the file, both without .weight and .bias.
        keys: The config's keys in transformers by those of the metadata.
        undo: What the converter did to the numbers: names of `conversions.CONVERSIONS`.
        rotary: Whether positions rotate queries and keys.
        fraction: The config's key for the part of a head that rotates; without one, all of it does.
        yarn: What the config of the architecture says beside the factor of yarn.
        has_local_base: Whether layers with a window may rotate by another base.
        window_period: Length of a period of layers, of which all but the last have a window; 0 if none are meant.
        may_have_no_window: Whether a file that states no window has none, instead of the family's own.
        model_type_with_window: The architecture in transformers of a file that states a window.
        wide_scale: The number of layers of the model whose scores are divided by the square root of d_model / heads.
        score_scale: The config's key for the scale of the scores, where transformers has another default.
        is_causal: Whether a query sees only itself and earlier tokens.
        config: Entries of the config that are the same in all files.
        leaves_open: The facts that some files do not determine.
    """

    model_type: str
    names: dict[str, str]
    keys: dict[str, str] = field(default_factory=dict)
    undo: tuple[str, ...] = ()
    rotary: bool = False
    fraction: str | None = None
    yarn: dict[str, Any] = field(default_factory=dict)
    has_local_base: bool = False
    window_period: int = 0
    may_have_no_window: bool = False
    model_type_with_window: str | None = None
    wide_scale: int | None = None
    score_scale: str | None = None
    is_causal: bool = True
    config: dict[str, Any] = field(default_factory=dict)
    leaves_open: tuple[LeftOpen, ...] = ()


@cache
def architectures() -> dict[str, Converted]:
    """Return the architectures that are read, by llama.cpp's names for them."""
    table = tomllib.loads(_FILE.read_text(encoding="utf-8"))
    return {name: _converted(entry, table["names"]) for name, entry in table["architectures"].items()}


def _converted(entry: dict[str, Any], names: dict[str, dict[str, str]]) -> Converted:
    stated = entry | {
        "names": names[entry.get("names", "separate")],
        "keys": _KEYS | entry.get("keys", {}),
        "undo": tuple(entry.get("undo", ())),
        "leaves_open": tuple(
            LeftOpen(**each | {"facts": tuple(each["facts"])}) for each in entry.get("leaves_open", ())
        ),
    }
    return Converted(**stated)
