"""Attention that is frozen and unfrozen while its rates hold, and steps that call those of their base class."""

import warnings
from typing import Any

import pytest
import torch
import transformers
from qkov.circuits import CallError
from qkov.probes import CircuitRates

from ..circuits.family_proof import small
from .fused_models import BY_NAME, VOCABULARY, batches, loss_of

LR, QK = 1e-2, 30.0
NAMES = ["model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.q_proj.weight"]


def llama() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(small("LlamaConfig", vocab_size=VOCABULARY)).double()


def trained(model) -> list[Any]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def times(model, *optimizers) -> list[float | None]:
    """By how many times rate and gradient W_Q of each layer moves in a step; None where it does not move."""
    model.zero_grad()
    loss_of(model, next(batches(1))).backward()
    weights = [model.get_parameter(name) for name in NAMES]
    before = [weight.detach().clone() for weight in weights]
    for optimizer in optimizers:
        optimizer.step()
    return [
        None if torch.equal(old, weight) else round(((old - weight.detach()) / (LR * weight.grad)).median().item(), 4)
        for old, weight in zip(before, weights, strict=True)
    ]


def test_layers_that_are_frozen_and_unfrozen_are_followed():
    model = llama()
    first, second = model.model.layers
    second.requires_grad_(False)
    optimizer = torch.optim.SGD(trained(model), lr=LR)
    rates = CircuitRates(optimizer, model, QK)
    assert times(model, optimizer) == [QK, None]
    second.requires_grad_(True)
    optimizer.add_param_group({"params": list(second.parameters())})
    assert times(model, optimizer) == [QK, QK]
    assert "frozen" not in rates.describe()
    assert rates.scales(optimizer, model.get_parameter(NAMES[1]))
    first.requires_grad_(False)
    assert times(model, optimizer) == [None, QK]
    assert not rates.scales(optimizer, model.get_parameter(NAMES[0]))
    assert "left out because they are frozen: model.layers.0.self_attn.q_proj.weight" in rates.describe()
    first.requires_grad_(True)
    assert times(model, optimizer) == [QK, QK]


def test_parameters_that_the_optimizer_held_while_they_were_frozen_are_scaled_when_they_are_not():
    model = llama()
    model.model.layers.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    rates = CircuitRates(optimizer, model, QK)
    assert rates.describe().startswith("QK: 30 times the base rate, of which nothing is trained\n")
    told = r"^no parameter of the QK circuit is trained, so CircuitRates scales nothing of it until one is unfrozen: "
    with pytest.warns(UserWarning, match=told):
        assert times(model, optimizer) == [None, None]
    # Told once.
    assert times(model, optimizer) == [None, None]
    model.model.layers[1].requires_grad_(True)
    assert times(model, optimizer) == [None, QK]


def test_attention_that_is_unfrozen_before_the_first_step_is_not_said_to_be_frozen():
    model = llama()
    model.model.layers.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    CircuitRates(optimizer, model, QK)
    model.model.layers.requires_grad_(True)
    assert times(model, optimizer) == [QK, QK]


def test_what_is_unfrozen_into_an_optimizer_that_the_rates_do_not_know_is_told():
    model = llama()
    model.model.layers[1].requires_grad_(False)
    optimizer = torch.optim.SGD(trained(model), lr=LR)
    CircuitRates(optimizer, model, QK)
    model.model.layers[1].requires_grad_(True)
    other = torch.optim.SGD(model.model.layers[1].parameters(), lr=LR)
    told = (
        r"^model\.layers\.1\..*q_proj\.weight, model\.layers\.1\..*k_proj\.weight is trained now, and held by none of"
    )
    with pytest.warns(UserWarning, match=told):
        assert times(model, optimizer, other) == [QK, 1.0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert times(model, optimizer, other) == [QK, 1.0]


def test_what_cannot_be_scaled_when_it_comes_learns_at_the_base_rate_and_is_told():
    model = llama()
    model.model.layers[1].requires_grad_(False)
    optimizer = torch.optim.SGD(trained(model), lr=LR)
    rates = CircuitRates(optimizer, model, QK)
    model.model.layers[1].requires_grad_(True)
    of_rates = {"params": list(model.model.layers[1].parameters()), "multiplier": 5.0}
    optimizer.add_param_group(of_rates)
    told = r"^model\.layers\.1\..*q_proj\.weight cannot be scaled from now on, and learns at the base rate: .*already"
    with pytest.warns(UserWarning, match=told):
        assert times(model, optimizer) == [QK, 1.0]
    assert times(model, optimizer) == [QK, 1.0]
    assert "at the base rate: model.layers.1.self_attn.q_proj.weight, since model.layers.1" in rates.describe()
    assert rates.describe().startswith("QK: 30 times the base rate, 4,608 entries in model.layers.0.self_attn.q_proj")


def test_both_circuits_of_a_fused_weight_are_scaled_when_it_is_unfrozen():
    model = BY_NAME["GPT-2"].model(torch.float64)
    weight: Any = model.get_parameter("transformer.h.0.attn.c_attn.weight").requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    CircuitRates(optimizer, model, QK, 2.0)
    weight.requires_grad_(True)
    loss_of(model, next(batches(1))).backward()
    width = weight.shape[0]
    times = torch.tensor([QK] * 2 * width + [2.0] * width, dtype=torch.float64)
    expected = weight.detach() - LR * times * weight.grad
    optimizer.step()
    torch.testing.assert_close(weight.detach(), expected, rtol=0, atol=1e-13)


def test_attention_that_is_trained_from_the_start_has_to_be_in_an_optimizer():
    model = llama()
    optimizer = torch.optim.SGD(model.model.layers[0].parameters(), lr=LR)
    with pytest.raises(CallError, match=r"the optimizer does not hold model\.layers\.1\.self_attn\.q_proj\.weight, "):
        CircuitRates(optimizer, model, QK)
    model.model.layers[1].requires_grad_(False)
    CircuitRates(optimizer, model, QK)


class Decaying(torch.optim.SGD):
    """Decays the weights before the step of its base class, and moves them on after it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        held = [(parameter, group["lr"]) for group in self.param_groups for parameter in group["params"]]
        for parameter, rate in held:
            parameter.mul_(1 - 0.5 * rate)
        loss = super().step(closure)
        for parameter, rate in held:
            parameter.add_(0.25 * rate)
        return loss


def test_a_step_that_calls_that_of_its_base_class_is_scaled_once_and_whole():
    """If an SGD was made before, torch calls hooks twice; all three parts of the step are at 30 times the rate."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    model = llama()
    optimizer = Decaying(model.parameters(), lr=1e-3)
    CircuitRates(optimizer, model, QK)
    weight, rate = model.get_parameter(NAMES[0]), QK * 1e-3
    for tokens in batches(2):
        optimizer.zero_grad()
        loss_of(model, tokens).backward()
        expected = weight.detach() * (1 - 0.5 * rate) - rate * weight.grad + 0.25 * rate
        optimizer.step()
        torch.testing.assert_close(weight.detach(), expected, rtol=0, atol=1e-14)
