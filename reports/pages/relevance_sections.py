"""The sections of an explanation's report on where attention goes: DTAP, MRTA, AC and ACMC, and the heads."""

from typing import Any

import pandas as pd

from ...analyses.attention.explanation.explanation import Explanation
from ...analyses.attention.measures.registry import MEASURES
from ...analyses.attention.relevance.compared_runs import ALL_TOKENS, ELSEWHERE
from ...analyses.attention.relevance.dtap import dtap_grid
from ..drawing.heat_maps import HeatMap, draw_heat_map
from .page import cell_of, percent, row_where, share

#: Maximum number of heads in a layer for which values are written into the map.
_WRITTEN_HEADS = 16
#: Number of rows in the table of heads.
_STRONGEST = 8


def relevant_attention(explanation: Explanation) -> dict[str, Any] | None:
    """Return MRTA, AC and ACMC of every attention measure beside chance; None if no example has relevant tokens."""
    table, main = explanation.relevance, explanation.description["settings"]["main"]
    if table.empty:
        return None
    shown = table[table["method"].isin(MEASURES)]
    statistics = [name for name in ("MRTA", "AC", "ACMC") if name in set(shown["metric"])]
    groups = []
    for tokens in (ALL_TOKENS, ELSEWHERE):
        of_tokens = shown[shown["tokens"] == tokens]
        of_main = of_tokens[of_tokens["method"] == main]
        if of_main.empty:
            continue
        rows = [
            {"method": method, "cells": [cell_of(row_where(of_one, metric=name)) for name in statistics]}
            for method, of_one in of_tokens.groupby("method", sort=False)
        ]
        chance = [share(row_where(of_main, metric=name)["chance"]) for name in statistics]
        groups.append({"tokens": tokens, "chance": chance, "rows": rows})
    return {
        "answer": _where_it_goes(explanation, shown),
        "statistics": statistics,
        "definitions": {str(row["metric"]): str(row["definition"]) for row in shown.to_dict("records")},
        "groups": groups,
    }


def _where_it_goes(explanation: Explanation, table: pd.DataFrame) -> list[str]:
    settings, relevant = explanation.description["settings"], explanation.description["task"]["relevant"]
    row = row_where(table, metric="MRTA", tokens=ALL_TOKENS, method=settings["main"])
    if row["low"] > row["chance"]:
        verdict = "More than chance"
    else:
        verdict = "Less than chance" if row["high"] < row["chance"] else "Not distinguishable from chance"
    sentences = [
        f"{verdict}: by {settings['main']}, {percent(row['value'], 3)} of the attention is on the relevant tokens, "
        f"{relevant} (95 % interval {percent(row['low'], 3)} to {percent(row['high'], 3)}, {row['examples']} "
        f"examples); uniform attention over the same tokens would put {percent(row['chance'], 3)} there."
    ]
    tokens = explanation.tokens
    first = float(tokens[tokens["position"] == 0][settings["main"]].mean())
    if first > 0.5:
        more = "; the other measures below say more" if first > 0.9 else ""
        sentences.append(f"The first token of a sequence gets {percent(first, 3)} on average{more}.")
    elsewhere = table[
        (table["metric"] == "MRTA") & (table["tokens"] == ELSEWHERE) & (table["method"] == settings["main"])
    ]
    if len(elsewhere):
        row = elsewhere.iloc[0]
        sentences.append(
            f"Without the token at the readout position, they get {percent(row['value'], 3)} of the rest; "
            f"uniform attention would put {percent(row['chance'], 3)} there."
        )
    return sentences


def dtap_panels(explanation: Explanation) -> list[Any]:
    """Return the DTAP as measured, and as it would be if attention were uniform."""
    cells = explanation.dtap
    if cells.empty:
        return []
    main = explanation.description["settings"]["main"]
    return [
        _dtap_panel(cells, "percent", f"{main}, as measured"),
        _dtap_panel(cells, "chance", "if attention were uniform"),
    ]


def _dtap_panel(cells: pd.DataFrame, column: str, title: str) -> Any:
    grid = dtap_grid(cells, column)
    values = grid.to_numpy(dtype=float)
    across = [*grid.columns, cells["attention_to"].max()]
    upwards = [cells["probability_to"].max(), *grid.index]
    said = [
        f"attention {row['attention_from']:g} to {row['attention_to']:g}, probability {row['probability_from']:g} to "
        f"{row['probability_to']:g}: {row[column]:.0f} %"
        for row in cells.to_dict("records")
        if row[column] > 0
    ]
    return draw_heat_map(
        HeatMap(
            title=title,
            description=f"DTAP, percent of examples, {title}: " + "; ".join(said),
            values=values,
            written=[[_whole_percent(value) for value in row] for row in values],
            x_label="attention on relevant tokens",
            y_label="probability of the right answer",
            columns=[f"{edge:g}" for edge in across],
            rows=[f"{edge:g}" for edge in upwards],
            strongest=100.0,
        ),
        cell=(3.2 / len(grid.columns), 2.4 / len(grid)),
    )


def _whole_percent(value: float) -> str:
    return "0" if value == 0 else "<1" if value < 0.5 else f"{value:.0f}"


def heads_section(explanation: Explanation) -> dict[str, Any] | None:
    """Return how much each head attends to relevant tokens: a map of all heads, and a table of the strongest."""
    heads = explanation.heads
    if heads.empty:
        return None
    grid = heads.pivot(index="layer", columns="head", values="attention")
    values = 100 * grid.to_numpy(dtype=float)
    chance = float(heads["chance"].iloc[0])
    strongest = heads.nlargest(_STRONGEST, "attention")
    written = grid.shape[1] <= _WRITTEN_HEADS
    best = strongest.iloc[0]
    panel = draw_heat_map(
        HeatMap(
            title="attention on relevant tokens, %",
            description=f"attention of each of {len(heads)} heads on relevant tokens; the highest is "
            f"{percent(best['attention'], 3)} in layer {best['layer']:.0f}, head {best['head']:.0f}",
            values=values,
            written=[[_whole_percent(value) if written else "" for value in row] for row in values],
            x_label="head",
            y_label="layer",
            columns=_thinned(grid.columns, 24),
            rows=_thinned(grid.index, 40),
        ),
        cell=(max(0.16, min(0.5, 4.8 / grid.shape[1])), 0.24),
        font=7.5,
    )
    above = int((heads["low"] > chance).sum())
    return {
        "answer": [
            f"{above} of {len(heads)} heads attend to the relevant tokens more than uniform attention would "
            f"({percent(chance, 3)}): their intervals lie above it. The highest is head {best['head']:.0f} of layer "
            f"{best['layer']:.0f}: {percent(best['attention'], 3)} (95 % interval {percent(best['low'], 3)} to "
            f"{percent(best['high'], 3)})."
        ],
        "panel": panel,
        "rows": [
            {
                "layer": int(row["layer"]),
                "head": int(row["head"]),
                **cell_of(row, "attention"),
                "elsewhere": share(row["attention_elsewhere"]),
            }
            for row in strongest.to_dict("records")
        ],
        "chance": share(chance),
        "chance_elsewhere": share(float(heads["chance_elsewhere"].iloc[0])),
    }


def _thinned(labels: pd.Index, most: int) -> list[str]:
    """Return numbers as labels; if there are too many, leave some of them empty."""
    apart = -(-len(labels) // most)
    return [str(label) if index % apart == 0 else "" for index, label in enumerate(labels)]
