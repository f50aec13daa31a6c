"""Weights that are not the whole of what multiplies the stream: parts of a sum, or numbers still to be scaled."""

from collections.abc import Iterable

from .errors import QkovError

#: What stands behind the name of a quantised weight for the factors that belong to it.
_SCALES = ("_scale_inv", "_scale")


def demand_no_adapters(names: Iterable[str], address: str) -> None:
    """QkovError where LoRA adapters lie beside the weights to which they have to be added."""
    if any(".lora_" in name for name in names):
        raise QkovError(f"{address} carries LoRA adapters beside its weights: merge them first (merge_and_unload)")


def demand_unscaled(wanted: Iterable[str], names: Iterable[str], address: str) -> None:
    """QkovError where one of the wanted tensors has scales of its own, as in files quantised to float8."""
    there = set(names)
    for name in wanted:
        scale = next((name + end for end in _SCALES if name + end in there), None)
        if scale is not None:
            raise QkovError(
                f"{name} of {address} is quantised: {scale} has its scales, and quantised weights are not read; "
                f"load the model dequantised, in bfloat16 say, and save it again"
            )
