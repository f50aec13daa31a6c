"""A few figures of the logged steps, of which a bounded number is kept."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from ...circuits.weights.layer_keys import layer_name

#: The most steps that are kept beside the last one.
_MOST = 400


@dataclass(frozen=True)
class Curve:
    """A figure over the logged steps.

    Attributes:
        title: What it is.
        values: Its value by step.
        largest: Where it is largest at the last step, in words; empty for what belongs to no head.
    """

    title: str
    values: dict[int, float]
    largest: str = ""


@dataclass(frozen=True)
class _Figure:
    """A figure of a step: its title, the column and the circuit of its rows, and what is made of those of all heads."""

    title: str
    column: str
    circuit: str
    of_all: Callable[[list[float]], float]


_FIGURES = (
    _Figure("loss", "training_loss", "QK", max),
    _Figure("norm of W_QK, median", "frobenius_norm", "QK", median),
    _Figure("norm of W_OV, median", "frobenius_norm", "OV", median),
    _Figure("effective ratio r(t), median", "effective_ratio", "QK", median),
    _Figure("largest score before the softmax", "max_logit", "QK", max),
)


class History:
    """The figures of the steps that were logged; of many steps, evenly spaced ones and the last."""

    def __init__(self) -> None:
        """Hold no step yet."""
        self._kept: list[tuple[int, dict[str, float]]] = []
        self._last: tuple[int, dict[str, float]] | None = None
        self._count, self._stride = 0, 1
        self._largest: dict[str, str] = {}

    def add(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Add a step, or replace it.

        Args:
            step: The step.
            rows: Its rows.
        """
        figures: dict[str, float] = {}
        self._largest = {}
        for figure in _FIGURES:
            known = [
                row
                for row in rows
                if row["circuit"] == figure.circuit
                and row.get(figure.column) is not None
                and math.isfinite(row[figure.column])
            ]
            if not known:
                continue
            figures[figure.title] = figure.of_all([row[figure.column] for row in known])
            top = max(known, key=lambda row: row[figure.column])
            if not figure.column.startswith("training_"):
                place = f"{layer_name(top['stack'], top['layer'])}, head {top['head']}"
                self._largest[figure.title] = f"{top[figure.column]:.4g} in {place}"
        if self._last is not None and self._last[0] != step:
            self._keep(self._last)
        self._last = step, figures

    def _keep(self, of_step: tuple[int, dict[str, float]]) -> None:
        if self._count % self._stride == 0:
            self._kept.append(of_step)
        self._count += 1
        if len(self._kept) > _MOST:
            self._kept, self._stride = self._kept[::2], 2 * self._stride

    def curves(self) -> list[Curve]:
        """Return the figures that are known, each over the steps."""
        curves, steps = [], [*self._kept, *([] if self._last is None else [self._last])]
        for figure in _FIGURES:
            values = {step: known[figure.title] for step, known in steps if figure.title in known}
            if values:
                curves.append(Curve(figure.title, values, self._largest.get(figure.title, "")))
        return curves
