"""The factors of a layer's circuits as training moves them: with their biases, and for all heads that share one."""

from dataclasses import replace

import torch
from torch import Tensor

from ..algebra.circuit import Circuit
from .attention_weights import AttentionWeights


def trained_circuits(weights: AttentionWeights) -> dict[str, Circuit]:
    """Return the factored circuits whose factors a training step moves, by name: QK, OV or both, [group, ...].

    With biases, the score and the output are those of the stream extended by a 1:

        score = [x_key; 1]' [W_K; b_K'] [W_Q; b_Q']' [x_query; 1]        written = W_O' [W_V; b_V']' [x; 1]

    Heads that share a key or a value have one circuit, `qk_groups` or `ov_groups`. If the loss is a function of these
    products (`without_product` says when it is not), the gradients of the factors are G B' and A'G. The weights are
    those of the parameters, in the basis that they are in, at rotary offset 0. Given the gradients of the weights in
    place of the weights, the function returns G_A as the left factor and G_B as the right factor.

    A collapsed circuit has no factors and is left out.
    """
    extended = {f"W_{side}": _with_bias(getattr(weights, f"W_{side}"), getattr(weights, f"b_{side}")) for side in "QKV"}
    whole = replace(weights, **extended, b_Q=None, b_K=None, b_V=None)
    circuits = {}
    if whole.has_qk and whole.W_QK is None:
        circuits["QK"] = whole.qk_groups(whole.stored_basis)
    if whole.has_ov and whole.W_OV is None:
        circuits["OV"] = whole.ov_groups(whole.stored_basis)
    return circuits


def without_product(weights: AttentionWeights) -> dict[str, str]:
    """Return why the loss depends on some circuits other than through the product of their factors, by circuit."""
    facts, reasons = weights.facts, {}
    if weights.W_QK is not None:
        reasons["QK"] = "it is trained collapsed"
    elif weights.query_norm is not None or weights.key_norm is not None:
        reasons["QK"] = "queries and keys are normalised"
    elif facts.rotary is not None:
        reasons["QK"] = "positions rotate queries and keys"
    elif facts.clip_qkv is not None:
        reasons["QK"] = "queries and keys are clipped"
    if weights.W_OV is not None:
        reasons["OV"] = "it is trained collapsed"
    elif facts.clip_qkv is not None:
        reasons["OV"] = "values are clipped"
    return reasons


def _with_bias(W: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Return [W; b'], with one row more than W."""
    return W if W is None or b is None else torch.cat([W, b[:, None]], dim=1)
