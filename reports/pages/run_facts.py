"""The facts of a tracked run that its report states in words."""

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from ...analyses.trajectories.integrity.auditing import NOT_NOTED, store_integrity
from ...analyses.trajectories.integrity.result import frozen_sentences, unknown_sentences
from ...analyses.trajectories.store import RunStore
from ...circuits.algebra.factor_steps import LARGEST_DISAGREEMENT
from ...circuits.checkpoints.steps.step import step_in_words
from ...circuits.weights.layer_keys import layer_label, layer_name
from .page import number

#: Number of rows for each kind of composition.
_STRONGEST = 5
_KINDS = {"Q": "queries", "K": "keys", "V": "values"}


def composition_table(stores: dict[str, RunStore]) -> dict[str, Any] | None:
    """Return the strongest scores of each kind at the last checkpoint that has any; None if no run has any."""
    rows, medians = [], []
    for label, store in stores.items():
        steps = store.composition_steps()
        scores = store.composition(steps[-1]) if steps else pd.DataFrame()
        for kind, reads in _KINDS.items():
            of_kind = scores[scores["kind"] == kind].dropna(subset="score") if len(scores) else scores
            if of_kind.empty:
                continue
            times = (of_kind["score"] / of_kind["chance"]).median()
            medians.append({"run": label, "reads": reads, "times": times})
            for row in of_kind.nlargest(_STRONGEST, "score").to_dict("records"):
                rows.append(
                    {
                        "run": label,
                        "reads": reads,
                        "earlier": f"{layer_name(row['stack'], row['earlier_layer'])}, head {row['earlier_head']}",
                        "later": f"{layer_name(row['stack'], row['later_layer'])}, head {row['later_head']}",
                        "score": number(row["score"], 3),
                        "chance": number(row["chance"], 3),
                        "times": number(row["score"] / row["chance"], 3),
                    }
                )
    return {"rows": rows, "medians": medians} if rows else None


#: Each basis in words, to follow "weights".
_BASES = {
    "raw": "raw",
    "folded": "with the norm in front of attention folded in",
    "folded_centred": "with the norm in front of attention folded in, and with the written output centred",
}
_DISAGREEING = (
    "the gradients of its factors do not belong to one product (some are from an earlier step, or the loss depends on "
    "the factors by more than their product)"
)
#: Maximum number of names of damaged circuits, and of what was left out.
_NAMES = 12


def run_facts(label: str, table: pd.DataFrame, description: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of one run for the template.

    Args:
        label: The name of the run in the report.
        table: The table of its store.
        description: The description of its store.
    """
    steps = np.unique(table["step"])
    first, last = at_step(table, steps[0]), at_step(table, steps[-1])
    unit = description.get("unit", "step")
    changes = []
    for circuit in ("QK", "OV"):
        norms = [rows[rows["circuit"] == circuit]["frobenius_norm"].median() for rows in (first, last)]
        if not any(np.isnan(norms)):
            changes.append({"circuit": circuit, "first": norms[0], "last": norms[1]})
    damaged = table[~table["finite"]]
    flagged = [
        f"{step_in_words(row['step'], unit)}, {layer_name(row['stack'], row['layer'])}, head {row['head']}, "
        f"W_{row['circuit']}"
        for row in damaged.head(_NAMES).to_dict("records")
    ]
    left_out = [f"{name}: {reason}" for name, reason in (description["left_out"] | description["skipped"]).items()]
    return {
        "label": label,
        "live": description.get("live", False),
        "source": description["source"],
        "recognised": description["recognised"],
        "steps": len(steps),
        "expected": len(description["checkpoints"]),
        "span": step_in_words(steps[0], unit) + (f" to {int(steps[-1])}" if len(steps) > 1 else ""),
        "saved": _saved(last) if len(steps) == 1 else "",
        "notes": step_notes(table, description),
        "layers": len(last[["stack", "layer"]].drop_duplicates()),
        "stacks": [stack for stack in last["stack"].unique() if stack],
        "heads": heads_in(table),
        "group_size": _group_size(last),
        "normalised_layers": len(last[last["qk_norm"]][["stack", "layer"]].drop_duplicates()),
        "shapes": ", ".join(
            f"W_{name} {rows} × {columns}, {f'factors of inner width {rank}' if factorized else 'collapsed'}"
            for (name, rows, columns, rank, factorized), _ in table.groupby(
                ["circuit", "rows", "columns", "rank_bound", "factorized"]
            )
        ),
        "changes": changes,
        "flagged": flagged,
        "flagged_count": len(damaged),
        "untested": _untested(table, description),
        "doubts": [f"{what}: {reason}" for what, reason in description.get("doubts", {}).items()],
        "failures": failures_in_words(description),
        "left_out": left_out[:_NAMES],
        "left_out_count": len(left_out),
        "basis": ", ".join(_BASES[basis] for basis in table["basis"].unique()),
        "rotary_offset": _rotary_offset(table),
        "reference": ", ".join(str(name) for name in table["reference"].dropna().unique()) or "none",
    }


def failures_in_words(description: dict[str, Any]) -> str:
    """Return what failed while a model was measured in training; an empty text if nothing is known to have failed.

    Args:
        description: The description of a store.
    """
    failures = description.get("failures")
    if not failures:
        return ""
    count = failures["count"]
    measurements = "1 measurement" if count == 1 else f"{count} measurements"
    return f"{measurements} failed while training went on; the last one: {failures['last']}."


def integrity_facts(store: RunStore, table: pd.DataFrame) -> dict[str, Any]:
    """Return what the contents in a store say about its run, for the template: what was found, and what is as stated.

    Args:
        store: The store.
        table: Its table.
    """
    if store.description().get("live") or table["step"].nunique() < 2:
        return {"integrity": [], "integrity_count": 0, "integrity_notes": []}
    integrity = store_integrity(store, store.contents())
    # Which checkpoints are not in the store yet is stated elsewhere.
    unknown = {step: why for step, why in integrity.unknown.items() if why == NOT_NOTED}
    findings = [finding.sentence for finding in integrity.findings]
    return {
        "integrity": findings[:_NAMES],
        "integrity_count": len(findings),
        "integrity_notes": [
            *unknown_sentences(replace(integrity, unknown=unknown)),
            *frozen_sentences(integrity),
        ],
    }


def at_step(table: pd.DataFrame, step: Any) -> pd.DataFrame:
    """Return the rows of a step; NaN stands for a step that is not known."""
    return table[table["step"].isna()] if np.isnan(step) else table[table["step"] == step]


def step_notes(table: pd.DataFrame, description: dict[str, Any]) -> list[str]:
    """Return what has to be said about the steps of a run: epochs, and checkpoints that state other steps.

    Args:
        table: The table of its store.
        description: The description of its store.
    """
    unit = description.get("unit", "step")
    notes = [*description.get("notes", ())]
    if unit == "epoch":
        notes.append("only epochs are known, so epochs take the place of steps")
    if "stated_step" in table:
        others = table[table["stated_step"].notna() & table["step"].notna() & (table["stated_step"] != table["step"])]
        for step, stated in others[["step", "stated_step"]].drop_duplicates().itertuples(index=False):
            notes.append(f"the checkpoint taken for {step_in_words(step, unit)} states {step_in_words(stated, unit)}")
    return notes


def _saved(rows: pd.DataFrame) -> str:
    """Return the numbers saved with a single checkpoint, in words."""
    columns = [str(column) for column in rows if str(column).startswith("training_")]
    values = {column: rows[column].iloc[0] for column in columns if rows[column].notna().any()}
    return ", ".join(f"{name.removeprefix('training_').replace('_', ' ')} {number(values[name], 4)}" for name in values)


def _untested(table: pd.DataFrame, description: dict[str, Any]) -> list[str]:
    """Return the circuits for which the step that Omega makes of the gradient is unknown, with the reasons."""
    reasons = {(entry["circuit"], entry["reason"]): [*entry["layers"]] for entry in description.get("untested", ())}
    stated = {(circuit, layer) for (circuit, _), layers in reasons.items() for layer in layers}
    disagreeing = (
        table[table["gradient_disagreement"] > LARGEST_DISAGREEMENT] if "gradient_disagreement" in table else table[:0]
    )
    for stack, layer, circuit in disagreeing[["stack", "layer", "circuit"]].drop_duplicates().itertuples(index=False):
        name = layer_label(stack, layer)
        if (circuit, name) not in stated:
            reasons.setdefault((circuit, _DISAGREEING), []).append(name)
    return [
        f"W_{circuit} of layer{'s' * (len(layers) > 1)} {', '.join(layers)}: {reason}"
        for (circuit, reason), layers in reasons.items()
    ]


def heads_in(rows: pd.DataFrame) -> int:
    """Return how many heads occur in the rows."""
    return len(rows[["stack", "layer", "head"]].drop_duplicates())


def _group_size(rows: pd.DataFrame) -> int:
    """Return the largest number of query heads that share a key-value head."""
    return int(rows.groupby(["stack", "layer", "key_value_head"])["head"].nunique().max())


def _rotary_offset(table: pd.DataFrame) -> int | None:
    offsets = table["rotary_offset"].dropna()
    return None if offsets.empty else int(offsets.iloc[0])
