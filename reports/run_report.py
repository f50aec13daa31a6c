"""The report of tracked runs: one run head by head, or several side by side."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ..analyses.trajectories.store import RunStore
from ..circuits.errors import CallError
from .page import number, write_page
from .panels import Panel, Series, draw, swatch

#: Most lines of one colour each in a panel; beyond that heads are gathered by layer, or all together.
_LINES = 6
#: Most rows of the table of heads.
_ROWS = 60

_QK, _OV = r"$W_{QK}$", r"$W_{OV}$"
_CIRCUITS = {"QK": _QK, "OV": _OV}


@dataclass(frozen=True)
class _Figure:
    """One figure of the store as it is drawn: a panel for each circuit that has it."""

    column: str
    label: str
    circuits: tuple[str, ...] = ("QK", "OV")
    log: bool = False
    limits: tuple[float | None, float | None] = (None, None)


@dataclass(frozen=True)
class _Group:
    """Rows that share a line: one head, a layer's heads, or a run's."""

    label: str
    rows: pd.DataFrame


_SECTIONS: tuple[tuple[str, str, tuple[_Figure, ...]], ...] = (
    (
        "How large are the circuits?",
        "Frobenius, spectral and nuclear norm: the root of the sum of the squared singular values, the largest, and "
        "their sum.",
        (
            _Figure("frobenius_norm", "Frobenius norm"),
            _Figure("spectral_norm", "spectral norm"),
            _Figure("nuclear_norm", "nuclear norm"),
        ),
    ),
    (
        "How many directions do they use?",
        "Stable rank ‖C‖²/s₁², and effective rank, the exponential of the entropy of the normalised singular "
        "values (Roy & Vetterli 2007).",
        (_Figure("stable_rank", "stable rank"), _Figure("effective_rank", "effective rank")),
    ),
    (
        "How fast do they move, and where to?",
        "Relative speed is ‖ΔC‖/‖C‖ for each step of training, since the checkpoint before. The effective ratio r(t) "
        "is that of W_QK over that of W_OV: a ratio of speeds, as the weights alone show them, which equals no ratio "
        "of learning rates. Cosine and scale are along the reference.",
        (
            _Figure("relative_speed", "relative speed per step", log=True),
            _Figure("reference_cosine", "cosine with reference", limits=(-1.05, 1.05)),
            _Figure("reference_scale", "scale along reference"),
            _Figure("effective_ratio", "effective ratio $r(t)$", circuits=("QK",), log=True),
        ),
    ),
    (
        "How does gradient descent on the factors move them?",
        "Ω(C) = (CᵀC)^½ ⊕ (CCᵀ)^½ is how gradient flow on balanced factors moves their product. Its rate along C "
        "itself is 2Σs³/Σs². Imbalance is ‖AᵀA − BBᵀ‖/(‖AᵀA‖ + ‖BBᵀ‖). The differences compare Ω's two sides with AAᵀ "
        "and BᵀB, of the factors themselves, relative to those: 0 where Ω is the exact operator.",
        (
            _Figure("omega_self", r"rate of $\Omega$ along $C$"),
            _Figure("imbalance", "imbalance of the factors", limits=(-0.02, 1.02)),
            _Figure("agreement_rows_difference", r"$\Omega$ against $AA^T$, difference"),
            _Figure("agreement_columns_difference", r"$\Omega$ against $B^TB$, difference"),
        ),
    ),
    (
        "What do they compute?",
        "Share of the squared norm that is symmetric (0.5 for a random matrix), and the score Σ Re λ / Σ |λ| of the "
        "eigenvalues of W_OV itself, without embedding and unembedding: positive where a head writes what it reads "
        "(after the copying score of Elhage et al. 2021).",
        (
            _Figure("symmetric_share", "symmetric share", limits=(-0.02, 1.02)),
            _Figure("copying_score", "copying score", circuits=("OV",), limits=(-1.05, 1.05)),
        ),
    ),
)


def write_run_report(stores: list[RunStore], path: Path, command: str) -> Path:
    """Write the report of one store, or of several side by side, and return its path.

    Raises:
        CallError: there is no store, or a store is none or is empty.
    """
    if not stores:
        raise CallError("a report needs at least one run store")
    labels = _labels(stores)
    descriptions = {label: store.description() for label, store in zip(labels, stores, strict=True)}
    tables = {label: store.table() for label, store in zip(labels, stores, strict=True)}
    groups = _groups(tables)
    log_steps = _spaced_logarithmically(next(iter(tables.values()))["step"])
    style = {group.label: position for position, group in enumerate(groups)}
    sections = []
    for title, caption, figures in _SECTIONS:
        panels = [
            drawn
            for figure in figures
            for circuit in figure.circuits
            if (drawn := _panel(figure, circuit, groups, style, log_steps)) is not None
        ]
        if panels:
            sections.append({"title": title, "caption": caption, "panels": panels})
    return write_page(
        path,
        "run.html.j2",
        title="Circuits over training" if len(stores) == 1 else "Circuits of several runs",
        subtitle=", ".join(tables),
        command=command,
        runs=[_run_facts(label, tables[label], descriptions[label]) for label in tables],
        legend=[{"swatch": swatch(style[group.label], dots=False), "label": group.label} for group in groups],
        gathered=any(_heads(group.rows) > 1 for group in groups),
        sections=sections,
        losses=_saved_panels(tables, style, losses=True),
        saved=_saved_panels(tables, style, losses=False),
        spectra=_spectra_panels(tables),
        heads=_head_rows(tables),
        rows_left_out=max(0, sum(len(_last_rows(table)) for table in tables.values()) - _ROWS),
        versions={label: described["versions"] for label, described in descriptions.items()},
    )


def _labels(stores: list[RunStore]) -> list[str]:
    """The folders' names, made longer until they differ."""
    paths = [store.folder.resolve() for store in stores]
    depth = max(len(path.parts) for path in paths)
    for count in range(1, depth + 1):
        labels = ["/".join(path.parts[-count:]) for path in paths]
        if len(set(labels)) == len(labels):
            return labels
    raise CallError("the same run store was given twice")


def _groups(tables: dict[str, pd.DataFrame]) -> list[_Group]:
    if len(tables) > 1:
        return [_Group(label, table) for label, table in tables.items()]
    (table,) = tables.values()
    heads = list(table.groupby(["layer", "head"]))
    if len(heads) <= _LINES:
        return [_Group(f"layer {layer}, head {head}", rows) for (layer, head), rows in heads]
    layers = list(table.groupby("layer"))
    if len(layers) <= _LINES:
        return [_Group(f"layer {layer}", rows) for layer, rows in layers]
    return [_Group("all heads", table)]


def _heads(rows: pd.DataFrame) -> int:
    return len(rows[["layer", "head"]].drop_duplicates())


def _spaced_logarithmically(steps: pd.Series) -> bool:
    distinct = np.unique(steps)
    return len(distinct) > 3 and float(np.median(distinct)) < 0.2 * float(distinct[-1])


def _panel(figure: _Figure, circuit: str, groups: list[_Group], style: dict[str, int], log_steps: bool) -> Any:
    series = []
    for group in groups:
        rows = group.rows[group.rows["circuit"] == circuit]
        if figure.column not in rows or rows[figure.column].isna().all():
            continue
        quartiles = rows.groupby("step")[figure.column].quantile(np.array([0.25, 0.5, 0.75])).unstack()
        band = (quartiles[0.25].to_numpy(), quartiles[0.75].to_numpy()) if _heads(rows) > 1 else None
        series.append(Series(quartiles.index, quartiles[0.5].to_numpy(), style[group.label], band=band))
    if not series:
        return None
    name = _CIRCUITS[circuit]
    title = (
        figure.label if len(figure.circuits) == 1 and figure.column == "effective_ratio" else f"{name} {figure.label}"
    )
    # A logarithmic axis cannot show a figure that is nowhere positive.
    log = figure.log and any((line.y > 0).any() for line in series)
    return draw(
        Panel(
            title=title,
            description=f"{figure.column.replace('_', ' ')} of W_{circuit} against the step of training",
            x_label="step",
            y_label="",
            series=series,
            x_log=log_steps,
            y_log=log,
            y_limits=figure.limits,
        )
    )


def _saved_panels(tables: dict[str, pd.DataFrame], style: dict[str, int], losses: bool) -> list[Any]:
    """The figures that were saved beside the weights, one panel each: the losses, or the others."""
    columns = sorted(
        {str(column) for table in tables.values() for column in table if str(column).startswith("training_")}
    )
    log_steps = _spaced_logarithmically(next(iter(tables.values()))["step"])
    panels = []
    for column in columns:
        if ("loss" in column) != losses:
            continue
        series = []
        for label, table in tables.items():
            if column in table and table[column].notna().any():
                over = table.groupby("step")[column].first()
                series.append(Series(over.index, over.to_numpy(), style.get(label, 0)))
        if not series:
            continue
        name = column.removeprefix("training_").replace("_", " ")
        values = np.concatenate([np.asarray(line.y) for line in series])
        values = values[np.isfinite(values)]
        wide = bool(values.size and values.min() > 0 and values.max() > 1e3 * values.min())
        panels.append(draw(Panel(name, f"{name} against the step", "step", "", series, x_log=log_steps, y_log=wide)))
    return panels


def _spectra_panels(tables: dict[str, pd.DataFrame]) -> list[Any]:
    """Median singular values over heads at the first, the middle and the last step; for one run only."""
    if len(tables) > 1:
        return []
    (table,) = tables.values()
    steps = np.unique(table["step"])
    chosen = list(dict.fromkeys([steps[0], steps[len(steps) // 2], steps[-1]]))
    panels = []
    for circuit, name in _CIRCUITS.items():
        series = []
        for position, step in enumerate(chosen):
            rows = table[(table["circuit"] == circuit) & (table["step"] == step) & table["finite"]]
            spectra = [np.asarray(values, dtype=float) for values in rows["singular_values"]]
            if spectra and len({len(values) for values in spectra}) == 1:
                median = np.median(spectra, axis=0)
                series.append(Series(np.arange(1, len(median) + 1), median, position))
        if series:
            shown = ", ".join(f"step {step}" for step in chosen)
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
                {"swatch": swatch(position, dots=False), "label": f"step {step}"}
                for position, step in enumerate(chosen)
            ],
        }
    ]


def _run_facts(label: str, table: pd.DataFrame, description: dict[str, Any]) -> dict[str, Any]:
    steps = np.unique(table["step"])
    first, last = table[table["step"] == steps[0]], table[table["step"] == steps[-1]]
    changes = []
    for circuit in _CIRCUITS:
        norms = [rows[rows["circuit"] == circuit]["frobenius_norm"].median() for rows in (first, last)]
        if not any(np.isnan(norms)):
            changes.append({"circuit": circuit, "first": norms[0], "last": norms[1]})
    damaged = table[~table["finite"]]
    flagged = [
        f"step {row.step}, layer {row.layer}, head {row.head}, W_{row.circuit}" for row in damaged.head(12).itertuples()
    ]
    expected = [checkpoint["step"] for checkpoint in description["checkpoints"]]
    return {
        "label": label,
        "source": description["source"],
        "steps": len(steps),
        "expected": len(expected),
        "first": int(steps[0]),
        "last": int(steps[-1]),
        "layers": table["layer"].nunique(),
        "heads": _heads(table),
        "shapes": ", ".join(
            f"W_{name} {rows} × {columns}, {f'factors of inner width {rank}' if factorized else 'collapsed'}"
            for (name, rows, columns, rank, factorized), _ in table.groupby(
                ["circuit", "rows", "columns", "rank_bound", "factorized"]
            )
        ),
        "changes": changes,
        "flagged": flagged,
        "flagged_count": len(damaged),
        "basis": ", ".join(table["basis"].unique()),
        "rotary": bool(table["rotary_offset"].notna().any()),
        "reference": ", ".join(str(name) for name in table["reference"].dropna().unique()) or "none",
    }


def _last_rows(table: pd.DataFrame) -> pd.DataFrame:
    return table[table["step"] == table["step"].max()]


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
            rows.append({"run": label, **{key: row[key] for key in ("layer", "head", "circuit")}, "cells": cells})
    return {"columns": list(columns.values()), "rows": rows[:_ROWS]}
