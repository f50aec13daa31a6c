"""Numbers of steps as people write them: 500, 000500, 10k, 1.5M, 1e5, 10,000."""

import re
from decimal import Decimal

#: The part of a name that may be the number of a step; `whole_number` says which number it is, if any.
NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?(?:[eE]\+?\d+)?[A-Za-z]*"
_PARTS = re.compile(r"(?P<digits>\d+|\d{1,3}(?:,\d{3})+)(?P<fraction>\.\d+)?(?:[eE]\+?(?P<exponent>\d+))?(?P<unit>\D*)")
_UNITS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6}
#: The store holds steps as 64-bit integers.
_LARGEST = 2**63 - 1
_LARGEST_EXPONENT = 18


def whole_number(text: str) -> int | None:
    """Return the whole number that a text writes, or None if it writes none.

    A unit (`10k`, `1.5M`), an exponent (`1e5`), groups of three digits (`10,000`) and leading zeros are understood.
    """
    parts = _PARTS.fullmatch(text)
    if parts is None or parts["unit"] not in _UNITS:
        return None
    exponent = int((parts["exponent"] or "0")[:4])
    if exponent > _LARGEST_EXPONENT:
        return None
    value = (
        Decimal(parts["digits"].replace(",", "") + (parts["fraction"] or "")).scaleb(exponent) * _UNITS[parts["unit"]]
    )
    is_decimal = parts["fraction"] is not None and not (parts["exponent"] or parts["unit"])
    return None if is_decimal or value > _LARGEST or value != value.to_integral_value() else int(value)
