"""CircuitMuon: steps of heads and of products, against torch.optim.Muon and plain formulas in float64."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from qkov.circuits import CallError, open_model
from qkov.probes import CircuitMuon, CircuitProbe
from qkov.probes.optimizers import circuit_muon
from qkov.probes.optimizers.orthogonal import COEFFICIENTS, orthogonalized
from torch import Tensor, nn

from .circuit_models import Classifier, language_loss, language_model, loss_of

NAMES = ("W_Q", "W_K", "W_V", "W_O")


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


def msign(matrix: np.ndarray, iterations: int = 5) -> np.ndarray:
    """What the iteration makes of the singular values, one by one."""
    U, s, V = np.linalg.svd(matrix, full_matrices=False)
    s = s / np.linalg.norm(s)
    a, b, c = COEFFICIENTS
    for _ in range(iterations):
        s = a * s + b * s**3 + c * s**5
    return (U * s) @ V


def weights_of(model: nn.Module) -> dict[tuple[int, str], np.ndarray]:
    """W_Q, W_K [head, d_model, d_head], W_V and W_O [head, d_head, d_model] of each layer."""
    return {
        (layer.layer, name): getattr(layer, name).double().numpy().copy()
        for layer in open_model(model).layers()
        for name in NAMES
    }


def gradients_of(model: Any) -> dict[tuple[int, str], np.ndarray]:
    """The gradients, arranged as the weights are by a copy of the model whose weights they are."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for own, parameter in zip(other.parameters(), model.parameters(), strict=True):
            own.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    return weights_of(other)


@pytest.fixture
def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """The iterations in float64, so that they can be compared with singular values."""

    def exact(matrices: Tensor, iterations: int) -> Tensor:
        return orthogonalized(matrices, iterations, torch.float64)

    monkeypatch.setattr(circuit_muon, "orthogonalized", exact)


@pytest.mark.parametrize("shape", [(3, 7, 4), (3, 4, 7), (5, 5)])
def test_singular_values_alone_change(shape):
    torch.manual_seed(0)
    matrices = drawn(*shape)
    found = orthogonalized(matrices, dtype=torch.float64)
    wanted = np.stack([msign(each) for each in matrices.reshape(-1, *shape[-2:]).numpy()]).reshape(shape)
    np.testing.assert_allclose(found.numpy(), wanted, rtol=0, atol=1e-12)
    assert not orthogonalized(torch.zeros(2, 3)).any()
    # Even in bfloat16, all are near 1.
    values = torch.linalg.svdvals(orthogonalized(matrices.float()).double())
    assert values.min() > 0.3
    assert values.max() < 1.3


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize(
    "options", [{}, {"nesterov": False, "momentum": 0.5, "weight_decay": 0.1}, {"match_adamw": True}]
)
def test_steps_of_heads_are_those_of_each_block_by_itself(in_float64, kind, options):
    model = language_model(kind)
    optimizer = CircuitMuon(model, lr=0.02, **options)
    wanted, momenta = weights_of(model), {}
    momentum, decay = options.get("momentum", 0.95), options.get("weight_decay", 0.0)
    for step in range(3):
        optimizer.zero_grad()
        language_loss(model, step).backward()
        for key, gradient in gradients_of(model).items():
            momenta[key] = momentum * momenta.get(key, 0) + gradient
            direction = gradient + momentum * momenta[key] if options.get("nesterov", True) else momenta[key]
            inputs, outputs = gradient.shape[1:]
            size = (
                0.2 * math.sqrt(max(inputs, outputs))
                if options.get("match_adamw")
                else math.sqrt(max(1, outputs / inputs))
            )
            taken = np.stack([msign(block) for block in direction])
            wanted[key] = wanted[key] * (1 - 0.02 * decay) - 0.02 * size * taken
        optimizer.step()
        for key, weight in weights_of(model).items():
            np.testing.assert_allclose(weight, wanted[key], rtol=0, atol=1e-11)


def test_steps_of_heads_are_those_of_muon_with_a_parameter_for_each_head():
    """torch.optim.Muon computes in bfloat16, one matrix after the other, with 8 bits for each product."""
    model = language_model("llama")
    optimizer = CircuitMuon(model, lr=0.02)
    before = weights_of(model)
    blocks = {
        (key, head): nn.Parameter(torch.from_numpy(block.T.copy()))
        for key, weight in before.items()
        for head, block in enumerate(weight)
    }
    muon = torch.optim.Muon(blocks.values(), lr=0.02, momentum=0.95, weight_decay=0.0)
    for step in range(2):
        optimizer.zero_grad()
        language_loss(model, step).backward()
        gradients = gradients_of(model)
        for (key, head), block in blocks.items():
            block.grad = torch.from_numpy(gradients[key][head].T.copy())
        optimizer.step()
        muon.step()
    for key, weight in weights_of(model).items():
        for head, block in enumerate(weight):
            start = before[key][head].T
            moved, wanted = block.T - start, blocks[key, head].detach().numpy() - start
            assert np.linalg.norm(moved - wanted) < 0.1 * np.linalg.norm(wanted)


def test_steps_of_products_are_whitened_by_the_other_factor(in_float64):
    model = language_model("gpt2")
    optimizer = CircuitMuon(model, lr=0.02, of="products", damping=0.1, momentum=0.9)
    wanted, momenta = weights_of(model), {}
    for step in range(2):
        optimizer.zero_grad()
        language_loss(model, step).backward()
        before, directions = {key: weight.copy() for key, weight in wanted.items()}, {}
        for key, gradient in gradients_of(model).items():
            momenta[key] = 0.9 * momenta.get(key, 0) + gradient
            directions[key] = gradient + 0.9 * momenta[key]

        def whitening(wide: np.ndarray) -> np.ndarray:
            values, vectors = np.linalg.eigh(wide.T @ wide)
            return (vectors / np.sqrt(values + 0.1 * values.mean())) @ vectors.T

        for layer in (0, 1):
            W = {name: before[layer, name] for name in NAMES}
            for head in range(3):
                for name, other in (("W_Q", W["W_K"][head]), ("W_K", W["W_Q"][head]), ("W_V", W["W_O"][head].T)):
                    root = whitening(other)
                    wanted[layer, name][head] -= 0.01 * msign(directions[layer, name][head] @ root) @ root
            roots = [whitening(W["W_V"][head]) for head in range(3)]
            parts = [root @ part for root, part in zip(roots, directions[layer, "W_O"], strict=True)]
            together = np.split(msign(np.concatenate(parts)), 3)
            for head, (root, part) in enumerate(zip(roots, together, strict=True)):
                wanted[layer, "W_O"][head] -= 0.01 * root @ part
        optimizer.step()
        for key, weight in weights_of(model).items():
            np.testing.assert_allclose(weight, wanted[key], rtol=0, atol=1e-10)


@pytest.mark.parametrize("size", [0.1, 1.0, 10.0])
def test_a_step_of_products_changes_w_qk_by_about_the_rate_whatever_the_size_of_its_factors(size):
    model = language_model("gpt2")
    with torch.no_grad():
        for block in model.transformer.h:
            block.attn.c_attn.weight.mul_(size)
    rate = 1e-5
    optimizer = CircuitMuon(model, lr=rate, of="products")
    before = weights_of(model)
    language_loss(model, 0).backward()
    optimizer.step()
    after = weights_of(model)
    for layer in (0, 1):
        change = after[layer, "W_K"] @ after[layer, "W_Q"].transpose(0, 2, 1) - before[layer, "W_K"] @ before[
            layer, "W_Q"
        ].transpose(0, 2, 1)
        norms = np.linalg.norm(change, ord=2, axis=(1, 2))
        assert (norms < 1.25 * rate).all()
        assert (norms > 0.3 * rate).all()


@pytest.mark.parametrize("of", ["heads", "products"])
def test_a_probe_follows_the_steps_of_circuit_muon_beside_another_optimizer(of):
    model = Classifier()
    attention = CircuitMuon(model, lr=0.01, of=of)
    rest = torch.optim.AdamW(attention.others, 0.01)
    assert {id(each) for each in attention.others} == {id(each) for each in model.parameters()} - {
        id(model.attention.in_proj_weight),
        id(model.attention.out_proj.weight),
    }
    losses = []
    with CircuitProbe(model, every=1, optimizer=[attention, rest]) as probe:
        for _ in range(30):
            loss = loss_of(model, 0)
            loss.backward()
            attention.step()
            rest.step()
            attention.zero_grad()
            rest.zero_grad()
            losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    rows = probe.table().query("step > 0")
    assert probe.steps == 30
    assert rows["taken_step_norm"].notna().all()
    assert (rows["taken_exact_cosine"].groupby(rows["circuit"]).mean() > 0).all()


def test_its_state_is_saved_and_loaded():
    model = language_model("gpt2")
    optimizer = CircuitMuon(model, lr=0.02)
    language_loss(model, 0).backward()
    optimizer.step()
    other = copy.deepcopy(model)
    resumed = CircuitMuon(other, lr=0.5)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, steps in ((model, optimizer), (other, resumed)):
        steps.zero_grad()
        language_loss(each, 1).backward()
        steps.step()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def test_frozen_weights_stay_and_a_closure_is_called():
    model = language_model("llama")
    attention = model.model.layers[0].self_attn
    attention.v_proj.weight.requires_grad_(requires_grad=False)
    before = copy.deepcopy(model.state_dict())
    optimizer = CircuitMuon(model, lr=0.02, weight_decay=0.5)
    calls = []

    def closure() -> Tensor:
        calls.append(1)
        loss = language_loss(model, 0)
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == pytest.approx(language_loss_of(before).item())
    assert calls == [1]
    moved = {name for name, weight in model.state_dict().items() if not torch.equal(weight, before[name])}
    assert moved == {f"model.layers.0.self_attn.{name}_proj.weight" for name in "qko"}


def language_loss_of(state: dict[str, Tensor]) -> Tensor:
    model = language_model("llama")
    model.load_state_dict(state)
    return language_loss(model, 0)


def test_wrong_calls_are_refused():
    model = language_model("gpt2")
    for options, message in (
        ({"of": "matrices"}, "of should be 'heads' or 'products', got 'matrices'"),
        ({"lr": -1.0}, "lr should be a finite number of at least 0, got -1.0"),
        ({"damping": math.nan}, "damping should be a finite number of at least 0, got nan"),
        ({"of": "products", "match_adamw": True}, "match_adamw is for of='heads'"),
    ):
        with pytest.raises(CallError, match=message):
            CircuitMuon(model, **options)
    with pytest.raises(CallError, match=r"the heads of .* share keys and values, and the rule for products is that of"):
        CircuitMuon(language_model("llama"), of="products")
    with pytest.raises(CallError, match="the attention weights alone: give others to another optimizer"):
        CircuitMuon(model).add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    for parameter in model.parameters():
        parameter.requires_grad_(requires_grad=False)
    with pytest.raises(CallError, match="the attention weights are frozen"):
        CircuitMuon(model)
