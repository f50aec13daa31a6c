"""The strongest compositions between heads, beside what chance gives."""

from typing import Any

import pandas as pd

from ..analyses.trajectories.store import RunStore
from .page import number
from .run_facts import layer_name

#: Rows of each kind.
_STRONGEST = 5
_KINDS = {"Q": "queries", "K": "keys", "V": "values"}


def composition_table(stores: dict[str, RunStore]) -> dict[str, Any] | None:
    """Return the strongest scores of each kind at the last checkpoint that has them; None where no run has any."""
    rows, medians = [], []
    for label, store in stores.items():
        steps = store.composition_steps()
        scores = store.composition(steps[-1]) if steps else pd.DataFrame()
        for kind, reads in _KINDS.items():
            of_kind = scores[scores["kind"] == kind].dropna(subset="score") if len(scores) else scores
            if of_kind.empty:
                continue
            times = (of_kind["score"] / of_kind["chance"]).median()
            medians.append({"run": label, "reads": reads, "times": times})
            for row in of_kind.nlargest(_STRONGEST, "score").to_dict("records"):
                rows.append(
                    {
                        "run": label,
                        "reads": reads,
                        "earlier": f"{layer_name(row['stack'], row['earlier_layer'])}, head {row['earlier_head']}",
                        "later": f"{layer_name(row['stack'], row['later_layer'])}, head {row['later_head']}",
                        "score": number(row["score"], 3),
                        "chance": number(row["chance"], 3),
                        "times": number(row["score"] / row["chance"], 3),
                    }
                )
    return {"rows": rows, "medians": medians} if rows else None
