"""The contents of the files beside the weights: the model's dimensions and the state of training."""

import json
from typing import Any

from ..errors import QkovError, named_input
from ..storage.places import Place

#: What a trainer's state calls the step of the weights, and what it logs.
STEP = "global_step"
LOGGED = ("loss", "learning_rate")


def read_config(place: Place) -> dict[str, Any]:
    """Return the table in a JSON or YAML file.

    Raises:
        QkovError: The file is damaged or does not hold a table.
    """
    content = place.read_bytes()
    if place.suffix == ".yaml":
        import yaml  # most checkpoints have no YAML file beside them

        with named_input(place, "the YAML of a model's config"):
            table = yaml.safe_load(content)
            _demand_no_more_entries(table, len(content))
    else:
        with named_input(place, "JSON"):
            table = json.loads(content)
    if not isinstance(table, dict):
        raise QkovError(f"{place} is damaged: expected a table, found a {type(table).__name__}; copy it again")
    return table


def _demand_no_more_entries(table: Any, most: int) -> None:
    """Refuse a table with more entries than bytes: YAML's aliases make a few lines stand for any number of them.

    Args:
        table: What YAML read.
        most: The largest number of entries.

    Raises:
        ValueError: There are more.
    """
    rest, seen = [table], 0
    while rest:
        seen += 1
        if seen > most:
            raise ValueError("its aliases stand for more entries than it has bytes")
        entry = rest.pop()
        rest += entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ()


def training_values(state: dict[str, Any], place: Place) -> dict[str, int | float]:
    """Return the trainer's step, and the loss and the learning rate that it logged last, at or before that step.

    Args:
        state: The trainer's state.
        place: The file that it was read from, for messages.

    Returns:
        The values under the names `global_step`, `loss` and `learning_rate`, as far as the state has them.

    Raises:
        QkovError: The state is damaged.
    """
    values: dict[str, int | float] = {}
    with named_input(place, "a trainer's state, whose log_history is a list of logged steps"):
        step = global_step(state)
        if step is not None:
            values[STEP] = step
        for entry in state.get("log_history", []):
            if step is None or entry["step"] <= step:
                values |= {name: float(entry[name]) for name in LOGGED if name in entry}
    return values


def global_step(state: dict[str, Any]) -> int | None:
    """Return the step of a trainer's state, or None if the state does not say it."""
    step = state.get(STEP)
    return step if isinstance(step, int) and not isinstance(step, bool) and 0 <= step < 2**63 else None
