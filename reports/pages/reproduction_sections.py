"""The sections of the reproduction's report. Each answers a question in words and with charts."""

from typing import Any

import numpy as np
import pandas as pd

from ...analyses.dynamics.equations import integrate
from ...analyses.dynamics.growth_laws import straight_line
from ...analyses.dynamics.matched_loss import at_loss
from ...analyses.dynamics.setting import Parameterization
from ...analyses.studies.growth import GrowthComparison
from ...analyses.studies.tables import Tables
from ..drawing.panels import Panel, Series, draw, swatch
from .page import mark_changes, number, percent

_LAW_WORDS = {
    Parameterization.CACO: "μ_QK linear in μ_OV²",
    Parameterization.CAFO: "μ_QK linear in μ_OV",
    Parameterization.FACO: "ln μ_QK linear in μ_OV²",
    Parameterization.FAFO: "ln μ_QK linear in μ_OV",
}
_LAW_AXES = {
    Parameterization.CACO: (r"$r\,\Delta\mu_{OV}^2$", r"$\mu_{QK}$"),
    Parameterization.CAFO: (r"$r\,\Delta\mu_{OV}$", r"$\mu_{QK}$"),
    Parameterization.FACO: (r"$r\,\Delta\mu_{OV}^2$", r"$\ln\,\mu_{QK}$"),
    Parameterization.FAFO: (r"$r\,\Delta\mu_{OV}$", r"$\ln\,\mu_{QK}$"),
}


def sharpening(tables: Tables, style: dict[float, int]) -> dict[str, Any]:
    """Return alpha against loss, trained and predicted, and what follows for the paper's claim.

    Args:
        tables: The tables of the reproduction.
        style: The number of the drawing style of each ratio.
    """
    reproduction, measured, matched = tables.reproduction, tables.measured, tables.matched
    plan = reproduction.plan
    slow, fast = min(plan.ratios), max(plan.ratios)
    loss = min((loss for loss in plan.losses if loss >= 1e-4), default=plan.losses[-1])
    at = matched[matched["loss"] == loss].set_index(["parameterization", "ratio"])["alpha"]
    pairs = [(chosen.value, at[chosen.value, slow], at[chosen.value, fast]) for chosen in Parameterization]
    sharper = [pair for pair in pairs if pair[2] > pair[1]]
    verdict = (
        f"Yes, in all {len(pairs)} parameterizations."
        if len(sharper) == len(pairs)
        else f"In {len(sharper)} of {len(pairs)} parameterizations."
    )
    details = "; ".join(f"{name} {number(low, 3)} → {number(high, 3)}" for name, low, high in pairs)
    answer = [
        f"{verdict} At the same loss of {loss:g}, α on the relevant tokens changes from r = {slow:g} to r = {fast:g} "
        f"as follows: {details}. Uniform attention is {number(plan.setting.uniform_attention, 3)}.",
        f"Trained and predicted scales differ by at most {percent(matched['difference'].max())} over "
        f"{len(matched)} pairs of run and loss.",
    ]
    low = [name for name, alpha, _ in pairs if alpha < 1.1 * plan.setting.uniform_attention]
    if low:
        answer.append(
            f"At r = {slow:g}, {' and '.join(low)} stay within a tenth of uniform attention down to this loss: "
            f"attention hardly contributes there."
        )
    panels = []
    for chosen in Parameterization:
        series = []
        for run in reproduction.balanced(chosen):
            table = measured[run.name]
            losses = np.geomspace(table["loss"].max() * (1 - 1e-9), table["loss"].min(), 120)
            reachable = losses[losses < float(plan.setting.loss(float(run.start.mu_qk), float(run.start.mu_ov)))]
            predicted = at_loss(plan.setting, chosen, run.ratio, reachable, run.start)
            series += [
                Series(reachable, np.asarray(predicted.attention), style[run.ratio]),
                Series(table["loss"], table["attention"], style[run.ratio], dots=True),
            ]
        panels.append(
            draw(
                Panel(
                    chosen.value,
                    f"{chosen.value}: attention on relevant tokens against loss, trained and predicted",
                    "loss (nats)",
                    r"$\alpha$",
                    series,
                    x_log=True,
                    x_reversed=True,
                    y_limits=(0.0, 1.03),
                    levels=((plan.setting.uniform_attention, "uniform"),),
                )
            )
        )
    return {"answer": answer, "panels": panels}


def falsifier(long_after: pd.DataFrame) -> dict[str, Any]:
    """Return alpha at ever smaller losses, one row per run, and in words how it goes on at the slowest rate."""
    losses = long_after["loss"].drop_duplicates().tolist()
    rows = []
    for (parameterization, ratio), of_run in long_after.groupby(["parameterization", "ratio"], sort=False):
        cells = of_run[["alpha_predicted", "alpha"]].to_dict("records")
        rows.append({"parameterization": parameterization, "ratio": ratio, "cells": cells})
    slow = long_after["ratio"].min()
    slowest = long_after[long_after["ratio"] == slow].set_index(["parameterization", "loss"])["alpha_predicted"]
    trained = long_after.dropna(subset="alpha")["loss"].min()
    parts = [
        f"{chosen.value} {number(slowest[chosen.value, trained], 3)} → {number(slowest[chosen.value, losses[-1]], 3)}"
        for chosen in Parameterization
    ]
    return {
        "losses": losses,
        "rows": mark_changes(rows, "parameterization"),
        "words": f"How attention develops after the loss has vanished: at r = {slow:g}, from a loss of {trained:g} to "
        f"one of {losses[-1]:g}, α changes in theory as follows: {'; '.join(parts)}.",
    }


def paper_setting(table: pd.DataFrame) -> dict[str, Any]:
    """Return alpha by theory in the setting of the paper's simulation: parameterizations in rows, ratios in columns."""
    alphas = table.pivot(index="parameterization", columns="ratio", values="alpha")
    printed = "; ".join(
        f"r = {row['ratio']:g}: μ_OV {row['mu_ov']:.3f} ({row['mu_ov_printed']:.3f}), "
        f"μ_QK {row['mu_qk']:.3f} ({row['mu_qk_printed']:.3f}), α {row['alpha']:.3f} ({row['alpha_printed']:.3f})"
        for row in table.dropna(subset="alpha_printed").to_dict("records")
    )
    return {
        "ratios": list(alphas.columns),
        "rows": [{"parameterization": name, "alphas": row.tolist()} for name, row in alphas.iterrows()],
        "printed": printed,
    }


def following(tables: Tables, style: dict[float, int]) -> dict[str, Any]:
    """Return scales and attention against time, first integrals, and the collapsed runs at the rescaled rate.

    Args:
        tables: The tables of the reproduction.
        style: The number of the drawing style of each ratio.
    """
    reproduction, measured, rescaled, readings = (
        tables.reproduction,
        tables.measured,
        tables.rescaled,
        tables.ratios,
    )
    factorized = [chosen for chosen in Parameterization if chosen is not Parameterization.CACO]
    rows = []
    for chosen in factorized:
        lines: dict[str, list[Series]] = {"mu_ov": [], "mu_qk": [], "attention": []}
        for run in reproduction.balanced(chosen):
            table = measured[run.name]
            later = table[table["time"] > 0]
            last = float(later["time"].max())
            flow = integrate(reproduction.plan.setting, chosen, run.ratio, until_time=last, start=run.start)
            sampled = flow.at(np.geomspace(float(later["time"].min()), last, 200))
            for quantity, series in lines.items():
                series.append(Series(sampled.time, getattr(sampled, quantity), style[run.ratio]))
                series.append(Series(later["time"], later[quantity], style[run.ratio], dots=True))
            if chosen is Parameterization.FAFO:
                imitating = next(other for other in reproduction.of_kind("rescaled") if other.ratio == run.ratio)
                others = measured[imitating.name]
                others = others[others["time"] > 0]
                for quantity, series in lines.items():
                    series.append(Series(others["time"], others[quantity], style[run.ratio], dots=True, hollow=True))
        panels = [
            draw(
                Panel(
                    f"{chosen.value}  {label}",
                    f"{chosen.value}: {quantity} against time, trained and predicted",
                    r"time ($\eta_{OV} = 1$)",
                    label,
                    lines[quantity],
                    x_log=True,
                    y_log=quantity != "attention",
                    y_limits=(0.0, 1.03) if quantity == "attention" else (None, None),
                ),
                width=3.4,
                height=2.8,
            )
            for quantity, label in (("mu_ov", r"$\mu_{OV}$"), ("mu_qk", r"$\mu_{QK}$"), ("attention", r"$\alpha$"))
        ]
        rows.append({"panels": panels})
    own = [reading for reading in readings if reading.run.parameterization in factorized]
    largest = max(reading.residual for reading in own)
    flow = tables.flow[tables.flow["parameterization"] != "CACO"]
    in_mu, in_alpha = float(flow[["mu_qk", "mu_ov"]].max().max()), float(flow["alpha"].max())
    verdict = "Yes" if max(in_mu, in_alpha, largest) < 0.1 else "Only roughly"
    in_time = abs(rescaled["time_collapsed"] / rescaled["time_factorized"] - 1).max()
    off = max(abs(reading.r / reading.run.ratio - 1) for reading in readings)
    identified = sum(reading.best is reading.run.parameterization for reading in readings)
    answer = [
        f"{verdict}: at the times of their checkpoints the factorized runs are within {percent(in_mu)} of the rescaled "
        f"equations in μ_QK and μ_OV and within {number(in_alpha, 2)} in α, and they satisfy their first "
        f"integrals within {percent(largest)} of the root mean square change of μ_QK over the run. Nothing is fitted.",
        f"From the weights alone, r is recovered within {percent(off)} in every run, and the right one of the four "
        f"parameterizations is identified in {identified} of {len(readings)} runs.",
        f"Collapsed runs trained at the rate η·2σμ(t) are compared with the factorized ones: at equal loss the scales "
        f"are within {percent(rescaled['difference'].max())} of each other, and the times within {percent(in_time)}.",
    ]
    return {"answer": answer, "rows": rows}


def growth(readings: list[GrowthComparison], style: dict[float, int]) -> dict[str, Any]:
    """Return each law in its own coordinates, and how well every law fits every run before saturation.

    Args:
        readings: The growth of each run.
        style: The number of the drawing style of each ratio.
    """
    rows, panels = [], []
    for chosen in Parameterization:
        series = []
        for reading in readings:
            if reading.run.parameterization is not chosen or reading.fits is None:
                continue
            x, y = straight_line(chosen, reading.series["mu_qk"].to_numpy(), reading.series["mu_ov"].to_numpy())
            line = y[0] + reading.slope_predicted * (x - x[0])
            # Every slope is proportional to r, so that against r times x all runs of a parameterization share one line.
            series.append(Series(reading.run.ratio * (x - x[0]), line, style[reading.run.ratio]))
            series.append(Series(reading.run.ratio * (x - x[0]), y, style[reading.run.ratio], dots=True))
            cells = [
                {"residual": fit.residual, "best": reading.decided and law is reading.fits.best}
                for law, fit in reading.fits.fits.items()
            ]
            own = reading.fits.fits[chosen]
            rows.append(
                {
                    "parameterization": chosen.value,
                    "ratio": reading.run.ratio,
                    "count": reading.fits.samples,
                    "cells": cells,
                    "slope": own.slope,
                    "slope_predicted": reading.slope_predicted,
                }
            )
        x_label, y_label = _LAW_AXES[chosen]
        panels.append(
            draw(
                Panel(
                    f"{chosen.value}: {y_label} against {x_label}",
                    f"{chosen.value}: {_LAW_WORDS[chosen]}, before saturation",
                    x_label,
                    y_label,
                    series,
                )
            )
        )
    decided = [reading for reading in readings if reading.decided and reading.fits is not None]
    right = [reading for reading in decided if reading.fits and reading.fits.best is reading.run.parameterization]
    names = ", ".join(f"{chosen.value}: {_LAW_WORDS[chosen]}" for chosen in Parameterization)
    answer = [
        f"Theory gives each parameterization its own law: {names}. In {len(right)} of the {len(decided)} runs that "
        f"grow enough before saturation to decide, the law of the run's own parameterization fits best.",
    ]
    confirmed = {reading.run.parameterization for reading in right}
    if len(right) == len(decided) and confirmed == set(Parameterization):
        answer.append(
            "So the log-squared growth of CACO does not survive factorization: a factorized output makes it "
            "logarithmic, and factorized attention exponential in μ_OV or its square, until attention saturates."
        )
    left_out = [reading.run.name for reading in readings if reading.fits is None]
    if left_out:
        answer.append(
            f"These runs have fewer than three checkpoints before saturation and were left out: {', '.join(left_out)}."
        )
    return {
        "answer": answer,
        "panels": panels,
        "rows": mark_changes(rows, "parameterization"),
        "laws": [law.value for law in Parameterization],
        "criterion": "until 1 − α has fallen by a tenth",
    }


def preconditioner(tables: Tables) -> dict[str, Any]:
    """Return the steps that factorized training took, compared with those of Omega(C)."""
    reproduction, measured, table = tables.reproduction, tables.measured, tables.preconditioner
    balanced, unbalanced = (table[table["kind"] == kind] for kind in ("balanced", "unbalanced"))
    spread = table[table["kind"] == "spread"]
    lines: dict[str, list[Series]] = {"cosine": [], "error": []}
    legend = []
    shown = [
        (run, circuit, operator)
        for kind, operator in (("spread", "omega"), ("spread", "gradient"), ("unbalanced", "omega"))
        for run in reproduction.of_kind(kind)
        for circuit in ("qk", "ov")
    ]
    for position, (run, circuit, operator) in enumerate(shown):
        over = measured[run.name]
        over = over[over["time"] > 0]
        start = "balanced, spread" if run.kind == "spread" else run.kind
        step = "Ω(C)G" if operator == "omega" else "G alone"
        legend.append({"swatch": swatch(position), "label": f"W_{circuit.upper()}, {start} start: {step}"})
        for quantity, series in lines.items():
            column = over[f"{operator}_{quantity}_{circuit}"]
            series.append(Series(over["time"], column, position))
            series.append(Series(over["time"], column, position, dots=True))
    panels = [
        draw(
            Panel(
                title,
                f"{title} against time, from a balanced start with spread singular values and from an unbalanced one",
                r"time ($\eta_{OV} = 1$)",
                "",
                lines[quantity],
                x_log=True,
                y_log=quantity == "error",
            )
        )
        for quantity, title in (
            ("cosine", "cosine with the step taken"),
            ("error", "relative error of the step"),
        )
    ]
    all_balanced = pd.concat([balanced, spread])
    smallest, largest = all_balanced["omega_cosine"].min(), unbalanced["omega_cosine_start"].max()
    first_steps = " and ".join(
        f"{cosine:.3f} (W_{circuit})"
        for circuit, cosine in zip(unbalanced["circuit"], unbalanced["omega_cosine_start"], strict=True)
    )
    (left_balance,) = reproduction.of_kind("unbalanced")
    course = measured[left_balance.name].dropna(subset=["omega_cosine_qk", "omega_cosine_ov"])
    imbalances = "; ".join(
        f"the imbalance of W_{side.upper()} goes from "
        f"{number(course[f'imbalance_{side}'].iloc[0], 2)} to {number(course[f'imbalance_{side}'].iloc[-1], 2)} and "
        f"the cosine from {course[f'omega_cosine_{side}'].iloc[0]:.3f} to {course[f'omega_cosine_{side}'].iloc[-1]:.6f}"
        for side in ("qk", "ov")
    )
    answer = [
        f"With balanced factors, {'yes' if smallest > 0.999 else 'not quite'}: over every saved step of every "
        f"factorized circuit the cosine is at least {smallest:.6f} and the relative error at most "
        f"{percent(all_balanced['omega_error'].max())}. The error of the exact operator, which leaves out only the "
        f"second order of the step, is at most {percent(all_balanced['exact_error'].max())}.",
        f"On the fixed directions all singular values are equal, so Ω is a scalar and only the size of the step tests "
        f"it. The balanced run that starts with spread singular values also tests the direction: there the cosine of G "
        f"without a preconditioner falls to {spread['gradient_cosine'].min():.3f}, and that of Ω(C)G is never "
        f"below {spread['omega_cosine'].min():.6f}.",
        f"Without balance, {'no' if largest < 0.99 else 'nearly'}: from the unbalanced start the first step has a "
        f"cosine of {first_steps}, and the error of Ω(C)G is {percent(unbalanced['omega_error'].max())} at worst, "
        f"while that of the exact operator AAᵀG + GBᵀB stays within {percent(unbalanced['exact_error'].max())}. "
        f"Gradient flow conserves AᵀA − BBᵀ, so its share shrinks as the factors grow; from the first saved step to "
        f"the last, {imbalances}.",
    ]
    return {
        "answer": answer,
        "panels": panels,
        "legend": legend,
        "rows": mark_changes(table.to_dict("records"), "parameterization"),
    }
