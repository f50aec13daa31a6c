"""Figures with their intervals, as the cells of a table."""

from typing import Any

import numpy as np
import pandas as pd


def share(value: float) -> str:
    """Return a share, or a difference of shares, to three decimal places: what is below is rounding of the model."""
    if not np.isfinite(value):
        return "–"
    return f"{round(value, 3) + 0.0:.3f}".replace("-", "−")


def cell_of(row: Any, column: str = "value") -> dict[str, Any]:
    """Return a figure and its interval, if it has one, as they are printed, and the figure itself."""
    return {
        "value": share(row[column]),
        "interval": f"{share(row['low'])} to {share(row['high'])}" if np.isfinite(row["low"]) else "",
        "number": float(row[column]),
        "best": False,
    }


def row_where(table: pd.DataFrame, **where: str) -> dict[str, Any]:
    """Return the one row whose columns have those values."""
    for column, value in where.items():
        table = table[table[column] == value]
    (row,) = table.to_dict("records")
    return {str(column): value for column, value in row.items()}
