"""The figure of a probe: a grid of layers and heads for each measure, and the maps that were kept."""

import io
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from ...analyses.inline_svg import literal
from ...circuits.errors import CallError
from ...circuits.weights.layer_keys import layer_name
from .tables import COLUMNS

#: The colour of all lines and letters, which the page replaces by its own.
FOREGROUND = "#1b1b1d"
_STYLE: dict[Any, Any] = {
    "axes.edgecolor": FOREGROUND,
    "axes.labelcolor": FOREGROUND,
    "axes.linewidth": 0.5,
    "axes.titlesize": 9,
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "image.cmap": "viridis",
    "svg.fonttype": "path",
    "text.color": FOREGROUND,
    "xtick.color": FOREGROUND,
    "ytick.color": FOREGROUND,
}
#: The width of the figure, and the height of a row of grids and of maps, in inches.
_WIDTH, _PANEL, _MAP = 11.6, 2.5, 5.0
_PER_ROW, _MAPS_PER_ROW = 4, 2
#: Rows of softmax weights in half precision may lack this much of 1.
_ROUNDING = 5e-3
#: The most maps that are drawn; more would take many pages.
_MAPS = 12
#: The most tokens whose labels are legible.
_LABELLED = 60


class ShownFigure(Figure):
    """A figure that a notebook shows, whether or not matplotlib is set up for the notebook."""

    def _repr_png_(self) -> bytes:
        picture = io.BytesIO()
        self.savefig(picture, format="png", dpi=110)
        return picture.getvalue()


MapKey = tuple[int, int] | tuple[str, int, int]


def draw(
    table: pd.DataFrame,
    maps: Mapping[MapKey, Float[Tensor, "query key"]],
    *,
    measures: Sequence[str] | None = None,
    tokens: Sequence[str] | None = None,
) -> Figure:
    """Return the figure.

    Args:
        table: The table of a probe.
        maps: The kept maps of one example; the first twelve are drawn.
        measures: Columns of the table to draw; all that were measured by default. An empty list draws only maps.
        tokens: Labels of the tokens of the example.

    Raises:
        CallError: A measure is not a column, or the number of labels differs from the number of keys of a map.
    """
    known = [name for name in COLUMNS if name in table and bool(table[name].notna().any())]
    if isinstance(measures, str) or any(name not in table or name not in COLUMNS for name in measures or ()):
        raise CallError(f"measures should be some of {', '.join(known)}, which the table has; got {measures!r}")
    names = list(measures) if measures is not None else [name for name in known if _says_something(table, name)]
    stacks = list(table.groupby("stack", sort=False)) if "stack" in table else [("", table)]
    panels = [(part, name, str(stack)) for stack, part in stacks for name in names]
    shown = [(key, attention, tokens) for key, attention in list(maps.items())[:_MAPS]]
    bands: list[tuple[Sequence[Any], Callable[..., None], int, float]] = [
        band for band in ((panels, _grid, _PER_ROW, _PANEL), (shown, _map, _MAPS_PER_ROW, _MAP)) if band[0]
    ]
    heights = [height * math.ceil(len(drawn) / per_row) for drawn, _, per_row, height in bands]
    width = max(_WIDTH * min(len(drawn), per_row) / per_row for drawn, _, per_row, _ in bands) if bands else _WIDTH
    with mpl.rc_context(_STYLE):
        figure = ShownFigure(figsize=(width, sum(heights) or _PANEL), layout="constrained")
        parts = figure.subfigures(len(bands), 1, squeeze=False, height_ratios=heights)[:, 0] if bands else []
        for part, (drawn, draw_one, per_row, _) in zip(parts, bands, strict=True):
            rows, columns = math.ceil(len(drawn) / per_row), min(len(drawn), per_row)
            for number, arguments in enumerate(drawn):
                draw_one(part.add_subplot(rows, columns, number + 1), *arguments)
    return figure


def _says_something(table: pd.DataFrame, name: str) -> bool:
    """Return whether a grid is worth drawing: chance is in its measure's title, and causal heads have no next token."""
    shown = {"next": 0.0, "no_token": _ROUNDING}
    return not name.startswith("chance") and (name not in shown or bool((table[name].abs() > shown[name]).any()))


def _grid(axes: Axes, table: pd.DataFrame, name: str, stack: str) -> None:
    layers = list(dict.fromkeys(table["layer"]))
    values = table.pivot(index="layer", columns="head", values=name).loc[layers].to_numpy(dtype=float)
    top = float(np.nanmax(values)) if np.isfinite(values).any() else 1.0
    image = axes.imshow(values, vmin=0.0, vmax=top or 1.0, aspect="auto", interpolation="nearest")
    chance = name.replace("relevant", "chance")
    beside = ""
    if chance != name and chance in table:
        beside = f"\nchance {table[chance].mean():.2f}"
    axes.set_title(literal(f"{stack} {name.replace('_', ' ')}".strip()) + beside)
    axes.set_xlabel("head")
    axes.set_ylabel("layer")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    axes.yaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    _bar(axes, image)


def _map(axes: Axes, key: MapKey, attention: Float[Tensor, "query key"], tokens: Sequence[str] | None) -> None:
    stack, layer, head = key if len(key) == 3 else ("", *key)
    image = axes.imshow(attention.float().numpy(), vmin=0.0, vmax=1.0, interpolation="nearest")
    axes.set_title(literal(f"{layer_name(stack, layer)}, head {head}"))
    axes.set_xlabel("key")
    axes.set_ylabel("query")
    queries, keys = attention.shape
    if tokens is not None and len(tokens) != keys:
        raise CallError(f"{len(tokens)} labels of tokens were given for a map of {keys} keys")
    if tokens is not None and keys <= _LABELLED:
        labels = [literal(str(token)) for token in tokens]
        size = min(8.0, 260 / keys)
        axes.set_xticks(range(keys), labels, rotation=90, fontsize=size)
        axes.set_yticks(range(queries), labels[keys - queries :], fontsize=size)
    _bar(axes, image)


def _bar(axes: Axes, image: Any) -> None:
    figure = axes.figure
    bar = figure.colorbar(image, ax=axes, shrink=0.9, pad=0.02)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=2, labelsize=7)
    bar.ax.yaxis.set_major_locator(MaxNLocator(3))
