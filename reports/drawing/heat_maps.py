"""Heat maps as inline SVG: every cell says its figure, and its shade repeats it."""

from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib as mpl
import numpy as np
from markupsafe import Markup
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from ...analyses.inline_svg import inline_svg
from .panels import COLOURS, FOREGROUND, STYLE

#: The strongest shade: text in the page's own colour still reads well on it, by day and by night.
STRONGEST = 0.55
#: Inches; the page makes every figure as wide as there is room.
_NARROWEST = 4.2


@dataclass(frozen=True)
class HeatMap:
    """A table of figures drawn as cells of one size.

    Attributes:
        title: above it.
        description: what it shows, for a reader who cannot see it.
        values: [row, column], the first row on top; none below 0, NaN where there is none.
        written: what stands in each cell; empty strings for nothing.
        x_label, y_label: of the axes.
        columns, rows: labels, from left to right and from top to bottom: one for each cell, or one more, which are then
            the edges between cells.
        strongest: the value of the strongest shade; the largest if None.
    """

    title: str
    description: str
    values: np.ndarray
    written: Sequence[Sequence[str]]
    x_label: str
    y_label: str
    columns: Sequence[str]
    rows: Sequence[str]
    strongest: float | None = None


def draw_heat_map(heat: HeatMap, cell: tuple[float, float] = (0.62, 0.42), font: float = 9) -> Markup:
    """Return a heat map as an SVG element for the page; sizes of a cell in inches at 100%."""
    rows, columns = heat.values.shape
    width, height = max(columns * cell[0] + 0.85, _NARROWEST), rows * cell[1] + 0.85
    strongest = heat.strongest or np.nanmax(heat.values, initial=0.0) or 1.0
    with mpl.rc_context({**STYLE, "axes.grid": False}):
        figure = Figure(figsize=(width, height))
        axes = figure.add_axes((0.7 / width, 0.5 / height, columns * cell[0] / width, rows * cell[1] / height))
        for row in range(rows):
            for column in range(columns):
                value = heat.values[row, column]
                shade = 0.0 if np.isnan(value) else STRONGEST * min(float(value) / strongest, 1.0)
                axes.add_patch(
                    Rectangle((column, row), 1, 1, facecolor=(*to_rgb(COLOURS[0]), shade), edgecolor=FOREGROUND, lw=0.2)
                )
                if heat.written[row][column]:
                    axes.text(
                        column + 0.5, row + 0.5, heat.written[row][column], ha="center", va="center", fontsize=font
                    )
        axes.set_xlim(0, columns)
        axes.set_ylim(rows, 0)
        axes.set_xticks(_places(heat.columns, columns), heat.columns)
        axes.set_yticks(_places(heat.rows, rows), heat.rows)
        axes.tick_params(length=0)
        axes.set_title(heat.title, loc="left")
        axes.set_xlabel(heat.x_label)
        axes.set_ylabel(heat.y_label)
        return inline_svg(figure, heat.description, foreground=FOREGROUND)


def _places(labels: Sequence[str], cells: int) -> np.ndarray:
    """In the middle of cells, or between them where there is a label more."""
    return np.arange(cells + 1) if len(labels) == cells + 1 else np.arange(cells) + 0.5
