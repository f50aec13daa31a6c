"""Heat maps as inline SVG. Each cell shows its value as a number and as a shade."""

from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib as mpl
import numpy as np
from markupsafe import Markup
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from ...analyses.inline_svg import inline_svg, literal
from .panels import COLOURS, FOREGROUND, STYLE

#: Opacity of the strongest shade. Text in the page's own colour stays readable on it, in light and in dark mode.
STRONGEST = 0.55
#: Least width in inches. The page scales every figure to the room there is.
_NARROWEST = 4.2


@dataclass(frozen=True)
class HeatMap:
    """A table of values that is drawn as shaded cells of one size.

    Attributes:
        title: The title above the map, in plain text or mathtext; `literal` makes a text from an input plain.
        description: What the map shows, for readers who cannot see it.
        values: [row, column], the first row at the top. Values are at least 0; NaN stands for a missing value.
        written: The text in each cell; an empty string for none.
        x_label: The label of the horizontal axis.
        y_label: The label of the vertical axis.
        columns: The labels of the columns from left to right: one for each column, or one more, which are then the
            edges between columns.
        rows: The labels of the rows from top to bottom: one for each row, or one more, which are then the edges.
        strongest: The value that has the strongest shade; None for the largest value.
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
    """Draw a heat map as an SVG element for a page.

    Args:
        heat: The heat map.
        cell: Width and height of a cell in inches.
        font: Size of the text in the cells, in points.
    """
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
                        column + 0.5,
                        row + 0.5,
                        literal(heat.written[row][column]),
                        ha="center",
                        va="center",
                        fontsize=font,
                    )
        axes.set_xlim(0, columns)
        axes.set_ylim(rows, 0)
        axes.set_xticks(_ticks(heat.columns, columns), map(literal, heat.columns))
        axes.set_yticks(_ticks(heat.rows, rows), map(literal, heat.rows))
        axes.tick_params(length=0)
        axes.set_title(heat.title, loc="left")
        axes.set_xlabel(heat.x_label)
        axes.set_ylabel(heat.y_label)
        return inline_svg(figure, heat.description, foreground=FOREGROUND)


def _ticks(labels: Sequence[str], cells: int) -> np.ndarray:
    """Return where labels stand: in the middle of cells, or at their edges if there is one more label than cells."""
    return np.arange(cells + 1) if len(labels) == cells + 1 else np.arange(cells) + 0.5
