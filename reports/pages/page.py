"""Pages, each one self-contained HTML file, made from templates that escape everything they are given."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ...circuits.storage.atomic_write import write_atomically
from ...circuits.visible_text import visible_lines


def share(value: float) -> str:
    """Return a share, or a difference of shares, to three decimals; smaller amounts are the model's own rounding."""
    if not np.isfinite(value):
        return "–"
    return f"{round(value, 3) + 0.0:.3f}".replace("-", "−")


def cell_of(row: Any, column: str = "value") -> dict[str, Any]:
    """Return the content of a table cell: a value and, if there is one, its interval, formatted, and the plain number.

    Args:
        row: A row with the columns `low` and `high`.
        column: The column of the value.
    """
    return {
        "value": share(row[column]),
        "interval": f"{share(row['low'])} to {share(row['high'])}" if np.isfinite(row["low"]) else "",
        "number": float(row[column]),
        "best": False,
    }


def row_where(table: pd.DataFrame, **where: str) -> dict[str, Any]:
    """Return the only row whose columns have the given values.

    Args:
        table: A table in which exactly one row matches.
        where: The value of each column.
    """
    for column, value in where.items():
        table = table[table[column] == value]
    (row,) = table.to_dict("records")
    return {str(column): value for column, value in row.items()}


_SUPERSCRIPTS = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")


def write_page(path: Path, template: str, **content: Any) -> Path:
    """Render a template to an HTML file and return its path. The file is written completely or not at all.

    Args:
        path: The path of the HTML file.
        template: The file name of the template.
        content: The variables of the template.

    Raises:
        CallError: The path cannot be written to.
    """
    return write_html(path, rendered(template, **content))


def rendered(template: str, **content: Any) -> str:
    """Render a template to HTML.

    Args:
        template: The file name of the template.
        content: The variables of the template.
    """
    return _environment().get_template(template).render(**content)


def write_html(path: Path, page: str) -> Path:
    """Write a page to an HTML file and return its path. The file is written completely or not at all.

    Args:
        path: The path of the HTML file.
        page: The HTML.

    Raises:
        CallError: The path cannot be written to.
    """
    write_atomically(path, page.encode())
    return path


def number(value: float | None, digits: int = 4) -> str:
    """Format a number for a page.

    Args:
        value: The number; None and NaN are shown as a dash.
        digits: The number of significant digits.
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    # Rounding comes first, since it can change the exponent: 9.99 to two digits is 10.
    mantissa, _, power = f"{value:.{digits - 1}e}".partition("e")
    exponent = int(power)
    if -4 <= exponent < 6:
        return f"{float(f'{mantissa}e{power}'):.{max(digits - 1 - exponent, 0)}f}".replace("-", "−")
    raised = str(exponent).translate(_SUPERSCRIPTS)
    return f"{mantissa} × 10{raised}".replace("-", "−")


def percent(value: float | None, digits: int = 2) -> str:
    """Format a share as a percentage with that many significant digits; None and NaN are shown as a dash."""
    if value is None or math.isnan(value):
        return "–"
    return f"{number(100 * value, digits)} %"


def cosine(value: float | None) -> str:
    """Format a cosine with six decimals, since near 1 they say more than significant digits."""
    return "–" if value is None or math.isnan(value) else f"{value:.6f}".replace("-", "−")


def subscripts(text: str) -> Markup:
    """Return a text as HTML with the letters of W_QK, μ_OV and the like as subscripts and ^½ as a superscript."""
    lowered = re.sub(r"([Wμη])_([A-Z]{1,2})", r"\1<sub>\2</sub>", str(Markup.escape(visible_lines(text))))
    return Markup(lowered.replace("^½", "<sup>½</sup>"))


def listed(values: Sequence[float]) -> str:
    """Return numbers as a list within a sentence: 1, 2 and 3."""
    *most, last = (f"{value:g}" for value in values)
    return f"{', '.join(most)} and {last}" if most else last


def mark_changes(rows: Sequence[Mapping[Any, Any]], column: str) -> list[dict[Any, Any]]:
    """Return the rows with the key `first`: whether a column's value changes there, where a table draws a rule."""
    return [
        {**row, "first": position > 0 and row[column] != rows[position - 1][column]}
        for position, row in enumerate(rows)
    ]


def _printable(value: Any) -> Any:
    """Return a text from an input so that it cannot turn the page around; what is HTML already stays as it is."""
    return visible_lines(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_printable,
    )
    environment.filters |= {"number": number, "percent": percent, "subscripts": subscripts, "cosine": cosine}
    return environment
