"""Attention computed anew from extracted weights and facts alone, in float64 and the plainest way, for comparison."""

from dataclasses import dataclass

import torch
from qkov.circuits import AttentionWeights, HeadNorm, Norm, Rotary
from torch import Tensor


@dataclass
class Attended:
    pattern: Tensor  # [head, query, key]
    output: Tensor  # [query, d_model]


def attend(
    weights: AttentionWeights,
    residual: Tensor,
    source: Tensor | None = None,
    values: Tensor | None = None,
    score_bias: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Attended:
    """What one sequence's attention gives: residual [query, d_model] as the layer receives it, before any norm.

    Args:
        weights: raw.
        residual: what is read by queries, and by keys and values unless there is a source.
        source: what keys and values of cross-attention read.
        values: what values read, where it is not what keys read.
        score_bias: [head, query, key], what the positions add to scores where they are not rotary; ALiBi's own if it is
            not given and the facts say ALiBi.
        sinks: [head], scores of no token that take part of the attention.
    """
    facts = weights.facts
    read = normalised(residual.double(), weights.norm)
    other = read if source is None else source.double()
    q, k, v = (
        project(x, W, b)
        for x, W, b in (
            (read, weights.W_Q, weights.b_Q),
            (other, weights.W_K, weights.b_K),
            (other if values is None else values.double(), weights.W_V, weights.b_V),
        )
    )
    if facts.clip_qkv is not None:
        q, k, v = (x.clamp(-facts.clip_qkv, facts.clip_qkv) for x in (q, k, v))
    q, k = head_normalised(q, weights.query_norm), head_normalised(k, weights.key_norm)
    if facts.rotary is not None:
        q, k = rotated(q, facts.rotary), rotated(k, facts.rotary)
    k, v = (x.repeat_interleave(weights.heads // x.shape[0], dim=0) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if facts.score_scale is None else facts.score_scale
    scores = scale * q @ k.mT
    if facts.soft_cap is not None:
        scores = facts.soft_cap * torch.tanh(scores / facts.soft_cap)
    back = torch.arange(q.shape[1])[:, None] - torch.arange(k.shape[1])
    if score_bias is not None:
        scores = scores + score_bias.double()
    elif facts.positions == "alibi":
        scores = scores - alibi_slopes(weights.heads)[:, None, None] * back
    hidden = torch.zeros_like(back, dtype=torch.bool)
    if facts.causal:
        hidden |= back < 0
    if facts.window is not None:
        hidden |= back.abs() >= facts.window
    scores = scores.masked_fill(hidden, -torch.inf)
    if facts.sinks and sinks is not None:
        with_sink = torch.cat([scores, sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)], dim=-1)
        pattern = with_sink.softmax(dim=-1)[..., :-1]
    else:
        pattern = scores.softmax(dim=-1)
    assert weights.W_O is not None
    output = torch.einsum("hqk,hkd,hdm->qm", pattern, v, weights.W_O.double())
    return Attended(pattern, output if weights.b_O is None else output + weights.b_O.double())


def project(x: Tensor, W: Tensor | None, b: Tensor | None) -> Tensor:
    assert W is not None
    projected = torch.einsum("nm,hmd->hnd", x, W.double())
    return projected if b is None else projected + b.double()[:, None]


def normalised(x: Tensor, norm: Norm | None) -> Tensor:
    if norm is None:
        return x
    if norm.kind == "layer_norm":
        x = x - x.mean(dim=-1, keepdim=True)
    assert norm.eps is not None
    x = x / (x.square().mean(dim=-1, keepdim=True) + norm.eps).sqrt()
    x = x if norm.gain is None else x * norm.gain.double()
    return x if norm.bias is None else x + norm.bias.double()


def head_normalised(x: Tensor, norm: HeadNorm | None) -> Tensor:
    """x is [head, position, d_head]."""
    if norm is None:
        return x
    dims = (0, 2) if norm.over == "all" else (2,)
    if norm.kind == "layer_norm":
        x = x - x.mean(dim=dims, keepdim=True)
    assert norm.eps is not None
    x = x / (x.square().mean(dim=dims, keepdim=True) + norm.eps).sqrt()
    for gain, apply in ((norm.gain, torch.mul), (norm.bias, torch.add)):
        if gain is not None:
            x = apply(x, gain.double() if gain.ndim == 1 else gain.double()[:, None])
    return x


def rotated(x: Tensor, rotary: Rotary) -> Tensor:
    """Each position's row turned by complex multiplication; pairs as the model forms them."""
    turning, rest = x[..., : rotary.dims], x[..., rotary.dims :]
    angles = torch.arange(x.shape[-2], dtype=torch.float64)[:, None] * torch.tensor(
        rotary.frequencies, dtype=torch.float64
    )
    turn = torch.polar(torch.ones_like(angles), angles)
    if rotary.pairing == "adjacent":
        pairs = turning.unflatten(-1, (-1, 2))
        turned = torch.view_as_real(torch.complex(pairs[..., 0], pairs[..., 1]) * turn).flatten(-2)
    else:
        first, second = turning.chunk(2, dim=-1)
        product = torch.complex(first, second) * turn
        turned = torch.cat([product.real, product.imag], dim=-1)
    return torch.cat([rotary.amplitude * turned, rest], dim=-1)


def alibi_slopes(heads: int) -> Tensor:
    """2^(-8/h), 2^(-16/h), ... for h a power of two; else those of the next lower one, and every other of twice it."""
    power = 2 ** (heads.bit_length() - 1)
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    slopes += [2 ** (-4 * (i + 1) / power) for i in range(0, 2 * (heads - power), 2)]
    return torch.tensor(slopes[:heads], dtype=torch.float64)
