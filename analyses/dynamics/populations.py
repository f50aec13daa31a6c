"""Finite sets of sequences whose gradients equal the population's exactly, and samples from the same distribution."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ...circuits.errors import CallError
from .sequences import Sequences
from .setting import Setting


class Directions(NamedTuple):
    """The fixed directions that the circuits stay on: W_QK = mu_QK C_QK and W_OV = mu_OV C_OV.

    Attributes:
        qk: C_QK; rows are the key side, columns the query side.
        ov: C_OV; rows are the write side, columns the read side.
    """

    qk: Float[Tensor, "d_model d_model"]
    ov: Float[Tensor, "classes d_model"]


def directions(setting: Setting) -> Directions:
    """Return C_QK and C_OV in the coordinates of the exact population.

        C_OV = sum_y (e_y - 1/M) S_y'                            [M, d_model]
        C_QK = sum_y S_y S_y' (token query)                      [d_model, d_model]
        C_QK = sum_y S_y q_y' (class query)                      [d_model, d_model]

    S_y is the sum of the b tokens of class y, e_y is the unit vector of its output, and q_y is its query.

    Source: Theorem 1 of "Faster Query-Key Learning Sharpens Attention". The class query was added for this project; see
        docs/theory, model and data.
    """
    embedding = _embedding(setting)
    M, b = setting.M, setting.b
    class_sums = embedding[: b * M].reshape(M, b, -1).sum(dim=1)
    queries = class_sums if setting.query == "token" else embedding[-M:]
    centred = torch.eye(M, dtype=torch.float64) - 1 / M
    return Directions(qk=class_sums.T @ queries, ov=centred @ class_sums)


def exact_population(setting: Setting) -> Sequences:
    """Return a finite set of sequences on which full-batch gradients equal those of the population.

    For every class there is a sequence for each cyclic window of m out of its b tokens and, with token queries, for
    each of the b queries. Every sequence contains the same n/2 background pairs v, -v. The query is not among the keys.
    The gradients are equal on the symmetric weights W_QK = mu_QK C_QK, W_OV = mu_OV C_OV, not in directions away from
    them.

    Raises:
        CallError: n is odd, so that the background cannot come in pairs.

    Source: derived for this project; see docs/theory, model and data.
    """
    _demand_even_background(setting)
    M, b, m = setting.M, setting.b, setting.m
    starts = torch.arange(b if m < b else 1)
    windows = (starts[:, None] + torch.arange(m)) % b
    in_window = torch.zeros(len(starts), b, dtype=torch.float64).scatter_(1, windows, 1.0)
    queries_per_class = b if setting.query == "token" else 1
    label, window, query = torch.cartesian_prod(
        torch.arange(M), torch.arange(len(starts)), torch.arange(queries_per_class)
    ).unbind(dim=1)
    return _sequences(setting, label, in_window[window], query)


def sample_population(setting: Setting, size: int, generator: torch.Generator) -> Sequences:
    """Draw sequences: a class, m of its b tokens without replacement, a query, and n background tokens of random sign.

    Args:
        setting: the data.
        size: number of sequences.
        generator: generator of the draws.

    Raises:
        CallError: n is odd. The sample and the exact population share one vocabulary, which consists of pairs.
    """
    _demand_even_background(setting)
    M, b, m, n = setting.M, setting.b, setting.m, setting.n
    label = torch.randint(M, (size,), generator=generator)
    query = torch.randint(b if setting.query == "token" else 1, (size,), generator=generator)
    chosen = torch.rand(size, b, generator=generator).topk(m, dim=1).indices
    context = torch.zeros(size, b, dtype=torch.float64).scatter_(1, chosen, 1.0)
    # Each direction is drawn twice, each time with its own sign: the background has zero mean over sequences, but not
    # within each sequence.
    positive = torch.randint(2, (2, size, n // 2), generator=generator).sum(dim=0).to(torch.float64)
    background = torch.stack([positive, 2 - positive], dim=2).reshape(size, n)
    return _sequences(setting, label, context, query, background)


def _sequences(
    setting: Setting,
    label: Tensor,
    context: Tensor,
    query: Tensor,
    background: Tensor | None = None,
) -> Sequences:
    M, b, n = setting.M, setting.b, setting.n
    embedding = _embedding(setting)
    counts = torch.zeros(len(label), len(embedding), dtype=torch.float64)
    own = label[:, None] * b + torch.arange(b)
    counts.scatter_(1, own, context)
    counts[:, b * M : b * M + n] = 1.0 if background is None else background
    relevant = torch.zeros(counts.shape, dtype=torch.bool).scatter_(1, own, torch.ones_like(own, dtype=torch.bool))
    first_query = label * b if setting.query == "token" else label + b * M + n
    return Sequences(
        counts=counts, query=first_query + query, label=label, relevant=relevant, embedding=embedding, classes=M
    )


def _embedding(setting: Setting) -> Tensor:
    """Return rows of b M class tokens, background v_1, -v_1, v_2, -v_2, ..., and for class queries M query vectors."""
    M, b, n = setting.M, setting.b, setting.n
    pairs = n // 2
    own_queries = M if setting.query == "class" else 0
    d_model = b * M + pairs + own_queries
    axes = torch.eye(d_model, dtype=torch.float64)
    background = axes[b * M : b * M + pairs]
    signed = torch.stack([background, -background], dim=1).reshape(2 * pairs, d_model)
    return torch.cat([axes[: b * M], signed, axes[b * M + pairs :]])


def _demand_even_background(setting: Setting) -> None:
    if setting.n % 2:
        raise CallError(
            f"the exact population needs an even number of background tokens, because they come in pairs v, -v; "
            f"got n = {setting.n}; use n = {setting.n + 1}"
        )
