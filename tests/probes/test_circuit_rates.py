"""Fused weights whose steps are scaled learn as split weights do whose groups have a rate of their own."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from qkov.probes import CircuitRates, circuit_parameter_groups

from ..circuits.family_proof import small
from .fused_models import BY_NAME, FUSED, HEADS, LENGTH, VOCABULARY, batches, largest_difference, loss_of, train

QK, OV, STEPS = 30.0, 2.0, 100
#: Enough of them for what differs from the comparison over all: other optimizers, biases, rounding.
FEWER = 25


def warm_up_and_cosine(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / 10) * (0.55 + 0.45 * math.cos(math.pi * step / STEPS))
    )


#: What makes the optimizer, its rate, and what makes its schedule.
OPTIMIZERS: dict[str, Any] = {
    "SGD": (lambda groups: torch.optim.SGD(groups), 1e-2, None),
    "momentum": (lambda groups: torch.optim.SGD(groups, momentum=0.9), 1e-3, None),
    "AdamW": (lambda groups: torch.optim.AdamW(groups, weight_decay=0.1), 1e-4, warm_up_and_cosine),
}
MORE_OPTIMIZERS: dict[str, Any] = {
    "Nesterov with decay": (
        lambda groups: torch.optim.SGD(groups, momentum=0.9, nesterov=True, weight_decay=0.1),
        1e-3,
        None,
    ),
    "Adam with decay, AMSGrad": (lambda groups: torch.optim.Adam(groups, amsgrad=True, weight_decay=0.1), 1e-4, None),
    "AdamW over all tensors at once": (lambda groups: torch.optim.AdamW(groups, foreach=True), 1e-4, None),
    "AdamW fused": (lambda groups: torch.optim.AdamW(groups, fused=True), 1e-4, warm_up_and_cosine),
    "RMSprop": (lambda groups: torch.optim.RMSprop(groups, momentum=0.5), 1e-4, None),
    "NAdam": (lambda groups: torch.optim.NAdam(groups, weight_decay=0.1, decoupled_weight_decay=True), 1e-4, None),
}


def groups_at(parameters, lr):
    return [{"params": list(parameters), "lr": lr}]


def trained_pair(fused, optimizer, dtype=torch.float64, *, steps=FEWER, biases=False, places=None) -> Any:
    """The model with scaled steps, and its twin with groups."""
    make, lr, schedule = optimizer
    model = fused.model(dtype)
    parts = fused if places is None else dataclasses.replace(fused, places=places)
    twin = parts.twin(model, biases=biases)
    assert largest_difference(model, twin) == 0
    of_model = make(groups_at(model.parameters(), lr))
    of_twin = make(circuit_parameter_groups(twin, lr, QK, OV, biases=biases, mapping=parts.mapping(biases=biases)))
    with CircuitRates(of_model, model, QK, OV, biases=biases, **dict(fused.options)):
        train(model, of_model, steps, schedule and schedule(of_model))
    train(twin, of_twin, steps, schedule and schedule(of_twin))
    return model, twin


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("fused", FUSED, ids=lambda fused: fused.name)
def test_fused_and_split_weights_stay_equal(fused, optimizer):
    model, twin = trained_pair(fused, OPTIMIZERS[optimizer], steps=STEPS)
    assert largest_difference(model, fused.model(torch.float64)) > 0.02
    # Phi-3 computes its norms in float32, where a difference of 1e-15 may round to one of 1e-7.
    assert largest_difference(model, twin) < (1e-7 if "Phi" in fused.name else 1e-10)


@pytest.mark.parametrize("optimizer", MORE_OPTIMIZERS)
def test_other_optimizers_that_move_each_entry_by_itself_do_too(optimizer):
    model, twin = trained_pair(BY_NAME["nanoGPT"], MORE_OPTIMIZERS[optimizer])
    assert largest_difference(model, twin) < 1e-10


@pytest.mark.parametrize("fused", [BY_NAME["GPT-2"], BY_NAME["GPT-NeoX"]], ids=lambda fused: fused.name)
def test_biases_learn_with_their_weights_if_asked(fused):
    # Biases of keys have no gradient but rounding, which Adam would bring to full size.
    model, twin = trained_pair(fused, OPTIMIZERS["momentum"], biases=True)
    assert largest_difference(model, twin) < 1e-10


@pytest.mark.parametrize("name", ["GPT-2", "GPT-NeoX", "Falcon, grouped heads"])
def test_queries_taken_for_values_are_seen(name):
    """The comparison above can fail: with W_Q and W_V in each other's places nothing is equal."""
    fused = BY_NAME[name]
    query, key, value = fused.places
    size = min(len(query), len(value))
    swapped = (value + query[size:], key, query[:size])
    model, twin = trained_pair(fused, OPTIMIZERS["momentum"], places=swapped)
    assert largest_difference(model, twin) > 1e-2


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("fused", [FUSED[0], FUSED[1], FUSED[2], FUSED[-1]], ids=lambda fused: fused.name)
def test_in_float32_they_differ_by_the_rounding_of_steps_that_is_scaled(fused, optimizer):
    model, twin = trained_pair(fused, OPTIMIZERS[optimizer], torch.float32)
    largest = max(model.get_parameter(fused.projection.format(layer=layer)).abs().max().item() for layer in (0, 1))
    half_unit = 2.0 ** (math.floor(math.log2(largest)) - 24)
    # Biases of keys have no gradient but rounding, which Adam brings to full size in either.
    assert largest_difference(model, twin, matrices=True) < FEWER * QK * half_unit


@pytest.mark.parametrize("grouped_heads", [1, 2, HEADS])
def test_one_step_of_gradient_descent_by_hand(grouped_heads):
    """Phi-3's rows: queries, then the keys and the values of its fewer heads; against numpy."""
    d_model, d_head, lr = 32, 8, 0.01
    config = small(
        "Phi3Config",
        hidden_size=d_model,
        num_attention_heads=HEADS,
        num_key_value_heads=grouped_heads,
        vocab_size=VOCABULARY,
        pad_token_id=0,
    )
    model = transformers.Phi3ForCausalLM(config).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    CircuitRates(optimizer, model, 7.0, 3.0)
    loss_of(model, next(batches(1))).backward()
    expected = {}
    for name, parameter in model.named_parameters():
        scale = np.ones((parameter.shape[0], *[1] * (parameter.ndim - 1)))
        if "qkv_proj" in name:
            scale[: (HEADS + grouped_heads) * d_head] = 7
            scale[(HEADS + grouped_heads) * d_head :] = 3
        elif "o_proj" in name:
            scale[:] = 3
        expected[name] = parameter.detach().numpy() - lr * scale * parameter.grad.numpy()
    optimizer.step()
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(parameter.detach().numpy(), expected[name], rtol=0, atol=1e-14, err_msg=name)


def test_split_weights_can_have_their_steps_scaled_as_well():
    def model() -> Any:
        torch.manual_seed(0)
        config = small("LlamaConfig", num_key_value_heads=2, vocab_size=VOCABULARY, max_position_embeddings=LENGTH)
        return transformers.LlamaForCausalLM(config).double()

    scaled, grouped = model(), model()
    of_scaled = torch.optim.AdamW(scaled.parameters(), lr=1e-4)
    CircuitRates(of_scaled, scaled, QK)
    train(scaled, of_scaled, 30)
    train(grouped, torch.optim.AdamW(circuit_parameter_groups(grouped, 1e-4, QK)), 30)
    # The model computes its norms in float32.
    assert largest_difference(scaled, grouped) < 1e-7
