"""Replace the look-ups in a family file by values of the config beside the weights, or UNKNOWN if there is no config.

A look-up is `{ config = "key" }`. A case of a stack changes facts, tensors or the layout if its conditions hold, for
all layers or for some. `families/README.md` describes every key of both.
"""

from collections.abc import Iterable
from collections.abc import Mapping as Dictionary
from typing import Any

from ..errors import CallError
from .schema import CONDITIONS, FACTS
from .stated_facts import UNKNOWN
from .tensor_names import named

Config = Dictionary[str, Any]
_ABSENT = object()


def filled(stack: dict[str, Any], config: Config | None, names: Iterable[str]) -> dict[str, Any]:
    """Return a stack's table with its look-ups replaced, and with the cases applied that hold for all layers.

    Args:
        stack: The table of the family file.
        config: The config beside the weights; None if there is none.
        names: Names of the tensors in the file.

    Raises:
        CallError: The config has a value that cannot be used.
    """
    table = {name: _fill(value, config) for name, value in stack.items() if name != "cases"}
    for case in stack.get("cases", ()):
        if config is None and _depends_on_config(case):
            changes = {name: _unknown(value) for name, value in case.items() if name in FACTS}
        elif "layers" not in case and _holds(case, config, names):
            changes = {name: _fill(value, config) for name, value in case.items() if name not in CONDITIONS}
        else:
            continue
        for name, value in changes.items():
            both = isinstance(value, dict) and isinstance(table.get(name), dict)
            table[name] = {**table[name], **value} if both else value
    # In a case, an empty string removes a tensor.
    table["tensors"] = {role: name for role, name in table["tensors"].items() if name}
    # False removes a fact, unless the fact itself is true or false.
    return {
        name: value
        for name, value in table.items()
        if value is not None and (value is not False or FACTS.get(name) == (bool,))
    }


def cases(
    stack: dict[str, Any], config: Config | None, names: Iterable[str], numbers: frozenset[int]
) -> tuple[tuple[frozenset[int], dict[str, Any]], ...]:
    """Return the facts in which some layers differ from the rest.

    Args:
        stack: The table of the family file.
        config: The config beside the weights; None if there is none.
        names: Names of the tensors in the file.
        numbers: Numbers of the layers.

    Returns:
        For each case that holds for some layers, their numbers and their facts.

    Raises:
        CallError: The config has a value that cannot be used.
    """
    chosen = []
    for case in stack.get("cases", ()):
        if "layers" in case and _holds(case, config, names):
            layers = _chosen_layers(case["layers"], config, numbers)
            facts = {name: _fill(value, config) for name, value in case.items() if name in FACTS}
            if layers:
                chosen.append((layers, facts))
    return tuple(chosen)


def look_up(config: Config, key: str, absent: Any = None) -> Any:
    """Return what the config says under a key.

    Args:
        config: The config.
        key: The key; its dots lead into nested dictionaries.
        absent: What to return if the config does not have the key.
    """
    value: Any = config
    for part in key.split("."):
        value = value.get(part, absent) if isinstance(value, Dictionary) else absent
    return value


def stated_by(lookup: dict[str, Any], config: Config) -> Any:
    """Return what a config itself states under a look-up, without its default; None if it states nothing.

    Args:
        lookup: The look-up.
        config: The config.

    Raises:
        CallError: The config has a value that cannot be used.
    """
    return _fill({key: value for key, value in lookup.items() if key != "default"}, config)


def _chosen_layers(layers: dict[str, Any], config: Config | None, numbers: frozenset[int]) -> frozenset[int]:
    kinds = _fill({"config": layers["config"]}, config) if "config" in layers else None
    if isinstance(kinds, list):
        return frozenset(number for number in numbers if _kind_of_layer(kinds, number) == layers["is"])
    if "only" in layers:
        return numbers & frozenset(layers["only"])
    if "every" in layers:
        period = _fill(layers["every"], config)
        if period is UNKNOWN or period is None:
            return frozenset()
        if not isinstance(period, int) or period < 1:
            raise CallError(f"it says {period!r} where a number of layers is expected")
        positions = {position % period for position in layers.get("at", layers.get("except", ()))}
        return frozenset(number for number in numbers if (number % period in positions) == ("at" in layers))
    first = _fill(layers.get("from"), config)
    return frozenset(number for number in numbers if isinstance(first, int) and number >= first)


def _kind_of_layer(kinds: list[Any], number: int) -> Any:
    """Return the kind of a layer, None beyond the list; GPT-Neo writes [[["global", "local"], 6]] for twelve layers.

    The repetitions are not written out, since a damaged config may state any number of them.
    """
    if not all(isinstance(entry, list) and len(entry) == 2 for entry in kinds):
        return kinds[number] if number < len(kinds) else None
    for several, times in kinds:
        if not isinstance(several, list) or not isinstance(times, int):
            raise CallError(f"it says {kinds} where kinds of layers and their numbers of repetitions are expected")
        length = len(several) * max(times, 0)
        if number < length:
            return several[number % len(several)]
        number -= length
    return None


def _holds(case: dict[str, Any], config: Config | None, names: Iterable[str]) -> bool:
    config = config or {}
    return (
        all(_is(config, key, value) for key, value in case.get("when", {}).items())
        and not any(_is(config, key, value) for key, value in case.get("unless", {}).items())
        and all(look_up(config, key) is None for key in case.get("missing", ()))
        and all(look_up(config, key) is not None for key in case.get("stated", ()))
        and all(look_up(config, key, _ABSENT) is not None for key in case.get("not_null", ()))
        and all(named(template, names) for template in case.get("has", ()))
    )


def _is(config: Config, key: str, value: Any) -> bool:
    stated = look_up(config, key)
    return stated in value if isinstance(value, list) else stated == value


def _depends_on_config(case: dict[str, Any]) -> bool:
    layers = case.get("layers", {})
    has_lookup = "config" in layers or any(isinstance(value, dict) for value in layers.values())
    return has_lookup or any(condition in case for condition in CONDITIONS if condition not in ("has", "layers"))


def _unknown(value: Any) -> Any:
    """Return UNKNOWN for a fact that depends on a config that is missing, or a table of it."""
    return dict.fromkeys(value, UNKNOWN) if isinstance(value, dict) and "config" not in value else UNKNOWN


def _fill(value: Any, config: Config | None) -> Any:
    if isinstance(value, list):
        return [_fill(entry, config) for entry in value]
    if not isinstance(value, dict):
        return value
    if "config" not in value:
        entries = {name: _fill(entry, config) for name, entry in value.items()}
        return {name: entry for name, entry in entries.items() if entry is not None}
    if config is None:
        return UNKNOWN
    keys = value["config"] if isinstance(value["config"], list) else [value["config"]]
    stated = [look_up(config, key, _ABSENT) for key in keys]
    for candidate in stated:
        if candidate is not None and candidate is not _ABSENT:
            return _computed(candidate, value, config)
    # A config that says null states that there is none. The default holds if it says nothing.
    return None if None in stated else value.get("default")


def _computed(number: Any, lookup: dict[str, Any], config: Config) -> Any:
    """Return number^power / divided_by * times + plus, with those that the look-up has."""
    is_computed = {"power", "divided_by", "times", "plus"} & set(lookup)
    if is_computed and (not isinstance(number, (int, float)) or ("power" in lookup and number <= 0)):
        raise CallError(f"it says {lookup['config']} = {number!r}, where a number above 0 is expected")
    if "power" in lookup:
        number = number ** lookup["power"]
    if "divided_by" in lookup:
        divisor = _fill(lookup["divided_by"], config)
        # Numbers of layers and of tokens are whole, so any other quotient says nothing about them.
        if not isinstance(divisor, int) or not isinstance(number, int) or divisor < 1 or number % divisor:
            return UNKNOWN
        number //= divisor
    if "times" in lookup:
        factor = _fill(lookup["times"], config)
        if not isinstance(factor, (int, float)):
            return UNKNOWN
        number *= factor
    return number + lookup["plus"] if "plus" in lookup else number
