"""A grid of small curves, one for each head: all share their axes, and each is shaded by its last value."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from markupsafe import Markup
from matplotlib.colors import to_rgb

from ...analyses.inline_svg import path_through
from .heat_maps import STRONGEST
from .panels import COLOURS

#: The size of a curve in its own units, of which its points are whole numbers; the page stretches it to the room that
#: there is.
_WIDTH, _HEIGHT = 200, 80
#: The share of the height above and below the curves.
_MARGIN = 0.06


@dataclass(frozen=True)
class SmallMultiples:
    """Curves over one axis, laid out in rows and columns.

    Attributes:
        label: What the grid shows, for readers who cannot see it.
        rows: The labels of the rows.
        columns: The labels of the columns.
        x: The horizontal coordinates, in ascending order.
        y: The vertical coordinates of each curve; NaN stands for a missing value.
        names: The name of each curve, shown when it is pointed at.
        written: The last value of each curve in words; an empty text where there is no curve.
        log: Whether the vertical axis is logarithmic; values that are not positive are then left out.
    """

    label: str
    rows: Sequence[str]
    columns: Sequence[str]
    x: Float[np.ndarray, " point"]
    y: Float[np.ndarray, "row column point"]
    names: Sequence[Sequence[str]]
    written: Sequence[Sequence[str]]
    log: bool = False


def scale_of(grid: SmallMultiples) -> tuple[float, float] | None:
    """Return the smallest and the largest value of all curves, which is the scale that they share; None without any."""
    shown = grid.y[np.isfinite(grid.y) & ((grid.y > 0) | (not grid.log))]
    return (float(shown.min()), float(shown.max())) if shown.size else None


def draw_small_multiples(grid: SmallMultiples) -> Markup:
    """Draw a grid as HTML, in elements of the classes multiples, row, column and multiple.

    Args:
        grid: The grid.
    """
    heights = _heights(grid)
    x = _along(grid.x) * _WIDTH
    red, green, blue = (round(255 * part) for part in to_rgb(COLOURS[0]))
    cells = [Markup('<span class="column"></span>')]
    cells += [Markup('<span class="column">{}</span>').format(label) for label in grid.columns]
    for row, label in enumerate(grid.rows):
        cells.append(Markup('<span class="row">{}</span>').format(label))
        for column in range(len(grid.columns)):
            known = np.flatnonzero(np.isfinite(heights[row, column]))
            if not known.size:
                cells.append(Markup('<span class="multiple"></span>'))
                continue
            curve = heights[row, column][known]
            shade = f"rgb({red} {green} {blue} / {STRONGEST * curve[-1]:.3f})"
            y = _HEIGHT * (1 - _MARGIN - (1 - 2 * _MARGIN) * curve)
            cells.append(
                Markup(
                    '<span class="multiple" style="background: {}" title="{}: {}"><svg viewBox="0 0 {} {}" '
                    'preserveAspectRatio="none" aria-hidden="true"><path d="{}" fill="none" stroke="currentColor" '
                    'vector-effect="non-scaling-stroke"/></svg><b>{}</b></span>'
                ).format(
                    shade,
                    grid.names[row][column],
                    grid.written[row][column],
                    _WIDTH,
                    _HEIGHT,
                    path_through(x[known], y, _WIDTH),
                    grid.written[row][column],
                )
            )
    return Markup('<div class="multiples" role="img" aria-label="{}" style="--columns: {}">{}</div>').format(
        grid.label, len(grid.columns), Markup("").join(cells)
    )


def _heights(grid: SmallMultiples) -> Float[np.ndarray, "row column point"]:
    """Where each value stands on the shared scale, from 0 to 1; NaN for what is not shown."""
    scale = scale_of(grid)
    if scale is None:
        return np.full_like(grid.y, np.nan)
    low, high = scale
    values = np.where((grid.y >= low) & (grid.y <= high), grid.y, np.nan)
    if low == high:
        return np.where(np.isnan(values), np.nan, 0.5)
    if grid.log:
        # Differences of logarithms, since a quotient of the ends may overflow.
        return (np.log(values) - np.log(low)) / (np.log(high) - np.log(low))
    # Halves, since the difference of the ends may overflow.
    return (values / 2 - low / 2) / (high / 2 - low / 2)


def _along(x: Float[np.ndarray, " point"]) -> Float[np.ndarray, " point"]:
    """Where each point stands on the horizontal axis, from 0 to 1."""
    return (x - x[0]) / (x[-1] - x[0]) if x[-1] > x[0] else np.zeros_like(x)
