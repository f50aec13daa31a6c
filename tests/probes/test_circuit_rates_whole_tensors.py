"""Optimizers that move whole matrices: their steps are scaled where a circuit's weights are parameters of their own."""

from typing import Any

import pytest
import torch
import transformers
from qkov.circuits import CallError
from qkov.probes import CircuitRates

from ..circuits.family_proof import small
from .fused_models import BY_NAME, VOCABULARY, largest_difference

LR, QK, OV = 0.02, 30.0, 2.0


def llama() -> Any:
    torch.manual_seed(0)
    config = small("LlamaConfig", num_key_value_heads=2, vocab_size=VOCABULARY)
    return transformers.LlamaForCausalLM(config).double()


def matrices(model) -> dict[str, Any]:
    return {
        name: parameter for name, parameter in model.named_parameters() if ".layers." in name and parameter.ndim == 2
    }


class Sign(torch.optim.Optimizer):
    """Steps along the gradient over its norm, as whole-tensor optimizers take them, of parameters of any shape."""

    def __init__(self, params: Any, lr: float = LR) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # noqa: ARG002
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * parameter.grad / parameter.grad.norm())


class Limited(Sign):
    """As `Sign`, but at a rate of at most one over the root of the step, as Adafactor's."""

    def step(self, closure: Any = None) -> Any:  # noqa: ARG002
        rates = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["taken"] = group.get("taken", 0) + 1
            group["lr"] = min(group["lr"], group["taken"] ** -0.5)
        super().step()
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate


OPTIMIZERS: dict[str, Any] = {
    "Muon": lambda groups: torch.optim.Muon(groups, lr=LR, weight_decay=0.1),
    "Muon, as large as AdamW": lambda groups: torch.optim.Muon(groups, lr=LR, adjust_lr_fn="match_rms_adamw"),
    "over the norm": lambda groups: Sign(groups, lr=LR),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_scaled_steps_are_those_of_groups_at_their_own_rates(name):
    """With the same gradients, since Muon rounds them to bfloat16 and a last digit may become a hundredth."""
    scaled, separate = llama(), llama()
    of_scaled = OPTIMIZERS[name](list(matrices(scaled).values()))
    rates = {"q_proj": QK, "k_proj": QK, "v_proj": OV, "o_proj": OV}
    of_separate = OPTIMIZERS[name](
        [
            {"params": [parameter], "lr": LR * next((m for part, m in rates.items() if part in path), 1.0)}
            for path, parameter in matrices(separate).items()
        ]
    )
    with CircuitRates(of_scaled, scaled, QK, OV) as made:
        generator = torch.Generator().manual_seed(1)
        for _ in range(10):
            for path, parameter in matrices(scaled).items():
                gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.grad, separate.get_parameter(path).grad = gradient, gradient.clone()
            of_scaled.step()
            of_separate.step()
    assert largest_difference(scaled, llama()) > 0.05
    assert largest_difference(scaled, separate) < 1e-11
    assert made.describe().startswith("QK: 30 times the base rate, 6,912 entries in model.layers.*.self_attn.q_proj")


def test_rates_of_layers_are_those_of_whole_matrices_and_rates_of_heads_are_not():
    model = llama()
    muon = torch.optim.Muon(list(matrices(model).values()))
    CircuitRates(muon, model, {0: 3.0}).remove()
    said = r"^Muon does not move each entry separately, but each parameter as a whole, and .*q_proj.* holds heads"
    with pytest.raises(CallError, match=said):
        CircuitRates(muon, model, {(0, 0): 3.0, (0, 1): 3.0})


@pytest.mark.parametrize("name", ["GPT-2", "GPT-NeoX"])
def test_fused_weights_are_refused_with_the_reason(name):
    model = BY_NAME[name].model(torch.float64)
    muon = torch.optim.Muon([one for one in model.parameters() if one.ndim == 2])
    said = r"^Muon does not move each entry separately, but each parameter as a whole, and .* holds W_QK fused"
    with pytest.raises(CallError, match=said):
        CircuitRates(muon, model, QK)
    # W_O is a parameter of its own, and W_V is not.
    with pytest.raises(CallError, match="holds W_OV fused with other weights: keep them as parameters of their own"):
        CircuitRates(muon, model, 1.0, OV)
    assert not muon.state
    assert not muon._optimizer_step_pre_hooks


def test_limits_on_the_rate_are_found_at_large_rates():
    model = llama()
    said = r"^Limited does not move each entry separately and in proportion to the rate, nor each tensor, so"
    with pytest.raises(CallError, match=said):
        CircuitRates(Limited(model.parameters()), model, QK)
    with pytest.raises(CallError, match=r"^Adafactor does not move each entry"):
        CircuitRates(torch.optim.Adafactor(model.parameters()), model, QK)


def test_muon_beside_another_optimizer_of_the_rest():
    model = llama()
    whole = matrices(model)
    rest = [parameter for name, parameter in model.named_parameters() if name not in whole]
    muon, adamw = torch.optim.Muon(list(whole.values()), lr=LR), torch.optim.AdamW(rest, lr=LR)
    rates = CircuitRates([muon, adamw], model, QK)
    query = model.model.layers[0].self_attn.q_proj.weight
    assert rates.scales(muon, query)
    assert not rates.scales(adamw, query)
    assert not rates.scales(muon, model.model.layers[0].self_attn.v_proj.weight)
