"""A bound on attention scores from weights and norms, which holds for every input."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float64
from torch import Tensor

from ..algebra.products import upcast
from ..errors import CallError
from .attention_weights import AttentionWeights
from .norms import HeadNorm
from .rotary import Rotary


def score_bound(weights: AttentionWeights, offsets: Sequence[int] | None = None) -> Float64[Tensor, " head"]:
    r"""Bound the scores of every head, after scale and soft cap, over all inputs of its layer.

    Behind LayerNorm or RMSNorm a query is q = A_Q' n + a_Q and a key is k = A_K' m + a_K, |n|, |m| <= sqrt(d_model).
    A and a are the weights and biases with the norm's gain and bias folded into them, so that

        |q . k| <= d_model |A_K A_Q'|_2 + sqrt(d_model) (|A_K a_Q| + |A_Q a_K|) + |a_K . a_Q|,

    with the largest singular value |.|_2. Without biases a layer behind RMSNorm attains it, up to the norm's eps. With
    rotary positions R(offset) stands between A_K and A_Q', and the largest of the given offsets is taken; without
    offsets the bound is that of the lengths, which no rotation changes,

        |q . k| <= (sqrt(d_model) |A_Q|_2 + |a_Q|) (sqrt(d_model) |A_K|_2 + |a_K|).

    Queries and keys with norms of their own (QK-norm) have lengths of at most sqrt(d) max|gain| + |bias|, where d is
    the number of dimensions that are normalised together. Positions that are added to scores (ALiBi, relative biases)
    are not part of it, as they are not part of the `max_logit` of a probe.

    Args:
        weights: The weights of a layer, raw or with their norm folded into them.
        offsets: Offsets in positions, the query's minus the key's, for which the bound is to hold in layers with rotary
            positions; None for all offsets.

    Returns:
        A bound on |score| of each query head.

    Raises:
        CallError: There is no norm in front of attention and none of queries and keys, so that no bound exists; keys
            are read from another stream; or a fact that the bound needs is not known.
    """
    facts = weights.facts
    missing = facts.unknown & {"score_scale", "soft_cap", "query_key_norm", "rotary"}
    if missing:
        raise CallError(f"{weights.label}: {', '.join(sorted(missing))} is not known, and the bound depends on it")
    if weights.query_norm is not None and weights.key_norm is not None:
        bound = _of_normalised(weights, weights.query_norm, weights.key_norm)
    else:
        bound = _of_weights(weights, offsets)
    d_head = _tensor(weights, "W_Q").shape[2]
    if facts.clip_qkv is not None and weights.query_norm is None:
        bound = bound.clamp(max=_stretch(facts.rotary) * d_head * facts.clip_qkv**2)
    bound = bound * (d_head**-0.5 if facts.score_scale is None else abs(facts.score_scale))
    return bound if facts.soft_cap is None else facts.soft_cap * (bound / facts.soft_cap).tanh()


def _tensor(weights: AttentionWeights, name: str) -> Tensor:
    tensor = getattr(weights, name)
    if tensor is None:
        raise CallError(f"{weights.label} has no {name}; the bound takes W_Q and W_K")
    return tensor


def _stretch(rotary: Rotary | None) -> float:
    """Return how much rotation lengthens a query and a key together; dimensions that do not rotate stay as they are."""
    return 1.0 if rotary is None else max(1.0, rotary.amplitude**2)


def _of_normalised(weights: AttentionWeights, query: HeadNorm, key: HeadNorm) -> Float64[Tensor, " head"]:
    heads, key_heads = _tensor(weights, "W_Q").shape[0], _tensor(weights, "W_K").shape[0]
    d_head = _tensor(weights, "W_Q").shape[2]
    keys = _length(key, key_heads, d_head).repeat_interleave(weights.group_size)
    return _stretch(weights.facts.rotary) * _length(query, heads, d_head) * keys


def _length(norm: HeadNorm, heads: int, d_head: int) -> Float64[Tensor, " head"]:
    """Return the largest length of a head's queries or keys behind their norm."""
    dimensions = d_head if norm.over == "head" else heads * d_head
    one, zero = torch.ones(d_head), torch.zeros(d_head)
    gain = upcast(one if norm.gain is None else norm.gain).reshape(-1, d_head).abs().amax(dim=-1)
    bias = upcast(zero if norm.bias is None else norm.bias).reshape(-1, d_head).norm(dim=-1)
    return (math.sqrt(dimensions) * gain + bias).expand(heads)


def _of_weights(weights: AttentionWeights, offsets: Sequence[int] | None) -> Float64[Tensor, " head"]:
    for name in ("W_Q", "W_K"):
        _tensor(weights, name)
    if weights.norm is None or weights.facts.cross:
        why = "keys are read from another stream" if weights.facts.cross else "no norm is in front of attention"
        raise CallError(f"{weights.label}: {why}, so that weights alone give no bound on scores")
    folded = weights.in_basis("folded" if weights.stored_basis == "raw" else weights.stored_basis)
    A_Q, A_K = upcast(_tensor(folded, "W_Q")), upcast(_tensor(folded, "W_K"))
    a_Q, a_K = _bias(folded.b_Q, A_Q), _bias(folded.b_K, A_K)
    root, group = math.sqrt(A_Q.shape[1]), weights.group_size
    rotary = weights.facts.rotary
    if rotary is not None and offsets is None:
        queries = root * torch.linalg.matrix_norm(A_Q, 2) + a_Q.norm(dim=-1)
        keys = root * torch.linalg.matrix_norm(A_K, 2) + a_K.norm(dim=-1)
        return _stretch(rotary) * queries * keys.repeat_interleave(group)
    A_K, a_K = A_K.repeat_interleave(group, 0), a_K.repeat_interleave(group, 0)
    bounds = []
    for offset in [0] if rotary is None or offsets is None else offsets:
        # Rows are the weights of dimensions of the stream; a rotation of queries turns each row.
        turned, bias = (A_Q, a_Q) if rotary is None else (_turned(A_Q, rotary, offset), _turned(a_Q, rotary, offset))
        product = _norm_of_product(A_K, turned)
        ends = (A_K @ bias[..., None]).norm(dim=(-2, -1)) + (turned @ a_K[..., None]).norm(dim=(-2, -1))
        bounds.append(root**2 * product + root * ends + (a_K * bias).sum(dim=-1).abs())
    return torch.stack(bounds).amax(dim=0)


def _turned(rows: Float64[Tensor, "*batch d_head"], rotary: Rotary, offset: int) -> Float64[Tensor, "*batch d_head"]:
    """Return rotated rows, with the factors that rotation puts on queries and on keys."""
    turned = rotary.rotate(rows, offset).clone()
    turned[..., : rotary.dims] *= rotary.amplitude**2
    return turned


def _bias(bias: Tensor | None, tall: Float64[Tensor, "head d_model d_head"]) -> Float64[Tensor, "head d_head"]:
    return torch.zeros_like(tall[:, 0]) if bias is None else upcast(bias)


def _norm_of_product(
    left: Float64[Tensor, "head d_model d_head"], right: Float64[Tensor, "head d_model d_head"]
) -> Float64[Tensor, " head"]:
    """Return the largest singular value of left right', from the triangular factors of both."""
    return torch.linalg.matrix_norm(torch.linalg.qr(left, "r").R @ torch.linalg.qr(right, "r").R.mT, 2)
