"""The life of circuit rates: closures, skipped steps, several optimizers, copies, removal, and what is refused."""

import copy
import gc
import io
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import transformers
from qkov.analyses.dynamics import Parameterization, SingleLayerAttention
from qkov.circuits import CallError, QkovError
from qkov.probes import CircuitRates, circuit_parameter_groups
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..circuits.family_proof import small
from .fused_models import BY_NAME, batches, largest_difference, loss_of, train

LR = 1e-2
FUSED = BY_NAME["GPT-2"]
WEIGHT = "transformer.h.0.attn.c_attn.weight"
D_MODEL = 24


def gpt2() -> Any:
    return FUSED.model(torch.float64)


def sgd(model, **options) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=LR, **options)


def backward(model):
    loss_of(model, next(batches(1))).backward()


def hooks(optimizer) -> int:
    return len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)


def moved(model, optimizer) -> torch.Tensor:
    """By how many times rate and gradient the columns of a fused weight move in a step."""
    model.zero_grad()
    backward(model)
    weight = model.get_parameter(WEIGHT)
    before = weight.detach().clone()
    optimizer.step()
    return -((weight.detach() - before) / (LR * weight.grad)).median(dim=0).values


def assert_factor(found, factor):
    expected = torch.ones(3 * D_MODEL, dtype=torch.float64)
    expected[: 2 * D_MODEL] = factor
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_steps_are_scaled_until_the_end_of_the_block():
    model = gpt2()
    optimizer = sgd(model)
    with CircuitRates(optimizer, model, 30.0) as rates:
        assert_factor(moved(model, optimizer), 30)
        kept = [weakref.ref(tensor) for one in rates._scaled for tensor in one.before]
        assert sum(tensor().numel() for tensor in kept) == 2 * 2 * D_MODEL**2
    assert_factor(moved(model, optimizer), 1)
    gc.collect()
    assert hooks(optimizer) == 0
    assert all(tensor() is None for tensor in kept)
    rates.remove()


def test_by_default_qk_learns_at_thirty_times_the_rate_and_its_biases_at_the_rate():
    model = gpt2()
    optimizer = sgd(model)
    CircuitRates(optimizer, model)
    bias = model.get_parameter(WEIGHT.replace("weight", "bias"))
    before = bias.detach().clone()
    assert_factor(moved(model, optimizer), 30.0)
    torch.testing.assert_close(bias.detach(), before - LR * bias.grad, rtol=0, atol=1e-15)


def test_hooks_are_gone_after_an_exception():
    model = gpt2()
    optimizer = sgd(model)
    with pytest.raises(KeyboardInterrupt), CircuitRates(optimizer, model):
        raise KeyboardInterrupt
    assert hooks(optimizer) == 0


def test_a_step_that_was_interrupted_is_no_part_of_the_next_one():
    model = gpt2()
    optimizer = sgd(model)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    # It comes after the weights moved, and before their step is scaled.
    handle = optimizer.register_step_post_hook(interrupt)
    CircuitRates(optimizer, model, 30.0)
    with pytest.raises(KeyboardInterrupt):
        moved(model, optimizer)
    handle.remove()
    assert_factor(moved(model, optimizer), 30)


def test_rates_whose_removal_was_interrupted_scale_nothing_and_can_be_removed(monkeypatch):
    model = gpt2()
    optimizer = sgd(model)
    rates = CircuitRates(optimizer, model, 30.0)
    assert_factor(moved(model, optimizer), 30)

    def interrupt(_handle: RemovableHandle) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(RemovableHandle, "remove", interrupt)
        with pytest.raises(KeyboardInterrupt):
            rates.remove()
    assert_factor(moved(model, optimizer), 1)
    rates.remove()
    assert hooks(optimizer) == 0


def test_a_multiplier_of_one_keeps_and_costs_nothing():
    model = gpt2()
    optimizer = sgd(model)
    rates = CircuitRates(optimizer, model, 1.0)
    assert hooks(optimizer) == 0
    assert rates.describe().startswith("QK: 1 times the base rate")


def test_rates_that_nobody_holds_still_scale_and_are_known():
    model = gpt2()
    optimizer = sgd(model)
    CircuitRates(optimizer, model, 5.0)
    gc.collect()
    with pytest.raises(CallError, match=r"c_attn\.weight are already scaled by another CircuitRates: remove\(\) that"):
        CircuitRates(optimizer, model, 5.0)
    assert_factor(moved(model, optimizer), 5)


def test_the_copies_are_made_once():
    model = gpt2()
    optimizer = sgd(model)
    rates = CircuitRates(optimizer, model, ov=2.0)

    def kept() -> list[int]:
        return [tensor.data_ptr() for one in rates._scaled for tensor in one.before]

    train(model, optimizer, 1)
    first = kept()
    train(model, optimizer, 3)
    assert kept() == first
    model.float()
    train(model, sgd(model), 1)
    optimizer.state.clear()
    train(model, optimizer, 1)
    assert all(one.before[0].dtype == torch.float32 for one in rates._scaled)


def test_a_closure_makes_the_gradients_of_the_step():
    model, other = gpt2(), gpt2()
    optimizer = sgd(model)
    CircuitRates(optimizer, model)

    def closure() -> float:
        optimizer.zero_grad()
        loss = loss_of(model, next(batches(1)))
        loss.backward()
        return loss.item()

    optimizer.step(closure)
    of_other = sgd(other)
    CircuitRates(of_other, other)
    train(other, of_other, 1)
    assert largest_difference(model, other) == 0


def test_parameters_without_gradient_stay_as_they_are():
    model = gpt2()
    optimizer = sgd(model, weight_decay=0.1)
    CircuitRates(optimizer, model)
    before = copy.deepcopy(model)
    optimizer.step()
    assert largest_difference(model, before) == 0


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_the_gradient_scaler_skips_changes_nothing(fused):
    model = FUSED.model(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=fused)
    CircuitRates(optimizer, model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    before = copy.deepcopy(model)
    scaler.scale(loss_of(model, next(batches(1)))).backward()
    model.get_parameter(WEIGHT).grad[0, 0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    assert largest_difference(model, before) == 0
    optimizer.zero_grad()
    scaler.scale(loss_of(model, next(batches(1)))).backward()
    scaler.step(optimizer)
    assert largest_difference(model, before) > LR


def test_several_optimizers_that_train_one_model():
    model, other = gpt2(), gpt2()
    attention = [parameter for name, parameter in model.named_parameters() if ".0.attn." in name]
    rest = [parameter for name, parameter in model.named_parameters() if ".0.attn." not in name]
    both = [torch.optim.SGD(attention, lr=LR), torch.optim.SGD(rest, lr=LR)]
    with pytest.raises(CallError, match=r"the optimizer does not hold transformer\.h\.1\.attn\.c_attn\.weight:"):
        CircuitRates(both[0], model)
    assert [hooks(optimizer) for optimizer in both] == [0, 0]
    CircuitRates([*both, both[0]], model)
    of_other = sgd(other)
    CircuitRates(of_other, other)
    for tokens in batches(3):
        for one, optimizers in ((model, both), (other, [of_other])):
            one.zero_grad()
            loss_of(one, tokens).backward()
            for optimizer in optimizers:
                optimizer.step()
    assert largest_difference(model, other) == 0


def test_every_parameter_may_have_a_group_of_its_own():
    model = gpt2()
    optimizer = torch.optim.SGD([{"params": [parameter]} for parameter in model.parameters()], lr=LR)
    CircuitRates(optimizer, model, 30.0)
    assert_factor(moved(model, optimizer), 30)


def test_models_that_share_an_optimizer_have_rates_of_their_own():
    first, second = gpt2(), gpt2()
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=LR)
    CircuitRates(optimizer, first, 5.0)
    CircuitRates(optimizer, second, 7.0)
    assert_factor(moved(first, optimizer), 5)
    optimizer.zero_grad()
    assert_factor(moved(second, optimizer), 7)


def test_saving_and_loading_the_optimizer_goes_on_as_if_nothing_had_been():
    def half(model, optimizer, part):
        for at, tokens in enumerate(batches(6)):
            if at // 3 == part:
                optimizer.zero_grad()
                loss_of(model, tokens).backward()
                optimizer.step()

    def start(model) -> Any:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        CircuitRates(optimizer, model)
        return optimizer

    whole, parted = gpt2(), gpt2()
    of_whole = start(whole)
    half(whole, of_whole, 0)
    half(whole, of_whole, 1)
    of_parted = start(parted)
    half(parted, of_parted, 0)
    file = io.BytesIO()
    torch.save({"model": parted.state_dict(), "optimizer": of_parted.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = gpt2()
    of_resumed = start(resumed)
    resumed.load_state_dict(saved["model"])
    of_resumed.load_state_dict(saved["optimizer"])
    half(resumed, of_resumed, 1)
    assert largest_difference(whole, resumed) == 0


def test_a_copy_of_the_optimizer_takes_rates_of_its_own():
    model = gpt2()
    optimizer = sgd(model)
    rates = CircuitRates(optimizer, model)
    other, of_other = copy.deepcopy((model, optimizer))
    assert hooks(of_other) == 0
    CircuitRates(of_other, other, 4.0)
    assert_factor(moved(other, of_other), 4)
    with pytest.raises(CallError, match="cannot be copied or saved: create new ones"):
        copy.deepcopy(rates)


def test_frozen_attention_is_left_alone_and_said():
    model = gpt2()
    model.transformer.h[1].requires_grad_(False)
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=LR)
    rates = CircuitRates(optimizer, model)
    assert_factor(moved(model, optimizer), 30)
    assert rates.describe().splitlines() == [
        f"QK: 30 times the base rate, {2 * D_MODEL**2:,} of {3 * D_MODEL**2:,} entries in "
        "transformer.h.0.attn.c_attn.weight",
        f"OV: 1 times the base rate, {2 * D_MODEL**2:,} of {4 * D_MODEL**2:,} entries in "
        "transformer.h.0.attn.c_attn.weight, transformer.h.0.attn.c_proj.weight",
        "rest: the base rate",
        "left out because they are frozen: transformer.h.1.attn.c_attn.weight, transformer.h.1.attn.c_proj.weight",
    ]


def test_weights_that_layers_share_are_scaled_once():
    torch.manual_seed(0)
    model: Any = transformers.AlbertModel(small("AlbertConfig", embedding_size=16)).double()
    optimizer = sgd(model)
    CircuitRates(optimizer, model, 8.0)
    model(torch.randint(3, 50, (2, 6))).last_hidden_state.square().sum().backward()
    query = next(one for name, one in model.named_parameters() if name.endswith("query.weight"))
    expected = query.detach() - 8 * LR * query.grad
    optimizer.step()
    torch.testing.assert_close(query.detach(), expected, rtol=0, atol=1e-12)


def test_collapsed_circuits_are_scaled():
    model = SingleLayerAttention(4, 3, Parameterization.CACO)
    optimizer = sgd(model)
    CircuitRates(optimizer, model, 20.0, 0.5)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for name, multiplier in (("W_QK", 20), ("W_OV", 0.5)):
        weight = model.get_parameter(name).detach()
        torch.testing.assert_close(weight, torch.full_like(weight, -multiplier * LR), rtol=1e-14, atol=0)


#: Optimizers whose step depends on other entries, or is not in proportion to the rate.
OTHERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "LBFGS": lambda model: torch.optim.LBFGS(model.parameters()),
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters()),
    "Muon": lambda model: torch.optim.Muon([one for one in model.parameters() if one.ndim == 2]),
    "Rprop": lambda model: torch.optim.Rprop(model.parameters()),
    "ASGD": lambda model: torch.optim.ASGD(model.parameters()),
}


@pytest.mark.parametrize("name", OTHERS)
def test_optimizers_for_which_it_would_not_be_a_rate_are_refused(name):
    model = gpt2()
    optimizer = OTHERS[name](model)
    before = copy.deepcopy(model)
    with pytest.raises(CallError, match=rf"^{name} (does not move each entry separately|cannot be tested)"):
        CircuitRates(optimizer, model)
    assert hooks(optimizer) == 0
    assert not optimizer.state
    assert largest_difference(model, before) == 0


class OfModel(torch.optim.SGD):
    """An optimizer that is not made of parameter groups."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=LR)


class Lookahead(torch.optim.Optimizer):
    """An optimizer around another."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        super().__init__(optimizer.param_groups, {})


class OfSquaredRates(torch.optim.SGD):
    """Steps of gradient descent, or in proportion to the square of the rate in groups that say so."""

    def __init__(self, params: Any, lr: float = LR, squared: bool = False) -> None:
        super().__init__(params, lr=lr)
        self.defaults["squared"] = squared
        for group in self.param_groups:
            group.setdefault("squared", squared)

    def step(self, closure: Any = None) -> Any:
        rates = [group["lr"] for group in self.param_groups]
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate**2 if group["squared"] else rate
        loss = super().step(closure)
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate
        return loss


def test_every_group_is_tried_with_its_own_options():
    model = gpt2()
    parts = [list(part.parameters()) for part in model.transformer.h]
    CircuitRates(OfSquaredRates([{"params": part} for part in parts]), model, 3.0).remove()
    optimizer = OfSquaredRates([{"params": parts[0]}, {"params": parts[1], "squared": True}])
    with pytest.raises(CallError, match=r"^OfSquaredRates does not move each entry separately and in"):
        CircuitRates(optimizer, model, 3.0)


class Noted(torch.optim.SGD):
    """Notes the shapes and the rates of what it steps."""

    steps: ClassVar[Counter[tuple[tuple[tuple[int, ...], float], ...]]] = Counter()

    def step(self, closure: Any = None) -> Any:
        moving = ((parameter, group["lr"]) for group in self.param_groups for parameter in group["params"])
        self.steps[tuple((tuple(parameter.shape), round(rate, 12)) for parameter, rate in moving)] += 1
        return super().step(closure)


def test_an_optimizer_is_tried_for_sixty_steps_at_a_rate_of_a_hundredth_and_three_times_that():
    model = gpt2()
    CircuitRates(Noted(model.parameters(), lr=LR), model)
    assert Noted.steps == {(((4, 3), 0.01),): 60, (((2, 3), 0.03), ((2, 3), 0.01)): 60}


class OfRandomRounding(torch.optim.SGD):
    """Draws random numbers with every step."""

    def step(self, closure: Any = None) -> Any:
        torch.rand(3)
        return super().step(closure)


def test_trying_an_optimizer_leaves_the_user_s_random_numbers_as_they_were():
    model = gpt2()
    optimizer = OfRandomRounding(model.parameters(), lr=LR)
    before = torch.get_rng_state()
    CircuitRates(optimizer, model, 3.0).remove()
    assert torch.equal(torch.get_rng_state(), before)


def test_optimizers_that_cannot_be_tried_are_refused():
    model = gpt2()
    with pytest.raises(CallError, match=r"^OfModel cannot be tested on a small tensor.*made of parameter groups"):
        CircuitRates(OfModel(model), model)
    with pytest.raises(CallError, match=r"^Lookahead wraps another optimizer: give that one, its \.optimizer"):
        CircuitRates(Lookahead(sgd(model)), model)


def test_weights_spread_over_processes_are_refused():
    model = gpt2()
    model.get_parameter(WEIGHT).full_tensor = None
    with pytest.raises(CallError, match=r"h\.0\.attn\.c_attn\.weight is spread over processes \(DTensor\)"):
        CircuitRates(sgd(model), model)


def test_a_compiled_model_is_scaled_as_it_is():
    model = gpt2()
    compiled: Any = torch.compile(model, backend="eager")
    optimizer = sgd(compiled)
    CircuitRates(optimizer, compiled, 6.0)
    assert_factor(moved(model, optimizer), 6)


def test_trying_an_optimizer_draws_no_random_number():
    model = gpt2()
    torch.manual_seed(0)
    expected = torch.randn(3)
    torch.manual_seed(0)
    CircuitRates(sgd(model), model)
    assert torch.equal(torch.randn(3), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_refused_with_the_way_out(dtype):
    model = gpt2().to(dtype)
    with pytest.raises(CallError, match=rf"c_attn\.weight is of {dtype}.*float32 and compute under torch\.autocast"):
        CircuitRates(sgd(model), model)


def test_rates_upon_rates_are_refused():
    fused = BY_NAME["nanoGPT"]
    twin = fused.twin(fused.model(torch.float64))
    optimizer = torch.optim.SGD(circuit_parameter_groups(twin, LR, mapping=fused.mapping()))
    with pytest.raises(CallError, match="already learns at 30 times the base rate through circuit_parameter_groups"):
        CircuitRates(optimizer, twin, mapping=fused.mapping())


def test_what_has_no_attention_is_refused():
    model = nn.Linear(3, 3)
    with pytest.raises(QkovError, match="are not recognised"):
        CircuitRates(sgd(model), model)
    with pytest.raises(CallError, match="the multiplier qk should be a finite number above 0, got nan"):
        CircuitRates(sgd(model), model, float("nan"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_step_is_scaled_as_it_is():
    """Against gradient descent by hand, with one multiplier and by head."""
    for qk, expected in ((30.0, 30.0), ({0: 30.0, (1, 0): 2.0}, 30.0)):
        model = gpt2()
        optimizer = sgd(model)
        CircuitRates(optimizer, model, qk)
        compiled = torch.compile(optimizer.step, backend="eager")
        for _ in range(2):
            model.zero_grad()
            backward(model)
            weight = model.get_parameter(WEIGHT)
            wanted = weight.detach().clone()
            wanted[:, : 2 * D_MODEL] -= expected * LR * weight.grad[:, : 2 * D_MODEL]
            wanted[:, 2 * D_MODEL :] -= LR * weight.grad[:, 2 * D_MODEL :]
            compiled()
            torch.testing.assert_close(weight.detach(), wanted, rtol=0, atol=1e-12)
