"""The holes of a family's file, filled with what the config beside the weights says; UNKNOWN where there is none.

A hole is `{ config = "key" }`, or a list of keys of which the first that says something counts, with

- `default`: what holds where the config is silent, as in transformers' class of the config,
- `power`, `divided_by`, `times`, `plus`: what is made of the number.

A case changes facts, tensors or the layout where all of its conditions hold, and facts alone where it is of `layers`:

- `when`, `unless`: keys with the value, or one of the values, that the config has, or has not,
- `told`, `missing`: keys of which the config says something, or nothing; `not_null`: keys that it does not say null of,
- `has`: names of tensors that are there,
- `layers`: `config` and `is`, the entries of a list; where there is no such list, or none is asked for, `every` so many
  those `at` or all `except`; `from` a number; `only` some.
"""

from collections.abc import Iterable
from collections.abc import Mapping as Dictionary
from typing import Any

from ..errors import CallError
from .stated_facts import FACTS, UNKNOWN
from .tensor_names import named

Config = Dictionary[str, Any]
_ABSENT = object()
_CONDITIONS = ("when", "unless", "missing", "told", "not_null", "has")


def filled(stack: dict[str, Any], config: Config | None, names: Iterable[str]) -> dict[str, Any]:
    """The stack's table with its holes filled, and with the cases that hold for all layers applied."""
    table = {name: _fill(value, config) for name, value in stack.items() if name != "cases"}
    for case in stack.get("cases", ()):
        if config is None and _asks_config(case):
            changed = {name: _untold(value) for name, value in case.items() if name in FACTS}
        elif "layers" not in case and _holds(case, config, names):
            changed = {name: _fill(value, config) for name, value in case.items() if name not in _CONDITIONS}
        else:
            continue
        for name, value in changed.items():
            both = isinstance(value, dict) and isinstance(table.get(name), dict)
            table[name] = {**table[name], **value} if both else value
    # An empty string takes a tensor of the other cases away.
    table["tensors"] = {role: name for role, name in table["tensors"].items() if name}
    # False takes a table of facts away; of a fact that is true or false it is the answer.
    return {
        name: value
        for name, value in table.items()
        if value is not None and (value is not False or FACTS.get(name) == (bool,))
    }


def cases(
    stack: dict[str, Any], config: Config | None, names: Iterable[str], numbers: frozenset[int]
) -> tuple[tuple[frozenset[int], dict[str, Any]], ...]:
    """The facts in which some layers differ."""
    found = []
    for case in stack.get("cases", ()):
        if "layers" in case and _holds(case, config, names):
            chosen = _chosen(case["layers"], config, numbers)
            facts = {name: _fill(value, config) for name, value in case.items() if name in FACTS}
            if chosen:
                found.append((chosen, facts))
    return tuple(found)


def _chosen(layers: dict[str, Any], config: Config | None, numbers: frozenset[int]) -> frozenset[int]:
    listed = _fill({"config": layers["config"]}, config) if "config" in layers else None
    if isinstance(listed, list):
        listed = _written_out(listed)
        return frozenset(number for number in numbers if number < len(listed) and listed[number] == layers["is"])
    if "only" in layers:
        return numbers & frozenset(layers["only"])
    if "every" in layers:
        period = _fill(layers["every"], config)
        if period is UNKNOWN or period is None:
            return frozenset()
        if not isinstance(period, int) or period < 1:
            raise CallError(f"it says {period!r} where a number of layers is expected")
        at = {each % period for each in layers.get("at", layers.get("except", ()))}
        return frozenset(number for number in numbers if (number % period in at) == ("at" in layers))
    first = _fill(layers.get("from"), config)
    return frozenset(number for number in numbers if isinstance(first, int) and number >= first)


def _written_out(kinds: list[Any]) -> list[Any]:
    """[[["global", "local"], 6]], as GPT-Neo says it, layer by layer."""
    if not all(isinstance(entry, list) and len(entry) == 2 for entry in kinds):
        return kinds
    if not all(isinstance(several, list) and isinstance(times, int) for several, times in kinds):
        raise CallError(f"it says {kinds} where kinds of layers and how often they come are expected")
    return [kind for several, times in kinds for _ in range(times) for kind in several]


def _holds(case: dict[str, Any], config: Config | None, names: Iterable[str]) -> bool:
    config = config or {}
    wanted = all(_is(config, key, value) for key, value in case.get("when", {}).items())
    unwanted = any(_is(config, key, value) for key, value in case.get("unless", {}).items())
    silent = all(look_up(config, key) is None for key in case.get("missing", ()))
    told = all(look_up(config, key) is not None for key in case.get("told", ()))
    not_null = all(look_up(config, key, _ABSENT) is not None for key in case.get("not_null", ()))
    there = all(named(template, names) for template in case.get("has", ()))
    return wanted and silent and told and not_null and there and not unwanted


def _is(config: Config, key: str, value: Any) -> bool:
    found = look_up(config, key)
    return found in value if isinstance(value, list) else found == value


def _asks_config(case: dict[str, Any]) -> bool:
    layers = case.get("layers", {})
    asks = "config" in layers or any(isinstance(value, dict) for value in layers.values())
    return asks or any(condition in case for condition in ("when", "unless", "missing", "told", "not_null"))


def _untold(value: Any) -> Any:
    """A fact that may be this or another: only the config would tell."""
    return dict.fromkeys(value, UNKNOWN) if isinstance(value, dict) and "config" not in value else UNKNOWN


def _fill(value: Any, config: Config | None) -> Any:
    if isinstance(value, list):
        return [_fill(entry, config) for entry in value]
    if not isinstance(value, dict):
        return value
    if "config" not in value:
        filled = {name: _fill(entry, config) for name, entry in value.items()}
        return {name: entry for name, entry in filled.items() if entry is not None}
    if config is None:
        return UNKNOWN
    keys = value["config"] if isinstance(value["config"], list) else [value["config"]]
    stated = [look_up(config, key, _ABSENT) for key in keys]
    for found in stated:
        if found is not None and found is not _ABSENT:
            return _computed(found, value, config)
    # A config that says null says that there is none; the default holds where it says nothing.
    return None if None in stated else value.get("default")


def _computed(found: Any, hole: dict[str, Any], config: Config) -> Any:
    """What a hole makes of the config's number: found^power / divided_by * times + plus."""
    made = {"power", "divided_by", "times", "plus"} & set(hole)
    if made and (not isinstance(found, (int, float)) or ("power" in hole and found <= 0)):
        raise CallError(f"it says {hole['config']} = {found!r}, where a number above 0 is expected")
    if "power" in hole:
        found = found ** hole["power"]
    if "divided_by" in hole:
        divisor = _fill(hole["divided_by"], config)
        # A quotient that is no whole number tells nothing of layers or tokens.
        if not isinstance(divisor, int) or not isinstance(found, int) or divisor < 1 or found % divisor:
            return UNKNOWN
        found //= divisor
    if "times" in hole:
        factor = _fill(hole["times"], config)
        if not isinstance(factor, (int, float)):
            return UNKNOWN
        found *= factor
    return found + hole["plus"] if "plus" in hole else found


def look_up(config: Config, key: str, absent: Any = None) -> Any:
    """Return what the config says under a key, whose dots lead into the dictionaries within it."""
    found: Any = config
    for part in key.split("."):
        found = found.get(part, absent) if isinstance(found, Dictionary) else absent
    return found
