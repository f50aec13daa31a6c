"""The rotary positions of a GGUF file as a config of transformers states them."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ..pickles.placeholders import DamagedError
from .architectures import Converted
from .metadata import Metadata

#: llama.cpp's base, where none is stated.
_BASE = 10000.0
#: Tensors by which the frequencies are divided.
_DIVISORS = ("rope_freqs.weight", "rope_factors_short.weight")
#: What transformers calls the settings of yarn.
_YARN = {
    "yarn_attn_factor": "attention_factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}


def stated_positions(
    metadata: Metadata,
    converted: Converted,
    width: int | None,
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], Tensor],
) -> tuple[dict[str, Any], str | None]:
    """Return the entries of the config about rotary positions.

    Args:
        metadata: The metadata.
        converted: How the architecture is stored.
        width: The width of a head; None if it is not known.
        shapes: The shapes of the tensors.
        read: Reads a tensor.

    Returns:
        The entries, and why the rotation is not known as stated; None if it is.

    Raises:
        QkovError: A value is not of the type that it should have.
    """
    if not converted.rotary:
        return {}, None
    base = metadata.number("rope.freq_base")
    config: dict[str, Any] = {"rope_theta": _BASE if base is None else base}
    local = metadata.number("rope.freq_base_swa")
    if converted.has_local_base and local is not None:
        config["rope_parameters"] = {"sliding_attention": {"rope_type": "default", "rope_theta": local}}
    turning = metadata.whole("rope.dimension_count")
    turning = width if turning is None else turning
    if turning is not None and width is not None and turning != width:
        if converted.fraction is None:
            return config, f"{turning} of {width} dimensions of a head rotate, which this family does not have"
        config[converted.fraction] = _fraction(turning, width)
    elif converted.fraction is not None:
        config[converted.fraction] = 1.0
    scaling = _scaling(metadata, converted, turning, shapes, read)
    if isinstance(scaling, str):
        return config, scaling
    return config | {"rope_scaling": scaling}, None


def _fraction(turning: int, width: int) -> float:
    """Return the part of a head of which transformers takes the whole part, so that just these dimensions rotate."""
    fraction = turning / width
    return fraction if int(width * fraction) == turning else math.nextafter(fraction, math.inf)


def _scaling(
    metadata: Metadata,
    converted: Converted,
    turning: int | None,
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], Tensor],
) -> dict[str, Any] | str:
    """Return the scaling of the frequencies, or why it is not known."""
    factor = metadata.number("rope.scaling.factor") or metadata.number("rope.scale_linear") or 1.0
    # A factor without a kind is that of linear scaling.
    kind = metadata.value("rope.scaling.type") or "linear"
    kind = "none" if kind == "linear" and factor == 1 else kind
    divisors = next((name for name in _DIVISORS if name in shapes), None)
    amplitude = metadata.number("rope.scaling.attn_factor")
    if divisors is None and amplitude not in (None, 1):
        return f"rope.scaling.attn_factor = {amplitude} without rope_factors_short"
    if divisors is not None and kind in ("none", "linear", "longrope"):
        listed = _listed(divisors, shapes[divisors], turning, read)
        return {
            "rope_type": "longrope",
            "short_factor": [divisor * (factor if kind == "linear" else 1.0) for divisor in listed],
            "attention_factor": 1.0 if amplitude is None else amplitude,
        }
    if divisors is not None or kind not in ("none", "linear", "yarn"):
        return f"rope.scaling.type = {kind!r:.80}" + ("" if divisors is None else f" beside {divisors}")
    if kind == "none":
        return {"rope_type": "default"}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    length = metadata.whole("rope.scaling.original_context_length")
    settings = {name: metadata.number(f"rope.scaling.{key}") for key, name in _YARN.items()}
    settings |= {"original_max_position_embeddings": length}
    stated = {name: value for name, value in settings.items() if value is not None}
    return {"rope_type": "yarn", "factor": factor, **stated, **converted.yarn}


def _listed(name: str, shape: tuple[int, ...], turning: int | None, read: Callable[[str], Tensor]) -> list[float]:
    if turning is None or shape != (turning // 2,):
        turns = "an unknown number" if turning is None else f"{turning}"
        raise DamagedError(f"{name} has shape {list(shape)}, and {turns} of a head's dimensions rotate")
    return read(name).double().tolist()
