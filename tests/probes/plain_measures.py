"""The measures of a probe in plain loops, over maps that are at hand."""

import math

import numpy as np
import torch

MEASURED = ("entropy", "largest", "relevant", "chance", "sink", "self", "previous", "next", "no_token")


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
                # An example without a relevant token has no attention on relevant tokens.
                has_relevant = any(bool(relevant[example, key]) for key in real)
                read = real[-1] if readout is None else readout[example]
                for query in real:
                    weights = {key: float(attention[example, head, query, key]) for key in real}
                    total = math.fsum(weights.values())
                    shares = {key: weight / total for key, weight in weights.items()}
                    seen = [key for key in real if not causal or key <= query]
                    seen = [key for key in seen if window is None or query - key < window]
                    values: dict[str, float] = {
                        "entropy": -math.fsum(share * math.log(share) for share in shares.values() if share > 0),
                        "largest": max(shares.values()),
                        "sink": shares[real[0]],
                        "self": shares[query],
                        "no_token": 1 - total,
                    }
                    if has_relevant:
                        values["relevant"] = math.fsum(share for key, share in shares.items() if relevant[example, key])
                        values["chance"] = sum(bool(relevant[example, key]) for key in seen) / len(seen)
                    for name, key in (("previous", query - 1), ("next", query + 1)):
                        if key in shares:
                            values[name] = shares[key]
                    if asked is None or asked[example, query]:
                        for name, value in values.items():
                            rows[name].append(value)
                    if query == read and has_relevant:
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
