"""The report of `qkov compare`: the change of each head between two models, as maps of layer and head."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup

from ...analyses.inline_svg import literal
from ...analyses.trajectories.comparison.models import ModelComparison
from ...analyses.versions import versions
from ...circuits.errors import CallError
from ..drawing.heat_maps import HeatMap, draw_heat_map
from ..drawing.panels import Panel, Series, draw
from .page import number, percent, write_page
from .run_sections import CIRCUITS

#: The number of heads of each circuit in the list of those that changed most.
_LISTED = 15
#: The widest map that has a number in each cell, in heads.
_NUMBERED = 16
#: The widest map whose numbers have the larger size, in heads.
_LARGE = 12


@dataclass(frozen=True)
class MappedQuantity:
    """A quantity that is drawn as a map of layer and head.

    Attributes:
        label: What it is, for the title of the map.
        scale: The factor on what is written in the cells.
        caption: What it is, in a sentence.
    """

    label: str
    scale: float
    caption: str


#: The quantities that can be drawn as a map, by the column of the table.
MAPPED = {
    "relative_change": MappedQuantity(
        "relative change, in %",
        100.0,
        "Relative change: ‖C′ − C‖/‖C‖, where C is the circuit in the base model and C′ in the other.",
    ),
    "change_stable_rank": MappedQuantity(
        "stable rank of the change", 1.0, "Stable rank of the change: Σs²/s₁² of the singular values of C′ − C."
    ),
    "change_effective_rank": MappedQuantity(
        "effective rank of the change",
        1.0,
        "Effective rank of the change: the exponential of the entropy of the normalised singular values of C′ − C "
        "(Roy & Vetterli 2007).",
    ),
    "change_top_share": MappedQuantity(
        "share in the top direction, in %",
        100.0,
        "Share in the top direction: s₁²/Σs² of the singular values of C′ − C.",
    ),
}


def write_compare_report(
    comparison: ModelComparison, path: Path, measures: list[str], command: str, table_path: Path
) -> Path:
    """Write the report of a comparison and return its path.

    Args:
        comparison: The comparison.
        path: The path of the HTML file.
        measures: The quantities to draw as maps, of those in `MAPPED`.
        command: The command that makes the report.
        table_path: Where the table is.

    Raises:
        CallError: The path cannot be written to, or a quantity cannot be drawn.
    """
    for measure in measures:
        if measure not in MAPPED:
            raise CallError(f"measures should be among {', '.join(MAPPED)}; got {measure!r}")
    table = comparison.table
    return write_page(
        path,
        "compare.html.j2",
        title="The change of each head between two models",
        subtitle=f"from {comparison.base} to {comparison.tuned}",
        sentences=comparison.sentences(),
        maps=[{"drawn": _maps(table, measure), "caption": MAPPED[measure].caption} for measure in measures],
        # On a narrow screen, more numbers than this in a row are scrolled instead of made smaller.
        narrowest=22 if table["head"].max() < _LARGE else 28,
        by_layer=_by_layer(table) if table.groupby("stack")["layer"].nunique().max() > 1 else [],
        ranked=_ranked(table),
        stacks=bool(table["stack"].any()),
        comparison=comparison,
        rotary=bool(table["rotary_offset"].notna().any()),
        command=command,
        table_path=str(table_path),
        versions=versions(),
    )


def _maps(table: pd.DataFrame, measure: str) -> list[Markup]:
    quantity, drawn = MAPPED[measure], []
    for stack, of_stack in table.groupby("stack", sort=False):
        for circuit, name in CIRCUITS.items():
            rows = of_stack[of_stack["circuit"] == circuit]
            if rows.empty or rows[measure].isna().all():
                continue
            values = rows.pivot_table(index="layer", columns="head", values=measure, dropna=False)
            heads, layers = len(values.columns), len(values)
            cell = min(0.62, 4.3 / heads), min(0.28, max(0.12, 7 / layers))
            numbered = heads <= _NUMBERED and cell[1] > 0.2
            largest = number(quantity.scale * float(rows[measure].max()), 2)
            title = f"{f'{literal(str(stack))}: ' if stack else ''}{name} {quantity.label}"
            drawn.append(
                draw_heat_map(
                    HeatMap(
                        title=title if numbered else f"{title}; darkest: {largest}",
                        description=f"W_{circuit}, {quantity.label}, by layer and head",
                        values=values.to_numpy(),
                        written=[
                            [
                                number(quantity.scale * value, 2) if numbered and np.isfinite(value) else ""
                                for value in row
                            ]
                            for row in values.to_numpy()
                        ],
                        x_label="head",
                        y_label="layer",
                        columns=_labels(values.columns, 4.3 / heads, 0.28),
                        rows=_labels(values.index, cell[1], 0.17),
                    ),
                    cell=cell,
                    font=8.0 if heads <= _LARGE else 6.5,
                )
            )
    return drawn


def _labels(numbers: Any, size: float, needed: float) -> list[str]:
    """Return the labels of rows or columns; where they would touch, only every second, fifth and so on is written."""
    every = next((step for step in (1, 2, 5, 10, 20) if step * size >= needed), 50)
    return [str(each) if each % every == 0 else "" for each in numbers]


def _by_layer(table: pd.DataFrame) -> list[Markup]:
    """Draw the median over the heads against the layer, with a band from the first to the third quartile."""
    panels = []
    for circuit, name in CIRCUITS.items():
        series = []
        rows = table[(table["circuit"] == circuit) & table["relative_change"].notna()]
        for style, (_, of_stack) in enumerate(rows.groupby("stack", sort=False)):
            quartiles = of_stack.groupby("layer")["relative_change"].quantile(np.array([0.25, 0.5, 0.75])).unstack()
            quartiles = 100 * quartiles
            band = quartiles[0.25].to_numpy(), quartiles[0.75].to_numpy()
            series.append(Series(quartiles.index, quartiles[0.5].to_numpy(), style, band=band))
        if series:
            description = f"relative change of W_{circuit} against the layer"
            title = f"{name} relative change, in %"
            panels.append(draw(Panel(title, description, "layer", "", series, x_integer=True)))
    return panels


def _ranked(table: pd.DataFrame) -> list[dict[str, Any]]:
    ranked = []
    for circuit in CIRCUITS:
        rows = table[(table["circuit"] == circuit) & (table["relative_change"] > 0)]
        for row in rows.nlargest(_LISTED, "relative_change").to_dict("records"):
            ranked.append(
                {
                    "circuit": circuit,
                    "first": bool(ranked) and ranked[-1]["circuit"] != circuit,
                    **{name: row[name] for name in ("stack", "layer", "head")},
                    "cells": [
                        percent(row["relative_change"]),
                        number(row["norm_before"]),
                        number(row["norm_after"]),
                        number(row["cosine"]),
                        number(row["change_stable_rank"], 3),
                        number(row["change_effective_rank"], 3),
                        percent(row["change_top_share"]),
                    ],
                }
            )
    return ranked
