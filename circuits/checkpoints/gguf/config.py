"""The config that transformers would write for the model of a GGUF file, from the metadata of the file."""

from typing import Any

from ...errors import QkovError
from .architectures import Converted
from .conversions import Heads
from .metadata import Metadata

_HEADS = ("attention.head_count", "attention.head_count_kv")
#: Keys whose values are whole numbers.
_WHOLE = ("embedding_length", "block_count", "decoder_block_count", "context_length", "attention.key_length")
_WINDOW, _PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"


def heads_of(metadata: Metadata) -> Heads:
    """Return the numbers of heads that the metadata state.

    Raises:
        QkovError: They are not numbers.
    """
    query, key_value = (metadata.by_layer(key) for key in _HEADS)
    return Heads(metadata.address, query, query if key_value is None else key_value)


def width_of_heads(metadata: Metadata) -> int | None:
    """Return the width of a head: what is stated, else the embedding's divided by the number of heads.

    Raises:
        QkovError: What is stated is not a number.
    """
    width, embedding, query = metadata.whole("attention.key_length"), metadata.whole("embedding_length"), None
    if width is None:
        query = heads_of(metadata).query
    if width is None and embedding and isinstance(query, int) and query and embedding % query == 0:
        width = embedding // query
    return width or None


def stated_config(metadata: Metadata, converted: Converted, layers: int) -> dict[str, Any]:
    """Return what the metadata state, under transformers' keys, without the rotary positions.

    Args:
        metadata: The metadata.
        converted: How the architecture is stored.
        layers: No more layers than this are in the file.

    Raises:
        QkovError: A value is not of the type that it should have.
    """
    config: dict[str, Any] = {"model_type": converted.model_type, **converted.config}
    for key, name in converted.keys.items():
        if key in _HEADS:
            _set(config, name, _in_all_layers(metadata.by_layer(key)))
        else:
            _set(config, name, metadata.whole(key) if key in (*_WHOLE, _WINDOW) else metadata.number(key))
    heads, width = heads_of(metadata), width_of_heads(metadata)
    if not isinstance(heads.key_value, list):
        _set(config, "num_key_value_heads", heads.key_value)
    # Where no width is stated, llama.cpp divides, whatever transformers takes for the family.
    _set(config, converted.keys["attention.key_length"], width)
    if converted.wide_scale is not None and width is not None and isinstance(heads.query, int) and heads.query:
        # The file does not state the scale of the scores; llama.cpp chooses it by the number of layers.
        is_wide = metadata.whole("block_count") == converted.wide_scale
        config["query_pre_attn_scalar"] = (metadata.whole("embedding_length") or 0) // heads.query if is_wide else width
    if converted.score_scale is not None and width is not None:
        config[converted.score_scale] = config.get(converted.score_scale) or width**-0.5
    return config | _windows(metadata, converted, layers)


def _in_all_layers(heads: int | list[int] | None) -> int | list[int] | None:
    """Return the number of heads, one for all layers if only those without attention have none."""
    numbers = {number for number in heads if number} if isinstance(heads, list) else set()
    return numbers.pop() if len(numbers) == 1 else heads


def _windows(metadata: Metadata, converted: Converted, layers: int) -> dict[str, Any]:
    """Return the window, and which layers have one, where the file says so."""
    if _WINDOW not in converted.keys:
        return {}
    window, pattern = metadata.whole(_WINDOW), metadata.value(_PATTERN)
    if not window:
        # A window of 0 says that there is none; without a word about it, transformers takes the family's.
        return {} if window is None and not converted.may_have_no_window else _without_window(converted, layers)
    stated: dict[str, Any] = {}
    if converted.model_type_with_window is not None:
        stated["model_type"] = converted.model_type_with_window
    if pattern is None and converted.window_period:
        pattern = converted.window_period
    if isinstance(pattern, list):
        stated["layer_types"] = _kinds(pattern[:layers])
    elif type(pattern) is int and pattern > 0:
        stated["layer_types"] = _kinds([(layer + 1) % pattern != 0 for layer in range(layers)])
    elif pattern is not None:
        raise QkovError(
            f"{metadata.address} states {metadata.architecture}.{_PATTERN} = {pattern!r:.80}, where a period of "
            f"layers, or a list with one entry for each, is expected; convert the model again"
        )
    return stated


def _without_window(converted: Converted, layers: int) -> dict[str, Any]:
    kinds = {"layer_types": _kinds([False] * layers)} if converted.window_period else {}
    return {converted.keys[_WINDOW]: None} | kinds


def _kinds(is_windowed: list[Any]) -> list[str]:
    return ["sliding_attention" if each else "full_attention" for each in is_windowed]


def _set(config: dict[str, Any], name: str, value: Any) -> None:
    """Set an entry, in a table within the config if its name has a dot; nothing is set without a value."""
    table, _, inner = name.rpartition(".")
    if value is not None:
        (config.setdefault(table, {}) if table else config)[inner] = value
