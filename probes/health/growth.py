"""How fast the largest scores grow, when they pass a limit, and the rate of W_Q and W_K at which they would not."""

import math

import torch
from jaxtyping import Float64
from torch import Tensor

#: Fewer records than this say nothing of growth.
FEWEST = 5


def growth_rates(
    positions: Float64[Tensor, "record head"], scores: Float64[Tensor, "record head"]
) -> Float64[Tensor, " head"]:
    r"""Return the growth of the logarithm of each head's largest score per unit of position.

    It is the slope of the least-squares line through the points (x_k, ln s_k),

        rho = sum_k (x_k - mean x) (ln s_k - mean ln s) / sum_k (x_k - mean x)^2,

    over the records whose score is finite and above 0.

    Args:
        positions: x. The number of the step; where the rate is lowered, the sum of the multiples up to that step, so
            that rho is the growth per step at the full rate.
        scores: s.

    Returns:
        The slopes; NaN, for unknown, where fewer than five records count or where all positions are the same.
    """
    counts = scores.isfinite() & (scores > 0) & positions.isfinite()
    number = counts.sum(dim=0).clamp(min=1)
    logs = torch.where(counts, scores, 1.0).log()
    x = _centred(positions, counts, number)
    y = _centred(logs, counts, number)
    spread = x.square().sum(dim=0)
    is_known = (counts.sum(dim=0) >= FEWEST) & (spread > 0)
    return torch.where(is_known, (x * y).sum(dim=0) / spread, torch.nan)


def steps_to_limit(
    scores: Float64[Tensor, " head"], rates: Float64[Tensor, " head"], limit: float
) -> Float64[Tensor, " head"]:
    """Return after how many steps each score passes a limit if it keeps growing at its rate: ln(limit / s) / rho.

    Args:
        scores: The largest scores s.
        rates: The growth rho of their logarithms per step.
        limit: The limit.

    Returns:
        The numbers of steps; 0 where the score has passed the limit, and NaN, for unknown, where it is below the limit
        and does not grow, or where nothing is known of it.
    """
    ahead = torch.where((rates > 0) & (scores > 0), (limit / scores).log() / rates, torch.nan)
    return torch.where(scores >= limit, 0.0, ahead)


def holding_multiples(
    scores: Float64[Tensor, " head"], rates: Float64[Tensor, " head"], limit: float, horizon: int
) -> Float64[Tensor, " head"]:
    r"""Return the multiple of the rate of W_Q and W_K at which each score would not pass a limit within some steps.

    A score is bilinear in W_Q and W_K. At m times their rate a step makes of q . k

        (q + m dq) . (k + m dk) = q . k + m (dq . k + q . dk) + m^2 dq . dk,

    so that its growth is in proportion to m up to second order, as long as the growth comes from W_Q and W_K alone and
    what the layer reads stays as it is. A score s that grows by rho per step in its logarithm then needs ln(limit / s)
    / (m rho) steps to the limit, which are as many as the horizon H for

        m = ln(limit / s) / (H rho).

    Args:
        scores: The largest scores s.
        rates: The growth rho of their logarithms per step at the present rate.
        limit: The limit.
        horizon: The number of steps H.

    Returns:
        The multiples, from 0, where the score has passed the limit and grows, to 1, where it does not pass the limit
        in time or does not grow; NaN, for unknown, where the growth is unknown.
    """
    wanted = (limit / scores).log() / (horizon * rates)
    held = torch.where((rates > 0) & (scores > 0), wanted.clamp(0.0, 1.0), 1.0)
    return torch.where(rates.isnan() | scores.isnan(), torch.nan, held)


def braking_multiples(
    scores: Float64[Tensor, " head"], rates: Float64[Tensor, " head"], limit: float, start: float, horizon: int
) -> Float64[Tensor, " head"]:
    r"""Return the multiple of the rate of W_Q and W_K by which a guard brakes each head.

    Up to the score `start` the rate is full, and above it

        m = ln(limit / s) / max(ln(limit / start), H rho), within 0 and 1.

    It is the lower of two multiples: that at which the score needs the horizon H to reach the limit, and one that falls
    with the logarithm of the score to 0 at the limit, however slow the growth seems. Because of the latter, a score
    below the limit stays there as long as a step at the full rate multiplies it by at most limit / start and the growth
    of its logarithm goes with m: ln s + m ln(limit / start) <= ln limit.

    Args:
        scores: The largest scores s.
        rates: The growth rho of their logarithms per step at the full rate; NaN where it is unknown.
        limit: The limit.
        start: The score from which on the rate is lowered.
        horizon: The number of steps H.

    Returns:
        The multiples; 1 where the score is unknown.
    """
    slowest = math.log(limit / start)
    multiples = (limit / scores).log() / (horizon * rates).nan_to_num(slowest).clamp(min=slowest)
    return torch.where(scores > start, multiples.clamp(0.0, 1.0), 1.0)


def clip_factors(scores: Float64[Tensor, " head"], limit: float) -> Float64[Tensor, " head"]:
    """Return the factor on each head's scores that brings the largest to a limit: min(1, limit / s).

    Scores are bilinear in W_Q and W_K with their biases, so that sqrt(limit / s) on each of them is this factor on all
    scores of the head, at every pair of positions, rotated or not.

    Args:
        scores: The largest scores s.
        limit: The limit.

    Returns:
        The factors; 1 where the score is unknown.

    Source: QK-Clip, "Kimi K2: Open Agentic Intelligence".
    """
    return torch.where(scores > limit, limit / scores, 1.0)


def _centred(values: Float64[Tensor, "record head"], counts: Tensor, number: Tensor) -> Float64[Tensor, "record head"]:
    values = torch.where(counts, values, 0.0)
    return torch.where(counts, values - values.sum(dim=0) / number, 0.0)
