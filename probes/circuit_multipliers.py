"""By how much the rates of the two circuits are multiplied, and whether that can change anything."""

import math
from numbers import Real

from ..circuits.errors import CallError
from .circuit_entries import CircuitEntries, in_words

#: The key of a parameter group that tells how many times the base rate it has.
MULTIPLIER = "multiplier"


def circuit_multipliers(qk: float, ov: float) -> dict[str, float]:
    """Return the multiplier of each circuit by its name.

    Raises:
        CallError: one is zero, negative, infinite or no number.
    """
    for name, multiplier in (("qk", qk), ("ov", ov)):
        if not (is_finite(multiplier) and multiplier > 0):
            raise CallError(f"the multiplier {name} should be a finite number above 0, got {multiplier!r}")
    return {"QK": qk, "OV": ov}


def is_finite(value: object) -> bool:
    """Say whether this is a number, and finite; one that is written in a string is none."""
    return isinstance(value, Real) and math.isfinite(value)


def training(entries: list[CircuitEntries], multipliers: dict[str, float]) -> list[CircuitEntries]:
    """Return the entries whose parameters train.

    Raises:
        CallError: none of a circuit does, and its multiplier is not 1.
    """
    found = [one for one in entries if one.parameter.requires_grad]
    for circuit, multiplier in multipliers.items():
        if multiplier != 1 and not any(one.circuit == circuit for one in found):
            frozen = in_words(one.name for one in entries if one.circuit == circuit)
            what = f"its parameters are frozen: {frozen}" if frozen else "none of its weights is there"
            raise CallError(
                f"nothing of the {circuit} circuit trains, so {multiplier:g} times the rate is in vain: {what}"
            )
    return found
