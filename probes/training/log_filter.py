"""Which values of a logged step are passed to `log`: medians and largest values of layers, and chosen heads."""

import math
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...analyses.trajectories.store import IDENTITY, NOT_NUMBERS
from ...circuits.errors import CallError
from ...circuits.weights.layer_keys import LayerKey, layer_name

#: What is called after each logged step, with the step and its values by name.
Log = Callable[[int, dict[str, float]], object]
#: The rows of a step: one for each layer, head and circuit.
Rows = list[dict[str, Any]]
#: A head: its layer and number, and the stack before them in a model with several.
HeadKey = tuple[int, int] | tuple[str, int, int]

#: The values of a step that belong to no head, such as its loss.
_SCALARS = "training_"
#: The figures that have one value for a head, which stands in the rows of both circuits.
_OF_HEADS = ("effective_ratio",)


@dataclass(frozen=True)
class LogFilter:
    """The values that a `CircuitProbe` passes to `log`: the numbers of the step, values of layers, and chosen heads.

        CircuitProbe(model, log=log_to_tensorboard(writer), log_filter=LogFilter(heads=[(5, 1)]))

    Names are those of columns of the probe's table, as in QK.frobenius_norm/layer5.median,
    QK.spectral_norm/layer5.largest, QK.spectral_norm/layer5.largest_head (the number of the head that has it),
    QK.frobenius_norm/layer5.head1, and training/loss. Values that are missing or not finite are left out.

    Attributes:
        medians: The figures of which the median over the heads of each layer is passed.
        largest: The figures of which the largest value of each layer is passed, with its head, since a median hides the
            one head that grows.
        heads: The heads of which all these figures are passed, such as (5, 1) for head 1 of layer 5; in a model with
            several stacks, such as ("decoder", 5, 1).
    """

    medians: Collection[str] = (
        "frobenius_norm",
        "relative_speed",
        "effective_ratio",
        "taken_rate",
        "taken_exact_cosine",
    )
    largest: Collection[str] = ("spectral_norm", "max_logit")
    heads: Collection[HeadKey] = ()

    def __post_init__(self) -> None:
        """Refuse what are not names and heads.

        Raises:
            CallError: A name is not a text, or a head is not a layer and a number.
        """
        for field, names in (("medians", self.medians), ("largest", self.largest)):
            if isinstance(names, str) or not all(isinstance(name, str) for name in names):
                raise CallError(f"{field} should be a list of names of columns, got {names!r}")
        for head in self.heads:
            _key_of(head)


class RowLog:
    """Passes the rows of a step to a user's `log`, as values by name."""

    def __init__(self, log: Log, chosen: LogFilter | Callable[[str], bool] | None) -> None:
        """Keep both.

        Args:
            log: Called with the step and its values by name.
            chosen: The values to pass; a function is asked for the name of every value of every head and layer.

        Raises:
            CallError: `log` is not a function, or what was chosen is neither a filter nor a function.
        """
        if not callable(log):
            raise CallError(f"log should be a function of a step and its values, got {log!r}")
        if chosen is not None and not isinstance(chosen, LogFilter) and not callable(chosen):
            raise CallError(f"log_filter should be a LogFilter or a function of a name, got {chosen!r}")
        self._log, self._chosen = log, LogFilter() if chosen is None else chosen
        self._is_checked = False

    def demand_heads(self, rows: Rows) -> None:
        """Refuse heads that the model does not have.

        Args:
            rows: The rows of a step.

        Raises:
            CallError: A chosen head is not among them.
        """
        if isinstance(self._chosen, LogFilter):
            known = dict.fromkeys((row["stack"], row["layer"], row["head"]) for row in rows)
            for head in self._chosen.heads:
                if _key_of(head) not in known:
                    raise CallError(f"log_filter names the head {head!r}, and the model has {_in_words(list(known))}")

    def __call__(self, step: int, rows: Rows) -> None:
        """Pass the rows of a step on.

        Args:
            step: The step.
            rows: Its rows.
        """
        if isinstance(self._chosen, LogFilter):
            self._warn_of_unknown(self._chosen, rows)
            self._log(step, chosen_values(rows, self._chosen))
        else:
            keep = self._chosen
            self._log(step, {name: value for name, value in all_values(rows).items() if keep(name)})

    def _warn_of_unknown(self, chosen: LogFilter, rows: Rows) -> None:
        """Warn once of names that are not columns; the rows of the start lack those of steps."""
        names = {name for row in rows for name in row}
        if self._is_checked or "change_norm" not in names:
            return
        self._is_checked = True
        # What the default names may depend on how the model is watched.
        asked = dict.fromkeys((*chosen.medians, *chosen.largest))
        unknown = [name for name in asked if name not in names and name not in (*LogFilter.medians, *LogFilter.largest)]
        if unknown:
            figures = sorted(name for name in names if name not in IDENTITY.names and name not in NOT_NUMBERS)
            warnings.warn(
                f"log_filter names {', '.join(unknown)}, of which no circuit has values; there are "
                f"{', '.join(figures)}",
                stacklevel=2,
            )


def chosen_values(rows: Rows, chosen: LogFilter) -> dict[str, float]:
    """Return the values that a filter chooses, by name.

    Args:
        rows: The rows of a step.
        chosen: The filter.
    """
    heads = {_key_of(head) for head in chosen.heads}
    values = _scalars(rows)
    for (layer, circuit), members in _by_layer(rows).items():
        for name in chosen.medians:
            if known := _known(members, circuit, name):
                values[f"{circuit}.{name}/{layer}.median"] = float(np.median(list(known.values())))
        for name in chosen.largest:
            if known := _known(members, circuit, name):
                head = max(known, key=lambda number: known[number])
                values[f"{circuit}.{name}/{layer}.largest"] = known[head]
                values[f"{circuit}.{name}/{layer}.largest_head"] = float(head)
        wanted = [row for row in members if (row["stack"], row["layer"], row["head"]) in heads]
        for name in dict.fromkeys((*chosen.medians, *chosen.largest)):
            for head, value in _known(wanted, circuit, name).items():
                values[f"{circuit}.{name}/{layer}.head{head}"] = value
    return values


def all_values(rows: Rows) -> dict[str, float]:
    """Return every value of every head, and every median and largest value of every layer, by name.

    Args:
        rows: The rows of a step.
    """
    left_out = (*IDENTITY.names, *NOT_NUMBERS)
    names = [
        name
        for name in dict.fromkeys(name for row in rows for name in row)
        if name not in left_out and not name.startswith(_SCALARS)
    ]
    every = dict.fromkeys((row["stack"], row["layer"], row["head"]) for row in rows)
    return chosen_values(rows, LogFilter(names, names, tuple(every)))


def _scalars(rows: Rows) -> dict[str, float]:
    """The values that all rows of a step share."""
    values = {
        name.replace(_SCALARS, "training/", 1): value
        for row in rows[:1]
        for name, value in row.items()
        if name.startswith(_SCALARS)
    }
    return {name: float(value) for name, value in values.items() if value is not None and math.isfinite(value)}


def _by_layer(rows: Rows) -> dict[tuple[str, str], Rows]:
    """The rows of each layer and circuit, with the layer as names of values state it."""
    parts: dict[tuple[str, str], Rows] = {}
    for row in rows:
        stack = f"{row['stack'].replace(' ', '_')}." if row["stack"] else ""
        parts.setdefault((f"{stack}layer{row['layer']}", row["circuit"]), []).append(row)
    return parts


def _known(rows: Rows, circuit: str, name: str) -> dict[int, float]:
    """The values of a figure by head, as far as they are known; those of whole heads are told for QK alone."""
    if name in _OF_HEADS and circuit != "QK":
        return {}
    values = {row["head"]: row.get(name) for row in rows}
    return {head: float(value) for head, value in values.items() if value is not None and math.isfinite(value)}


def _key_of(head: Any) -> tuple[str, int, int]:
    """Return the stack, the layer and the number of a head."""
    if isinstance(head, tuple) and len(head) in (2, 3):
        stack, layer, number = head if len(head) == 3 else ("", *head)
        if isinstance(stack, str) and all(isinstance(n, int) and not isinstance(n, bool) for n in (layer, number)):
            return stack, layer, number
    raise CallError(f"a head should be its layer and number, such as (5, 1), got {head!r}")


def _in_words(known: list[tuple[str, int, int]]) -> str:
    """Say which heads a model has."""
    layers: dict[LayerKey, list[int]] = {}
    for stack, layer, head in known:
        layers.setdefault((stack, layer), []).append(head)
    first, last = next(iter(layers)), list(layers)[-1]
    heads = f"heads {min(layers[first])} to {max(layers[first])} in {layer_name(*first)}"
    return heads if first == last else f"{heads}, and layers up to {layer_name(*last)}"
