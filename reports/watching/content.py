"""The page of a run in training: its losses, then a curve of every head, then the figures of the last step."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup

from ...analyses.inline_svg import literal
from ...circuits.weights.layer_keys import layer_label, layer_name
from ..drawing.panels import Panel, Series, draw
from ..drawing.small_multiples import SmallMultiples, draw_small_multiples, scale_of
from ..pages.page import number, rendered
from ..pages.run_facts import failures_in_words
from .reading import Reading

#: The most points of all curves of one grid, so that a model of thousands of heads makes no page of many megabytes.
_POINTS = 12_000
#: The most heads in the table of the last step.
_HEADS = 300


@dataclass(frozen=True)
class _Figure:
    """A quantity of the store that every head has.

    Attributes:
        column: The column of the store.
        circuit: The circuit whose rows hold it.
        title: Its title, in which W_QK and the like become subscripts.
        log: Whether its curves are drawn on a logarithmic axis.
    """

    column: str
    circuit: str
    title: str
    log: bool = False


#: What is drawn, in this order, of all that the store has.
_FIGURES = (
    _Figure("frobenius_norm", "QK", "norm of W_QK"),
    _Figure("frobenius_norm", "OV", "norm of W_OV"),
    _Figure("effective_ratio", "QK", "effective ratio r(t)", log=True),
    _Figure("max_logit", "QK", "largest score before the softmax"),
    _Figure("spectral_norm", "QK", "largest singular value of W_QK"),
    _Figure("relative_speed", "QK", "relative speed of W_QK per step", log=True),
    _Figure("relative_speed", "OV", "relative speed of W_OV per step", log=True),
    _Figure("taken_rate", "QK", "rate of the step of W_QK"),
    _Figure("taken_rate", "OV", "rate of the step of W_OV"),
)


def title_of(reading: Reading) -> str:
    """Return the title of the page's tab: the last step and the loss, if they are known."""
    if reading.rows is None:
        return "waiting for a run"
    losses = _series(reading.rows, "training_loss")
    last = reading.steps[-1]
    return f"step {last}" + (f", loss {number(float(losses[last]), 4)}" if last in losses.index else "")


def status_of(reading: Reading) -> list[str]:
    """Return what the page says about the run, apart from how long ago its last step was written.

    Args:
        reading: What the store held.
    """
    if not reading.steps or reading.rows is None:
        return ["The store holds no step yet."] if reading.description else []
    first, last, count = reading.steps[0], reading.steps[-1], len(reading.steps)
    sentences = [
        f"Step {last}." if count == 1 else f"Step {last}, the last of {count} logged steps since step {first}."
    ]
    shown = reading.rows["step"].nunique()
    if shown < count:
        sentences.append(f"The curves show {shown} of them, evenly spaced.")
    return sentences


def content_of(reading: Reading) -> str:
    """Return the part of the page that is replaced as the run goes on, as HTML.

    Args:
        reading: What the store held.
    """
    rows = reading.rows
    return rendered(
        "watch_content.html.j2",
        problem=reading.problem,
        status=status_of(reading),
        failures=failures_in_words(reading.description),
        is_there=rows is not None,
        losses=[] if rows is None else _panels(rows, losses=True),
        others=[] if rows is None else _panels(rows, losses=False),
        grids=[] if rows is None else _grids(rows),
        heads=None if rows is None else _last_heads(rows, reading.steps[-1]),
    )


def page_of(reading: Reading, folder: Path, answer: dict[str, Any], nonce: str) -> str:
    """Return the whole page, which asks for what changed by itself.

    Args:
        reading: What the store held.
        folder: The store's folder.
        answer: What the page would be answered if it asked now.
        nonce: The value that lets the page's own script run, and no other.
    """
    return rendered(
        "watch.html.j2",
        title="A run in training",
        subtitle=f"{reading.description.get('source', 'a run store')} in {folder}",
        answer=answer,
        content=Markup(answer["content"]),
        nonce=nonce,
    )


def _series(rows: pd.DataFrame, column: str) -> pd.Series:
    """The values of a column that all rows of a step share, by step, without the missing ones."""
    if column not in rows:
        return pd.Series(dtype=float)
    return rows.groupby("step")[column].first().dropna()


def _panels(rows: pd.DataFrame, losses: bool) -> list[Markup]:
    """Draw the numbers of the steps: the losses, or the others."""
    panels = []
    for column in sorted(str(name) for name in rows if str(name).startswith("training_")):
        if ("loss" in column) != losses or column.endswith("_loss_step"):
            continue
        series = _series(rows, column)
        if series.empty:
            continue
        name = column.removeprefix("training_").replace("_", " ")
        values = series.to_numpy(dtype=float)
        wide = bool(values.min() > 0 and values.max() > 1e3 * values.min())
        lines = [Series(series.index, values)]
        panels.append(draw(Panel(literal(name), f"{name} against the step", "step", "", lines, y_log=wide), height=2.4))
    return panels


def _grids(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """Draw every figure that the store has: one grid of layers and heads for each stack."""
    grids = []
    for figure in _FIGURES:
        if figure.column not in rows:
            continue
        known = rows[(rows["circuit"] == figure.circuit) & np.isfinite(rows[figure.column].astype(float))]
        parts = [_grid(figure, str(stack), part) for stack, part in known.groupby("stack", sort=False)]
        for stack, grid in parts:
            scale = scale_of(grid)
            if scale is not None:
                grids.append(
                    {
                        "title": figure.title,
                        "stack": stack,
                        "low": scale[0],
                        "high": scale[1],
                        "log": figure.log,
                        "drawn": draw_small_multiples(grid),
                    }
                )
    return grids


def _grid(figure: _Figure, stack: str, rows: pd.DataFrame) -> tuple[str, SmallMultiples]:
    layers, heads, steps = (sorted(rows[name].unique().tolist()) for name in ("layer", "head", "step"))
    shown = _thinned(steps, max(_POINTS // (len(layers) * len(heads)), 2))
    places = pd.MultiIndex.from_product([layers, heads, shown])
    values = rows.set_index(["layer", "head", "step"])[figure.column].reindex(places).to_numpy(dtype=float)
    y = values.reshape(len(layers), len(heads), len(shown))
    last = [[_last(curve) for curve in of_layer] for of_layer in y]
    return stack, SmallMultiples(
        label=f"{figure.title.replace('_', ' ')} of every head against the step",
        rows=[layer_label("", layer) for layer in layers],
        columns=[str(head) for head in heads],
        x=np.asarray(shown, dtype=float),
        y=y,
        names=[[f"{layer_name(stack, layer)}, head {head}" for head in heads] for layer in layers],
        written=[["" if np.isnan(value) else number(float(value), 3) for value in of_layer] for of_layer in last],
        log=figure.log,
    )


def _thinned(steps: list[int], most: int) -> list[int]:
    """Return at most so many steps, evenly spaced, the last among them."""
    if len(steps) <= most:
        return steps
    places = np.linspace(0, len(steps) - 1, most).round().astype(int)
    return [steps[place] for place in dict.fromkeys(places)]


def _last(curve: np.ndarray) -> float:
    """Return the last value that is known."""
    known = curve[np.isfinite(curve)]
    return known[-1] if known.size else np.nan


def _last_heads(rows: pd.DataFrame, step: int) -> dict[str, Any]:
    """Return the table of the last step: a row for each head, and a column for each figure that is known."""
    last = rows[rows["step"] == step]
    figures = [
        figure
        for figure in _FIGURES
        if figure.column in last and last.loc[last["circuit"] == figure.circuit, figure.column].notna().any()
    ]
    by_circuit = {
        circuit: of_circuit.set_index(["stack", "layer", "head"]) for circuit, of_circuit in last.groupby("circuit")
    }
    heads = last[["stack", "layer", "head"]].drop_duplicates().sort_values(["stack", "layer", "head"])
    table = []
    for stack, layer, head in heads.head(_HEADS).itertuples(index=False):
        cells = []
        for figure in figures:
            of_circuit = by_circuit[figure.circuit]
            value = of_circuit[figure.column].get((stack, layer, head), np.nan)
            cells.append(number(None if pd.isna(value) else float(value), 4))
        table.append({"layer": layer_label(stack, layer), "head": head, "cells": cells})
    return {
        "step": step,
        "columns": [figure.title for figure in figures],
        "rows": table,
        "left_out": max(len(heads) - _HEADS, 0),
    }
