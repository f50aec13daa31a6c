"""The sections of an explanation's report on whether rankings are faithful: the table of methods, and the curves."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from ...analyses.attention.explanation.explanation import Explanation
from ...analyses.attention.explanation.tables import AVERAGE_PRECISION, MASS, beyond_random
from ...analyses.attention.rationales.faithfulness import METRICS, RANDOM
from ..drawing.panels import Panel, Series, draw, swatch
from .page import cell_of, row_where, share

#: Most lines in a panel, one colour each.
_LINES = 6
_DECIMALS = 3
#: Of a method whose weights are nowhere on relevant tokens.
_NOTHING = dict.fromkeys(("value", "low", "high"), np.nan)
#: The figures of the table of methods, what stands above them, and which end is the better one.
FIGURES = (
    ("comprehensiveness", "comprehensiveness", max),
    ("sufficiency", "sufficiency", min),
    (AVERAGE_PRECISION, "AUPRC", max),
    (MASS, MASS, max),
)


def method_section(explanation: Explanation) -> dict[str, Any]:
    """The table of methods, and what it says of the main one beside random rankings."""
    table, settings = explanation.methods, explanation.description["settings"]
    methods = [method for method in settings["methods"] if method in set(table["method"])]
    columns = [(figure, label, better) for figure, label, better in FIGURES if figure in set(table["metric"])]
    best = {}
    for figure, _, better in columns:
        values = table[table["metric"] == figure]["value"].dropna().round(_DECIMALS)
        # What most methods share tells none of them apart.
        best[figure] = better(values) if 2 * (values == better(values)).sum() <= len(values) else None
    rows = []
    for method in methods:
        cells = []
        for figure, _, _ in columns:
            found = table[(table["method"] == method) & (table["metric"] == figure)]
            cell = cell_of(found.iloc[0] if len(found) else _NOTHING)
            is_best = best[figure] is not None and round(cell["number"], _DECIMALS) == best[figure]
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
        return [f"Random rankings were not drawn, so that nothing says how faithful {main} would be by chance."]
    sentences = []
    for measure, what, verdicts in (
        ("comprehensiveness", "Without the first tokens", ("cost more than", "cost less than")),
        ("sufficiency", "With those alone", ("are worse to have alone than", "are better to have alone than")),
    ):
        ours, theirs = (row_where(table, metric=measure, method=method)["value"] for method in (main, RANDOM))
        beyond = row_where(table, metric=beyond_random(measure), method=main)
        above, below = beyond["low"] > 0, beyond["high"] < 0
        verdict = f"they {verdicts[0] if above else verdicts[1]}" if above or below else "that cannot be told from"
        sentences.append(
            f"{what} by {main} the probability falls by {share(ours)}, by {share(theirs)} for random rankings: "
            f"{verdict} random tokens (difference {share(beyond['value'])}, 95 % interval {share(beyond['low'])} to "
            f"{share(beyond['high'])})."
        )
    return sentences


@dataclass(frozen=True)
class _Line:
    """A line of a panel, and what its legend says."""

    label: str
    style: int
    curve: pd.DataFrame


def curve_panels(explanation: Explanation) -> list[dict[str, Any]]:
    """Curves against the cut: the main method with its reverse and the random band, and then the other methods."""
    curves, settings = explanation.curves, explanation.description["settings"]
    of = dict(list(curves.groupby(["method", "order"])))
    main = settings["main"]
    first = [
        _Line(f"{main}, first tokens first", 0, of[main, "given"]),
        _Line(f"{main}, reversed", 1, of[main, "reversed"]),
    ]
    if (RANDOM, "given") in of:
        first.append(_Line(f"random, mean of {settings['draws']} draws and their range", 4, of[RANDOM, "given"]))
    others = [method for method in settings["methods"] if method not in (RANDOM, main)]
    panels = -(-len(others) // _LINES)
    groups = [first] + [
        [_Line(method, style, of[method, "given"]) for style, method in enumerate(some)]
        for some in (others[place::panels] for place in range(panels))
    ]
    return [
        {
            "legend": [{"swatch": swatch(line.style), "label": line.label} for line in lines],
            "panels": [_curve_panel(measure, lines, _limits(curves, measure)) for measure in METRICS],
        }
        for lines in groups
    ]


def _limits(curves: pd.DataFrame, measure: str) -> tuple[float, float]:
    """The same for all panels of a measure, and wide enough not to magnify rounding."""
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
            x_label="tokens taken, % of those that can be",
            y_label="loss of probability",
            series=series,
            y_limits=limits,
        )
    )
