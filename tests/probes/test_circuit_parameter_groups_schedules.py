"""Schedules that keep the ratio of parameter groups, those that do not, and how that is told."""

import copy
import warnings
from typing import Any

import pytest
import torch
import transformers
from qkov.analyses.dynamics import Parameterization, SingleLayerAttention
from qkov.circuits import CallError
from qkov.probes import CircuitRates, circuit_parameter_groups
from torch import nn
from torch.optim import lr_scheduler

from ..circuits.family_proof import small
from .fused_models import VOCABULARY, loss_of

LR, QK, OV, STEPS = 1e-2, 30.0, 2.0, 12


def model() -> Any:
    return SingleLayerAttention(4, 3, Parameterization.FAFO)


class WithRest(SingleLayerAttention):
    """The paper's model with a parameter of neither circuit."""

    def __init__(self) -> None:
        super().__init__(4, 3, Parameterization.FAFO)
        self.bias = nn.Parameter(torch.zeros(3, dtype=torch.float64))


def by_lambda(optimizer):
    return lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)


def in_sequence(optimizer):
    warm_up = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
    return lr_scheduler.SequentialLR(optimizer, [warm_up, lr_scheduler.ExponentialLR(optimizer, 0.9)], [4])


def chained(optimizer):
    return lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, 0.1, 4), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    )


def of_transformers(name, **settings):
    return lambda optimizer: transformers.get_scheduler(
        name, optimizer, num_warmup_steps=3, num_training_steps=STEPS, scheduler_specific_kwargs=settings
    )


#: Each schedule, and whether it keeps the ratio of the groups.
SCHEDULES: dict[str, tuple[Any, bool]] = {
    "LambdaLR": (by_lambda, True),
    "MultiplicativeLR": (lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.9), True),
    "StepLR": (lambda o: lr_scheduler.StepLR(o, 3), True),
    "MultiStepLR": (lambda o: lr_scheduler.MultiStepLR(o, [3, 6]), True),
    "ConstantLR": (lambda o: lr_scheduler.ConstantLR(o, 0.1, 4), True),
    "LinearLR": (lambda o: lr_scheduler.LinearLR(o, 0.1, 0.5, 8), True),
    "ExponentialLR": (lambda o: lr_scheduler.ExponentialLR(o, 0.5), True),
    "PolynomialLR": (lambda o: lr_scheduler.PolynomialLR(o, STEPS), True),
    "SequentialLR": (in_sequence, True),
    "ChainedScheduler": (chained, True),
    "CosineAnnealingLR": (lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS), True),
    "CosineAnnealingWarmRestarts": (lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5), True),
    "CosineAnnealingLR, eta_min": (lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS, eta_min=1e-3), False),
    "CosineAnnealingWarmRestarts, eta_min": (
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5, eta_min=1e-3),
        False,
    ),
    "OneCycleLR": (lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=STEPS + 1, cycle_momentum=False), False),
    "CyclicLR": (lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-2, 4, cycle_momentum=False), False),
    "ReduceLROnPlateau": (lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0), True),
    "ReduceLROnPlateau, min_lr": (lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, min_lr=1e-3), False),
    "transformers: linear": (of_transformers("linear"), True),
    "transformers: cosine": (of_transformers("cosine"), True),
    "transformers: cosine_with_restarts": (of_transformers("cosine_with_restarts", num_cycles=2), True),
    "transformers: polynomial": (of_transformers("polynomial", lr_end=1e-3), True),
    "transformers: constant": (of_transformers("constant"), True),
    "transformers: constant_with_warmup": (of_transformers("constant_with_warmup"), True),
    "transformers: inverse_sqrt": (of_transformers("inverse_sqrt"), True),
    "transformers: cosine_with_min_lr": (of_transformers("cosine_with_min_lr", min_lr=1e-3), True),
    "transformers: cosine_warmup_with_min_lr": (of_transformers("cosine_warmup_with_min_lr", min_lr=1e-3), True),
    "transformers: warmup_stable_decay": (
        of_transformers("warmup_stable_decay", num_decay_steps=4, min_lr_ratio=0.1),
        True,
    ),
    "transformers: reduce_lr_on_plateau": (
        of_transformers("reduce_lr_on_plateau", patience=0, min_lr=1e-3),
        False,
    ),
    "transformers: greedy": (
        of_transformers("greedy", patience=0, warmup=0, cooldown=0, factor=0.5, min_lr=5e-3),
        False,
    ),
}


def grouped(**options: Any) -> tuple[Any, torch.optim.Optimizer]:
    groups = circuit_parameter_groups(WithRest(), LR, QK, OV, **options)
    return groups, torch.optim.SGD(groups, lr=LR)


def run(optimizer, schedule) -> tuple[list[str], bool]:
    """What was told, and whether the rates were in their ratio at each step."""
    is_kept = True
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(STEPS):
            qk, ov, rest = (float(group["lr"]) for group in optimizer.param_groups)
            is_kept = is_kept and qk == pytest.approx(QK * rest, rel=1e-6) and ov == pytest.approx(OV * rest, rel=1e-6)
            optimizer.step()
            # These two follow a loss, which stays the same.
            schedule.step(*([1.0] if type(schedule).__name__ in ("ReduceLROnPlateau", "GreedyLR") else []))
    return [str(one.message) for one in told if issubclass(one.category, UserWarning)], is_kept


def test_the_table_of_schedules_is_whole():
    own = {name for name in vars(lr_scheduler) if isinstance(getattr(lr_scheduler, name), type)}
    of_torch = {name for name in own if issubclass(getattr(lr_scheduler, name), lr_scheduler.LRScheduler)}
    tested = {name.partition(",")[0] for name in SCHEDULES}
    assert of_torch - {"LRScheduler", "_LRScheduler"} <= tested
    known = {f"transformers: {name.value}" for name in transformers.SchedulerType}
    assert known <= tested


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_that_leaves_the_ratio_is_told_once_and_others_are_not(name):
    make, keeps = SCHEDULES[name]
    _, optimizer = grouped()
    told, is_kept = run(optimizer, make(optimizer))
    assert is_kept == keeps
    assert len(told) == (0 if keeps else 1), told
    if not keeps:
        assert told[0].startswith("SGD: the group QK should learn at 30 times the base rate and learns at ")
        assert "give it a rate for each group, as in max_lr=groups.rates(1e-3); or use CircuitRates" in told[0]


def test_one_cycle_says_what_was_promised_and_what_was_found():
    """L7: all groups at one rate, while group["multiplier"] says 30."""
    groups, optimizer = grouped()
    schedule = lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=STEPS, cycle_momentum=False)
    assert [group["lr"] for group in groups] == pytest.approx([4e-5] * 3)
    said = (
        r"^SGD: the group QK should learn at 30 times the base rate and learns at 1 times it \(4e-05, where the group "
        r"rest makes the base rate 4e-05\); so it is with 1 other group\. What set"
    )
    with pytest.warns(UserWarning, match=said):
        optimizer.step()
    schedule.step()
    optimizer.step()
    lines = [line for line in groups.describe().splitlines() if line.startswith("out of ratio: ")]
    assert [line.partition(" should")[0] for line in lines] == [
        "out of ratio: the group QK",
        "out of ratio: the group OV",
    ]


def test_rates_for_each_group_keep_the_ratio_of_schedules_that_set_rates():
    for make in (
        lambda o, groups: lr_scheduler.OneCycleLR(o, groups.rates(1e-3), total_steps=STEPS + 1, cycle_momentum=False),
        lambda o, groups: lr_scheduler.CyclicLR(o, groups.rates(1e-4), groups.rates(1e-3), 4, cycle_momentum=False),
        lambda o, groups: lr_scheduler.ReduceLROnPlateau(o, patience=0, min_lr=groups.rates(1e-4)),
    ):
        groups, optimizer = grouped()
        assert groups.rates(1e-3) == pytest.approx([0.03, 0.002, 0.001])
        told, is_kept = run(optimizer, make(optimizer, groups))
        assert not told
        assert is_kept
        assert "out of ratio" not in groups.describe()


def test_rates_of_groups_with_a_base_rate_of_their_own():
    network = WithRest()
    parts = [{"params": [network.W_Q, network.bias]}, {"params": [network.W_K, network.W_V, network.W_O], "lr": 0.04}]
    groups = circuit_parameter_groups(network, LR, QK, groups=parts)
    assert [(group["name"], group["lr"]) for group in groups] == [
        ("0 QK", 0.3),
        ("0 rest", 0.01),
        ("1 QK", 1.2),
        ("1 OV", 0.04),
    ]
    assert groups.rates(1.0) == pytest.approx([30.0, 1.0, 120.0, 4.0])
    none = circuit_parameter_groups(network, 0.0, QK, groups=parts)
    with pytest.raises(CallError, match="rates of their own beside a base rate of 0, so their ratio is not known"):
        none.rates(1.0)
    assert circuit_parameter_groups(network, 0.0, QK).rates(0.5) == [15.0, 0.5, 0.5]
    for rate in (-1.0, float("nan")):
        with pytest.raises(CallError, match="the base rate should be a finite number of at least 0, got"):
            groups.rates(rate)


def test_groups_are_compared_with_those_of_their_own_base_rate():
    network = WithRest()
    parts = [{"params": [network.W_Q, network.bias]}, {"params": [network.W_K, network.W_V, network.W_O], "lr": 0.04}]
    optimizer = torch.optim.SGD(circuit_parameter_groups(network, LR, QK, groups=parts))
    for group in optimizer.param_groups[2:]:
        group["lr"] *= 7
    optimizer.step()
    optimizer.param_groups[2]["lr"] /= 2
    with pytest.warns(
        UserWarning, match=r"the group 1 QK should learn at 30 times the base rate and learns at 15 times"
    ):
        optimizer.step()


def test_a_rate_that_is_changed_by_hand_is_told_and_a_multiplier_that_is_changed_with_it_is_not():
    _, optimizer = grouped()
    qk = optimizer.param_groups[0]
    qk["lr"], qk["multiplier"] = 10 * LR, 10.0
    optimizer.step()
    qk["lr"] = 5 * LR
    with pytest.warns(UserWarning, match="at 10 times the base rate and learns at 5 times it"):
        optimizer.step()


def test_rates_of_zero():
    _, optimizer = grouped()
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.3
    with pytest.warns(
        UserWarning, match="QK should learn at 30 times the base rate and learns at a rate while that is 0"
    ):
        optimizer.step()
    _, frozen = grouped()
    frozen.param_groups[0]["lr"] = 0.0
    with pytest.warns(
        UserWarning, match=r"QK should learn at 30 times the base rate and learns at 0 times it \(0, where"
    ):
        frozen.step()


def test_the_base_rate_is_that_of_the_group_whose_multiplier_is_nearest_to_one():
    optimizer = torch.optim.SGD(circuit_parameter_groups(WithRest(), LR, QK, 0.5))
    optimizer.param_groups[0]["lr"] = LR
    with pytest.warns(
        UserWarning, match=r"learns at 1 times it \(0\.01, where the group rest makes the base rate 0\.01\)\."
    ):
        optimizer.step()


@pytest.mark.parametrize(
    ("rates", "is_told"),
    [
        # Of 30, 1 and 1 times the base rate: within a thousandth, and beyond.
        ((0.30025, 0.01, 0.01), False),
        ((0.3006, 0.01, 0.01), True),
        # Rates of less than a millionth of the first ones are rounding, near the end of a schedule.
        ((2e-7, 1e-9, 1e-9), False),
        ((4e-7, 1e-9, 1e-9), True),
    ],
)
def test_what_counts_as_another_ratio(rates, is_told):
    optimizer = torch.optim.SGD(circuit_parameter_groups(WithRest(), LR, QK))
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        optimizer.step()
    assert bool(told) == is_told


def test_groups_that_lost_their_parameters_are_left_out():
    _, optimizer = grouped()
    optimizer.param_groups[0]["params"].clear()
    optimizer.param_groups[0]["lr"] = 7.0
    optimizer.step()


def test_optimizers_that_have_taken_other_numbers_of_steps_are_not_compared():
    groups = circuit_parameter_groups(WithRest(), LR, QK)
    ahead, behind = torch.optim.SGD(groups[:1]), torch.optim.SGD(groups[1:])
    ahead.step()
    ahead.param_groups[0]["lr"] /= 2
    ahead.step()
    behind.step()
    with pytest.warns(UserWarning, match="learns at 15 times it"):
        behind.step()


def test_rates_in_tensors_are_compared_too():
    groups = circuit_parameter_groups(WithRest(), LR, QK)
    optimizer = torch.optim.SGD(groups)
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(float(group["lr"]))
    optimizer.step()
    optimizer.param_groups[0]["lr"].fill_(LR)
    with pytest.warns(UserWarning, match="learns at 1 times it"):
        optimizer.step()


def test_copies_and_loaded_states_are_watched_and_other_groups_are_not():
    _, optimizer = grouped()
    copied = copy.deepcopy(optimizer)
    copied.param_groups[0]["lr"] = LR
    optimizer.step()
    with pytest.warns(UserWarning, match="learns at 1 times it"):
        copied.step()
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = 2 * LR
    optimizer.load_state_dict(state)
    with pytest.warns(UserWarning, match="learns at 2 times it"):
        optimizer.step()
    extended, other = grouped()[1], nn.Parameter(torch.zeros(2))
    extended.add_param_group({"params": [other], "lr": 1.0})
    extended.step()


def test_groups_in_several_optimizers_are_compared_step_by_step():
    def parted() -> list[torch.optim.Optimizer]:
        groups = circuit_parameter_groups(WithRest(), LR, QK)
        return [torch.optim.SGD(groups[:1]), torch.optim.SGD(groups[1:])]

    both = parted()
    schedules = [by_lambda(optimizer) for optimizer in both]
    for _ in range(3):
        for optimizer, schedule in zip(both, schedules, strict=True):
            optimizer.step()
            schedule.step()
    # Another call made groups of the same names and base rate.
    others = parted()
    for optimizer in others:
        for group in optimizer.param_groups:
            group["lr"] *= 5
        optimizer.step()
    both[0].param_groups[0]["lr"] /= 2
    both[0].step()
    with pytest.warns(UserWarning, match=r"the group QK should learn at 30 times the base rate and learns at 15 times"):
        both[1].step()


def test_weights_at_rates_of_layers_are_in_groups_of_their_multiplier():
    config = small("LlamaConfig", num_key_value_heads=2, num_hidden_layers=3, vocab_size=VOCABULARY)
    llama: Any = transformers.LlamaForCausalLM(config)
    groups = circuit_parameter_groups(llama, LR, {0: 30.0, 2: 30.0}, torch.tensor([1.0, 2.0, 3.0]))
    names = {id(parameter): name for name, parameter in llama.named_parameters()}
    found = {
        group["name"]: (group["lr"], sorted(names[id(one)].removeprefix("model.layers.") for one in group["params"]))
        for group in groups
        if group["name"] != "rest"
    }
    qk = [f"{layer}.self_attn.{side}_proj.weight" for layer in (0, 2) for side in "kq"]
    assert found == {
        "QK at 30": (30 * LR, qk),
        "QK at 1": (LR, ["1.self_attn.k_proj.weight", "1.self_attn.q_proj.weight"]),
        "OV at 3": (3 * LR, ["2.self_attn.o_proj.weight", "2.self_attn.v_proj.weight"]),
        "OV at 2": (2 * LR, ["1.self_attn.o_proj.weight", "1.self_attn.v_proj.weight"]),
        "OV at 1": (LR, ["0.self_attn.o_proj.weight", "0.self_attn.v_proj.weight"]),
    }
    with pytest.raises(
        CallError, match=r"layers\.0\.self_attn\.q_proj\.weight holds heads at 1 and 30 times the base "
    ):
        circuit_parameter_groups(llama, LR, {(0, 0): 30.0, (0, 1): 30.0})
    optimizer = torch.optim.AdamW(groups)
    before = llama.model.layers[2].self_attn.q_proj.weight.detach().clone()
    loss_of(llama, torch.arange(20).view(2, 10)).backward()
    optimizer.step()
    # The first step of Adam is the rate itself.
    moved = (llama.model.layers[2].self_attn.q_proj.weight - before * (1 - 30 * LR * 0.01)).abs().median()
    assert moved.item() == pytest.approx(30 * LR, rel=1e-3)


def test_circuit_rates_keep_their_multipliers_under_any_schedule():
    network: Any = WithRest()
    optimizer = torch.optim.SGD(network.parameters(), lr=LR)
    schedule = lr_scheduler.CosineAnnealingLR(optimizer, 3, eta_min=1e-3)
    with CircuitRates(optimizer, network, QK):
        for _ in range(3):
            before = [network.W_Q.detach().clone(), network.bias.detach().clone()]
            for parameter in network.parameters():
                parameter.grad = torch.ones_like(parameter)
            rate = optimizer.param_groups[0]["lr"]
            optimizer.step()
            schedule.step()
            moved = [
                (old - new.detach()).max().item() for old, new in zip(before, (network.W_Q, network.bias), strict=True)
            ]
            assert moved == pytest.approx([QK * rate, rate], rel=1e-10)
