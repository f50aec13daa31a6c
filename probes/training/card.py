"""The HTML that a notebook shows for a circuit probe: a row with a small curve for each figure."""

from collections.abc import Sequence

import numpy as np
from jinja2 import Environment

from ...analyses.inline_svg import path_through
from .history import Curve

_WIDTH, _HEIGHT = 240, 30

_TEMPLATE = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
    """<div class="qkov-card" style="font-family: system-ui, sans-serif; font-size: 13px; max-width: 900px">
<style>.qkov-card td, .qkov-card th { padding: 1px 10px; text-align: right; font-variant-numeric: tabular-nums }
.qkov-card th[scope=row] { text-align: left; font-weight: 400 }</style>
<p style="margin: 0 0 6px"><strong>{{ name }}</strong>{% for word in words %} · {{ word }}{% endfor %}</p>
{% if rows %}
<table><thead><tr><th></th><th>first</th><th>last</th><th>over the steps</th><th>largest head</th></tr></thead>
<tbody>{% for row in rows %}
<tr><th scope="row">{{ row.title }}</th><td>{{ row.first }}</td><td>{{ row.last }}</td>
<td><svg width="{{ width }}" height="{{ height }}" viewBox="0 0 {{ width }} {{ height }}" role="img" aria-label="{{ \
row.title }} from step {{ row.start }} to step {{ row.end }}"><path d="{{ row.path }}" fill="none" \
stroke="currentColor" stroke-width="1.3"/></svg></td><td>{{ row.largest }}</td></tr>
{% endfor %}</tbody></table>
{% endif %}
</div>"""
)


def card(name: str, words: Sequence[str], curves: Sequence[Curve]) -> str:
    """Return a fragment of HTML that needs no script and no other file.

    Args:
        name: What the card is of.
        words: What is said beside the name.
        curves: The figures; each curve has its own scale.
    """
    rows = []
    for curve in curves:
        steps, values = list(curve.values), list(curve.values.values())
        rows.append(
            {
                "title": curve.title,
                "first": f"{values[0]:.4g}",
                "last": f"{values[-1]:.4g}",
                "start": steps[0],
                "end": steps[-1],
                "path": _path(np.asarray(steps, dtype=float), np.asarray(values)),
                "largest": curve.largest,
            }
        )
    return _TEMPLATE.render(name=name, words=words, rows=rows, width=_WIDTH, height=_HEIGHT)


def _path(steps: np.ndarray, values: np.ndarray) -> str:
    x = _share(steps) * _WIDTH
    return path_through(x, 2 + (1 - _share(values)) * (_HEIGHT - 4), _WIDTH)


def _share(values: np.ndarray) -> np.ndarray:
    """Where each value stands between the smallest and the largest one, from 0 to 1; 0.5 if all are equal."""
    low, high = values.min() / 2, values.max() / 2
    return (values / 2 - low) / (high - low) if high > low else np.full_like(values, 0.5)
