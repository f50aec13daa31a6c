"""The tables of a probe: one row for each head, or for each example."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import torch

from ...analyses.attention.maps.modes import EVALUATION
from ...circuits.weights.layer_keys import LayerKey
from .batch import ExampleValues
from .head_sums import HeadSums

#: The columns of measures, in order.
COLUMNS = (
    "entropy",
    "largest",
    "relevant",
    "chance",
    "relevant_at_readout",
    "chance_at_readout",
    "sink",
    "self",
    "previous",
    "next",
    "no_token",
    "max_logit",
)


def head_table(
    sums: Mapping[LayerKey, Mapping[str, HeadSums]],
    modes: Mapping[LayerKey, Sequence[str]],
    hook_points: Mapping[LayerKey, str],
    left_out: str,
) -> pd.DataFrame:
    """Return a row for each head: stack, layer, head, queries, measures, finite, unknown, partial, mode, hook.

    Args:
        sums: The sums by layer and measure; `queries` holds the number of queries.
        modes: The modes that each layer ran in; without any other than evaluation there is no column for them.
        hook_points: The names of the hook points of the layers; without any there is no column for them.
        left_out: The calls that were left out and why, in words; if it is empty there is no column `partial`.
    """
    parts = []
    for (stack, layer), by_name in sums.items():
        means = {name: by_name[name].mean().numpy() for name in COLUMNS if name in by_name}
        heads = len(by_name["queries"].total)
        measured = [(by_name[name].count.numpy() > 0) & (not by_name[name].unknown) for name in means]
        unknown: dict[str, list[str]] = {}
        for name in means:
            for reason in by_name[name].unknown or _why_nothing_counts(name, by_name):
                unknown.setdefault(reason, []).append(name)
        finite = [~seen | np.isfinite(mean) for seen, mean in zip(measured, means.values(), strict=True)]
        parts.append(
            pd.DataFrame(
                {
                    "stack": stack,
                    "layer": layer,
                    "head": np.arange(heads),
                    "queries": by_name["queries"].total.numpy().astype(int),
                    **means,
                    "finite": np.logical_and.reduce(finite) if finite else np.ones(heads, dtype=bool),
                    "unknown": "; ".join(f"{', '.join(names)}: {reason}" for reason, names in unknown.items()),
                    "partial": left_out,
                    "mode": "; ".join(modes.get((stack, layer), [EVALUATION.words])),
                    "hook": hook_points.get((stack, layer)),
                }
            )
        )
    table = pd.concat(parts, ignore_index=True)
    ordered = ["stack", "layer", "head", "queries", *(name for name in COLUMNS if name in table), "finite"]
    if (table["unknown"] != "").any():
        ordered.append("unknown")
    if left_out:
        ordered.append("partial")
    if (table["mode"] != EVALUATION.words).any():
        ordered.append("mode")
    if hook_points:
        ordered.append("hook")
    stacks = table["stack"].nunique() > 1
    return table[ordered if stacks else ordered[1:]]


def _why_nothing_counts(name: str, by_name: Mapping[str, HeadSums]) -> tuple[str, ...]:
    """Return why a measure of a layer has no value in any head; nothing if it has one."""
    if by_name[name].count.any():
        return ()
    if not by_name["queries"].total.any():
        return ("no query was counted",)
    if name.startswith(("relevant", "chance")):
        return ("no example has a relevant token",)
    return ("no query has such a token",)


def example_table(values: Sequence[ExampleValues]) -> pd.DataFrame:
    """Return a row for each example: example, tokens, readout, relevant, chance, rollout, attention."""
    parts = []
    for call in values:
        missing = np.full(len(call.tokens), np.nan)
        heads = list(call.heads.values())
        parts.append(
            pd.DataFrame(
                {
                    "tokens": call.tokens.numpy(),
                    "readout": call.readout.numpy(),
                    "relevant": missing if call.relevant is None else call.relevant.numpy(),
                    "chance": missing if call.chance is None else call.chance.numpy(),
                    "rollout": missing if call.rollout is None else call.rollout.numpy(),
                    "attention": torch.cat(heads, dim=1).mean(dim=1).numpy() if heads else missing,
                }
            )
        )
    columns = ["tokens", "readout", "relevant", "chance", "rollout", "attention"]
    table = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=columns)
    table.insert(0, "example", np.arange(len(table)))
    return table


def head_rows(values: Sequence[ExampleValues]) -> pd.DataFrame:
    """Return a row for each example and head: example, stack, layer, head, attention on the relevant tokens."""
    parts, seen = [], 0
    for call in values:
        for (stack, layer), attention in call.heads.items():
            examples, heads = attention.shape
            parts.append(
                pd.DataFrame(
                    {
                        "example": seen + np.arange(examples).repeat(heads),
                        "stack": stack,
                        "layer": layer,
                        "head": np.tile(np.arange(heads), examples),
                        "attention": attention.flatten().numpy(),
                    }
                )
            )
        seen += len(call.tokens)
    columns = ["example", "stack", "layer", "head", "attention"]
    table = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=columns)
    table = table.sort_values("example", kind="stable", ignore_index=True)
    return table if table["stack"].nunique() > 1 else table.drop(columns="stack")
