"""Matplotlib figures as SVG elements inside an HTML page; the reports and the probes' notebook pages share it."""

import io
import itertools
import re
import warnings

import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure

from ..circuits.visible_text import visible, visible_lines

_serial = itertools.count()


def literal(text: str) -> str:
    """Return a text from an input so that matplotlib draws it as it is: a dollar sign would begin a formula."""
    return visible(text).replace("$", r"\$")


def inline_svg(figure: Figure, description: str, *, foreground: str, style: str = "") -> Markup:
    """Return a figure as an SVG element that can stand on a page beside others.

    The element has no metadata and no XML header, its ids occur in no other element of this process, and what is drawn
    in the foreground colour takes the colour of the page's text, by day and by night.

    Args:
        figure: The figure.
        description: What the figure shows, for readers who cannot see it.
        foreground: The colour, as #rrggbb, in which the figure draws text and axes.
        style: CSS declarations for the element.
    """
    text = io.StringIO()
    with warnings.catch_warnings():
        # Characters that the font does not have are drawn as boxes.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    prefix = f"figure{next(_serial)}-"
    svg = re.sub(r'\bid="', f'id="{prefix}', svg)
    svg = svg.replace("url(#", f"url(#{prefix}").replace('href="#', f'href="#{prefix}')
    svg = svg.replace(foreground, "currentColor")
    attributes = Markup(' role="img" aria-label="{}"').format(visible_lines(description))
    attributes += Markup(' style="{}"').format(style) if style else ""
    return Markup(svg.replace("<svg", f"<svg{attributes}", 1))


def path_through(x: np.ndarray, y: np.ndarray, width: int) -> str:
    """Return the path of an SVG element through some points, of which whole numbers are kept.

    Args:
        x: The horizontal coordinates.
        y: The vertical coordinates.
        width: The width of the drawing; a single point is drawn as a line through all of it.
    """
    if len(x) == 1:
        return f"M0 {y[0]:.0f}H{width}"
    return "M" + "L".join(f"{across:.0f} {down:.0f}" for across, down in zip(x, y, strict=True))
