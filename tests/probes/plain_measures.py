"""The measures of a probe in plain loops, over maps that are at hand."""

import math
from collections.abc import Container, Mapping, Sequence

import numpy as np
import torch

MEASURED = ("entropy", "largest", "relevant", "chance", "sink", "self", "previous", "next", "no_token")


def measures_of_query(
    weights: Mapping[int, float], seen: Sequence[int], relevant: Container[int], own: int | None
) -> dict[str, float]:
    """The measures of one query.

    Args:
        weights: The weight of each key that is a token, in the order of the sequence.
        seen: The keys among them that the query can see.
        relevant: The keys that are relevant; without one among the tokens, nothing is said of them.
        own: The key that is the query itself; None in cross-attention.
    """
    total = math.fsum(weights.values())
    shares = {key: weight / total for key, weight in weights.items()}
    values = {
        "entropy": -math.fsum(share * math.log(share) for share in shares.values() if share > 0),
        "largest": max(shares.values()),
        "sink": next(iter(shares.values())),
        "no_token": 1 - total,
    }
    marked = {key for key in shares if key in relevant}
    if marked:
        values["relevant"] = math.fsum(shares[key] for key in marked)
        values["chance"] = len(marked.intersection(seen)) / len(seen)
    if own is not None:
        beside = {"self": own, "previous": own - 1, "next": own + 1}
        values |= {name: shares[key] for name, key in beside.items() if key in shares}
    return values


def plain_measures(
    maps: list[torch.Tensor],
    mask: torch.Tensor,
    relevant: torch.Tensor,
    *,
    readout: list[int] | None = None,
    causal: bool = True,
    window: int | None = None,
    asked: torch.Tensor | None = None,
) -> dict[str, np.ndarray]:
    """Each measure as [layer, head]: means over all queries that are tokens, in float64."""
    heads = maps[0].shape[1]
    found = {
        name: np.full((len(maps), heads), np.nan) for name in (*MEASURED, "relevant_at_readout", "chance_at_readout")
    }
    for layer, attention in enumerate(maps):
        for head in range(heads):
            rows: dict[str, list[float]] = {name: [] for name in found}
            for example, tokens in enumerate(mask.tolist()):
                real = [place for place, is_token in enumerate(tokens) if is_token]
                marked = set(relevant[example].nonzero()[:, 0].tolist())
                read = real[-1] if readout is None else readout[example]
                for query in real:
                    weights = {key: float(attention[example, head, query, key]) for key in real}
                    seen = [key for key in real if not causal or key <= query]
                    seen = [key for key in seen if window is None or query - key < window]
                    values = measures_of_query(weights, seen, marked, query)
                    if asked is None or asked[example, query]:
                        for name, value in values.items():
                            rows[name].append(value)
                    if query == read and "relevant" in values:
                        rows["relevant_at_readout"].append(values["relevant"])
                        rows["chance_at_readout"].append(values["chance"])
            for name, measured in rows.items():
                if measured:
                    found[name][layer, head] = math.fsum(measured) / len(measured)
    return found


def assert_table(table, wanted: dict[str, np.ndarray], tolerance: float = 1e-6) -> None:
    for name, values in wanted.items():
        np.testing.assert_allclose(table[name].to_numpy(), values.flatten(), rtol=0, atol=tolerance, err_msg=name)


def plain_rollout(
    maps: list[torch.Tensor], mask: torch.Tensor, readout: list[int], residual: float = 0.5
) -> torch.Tensor:
    """The row of A_L ... A_1 at each readout, by products of dense matrices over the tokens alone."""
    rows = torch.zeros(mask.shape, dtype=torch.float64)
    for example in range(len(mask)):
        real = mask[example].nonzero()[:, 0]
        product = torch.eye(len(real), dtype=torch.float64)
        for attention in maps:
            fused = attention[example].double().mean(dim=0)[real][:, real]
            fused = fused / fused.sum(dim=-1, keepdim=True)
            product = ((1 - residual) * fused + residual * torch.eye(len(real))) @ product
        rows[example, real] = product[int((real == readout[example]).nonzero())]
    return rows
