"""The sections of an explanation's report on faithfulness: the table of methods, and the curves."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from ...analyses.attention.explanation.explanation import Explanation
from ...analyses.attention.explanation.tables import AVERAGE_PRECISION, MASS, beyond_random
from ...analyses.attention.rationales.faithfulness import METRICS, RANDOM
from ..drawing.panels import Panel, Series, draw, swatch
from .page import cell_of, row_where, share

#: Maximum number of lines in a panel, each of its own colour.
_LINES = 6
_DECIMALS = 3
#: Stands for the result of a method that puts no weight on relevant tokens.
_NOTHING = dict.fromkeys(("value", "low", "high"), np.nan)
#: The statistics in the table of methods, the headings of their columns, and whether high or low is better.
STATISTICS = (
    ("comprehensiveness", "comprehensiveness", max),
    ("sufficiency", "sufficiency", min),
    (AVERAGE_PRECISION, "AUPRC", max),
    (MASS, MASS, max),
)


def method_section(explanation: Explanation) -> dict[str, Any]:
    """Return the table of methods, and sentences that compare the main method with random rankings."""
    table, settings = explanation.methods, explanation.description["settings"]
    methods = [method for method in settings["methods"] if method in set(table["method"])]
    columns = [
        (statistic, label, better) for statistic, label, better in STATISTICS if statistic in set(table["metric"])
    ]
    best = {}
    for statistic, _, better in columns:
        values = table[table["metric"] == statistic]["value"].dropna().round(_DECIMALS)
        # A value that most methods share does not distinguish any of them.
        best[statistic] = better(values) if 2 * (values == better(values)).sum() <= len(values) else None
    rows = []
    for method in methods:
        cells = []
        for statistic, _, _ in columns:
            results = table[(table["method"] == method) & (table["metric"] == statistic)]
            cell = cell_of(results.iloc[0] if len(results) else _NOTHING)
            is_best = best[statistic] is not None and round(cell["number"], _DECIMALS) == best[statistic]
            cells.append({**cell, "best": is_best})
        rows.append({"method": method, "cells": cells})
    chances = table.groupby("metric")["chance"].first()
    return {
        "answer": _is_it_faithful(table, settings["main"]),
        "columns": [label for _, label, _ in columns],
        "rows": rows,
        "mass_chance": share(chances[MASS]) if MASS in chances else None,
        "agreement_chance": share(chances[AVERAGE_PRECISION]) if AVERAGE_PRECISION in chances else None,
        "few": int(table["examples"].min()),
        "many": int(table["examples"].max()),
    }


def _is_it_faithful(table: pd.DataFrame, main: str) -> list[str]:
    if RANDOM not in set(table["method"]):
        return [f"Random rankings were not drawn, so {main} cannot be compared with chance."]
    sentences = []
    for measure, what, verdicts in (
        (
            "comprehensiveness",
            "Without the first tokens",
            ("removing them costs more than removing", "removing them costs less than removing"),
        ),
        (
            "sufficiency",
            "With only those tokens",
            ("keeping only them costs more than keeping only", "keeping only them costs less than keeping only"),
        ),
    ):
        ours, theirs = (row_where(table, metric=measure, method=method)["value"] for method in (main, RANDOM))
        beyond = row_where(table, metric=beyond_random(measure), method=main)
        above, below = beyond["low"] > 0, beyond["high"] < 0
        verdict = verdicts[0] if above else verdicts[1] if below else "this is not distinguishable from"
        sentences.append(
            f"{what} by {main}, the probability falls by {share(ours)}, compared with {share(theirs)} for random "
            f"rankings: {verdict} random tokens (difference {share(beyond['value'])}, 95 % interval "
            f"{share(beyond['low'])} to {share(beyond['high'])})."
        )
    return sentences


@dataclass(frozen=True)
class _Line:
    """A line of a panel with its legend."""

    label: str
    style: int
    curve: pd.DataFrame


def curve_panels(explanation: Explanation) -> list[dict[str, Any]]:
    """Return curves against the cut: those of the main method, its reverse and random rankings, then the others'."""
    curves, settings = explanation.curves, explanation.description["settings"]
    of = dict(list(curves.groupby(["method", "order"])))
    main = settings["main"]
    first = [
        _Line(f"{main}, first tokens first", 0, of[main, "given"]),
        _Line(f"{main}, reversed", 1, of[main, "reversed"]),
    ]
    if (RANDOM, "given") in of:
        first.append(_Line(f"random, mean and range of {settings['draws']} draws", 4, of[RANDOM, "given"]))
    others = [method for method in settings["methods"] if method not in (RANDOM, main)]
    panels = -(-len(others) // _LINES)
    groups = [first] + [
        [_Line(method, style, of[method, "given"]) for style, method in enumerate(some)]
        for some in (others[first::panels] for first in range(panels))
    ]
    return [
        {
            "legend": [{"swatch": swatch(line.style), "label": line.label} for line in lines],
            "panels": [_curve_panel(measure, lines, _limits(curves, measure)) for measure in METRICS],
        }
        for lines in groups
    ]


def _limits(curves: pd.DataFrame, measure: str) -> tuple[float, float]:
    """Return the limits of all panels of a measure, wide enough not to magnify rounding."""
    values = curves[[measure, f"{measure}_lowest", f"{measure}_highest"]]
    low, high = min(float(np.nanmin(values)), 0.0), max(float(np.nanmax(values)), 0.02)
    return low - 0.05 * (high - low), high + 0.05 * (high - low)


def _curve_panel(measure: str, lines: list[_Line], limits: tuple[float, float]) -> Any:
    series = []
    for line in lines:
        curve = line.curve.sort_values("cut")
        shares = 100 * curve["cut"]
        lowest, highest = (curve[f"{measure}_{edge}"].to_numpy() for edge in ("lowest", "highest"))
        band = (lowest, highest) if np.isfinite(lowest).all() else None
        series.append(Series(shares, curve[measure], line.style, band=band))
        series.append(Series(shares, curve[measure], line.style, dots=True))
    better = "higher is better" if measure == "comprehensiveness" else "lower is better"
    return draw(
        Panel(
            title=f"{measure} ({better})",
            description=f"{measure} against the share of tokens taken: {', '.join(line.label for line in lines)}",
            x_label="tokens taken, % of removable tokens",
            y_label="loss of probability",
            series=series,
            y_limits=limits,
        )
    )
