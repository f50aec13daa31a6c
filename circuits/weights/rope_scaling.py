"""Frequencies of rotary positions that were scaled for longer contexts."""

import math
from collections.abc import Mapping as Dictionary
from typing import Any

from ..errors import CallError, QkovError
from .rotary import Pairing, Rotary

_UNSCALED = ("default", "dynamic")


def scaled_rotary(
    d_head: int,
    dims: int,
    base: float,
    pairing: Pairing,
    scaling: Dictionary[str, Any] | None,
    max_positions: int | None = None,
    trained_positions: int | None = None,
) -> Rotary:
    """Return the rotary positions of a head, with the scaling that a transformers config states.

    The kinds default and linear give base^(-2i/dims), divided by the factor for linear; llama3 divides only the long
    wavelengths (Dubey et al. 2024), and longrope each frequency by its own short factor (Ding et al. 2024). Dynamic
    scaling, which begins beyond the length of training, is left out, as are the long factors of longrope. Other kinds
    are computed by transformers.

    Args:
        d_head: The width of a head.
        dims: How many of its dimensions rotate.
        base: The base of the frequencies.
        pairing: How the dimensions pair.
        scaling: `rope_scaling` or `rope_parameters` of the config.
        max_positions: `max_position_embeddings` of the config.
        trained_positions: `original_max_position_embeddings`, if the config states it outside the scaling.

    Returns:
        The rotary positions, with scaled frequencies.

    Raises:
        QkovError: The kind of scaling is unknown, or a number is missing.
    """
    scaling = dict(scaling or {})
    # Phi-3 calls longrope "su" or "yarn".
    kind = "longrope" if "short_factor" in scaling else scaling.get("rope_type", scaling.get("type", "default"))
    if trained_positions is not None:
        scaling["original_max_position_embeddings"] = trained_positions
    elif max_positions is not None:
        scaling.setdefault("original_max_position_embeddings", max_positions)
    try:
        if not 0 < base < math.inf:
            raise ValueError(f"the base is {base}")
        if not 2 <= dims <= d_head:
            raise ValueError(f"{dims} of {d_head} dimensions rotate")
        if kind in _UNSCALED:
            return Rotary.of_base(dims, base, pairing)
        if kind == "linear":
            return Rotary.of_base(dims, base, pairing, factor=float(scaling["factor"]))
        if kind == "llama3":
            return _llama3(Rotary.of_base(dims, base, pairing), scaling)
        if kind == "longrope":
            return _longrope(Rotary.of_base(dims, base, pairing), scaling, max_positions)
        return _by_transformers(kind, d_head, dims, base, pairing, scaling, max_positions)
    except Exception as error:
        # What the config says is wrong, not a call.
        if isinstance(error, QkovError) and not isinstance(error, CallError):
            raise
        raise QkovError(f"the rotary scaling {kind!r} of the config cannot be used: {scaling} ({error!r})") from error


def _llama3(rotary: Rotary, scaling: Dictionary[str, Any]) -> Rotary:
    """Keep wavelengths up to length/high, stretch those above length/low by the factor, and blend between them."""
    factor, low, high = (float(scaling[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    length = float(scaling["original_max_position_embeddings"])
    scaled = []
    for frequency in rotary.frequencies or ():
        turns = length * frequency / (2 * math.pi)
        blend = min(1.0, max(0.0, (turns - low) / (high - low)))
        scaled.append(frequency * (blend + (1 - blend) / factor))
    return Rotary(dims=rotary.dims, pairing=rotary.pairing, frequencies=tuple(scaled))


def _longrope(rotary: Rotary, scaling: Dictionary[str, Any], max_positions: int | None) -> Rotary:
    """Divide each frequency by its short factor, and let the scores grow with the stretch of the context.

    transformers 4 takes the length of training from another part of the config than transformers 5, which changes the
    amplitude, so the closed form is used with both.
    """
    factors = [float(factor) for factor in scaling["short_factor"]]
    frequencies = tuple(frequency / factor for frequency, factor in zip(rotary.frequencies or (), factors, strict=True))
    amplitude = scaling.get("attention_factor")
    if amplitude is None:
        length = float(scaling["original_max_position_embeddings"])
        stretch = scaling.get("factor")
        if stretch is None:
            stretch = 1.0 if max_positions is None else max_positions / length
        amplitude = math.sqrt(1 + math.log(max(1.0, stretch)) / math.log(length))
    return Rotary(dims=rotary.dims, pairing=rotary.pairing, frequencies=frequencies, amplitude=float(amplitude))


def _by_transformers(
    kind: str, d_head: int, dims: int, base: float, pairing: Pairing, scaling: dict[str, Any], max_positions: int | None
) -> Rotary:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.utils import logging

    if kind not in ROPE_INIT_FUNCTIONS:
        known = ", ".join(dict.fromkeys((*_UNSCALED, *ROPE_INIT_FUNCTIONS)))
        raise QkovError(f"the rotary scaling {kind!r} of the config is not known; known are {known}")
    # transformers 5 reads these two from the scaling, transformers 4 from the config.
    beside = {"rope_theta": base, "partial_rotary_factor": dims / d_head}
    stated = {key: value for key, value in scaling.items() if key != "type"} | beside | {"rope_type": kind}
    lengths: dict[str, Any] = {} if max_positions is None else {"max_position_embeddings": max_positions}
    shown = logging.get_verbosity()
    # transformers' warnings are for those who run the model.
    logging.set_verbosity_error()
    try:
        facts: dict[str, Any] = {"hidden_size": d_head, "num_attention_heads": 1, "head_dim": d_head}
        facts |= {"rope_scaling": stated, **beside, **lengths}
        config = LlamaConfig(**facts)
        frequencies, amplitude = ROPE_INIT_FUNCTIONS[kind](config, device="cpu")
    finally:
        logging.set_verbosity(shown)
    return Rotary(
        dims=2 * len(frequencies),
        pairing=pairing,
        frequencies=tuple(frequencies.double().tolist()),
        amplitude=float(amplitude),
    )
