"""The report of tracked runs: one run head by head, or several side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ...analyses.inline_svg import literal
from ...analyses.trajectories.store import RunStore
from ...circuits.checkpoints.steps.step import step_in_words
from ...circuits.errors import CallError, named_input
from ...circuits.weights.layer_keys import layer_name
from ..drawing.panels import Panel, Series, draw, swatch
from .page import number, rendered, write_html
from .run_facts import at_step, composition_table, heads_in, integrity_facts, run_facts
from .run_sections import CIRCUITS, SECTIONS, Quantity

#: Maximum number of lines in a panel, each of its own colour. More heads are gathered by layer, or all together.
_LINES = 6
#: Maximum number of rows in the table of heads.
_ROWS = 60


@dataclass(frozen=True)
class _Group:
    """The rows behind one line: those of a head, of a layer's heads or of a whole run."""

    label: str
    rows: pd.DataFrame


def write_run_report(runs: Sequence[RunStore | Path | str], path: Path | str, command: str | None = None) -> Path:
    """Write the report of one run store, or of several side by side, and return its path.

    Args:
        runs: The stores, or their folders.
        path: The path of the report.
        command: The command that renders the report, which the report states; None if no command does.

    Raises:
        CallError: No store is given, one of them is not a run store or is empty, or the path cannot be written to.
    """
    if not runs:
        raise CallError("a report needs at least one run store")
    stores = [run if isinstance(run, RunStore) else RunStore(run) for run in runs]
    with named_input(", ".join(str(store.folder) for store in stores), "a run store", "track again"):
        page = _page(stores, command)
    return write_html(Path(path), page)


def _page(stores: list[RunStore], command: str | None) -> str:
    labels = _labels(stores)
    descriptions = {label: store.description() for label, store in zip(labels, stores, strict=True)}
    tables = {label: store.table() for label, store in zip(labels, stores, strict=True)}
    over = _axis(tables)
    groups = _groups(tables, over)
    units = {described.get("unit", "step") for described in descriptions.values()}
    unit = units.pop() if len(units) == 1 else "step"
    log_steps = _spaced_logarithmically(next(iter(tables.values()))["step"])
    style = {group.label: position for position, group in enumerate(groups)}
    sections = []
    for title, caption, quantities in SECTIONS:
        panels = [
            drawn
            for quantity in quantities
            for circuit in quantity.circuits
            if (drawn := _panel(quantity, circuit, groups, style, over, unit, log_steps)) is not None
        ]
        if panels:
            caption = caption.replace("per training step", "per training step" if unit == "step" else f"per {unit}")
            sections.append({"title": title, "caption": caption, "panels": panels})
    return rendered(
        "run.html.j2",
        live=all(described.get("live", False) for described in descriptions.values()),
        title=_title(len(stores), over),
        subtitle=", ".join(tables),
        command=command,
        runs=[
            run_facts(label, tables[label], descriptions[label]) | integrity_facts(store, tables[label])
            for label, store in zip(tables, stores, strict=True)
        ],
        legend=[{"swatch": swatch(style[group.label], dots=False), "label": group.label} for group in groups],
        gathered=any(heads_in(group.rows) > 1 for group in groups),
        sections=sections,
        losses=_saved_panels(tables, style, unit, losses=True),
        saved=_saved_panels(tables, style, unit, losses=False),
        spectra=_spectra_panels(tables, unit),
        offsets=_offset_panel(groups, style),
        composition=composition_table(dict(zip(labels, stores, strict=True))),
        heads=_head_rows(tables),
        rows_left_out=max(0, sum(len(_last_rows(table)) for table in tables.values()) - _ROWS),
        versions={label: described["versions"] for label, described in descriptions.items()},
    )


def _labels(stores: list[RunStore]) -> list[str]:
    """Return the names of the stores' folders, with as many parent folders as it takes to tell them apart."""
    paths = [store.folder.resolve() for store in stores]
    depth = max(len(path.parts) for path in paths)
    for count in range(1, depth + 1):
        labels = ["/".join(path.parts[-count:]) for path in paths]
        if len(set(labels)) == len(labels):
            return labels
    raise CallError("the same run store was given twice")


def _title(stores: int, over: str) -> str:
    if over == "layer":
        return "Circuits of a model" if stores == 1 else "Circuits of several models"
    return "Circuits over training" if stores == 1 else "Circuits of several runs"


def _axis(tables: dict[str, pd.DataFrame]) -> str:
    """Return the horizontal axis: the training step, or the layer if there is one checkpoint of each model."""
    single = all(table["step"].nunique(dropna=False) == 1 for table in tables.values())
    shows_layers = any(table["layer"].nunique() > 1 or table["step"].isna().any() for table in tables.values())
    return "layer" if single and shows_layers else "step"


def _groups(tables: dict[str, pd.DataFrame], over: str) -> list[_Group]:
    if len(tables) > 1:
        return [_Group(label, table) for label, table in tables.items()]
    (table,) = tables.values()
    heads, layers = list(table.groupby(["stack", "layer", "head"])), list(table.groupby(["stack", "layer"]))
    # Over the layers, only what is in one layer can be told apart by lines.
    is_split = over == "step" or table["layer"].nunique() == 1
    if is_split and len(heads) <= _LINES:
        return [_Group(f"{layer_name(str(stack), layer)}, head {head}", rows) for (stack, layer, head), rows in heads]
    if is_split and len(layers) <= _LINES:
        return [_Group(layer_name(str(stack), layer), rows) for (stack, layer), rows in layers]
    stacks = list(table.groupby("stack"))
    if len(stacks) > 1:
        return [_Group(f"all heads of the {stack}", rows) for stack, rows in stacks]
    return [_Group("all heads", table)]


def _spaced_logarithmically(steps: pd.Series) -> bool:
    distinct = np.unique(steps)
    return len(distinct) > 3 and float(np.median(distinct)) < 0.2 * float(distinct[-1])


def _panel(
    quantity: Quantity, circuit: str, groups: list[_Group], style: dict[str, int], over: str, unit: str, log_steps: bool
) -> Any:
    axis = unit if over == "step" else over
    series = []
    for group in groups:
        rows = group.rows[group.rows["circuit"] == circuit]
        if quantity.column not in rows or rows[quantity.column].isna().all():
            continue
        quartiles = rows.groupby(over)[quantity.column].quantile(np.array([0.25, 0.5, 0.75])).unstack()
        band = (quartiles[0.25].to_numpy(), quartiles[0.75].to_numpy()) if heads_in(rows) > 1 else None
        series.append(Series(quartiles.index, quartiles[0.5].to_numpy(), style[group.label], band=band))
    if not series:
        return None
    name = CIRCUITS[circuit]
    title = (
        quantity.label
        if len(quantity.circuits) == 1 and quantity.column == "effective_ratio"
        else f"{name} {quantity.label}".replace("per step", f"per {unit}")
    )
    # A logarithmic axis cannot show values that are nowhere positive.
    log = quantity.log and any((line.y > 0).any() for line in series)
    return draw(
        Panel(
            title=title,
            description=f"{quantity.column.replace('_', ' ')} of W_{circuit} against the {axis}",
            x_label=axis,
            y_label="",
            series=series,
            x_log=log_steps and over == "step",
            y_log=log,
            x_integer=over == "layer",
            y_limits=quantity.limits,
        )
    )


def _saved_panels(tables: dict[str, pd.DataFrame], style: dict[str, int], unit: str, losses: bool) -> list[Any]:
    """Draw the scalars that were saved beside the weights, each in its panel: either the losses or the others.

    What was saved at a step that is not known has no place on the axis; the facts of the run state it.
    """
    columns = sorted(
        {str(column) for table in tables.values() for column in table if str(column).startswith("training_")}
    )
    log_steps = _spaced_logarithmically(next(iter(tables.values()))["step"])
    panels = []
    for column in columns:
        if ("loss" in column) != losses or column.endswith("_loss_step"):
            continue
        series = []
        for label, table in tables.items():
            if column in table and (table[column].notna() & table["step"].notna()).any():
                over = table.groupby("step")[column].first()
                series.append(Series(over.index, over.to_numpy(), style.get(label, 0)))
        if not series:
            continue
        name = column.removeprefix("training_").replace("_", " ")
        values = np.concatenate([np.asarray(line.y) for line in series])
        values = values[np.isfinite(values)]
        wide = bool(values.size and values.min() > 0 and values.max() > 1e3 * values.min())
        panels.append(
            draw(Panel(literal(name), f"{name} against the {unit}", unit, "", series, x_log=log_steps, y_log=wide))
        )
    return panels


def _spectra_panels(tables: dict[str, pd.DataFrame], unit: str) -> list[Any]:
    """Draw the median singular values over heads at the first, middle and last step; only if there is one run."""
    if len(tables) > 1:
        return []
    (table,) = tables.values()
    steps = np.unique(table["step"])
    chosen = list(dict.fromkeys([steps[0], steps[len(steps) // 2], steps[-1]]))
    panels = []
    for circuit, name in CIRCUITS.items():
        series = []
        for position, step in enumerate(chosen):
            rows = at_step(table[(table["circuit"] == circuit) & table["finite"]], step)
            spectra = [np.asarray(values, dtype=float) for values in rows["singular_values"]]
            if spectra and len({len(values) for values in spectra}) == 1:
                median = np.median(spectra, axis=0)
                series.append(Series(np.arange(1, len(median) + 1), median, position))
        if series:
            shown = ", ".join(step_in_words(step, unit) for step in chosen)
            panels.append(
                draw(
                    Panel(
                        f"{name} singular values",
                        f"singular values of W_{circuit} at {shown}",
                        "index",
                        "",
                        series,
                        x_integer=True,
                    )
                )
            )
    return [
        {
            "panels": panels,
            "legend": [
                {"swatch": swatch(position, dots=False), "label": step_in_words(step, unit)}
                for position, step in enumerate(chosen)
            ],
        }
    ]


def _offset_panel(groups: list[_Group], style: dict[str, int]) -> Any:
    """Draw ||W_QK|| of rotary models against the offset, relative to offset 0, at the last checkpoint."""
    series = []
    for group in groups:
        rows = _last_rows(group.rows)
        rows = rows[(rows["circuit"] == "QK") & rows["rotary_offsets"].notna()]
        if rows.empty:
            continue
        offsets = np.asarray(rows["rotary_offsets"].iloc[0])
        norms = np.stack([np.asarray(of_head, dtype=float) for of_head in rows["frobenius_norm_at_offsets"]])
        with np.errstate(invalid="ignore"):
            relative = norms[:, 1:] / norms[:, :1]
        shown = relative[np.isfinite(relative).all(axis=1)]
        if len(shown):
            low, middle, high = np.quantile(shown, [0.25, 0.5, 0.75], axis=0)
            series.append(Series(offsets[1:], middle, style[group.label], band=(low, high) if len(shown) > 1 else None))
    if not series:
        return None
    return draw(
        Panel(
            title=f"{CIRCUITS['QK']} Frobenius norm, relative to offset 0",
            description="Frobenius norm of W_QK at rotary offsets over that at offset 0, at the last checkpoint",
            x_label="rotary offset",
            y_label="",
            series=series,
            x_log=True,
            levels=((1.0, "offset 0"),),
        )
    )


def _last_rows(table: pd.DataFrame) -> pd.DataFrame:
    return at_step(table, table["step"].max())


def _head_rows(tables: dict[str, pd.DataFrame]) -> dict[str, Any]:
    columns = {
        "frobenius_norm": "Frobenius",
        "spectral_norm": "spectral",
        "stable_rank": "stable rank",
        "effective_rank": "effective rank",
        "omega_self": "rate of Ω",
        "imbalance": "imbalance",
        "agreement_rows_difference": "Ω with AAᵀ, difference",
        "symmetric_share": "symmetric",
        "copying_score": "copying",
    }
    rows = []
    for label, table in tables.items():
        for row in _last_rows(table).to_dict("records"):
            cells = [number(row.get(column), 4) for column in columns]
            rows.append(
                {"run": label, **{key: row[key] for key in ("stack", "layer", "head", "circuit")}, "cells": cells}
            )
    return {"columns": list(columns.values()), "rows": rows[:_ROWS], "stacks": any(row["stack"] for row in rows)}
