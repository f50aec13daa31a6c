"""Small charts as inline SVG: dots show what was measured, lines show what was predicted."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ...analyses.inline_svg import inline_svg

#: A colour that stands for the page's text colour, so that a chart follows the page into dark mode and print.
FOREGROUND = "#010203"
#: Settings of matplotlib for every chart.
STYLE: dict[Any, Any] = {
    "axes.edgecolor": FOREGROUND,
    "axes.formatter.limits": (-4, 7),
    "axes.formatter.useoffset": False,
    "axes.grid": True,
    "axes.labelcolor": FOREGROUND,
    "axes.linewidth": 0.7,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "grid.alpha": 0.15,
    "grid.color": FOREGROUND,
    "grid.linewidth": 0.6,
    "mathtext.fontset": "dejavusans",
    "svg.fonttype": "path",
    "svg.hashsalt": "qkov",
    "text.color": FOREGROUND,
    "xtick.color": FOREGROUND,
    "ytick.color": FOREGROUND,
}

#: Colours of middle lightness, legible on white and on near-black, and distinguishable without red or green.
COLOURS = ("#3a7ebf", "#e0792b", "#2f9e73", "#b45fb0", "#8a8f98", "#c9a227")
MARKERS = ("o", "s", "^", "D", "v", "P")
DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)))

Points = Sequence[float] | np.ndarray | pd.Series | pd.Index


@dataclass(frozen=True)
class Series:
    """A line or a row of dots.

    Attributes:
        x: The horizontal coordinates.
        y: The vertical coordinates. Points that are not finite are left out.
        style: The number of the colour, marker and dash.
        dots: Draw dots (measured values) instead of a line (predicted values, or a series in time).
        hollow: Draw large empty dots, which can be seen around others.
        band: The lower and upper edge of a shaded band around the line.
    """

    x: Points
    y: Points
    style: int = 0
    dots: bool = False
    hollow: bool = False
    band: tuple[np.ndarray, np.ndarray] | None = None


@dataclass(frozen=True)
class Panel:
    """A pair of axes with its series.

    Attributes:
        title: The title above the axes, in plain text or mathtext; `literal` makes a text from an input plain.
        description: What the panel shows, for readers who cannot see it.
        x_label: The label of the horizontal axis.
        y_label: The label of the vertical axis.
        series: The lines and dots.
        x_log: Whether the horizontal axis is logarithmic.
        y_log: Whether the vertical axis is logarithmic.
        x_reversed: Whether the horizontal axis runs from right to left.
        x_integer: Whether the horizontal axis has ticks at integers only.
        y_limits: The limits of the vertical axis; None for those that the series need.
        levels: Horizontal reference lines as (height, label).
    """

    title: str
    description: str
    x_label: str
    y_label: str
    series: list[Series] = field(default_factory=list)
    x_log: bool = False
    y_log: bool = False
    x_reversed: bool = False
    x_integer: bool = False
    y_limits: tuple[float | None, float | None] = (None, None)
    levels: tuple[tuple[float, str], ...] = ()


def draw(panel: Panel, width: float = 4.2, height: float = 3.0) -> Markup:
    """Draw a panel as an SVG element for a page.

    Args:
        panel: The panel.
        width: Width in inches.
        height: Height in inches.
    """
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width, height))
        # The margins are fixed so that panels below each other line up. Measuring the layout would also take as long
        # as drawing.
        left, right, bottom, top = 0.66 / width, 0.14 / width, 0.48 / height, 0.3 / height
        axes = figure.add_axes((left, bottom, 1 - left - right, 1 - bottom - top))
        for series in panel.series:
            _draw_series(axes, series)
        axes.set_title(panel.title, loc="left")
        axes.set_xlabel(panel.x_label)
        axes.set_ylabel(panel.y_label)
        if panel.x_log:
            axes.set_xscale("log")
        if panel.y_log:
            axes.set_yscale("log")
        if panel.x_reversed:
            axes.invert_xaxis()
        axes.set_ylim(*(around_a_constant(panel) or panel.y_limits))
        for axis, log in ((axes.xaxis, panel.x_log), (axes.yaxis, panel.y_log)):
            if not log:
                axis.set_major_locator(MaxNLocator(nbins=5, integer=panel.x_integer and axis is axes.xaxis))
        for level, label in panel.levels:
            axes.axhline(level, color=FOREGROUND, linewidth=0.8, linestyle=":", alpha=0.7)
            axes.annotate(
                label,
                (0.99, level),
                xycoords=("axes fraction", "data"),
                ha="right",
                va="bottom",
                fontsize=7.5,
                alpha=0.8,
            )
        return inline_svg(figure, panel.description, foreground=FOREGROUND)


def swatch(style: int, *, dots: bool = True, line: bool = True, hollow: bool = False) -> Markup:
    """Draw the sample of a style for a legend.

    Args:
        style: The number of the colour, marker and dash.
        dots: Draw the marker.
        line: Draw the line.
        hollow: Draw the marker empty.
    """
    colour = COLOURS[style % len(COLOURS)]
    shapes = {
        "o": '<circle cx="14" cy="7" r="3.6" {}/>',
        "s": '<rect x="10.6" y="3.6" width="6.8" height="6.8" {}/>',
        "^": '<path d="M14 2.8 18.2 10.6H9.8Z" {}/>',
        "D": '<path d="M14 2.4 18.6 7 14 11.6 9.4 7Z" {}/>',
        "v": '<path d="M14 11.2 18.2 3.4H9.8Z" {}/>',
        "P": '<path d="M12.4 2.6h3.2v2.8h2.8v3.2h-2.8v2.8h-3.2V8.6H9.6V5.4h2.8Z" {}/>',
    }
    fill = f'fill="none" stroke="{colour}" stroke-width="1.4"' if hollow else f'fill="{colour}"'
    dashes = ("", "6 3", "7 2 2 2", "2 2", "7 1", "4 1 1 1")[style % len(DASHES)]
    drawn = f'<path d="M0 7H28" stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"/>' if line else ""
    drawn += shapes[MARKERS[style % len(MARKERS)]].format(fill) if dots else ""
    return Markup(f'<svg class="swatch" width="28" height="14" viewBox="0 0 28 14" aria-hidden="true">{drawn}</svg>')


def around_a_constant(panel: Panel) -> tuple[float, float] | None:
    """Return limits for a panel whose values are all equal, so that the axis does not magnify rounding; else None."""
    drawn = np.concatenate([np.asarray(series.y, dtype=float) for series in panel.series] or [np.empty(0)])
    drawn = drawn[np.isfinite(drawn)]
    if panel.y_limits != (None, None) or not drawn.size or np.ptp(drawn) > 1e-6 * np.abs(drawn).max():
        return None
    middle = float(drawn.mean())
    return (0.9 * middle, 1.1 * middle) if middle > 0 else (middle - 1.0, middle + 1.0)


def _draw_series(axes, series: Series) -> None:
    x, y = np.asarray(series.x, dtype=float), np.asarray(series.y, dtype=float)
    shown = np.isfinite(x) & np.isfinite(y)
    colour = COLOURS[series.style % len(COLOURS)]
    if series.dots:
        axes.plot(
            x[shown],
            y[shown],
            linestyle="none",
            marker=MARKERS[series.style % len(MARKERS)],
            markersize=7 if series.hollow else 4,
            color=colour,
            markerfacecolor="none" if series.hollow else colour,
            markeredgewidth=1.0 if series.hollow else 0.0,
        )
        return
    axes.plot(
        x[shown],
        y[shown],
        color=colour,
        linestyle=DASHES[series.style % len(DASHES)],
        linewidth=1.6,
        # A line through a single point would be invisible.
        marker=MARKERS[series.style % len(MARKERS)] if shown.sum() == 1 else None,
        markersize=4,
    )
    if series.band is not None:
        axes.fill_between(x, *series.band, color=colour, alpha=0.15, linewidth=0)
