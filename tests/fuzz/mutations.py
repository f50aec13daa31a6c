"""Faults put into bytes and into tables: what a truncated copy, a wrong program or an attacker might leave there."""

import copy
import json
import random
from typing import Any

#: A string that stands for thousands of nested lists, since Python's own writer refuses to write so many.
_DEEP = "a place for deep nesting"
_LEVELS = 5000
#: Numbers at the edges of types, and far beyond what a file of this size can hold.
NUMBERS = (0, -1, 1, 3, 7, 255, 2**31, 2**63, 2**64, 10**7, 10**9, 10**18, 10**30, 0.5, -0.0, 1e308, 1e-320)
SPECIAL = (float("nan"), float("inf"), float("-inf"))
STRINGS = (
    *("", " ", "a", "0", "-1", "1e999", "true", "null", "9" * 5000, "x" * 10_000, "layers.0.q", "{layer}", "{head}"),
    *("\x00", "\x1b[31mred\x1b[0m", "a\nb\rc", "\u202eevil", "\ud800", "é", "𝕎", "ﬁ", "٣", "²"),
    *("../../../etc/passwd", "/etc/passwd", "C:\\x", "file:///etc/passwd", "a/b", ".", "..", "~", "%2e%2e%2f"),
    *("<script>alert(1)</script>", "{{ 7*7 }}", "$x^{2$", "\\frac{1}{0}", "%s%n", "yarn", "longrope", "llama3"),
)


def mutated_bytes(content: bytes, order: random.Random) -> bytes:
    """Return bytes with a few faults: flipped, overwritten, repeated, moved, dropped or cut short."""
    changed = bytearray(content)
    for _ in range(order.choice((1, 1, 1, 2, 4, 8))):
        size = len(changed)
        at = order.randrange(size + 1)
        length = min(order.choice((1, 1, 2, 4, 8, 64)), size - at)
        match order.randrange(8):
            case 0 if length:
                changed[at] ^= 1 << order.randrange(8)
            case 1:
                changed[at : at + length] = order.randbytes(length)
            case 2:
                del changed[at : at + length]
            case 3:
                changed[at:at] = order.randbytes(order.choice((1, 2, 8)))
            case 4:
                changed[at:at] = changed[at : at + length] * order.choice((2, 16, 200))
            case 5:
                del changed[at:]
            case 6:
                changed[at : at + length] = order.choice((b"\x00", b"\xff")) * length
            case 7:
                number = order.choice((0, 1, 2**31 - 1, 2**32 - 1, 2**62, 2**64 - 1))
                changed[at : at + 8] = number.to_bytes(8, "little")
    return bytes(changed)


def mutated_table(value: Any, order: random.Random) -> Any:
    """Return a value of JSON's types with a few faults: other types, other numbers, other keys, more and less."""
    changed = copy.deepcopy(value)
    for _ in range(order.choice((1, 1, 2, 3, 5))):
        places = list(_places(changed))
        if not places:
            return junk(order)
        holder, key = order.choice(places)
        match order.randrange(9):
            case 0 | 1 | 2:
                holder[key] = junk(order)
            case 3:
                del holder[key]
            case 4:
                holder[key] = _other_number(holder[key], order)
            case 5:
                holder[key] = order.choice((str, lambda v: [v], lambda v: {"a": v}, lambda v: [v, v]))(holder[key])
            case 6:
                other, name = order.choice(places)
                # A copy, so that no table comes to hold itself.
                if _has(other, name):
                    holder[key] = copy.deepcopy(other[name])
            case 7 if isinstance(holder, dict):
                holder[order.choice((*STRINGS, f"{key}.{key}", str(key).upper()))] = holder.pop(key)
            case 8 if isinstance(holder, list):
                holder[key:key] = [copy.deepcopy(holder[key])] * order.choice((1, 2, 50))
    return changed


def junk(order: random.Random) -> Any:
    """Return a value that is hardly ever right."""
    return order.choice(
        (
            lambda: order.choice(NUMBERS),
            lambda: -order.choice(NUMBERS),
            lambda: order.choice(SPECIAL),
            lambda: order.choice(STRINGS),
            lambda: order.choice((None, True, False)),
            lambda: order.choice(([], [[]], {}, {"a": None}, [None], [1, "a"], [{}], {"": {}})),
            lambda: [order.choice(NUMBERS) for _ in range(order.choice((1, 2, 4, 300)))],
            lambda: {order.choice(STRINGS): order.choice(NUMBERS) for _ in range(order.choice((1, 3)))},
            lambda: _DEEP,
        )
    )()


def as_json(value: Any, order: random.Random) -> bytes:
    """Write a value as JSON; now and then, what is written is damaged as well."""
    opening, closing = order.choice((("[", "]"), ('{"a":', "}")))
    nested = opening * _LEVELS + "1" + closing * _LEVELS
    content = json.dumps(value).replace(f'"{_DEEP}"', nested).encode()
    return mutated_bytes(content, order) if order.random() < 0.15 else content


def _places(value: Any) -> Any:
    if isinstance(value, dict):
        for key, entry in value.items():
            yield value, key
            yield from _places(entry)
    elif isinstance(value, list):
        for position, entry in enumerate(value):
            yield value, position
            yield from _places(entry)


def _has(holder: Any, key: Any) -> bool:
    return key in holder if isinstance(holder, dict) else key < len(holder)


def _other_number(value: Any, order: random.Random) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return junk(order)
    return order.choice(
        (value + 1, value - 1, -value, value * 2, value * 10**6, value * 10**12, value / 3, value + 0.5)
    )
