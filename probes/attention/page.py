"""The HTML that a notebook shows for a probe: one line of text, the figure, and a table that can be unfolded."""

import pandas as pd
from jinja2 import Environment
from markupsafe import Markup
from matplotlib.figure import Figure

from ...analyses.inline_svg import inline_svg
from .figure import FOREGROUND

#: Number of rows of the table that are shown; a model with a thousand heads would fill the notebook.
_SHOWN = 200

_TEMPLATE = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
    """<div class="qkov-probe" style="font-family: system-ui, sans-serif; font-size: 13px; max-width: 1100px">
<style>.qkov-probe td, .qkov-probe th { padding: 1px 8px; text-align: right }</style>
<p style="margin: 0 0 6px"><strong>{{ name }}</strong> · {{ words }}</p>
{{ figure }}
{% if table %}
<details><summary style="cursor: pointer">table{% if left %} (the first {{ shown }} of {{ shown + left }} heads; all: \
probe.table()){% endif %}</summary>
<div style="overflow-x: auto">{{ table }}</div></details>
{% endif %}
</div>"""
)


def message_page(name: str, message: str) -> str:
    """Return a fragment of HTML that shows a message instead of the results of a probe.

    Args:
        name: The name of the probe.
        message: The message.
    """
    return _TEMPLATE.render(name=name, words=message, figure="", table="")


def page(
    name: str, table: pd.DataFrame, examples: pd.DataFrame | None, figure: Figure, mode: str = "", left_out: str = ""
) -> str:
    """Return a fragment of HTML that needs no other file.

    Args:
        name: The name of the probe.
        table: One row for each head, as `AttentionProbe.table` returns it.
        examples: One row for each example, as `AttentionProbe.examples` returns it; None if it refuses to.
        figure: The drawing of the table.
        mode: The mode that the model ran in, in words.
        left_out: The calls that were left out and why, in words.
    """
    parts = [] if examples is None else _of_examples(examples)
    if left_out:
        parts.append(f"partial: {left_out}")
    if mode:
        parts.append(mode)
    flagged = int((~table["finite"]).sum())
    if flagged:
        parts.append(f"{flagged} heads have maps that are not finite")
    if "unknown" in table:
        parts += [f"not known: {reason}" for reason in table["unknown"].unique() if reason]
    # Underscores become spaces, so that long headings may take two lines.
    shown = (
        table.head(_SHOWN)
        .rename(columns=lambda name: name.replace("_", " "))
        .to_html(index=False, border=0, na_rep="", float_format=lambda value: f"{value:.3f}", justify="right")
    )
    return _TEMPLATE.render(
        name=name,
        words="; ".join(parts) or "one row of attention for each sequence",
        figure=inline_svg(
            figure,
            f"Attention of {name} by layer and head",
            foreground=FOREGROUND,
            style="width: 100%; height: auto",
        ),
        table=Markup(shown),
        shown=min(len(table), _SHOWN),
        left=max(len(table) - _SHOWN, 0),
    )


def _of_examples(examples: pd.DataFrame) -> list[str]:
    if examples.empty:
        return []
    count = "1 example" if len(examples) == 1 else f"{len(examples)} examples"
    parts = [f"{count}, {int(examples['tokens'].sum())} tokens"]
    without = int((examples["relevant"].astype(float) == 0).sum())
    if without:
        parts.append(f"{without} of {len(examples)} without a relevant token, left out of what is said about these")
    rolled = examples[["rollout", "chance"]].astype(float).dropna()
    if len(rolled):
        parts.append(f"rollout on relevant tokens {rolled['rollout'].mean():.3f}, chance {rolled['chance'].mean():.3f}")
    return parts
