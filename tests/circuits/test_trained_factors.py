"""The factors that training moves: their gradients are those of one product, which is trained as a leaf here."""

import dataclasses
from typing import Any

import pytest
import torch
from qkov.circuits import AttentionFacts, AttentionWeights, HeadNorm, Rotary
from qkov.circuits.weights.trained_factors import trained_circuits, without_product

D_MODEL, D_HEAD, TOKENS = 10, 3, 7
BIASES = ("b_Q", "b_K", "b_V")


def drawn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def weights_of(heads, shared, biases):
    """Make leaves; the widths of the two circuits' outer sides differ where they can."""
    torch.manual_seed(0)
    few = heads // shared
    sizes = {"W_Q": (heads, D_MODEL, D_HEAD), "W_K": (few, D_MODEL, D_HEAD)}
    sizes |= {"W_V": (few, D_MODEL, D_HEAD), "W_O": (heads, D_HEAD, D_MODEL + 1)}
    sizes |= {name: (heads if name == "b_Q" else few, D_HEAD) for name in biases}
    return {name: drawn(*size).requires_grad_() for name, size in sizes.items()}


def with_one(x):
    return torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], dim=1)


def loss_of(W_QK, W_OV, x):
    """Attend by the products [head, key, query] and [head, write, read]; biases extend the stream by a 1."""
    keys, queries, read = (with_one(x) if size > D_MODEL else x for size in (*W_QK.shape[1:], W_OV.shape[2]))
    pattern = (queries @ W_QK.mT @ keys.mT / D_HEAD**0.5).softmax(dim=-1)
    return (pattern @ read @ W_OV.mT).sum(0).tanh().square().sum()


def products(leaves, shared):
    """Form the products one head at a time, with each factor's bias as an additional row."""
    tall = {}
    for side in "QKV":
        W, b = leaves[f"W_{side}"], leaves.get(f"b_{side}")
        tall[side] = W if b is None else torch.cat([W, b[:, None]], dim=1)
    heads = range(len(leaves["W_Q"]))
    W_QK = torch.stack([tall["K"][head // shared] @ tall["Q"][head].T for head in heads])
    W_OV = torch.stack([leaves["W_O"][head].T @ tall["V"][head // shared].T for head in heads])
    return W_QK, W_OV


@pytest.mark.parametrize("biases", [(), ("b_V",), ("b_Q", "b_V"), BIASES], ids=["none", "V", "Q and V", "all"])
@pytest.mark.parametrize(("heads", "shared"), [(2, 1), (4, 2), (3, 3)])
def test_gradients_are_those_of_one_product(heads, shared, biases):
    leaves = weights_of(heads, shared, biases)
    x = drawn(TOKENS, D_MODEL)
    W_QK, W_OV = products(leaves, shared)
    collapsed = W_QK.detach().requires_grad_(), W_OV.detach().requires_grad_()
    loss = loss_of(W_QK, W_OV, x)
    loss.backward()
    G_QK, G_OV = torch.autograd.grad(loss_of(*collapsed, x), collapsed)
    weights = trained_circuits(AttentionWeights(0, **leaves))
    gradients = trained_circuits(AttentionWeights(0, **{name: leaf.grad for name, leaf in leaves.items()}))

    groups = range(heads // shared)
    joined: dict[str, Any] = {
        "QK": (W_QK, G_QK, lambda blocks: torch.cat(list(blocks), dim=1)),
        "OV": (W_OV, G_OV, lambda blocks: torch.cat(list(blocks), dim=0)),
    }
    for name, (C, G, join) in joined.items():
        circuit, gradient = weights[name], gradients[name]
        C, G = (torch.stack([join(M[shared * group :][:shared]) for group in groups]) for M in (C, G))
        torch.testing.assert_close(circuit.dense(), C.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradient.left, G @ circuit.right.mT, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(gradient.right, circuit.left.mT @ G, rtol=1e-10, atol=1e-12)


def test_collapsed_circuits_have_no_factors():
    weights = AttentionWeights(0, W_QK=drawn(2, 4, 4), W_V=drawn(2, 4, 3), W_O=drawn(2, 3, 4))
    assert set(trained_circuits(weights)) == {"OV"}
    assert without_product(weights) == {"QK": "it is trained collapsed"}
    weights = AttentionWeights(0, W_Q=drawn(2, 4, 3), W_K=drawn(2, 4, 3), W_OV=drawn(2, 4, 4))
    assert set(trained_circuits(weights)) == {"QK"}
    assert without_product(weights) == {"OV": "it is trained collapsed"}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {}),
        ({"facts": AttentionFacts(rotary=Rotary.of_base(2))}, {"QK": "positions rotate queries and keys"}),
        ({"query_norm": HeadNorm("rms_norm")}, {"QK": "queries and keys are normalised"}),
        ({"facts": AttentionFacts(clip_qkv=8.0)}, {"QK": "queries and keys are clipped", "OV": "values are clipped"}),
        ({"facts": AttentionFacts(positions="alibi", soft_cap=5.0, sinks=True, window=3)}, {}),
    ],
    ids=["plain", "rotary", "QK-norm", "clipped", "what only the scores know"],
)
def test_circuits_that_are_not_seen_as_products_are_named_with_the_reason(changes, expected):
    weights = AttentionWeights(0, **{name: leaf.detach() for name, leaf in weights_of(2, 1, ()).items()})
    assert without_product(dataclasses.replace(weights, **changes)) == expected
