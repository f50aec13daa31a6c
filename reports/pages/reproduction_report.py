"""The report of `qkov reproduce`, which compares training with theory, question by question."""

from pathlib import Path
from typing import Any

import numpy as np

from ...analyses.dynamics.populations import exact_population
from ...analyses.studies.paper_setting import PAPER_LOSS, PAPER_SETTING, paper_setting_table
from ...analyses.studies.ratios import RatioEstimate
from ...analyses.studies.tables import Tables
from ..drawing.panels import swatch
from .page import listed, mark_changes, write_page
from .reproduction_sections import falsifier, following, growth, paper_setting, preconditioner, sharpening


def write_reproduction_report(tables: Tables, path: Path, command: str) -> Path:
    """Write the report of a finished reproduction and return its path.

    Args:
        tables: The tables of the reproduction.
        path: The path of the HTML file.
        command: The command that renders the report.

    Raises:
        CallError: The path cannot be written to.
    """
    reproduction = tables.reproduction
    plan, setting = reproduction.plan, reproduction.plan.setting
    style = {ratio: position for position, ratio in enumerate(plan.ratios)}
    shown_losses = [loss for loss in plan.losses if loss in (0.1, 0.01, 1e-4)] or list(plan.losses)
    matched, rescaled = tables.matched, tables.rescaled
    return write_page(
        path,
        "reproduction.html.j2",
        title="Faster QK learning and attention: trained against theory",
        subtitle=(
            f"{len(reproduction.runs)} runs of a single attention layer, collapsed and factorized, "
            f"at r = {listed(plan.ratios)}"
        ),
        command=command,
        trained_by=reproduction.command,
        folder=str(reproduction.folder.resolve()),
        setting=setting,
        population=len(exact_population(setting)),
        ratios=listed(plan.ratios),
        start=max(max(run.start.mu_qk, run.start.mu_ov) for run in reproduction.runs),
        runs=len(reproduction.runs),
        checkpoints=sum(len(table) for table in tables.measured.values()),
        step=plan.step,
        ratio_legend=[{"swatch": swatch(style[ratio]), "label": f"r = {ratio:g}"} for ratio in plan.ratios],
        rescaled_legend=[
            {
                "swatch": swatch(style[ratio], hollow=True, line=False),
                "label": f"collapsed, rescaled rate, r = {ratio:g}",
            }
            for ratio in plan.ratios
        ],
        sharpening=sharpening(tables, style),
        matched=mark_changes(matched[matched["loss"].isin(shown_losses)].to_dict("records"), "parameterization"),
        matched_count=len(matched),
        largest_difference=matched["difference"].max(),
        paper=paper_setting(paper_setting_table()),
        paper_case=PAPER_SETTING,
        paper_loss=PAPER_LOSS,
        long_after=falsifier(tables.long_after),
        following=following(tables, style),
        readings=mark_changes([_reading_row(reading) for reading in tables.ratios], "parameterization"),
        rescaled=mark_changes(rescaled[rescaled["loss"].isin(shown_losses)].to_dict("records"), "ratio"),
        growth=growth(tables.growth, style),
        preconditioner=preconditioner(tables),
        versions=reproduction.versions,
    )


def reproduction_summary(tables: Tables) -> dict[str, Any]:
    """Return the results by which a reproduction is judged, in a form that JSON can hold."""
    steps = tables.preconditioner
    balanced, unbalanced = steps[steps["kind"] != "unbalanced"], steps[steps["kind"] == "unbalanced"]
    return {
        "largest_difference": float(tables.matched["difference"].max()),
        "largest_residual": max(reading.residual for reading in tables.ratios),
        "rescaled_difference": float(tables.rescaled["difference"].max()),
        "balanced_cosine": float(balanced["omega_cosine"].min()),
        "unbalanced_cosine": float(unbalanced["omega_cosine_start"].max()),
        "matched_loss": tables.matched.to_dict("records"),
        "ratios": [_reading_row(reading) for reading in tables.ratios],
        "flow": tables.flow.to_dict("records"),
        "preconditioner": steps.to_dict("records"),
    }


def _reading_row(reading: RatioEstimate) -> dict[str, Any]:
    ordered = sorted(
        (residual, chosen.value) for chosen, residual in reading.residuals.items() if np.isfinite(residual)
    )
    return {
        "parameterization": reading.run.parameterization.value,
        "ratio": reading.run.ratio,
        "residual": reading.residual,
        "recovered": reading.r,
        "best": ordered[0][1],
        "second": ordered[1][1] if len(ordered) > 1 else None,
        "times": ordered[1][0] / ordered[0][0] if len(ordered) > 1 else None,
    }
