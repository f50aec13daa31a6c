"""What a probe found as tables."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import torch

from ..maps.source import LayerKey
from .batch import ExampleFigures, HeadSums

#: Columns of measures in the order in which they stand.
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
)


def head_table(sums: Mapping[LayerKey, Mapping[str, HeadSums]]) -> pd.DataFrame:
    """Return a row for each head: stack, layer, head, queries, the means of its measures, finite.

    Args:
        sums: by layer and measure; queries has how many there were.
    """
    parts = []
    for (stack, layer), found in sums.items():
        means = {name: found[name].mean().numpy() for name in COLUMNS if name in found}
        heads = len(found["queries"].total)
        measured = [found[name].count.numpy() > 0 for name in means]
        finite = [~seen | np.isfinite(mean) for seen, mean in zip(measured, means.values(), strict=True)]
        parts.append(
            pd.DataFrame(
                {
                    "stack": stack,
                    "layer": layer,
                    "head": np.arange(heads),
                    "queries": found["queries"].total.numpy().astype(int),
                    **means,
                    "finite": np.logical_and.reduce(finite) if finite else np.ones(heads, dtype=bool),
                }
            )
        )
    table = pd.concat(parts, ignore_index=True)
    ordered = ["stack", "layer", "head", "queries", *(name for name in COLUMNS if name in table), "finite"]
    stacks = table["stack"].nunique() > 1
    return table[ordered if stacks else ordered[1:]]


def example_table(figures: Sequence[ExampleFigures]) -> pd.DataFrame:
    """Return a row for each example: example, tokens, readout, relevant, chance, rollout, attention."""
    parts = []
    for found in figures:
        missing = np.full(len(found.tokens), np.nan)
        heads = list(found.heads.values())
        parts.append(
            pd.DataFrame(
                {
                    "tokens": found.tokens.numpy(),
                    "readout": found.readout.numpy(),
                    "relevant": missing if found.relevant is None else found.relevant.numpy(),
                    "chance": missing if found.chance is None else found.chance.numpy(),
                    "rollout": missing if found.rollout is None else found.rollout.numpy(),
                    "attention": torch.cat(heads, dim=1).mean(dim=1).numpy() if heads else missing,
                }
            )
        )
    columns = ["tokens", "readout", "relevant", "chance", "rollout", "attention"]
    table = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=columns)
    table.insert(0, "example", np.arange(len(table)))
    return table


def head_rows(figures: Sequence[ExampleFigures]) -> pd.DataFrame:
    """Return a row for each example and head: example, stack, layer, head, attention on the relevant tokens."""
    parts, seen = [], 0
    for found in figures:
        for (stack, layer), attention in found.heads.items():
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
        seen += len(found.tokens)
    columns = ["example", "stack", "layer", "head", "attention"]
    table = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=columns)
    table = table.sort_values("example", kind="stable", ignore_index=True)
    return table if table["stack"].nunique() > 1 else table.drop(columns="stack")
